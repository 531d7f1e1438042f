"""Dialogs over the chat.

help_screen         keys and commands. Open this file first
settings_screen     the form of sampling settings, system prompt and theme; settings_form: its values, without widgets
palette_lines       entries of the command palette; themes: the palette and the list of themes

Opened by `tui.app`. Not here: the model picker and its questions (`tui.models`).
"""
