"""Background work of a screen."""
