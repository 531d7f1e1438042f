"""The terminal under Textual: what the app corrects or adds.

terminal_app        base of the app and of its screens. Open this file first
error_guard         unexpected errors are shown, and the app goes on
input_priority      typed keys are handled before drawing
terminal_input      reading keys and pastes; terminal_output: writing to a terminal that may be gone
sanitized_lines     control characters never reach the terminal
signals             signals that end the app

Written against Textual 8.2; comments name what is different there. Used by `tui.app` and all screens.
"""
