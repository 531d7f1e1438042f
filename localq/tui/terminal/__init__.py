"""The terminal under Textual."""
