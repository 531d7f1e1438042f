"""Replies drawn as Markdown while they stream.

reply_text          the widget of a reply: which parts change when text is added. Open this file first
prose_blocks        blocks of a reply from parser tokens; prose_rows: their rows at a width; prose: their widget
code_colours        lines of code in colours, incrementally; code_lines: their widget
repeated_row, reply_block   mixins that make containers and growing parts cheap to lay out

One widget draws many blocks, because Textual's own Markdown has a widget for each paragraph and cell, and each costs
time at every layout. Used by `tui.chat.turn_view`. Not here: the line chat's Markdown (`cli.markdown`).
"""
