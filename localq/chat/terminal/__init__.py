"""Terminal helpers that the line chat and the TUI share.

clipboard (OSC 52), editor ($VISUAL), input_history (the file of typed messages), transfer_rate (speed and time left of
a download). Called by `cli/line`, `cli/progress` and `tui`. Not here: drawing. Open `clipboard` first.
"""
