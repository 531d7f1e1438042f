"""The Markdown dialect of replies: CommonMark, tables, strikethrough; no HTML, no bare links."""

from __future__ import annotations

import functools

from markdown_it import MarkdownIt


@functools.cache
def markdown_parser(references: bool = True) -> MarkdownIt:
    """The parser; do not change it. references: False where a text is one block, so that definitions in other blocks
    are missing.

    One serves all texts, also in several threads: making it takes 3 ms and leaves reference cycles of 0.1 MB. Two
    threads must not make it at once.
    """
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    if not references:
        parser.disable("reference")
    parser.parse("a")  # it sets up its rules at the first text: not in two threads
    return parser
