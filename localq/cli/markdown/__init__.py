"""Markdown drawn as terminal rows while a reply streams.

Here: the stream that redraws finished blocks (`stream`), blocks as rows by Rich (`rows`, `wrap`), the cursor and the
state of the terminal (`terminal_rows`).
Not here: the splitter into blocks (`text/markdown`), Markdown as widgets of the full screen (`tui/reply`).
Called by: `cli/line/reply_printer`.
Open first: `stream.py`.
"""
