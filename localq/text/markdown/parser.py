"""The Markdown dialect of replies: CommonMark, tables, strikethrough; no HTML, no bare links."""

from __future__ import annotations

from markdown_it import MarkdownIt


def markdown_parser(references: bool = True) -> MarkdownIt:
    """A new parser. references: False where a text is one block, so that definitions in other blocks are missing."""
    parser = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
    return parser if references else parser.disable("reference")
