"""Blocks of a reply (`text.markdown.blocks`) with Textual's inline content."""

from __future__ import annotations

from typing import Any

from markdown_it.token import Token
from textual.content import Content
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownBlock

from localq.text.markdown.blocks import Block, BlockReader, ReplyBlock, TextBlock

ProseText = TextBlock[Content]
ProseBlock = Block[Content]
ProseOrOther = ReplyBlock[Content]


def _content(token: Token) -> tuple[Content, tuple[Any, ...]]:
    content = MarkdownBlock._token_to_content(None, token)  # type: ignore[arg-type]  # it does not use its block
    return content, (content.plain, tuple(content.spans))  # the equality of Content ignores styles


READER = BlockReader(_content, Markdown.BULLETS)
