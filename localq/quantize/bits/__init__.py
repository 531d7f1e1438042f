"""Formats mixed by bits."""
