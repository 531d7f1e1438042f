"""Markdown drawn as terminal rows."""
