"""Dialogs and side screens."""
