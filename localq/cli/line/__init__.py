"""The chat line by line: reads a message or a command, prints the reply as it streams.

Here: the loop (`line_chat`), its line editor (`line_input`, `line_editor`, `type_ahead`, `extended_keys`), printing of
replies and thinking (`reply_printer`, `thinking_lines`), the clipboard. Ctrl-C: `session.stop_on_interrupt` stops a
reply, `interrupts` holds presses outside one.
Not here: what messages and commands do (`localq.chat`), how Markdown becomes rows (`cli/markdown`).
Called by: `localq chat`, and `localq run` for one reply.
Open first: `line_chat.py`.
"""
