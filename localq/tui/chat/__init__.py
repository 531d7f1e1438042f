"""The chat screen."""
