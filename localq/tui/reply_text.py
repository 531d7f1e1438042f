"""The text of a reply as Markdown, which grows while it streams; its blocks of code can be copied as they were written.

HTML is shown as the text that it is, and a link opens nothing: where it leads is a message for the screen to show.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.token import Token
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.message import Message
from textual.widgets import Markdown, Static
from textual.widgets._markdown import MarkdownBlock, MarkdownFence

from localq.tui.keys import bindings

BLOCKS_AT_ONCE = 10  # that are compared between two looks at the keyboard


class CopyWanted(Message):
    """`text` is to go to the clipboard, as it is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class CopyMark(Static):
    """The line above a block of code: its language, and what is clicked to copy it."""

    ALLOW_SELECT = False

    def on_click(self) -> None:
        """Copy the block below."""
        self.query_ancestor(CodeBlock).action_copy_turn()


class CodeBlock(MarkdownFence, can_focus=True):
    """A block of code. `source` is what stood between the fences."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("copy_turn"), Binding("enter", "copy_turn", "copy", show=False)
    ]  # fmt: skip

    def __init__(self, markdown: Markdown, token: Token, code: str) -> None:
        super().__init__(markdown, token, code)
        self.code_source = token.content.removesuffix("\n")

    def compose(self) -> ComposeResult:
        """A line to copy it by, and the code."""
        yield CopyMark(self._mark())
        yield from super().compose()

    def _mark(self) -> Content:
        return Content(f"{self.lexer.split(' ')[0] or 'code'} · copy")

    def _copy_context(self, block: MarkdownBlock) -> None:
        super()._copy_context(block)
        if isinstance(block, CodeBlock):
            self.code_source = block.code_source
            for mark in self.query(CopyMark):
                mark.update(self._mark())

    def action_copy_turn(self) -> None:
        """Ask for a copy of the source."""
        self.post_message(CopyWanted(self.code_source))


class ReplyText(Markdown):
    """Markdown without HTML, without guessed links, with blocks of code that can be copied."""

    BLOCKS = {**Markdown.BLOCKS, "fence": CodeBlock, "code_block": CodeBlock}  # noqa: RUF012 - as its base has it

    def __init__(self, text: str = "") -> None:
        super().__init__(text, parser_factory=_parser, open_links=False)

    async def settle(self, text: str) -> None:
        """`text` is all of it: where what streamed is not that, block by block, it is set anew.

        Textual's own parts draw some ends of a stream otherwise than the whole; drawing all of a long reply once more
        would take the time of many keys.
        """
        if self.source != text or not await self._is(text):
            await self.update(text)

    async def _is(self, text: str) -> bool:
        tokens = await asyncio.get_running_loop().run_in_executor(None, _parser().parse, text)
        shown = [each for each in self.children if isinstance(each, MarkdownBlock)]
        count = 0
        for wanted in self._parse_markdown(tokens):
            if count == len(shown) or type(shown[count]) is not type(wanted):
                return False
            if [_drawn(each) for each in _leaves(shown[count], list(shown[count].query(MarkdownBlock)))] != [
                _drawn(each) for each in _leaves(wanted, _below(wanted))
            ]:
                return False
            count += 1
            if count % BLOCKS_AT_ONCE == 0:
                await asyncio.sleep(0)  # keys first
        return count == len(shown)


def _below(block: MarkdownBlock) -> list[MarkdownBlock]:
    """The blocks within one that is not drawn yet, in their order."""
    return [each for child in block._blocks for each in (child, *_below(child))]


def _leaves(block: MarkdownBlock, below: list[MarkdownBlock]) -> list[MarkdownBlock]:
    return [each for each in (block, *below) if each._inline_token is not None or isinstance(each, CodeBlock)]


def _drawn(block: MarkdownBlock) -> tuple[str, str, str]:
    """What is seen of a block that has text of its own."""
    if isinstance(block, CodeBlock):
        return "code", block.code_source, block.lexer
    return type(block).__name__, block._content.plain, str(block._content.spans)


def _parser() -> MarkdownIt:
    return MarkdownIt("gfm-like", {"html": False, "linkify": False})
