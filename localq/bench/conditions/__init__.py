"""The conditions of a measurement."""
