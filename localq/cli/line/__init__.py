"""The line chat."""
