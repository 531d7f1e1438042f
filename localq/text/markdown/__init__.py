"""Markdown of replies for both front ends: dialect, split of a stream, block model.

parser              the Markdown dialect, as a markdown-it parser
split               splits a streaming text into blocks, line by line. Open this file first
blocks              blocks of a text from the parser's tokens, generic in their inline content

Used by `cli.markdown` (split) and `tui.reply` (blocks). The front ends differ in what a block is:
the line chat cannot redraw rows that have scrolled away, so `split` flattens lists and ends every item as a block of
its own; the screen redraws a list as a whole, aligns its numbers and nests its items, so `blocks` keeps it as one.
Not here: rows of a terminal (`cli.markdown`), widgets (`tui.reply`).
"""
