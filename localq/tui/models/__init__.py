"""The model list and the opening screen."""
