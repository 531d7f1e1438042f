"""Terminal helpers that the line chat and the TUI share.

clipboard (OSC 52), editor ($VISUAL), input_history (the file of typed messages), error_log (the file of unexpected
errors), transfer_rate (speed and time left of a download). Called by `cli` and `tui`. Not here: drawing. Open
`clipboard` first.
"""
