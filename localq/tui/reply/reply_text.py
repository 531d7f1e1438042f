"""`ReplyText`: a reply as Markdown that grows while it streams; code blocks can be copied.

HTML is shown as text. A click on a link opens nothing; it posts a message, and the screen shows the address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from markdown_it.token import Token
from textual.app import App, ComposeResult
from textual.await_complete import AwaitComplete
from textual.binding import Binding, BindingType
from textual.content import Content
from textual.geometry import Size
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Markdown, Static
from textual.widgets._markdown import MarkdownFence

from localq.text.markdown.blocks import OpaqueBlock, last_line
from localq.text.markdown.parser import markdown_parser
from localq.tui.keys import bindings
from localq.tui.reply import code_colours
from localq.tui.reply.code_colours import ColouredLine, Look
from localq.tui.reply.code_lines import CodeLines
from localq.tui.reply.prose import Prose
from localq.tui.reply.prose_blocks import READER, ProseBlock, ProseOrOther
from localq.tui.reply.repeated_row import RepeatedRow
from localq.tui.reply.reply_block import SizedByContent
from localq.tui.terminal.input_priority import InputPriority

MOST_TOGETHER = 16  # blocks in one widget; all are wrapped again when one grows


class CopyRequested(Message):
    """Copy `text` to the clipboard."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class CopyMark(Static):
    """The line above a code block: its language, and "copy", which can be clicked."""

    ALLOW_SELECT = False

    def on_click(self) -> None:
        """Copy the code block."""
        self.query_ancestor(CodeBlock).action_copy_turn()


class CodeBlock(SizedByContent, RepeatedRow, MarkdownFence, can_focus=True):
    """A code block. code_source: the text between the fences."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings("copy_turn"), Binding("enter", "copy_turn", "copy", show=False)
    ]  # fmt: skip

    def __init__(self, markdown: Markdown, token: Token, code: str) -> None:
        super().__init__(markdown, token, code)
        self.code_source = token.content.removesuffix("\n")
        self._lines = code_colours.lines(code, self._look)
        self._growing = code_colours.GrowingCode(self._look, self._lines)

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        """Return empty content: `CodeLines` draws the lines."""
        return Content("")

    def compose(self) -> ComposeResult:
        """The copy line, and the code."""
        yield CopyMark(self._mark())
        yield CodeLines(self._lines, id="code-content")

    @property
    def _look(self) -> Look:
        return look(self.app, self.lexer)

    def _mark(self) -> Content:
        return Content(f"{self.lexer.split(' ')[0] or 'code'} · copy")

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """The number of lines, which are not wrapped, so nothing is laid out."""
        gutters = sum(child.styles.gutter.height for child in self.children)
        return len(self._lines) + gutters + len(self.query_children(CopyMark))

    def notify_style_update(self) -> None:
        """Colour again if the theme has changed."""
        if self._growing.look != self._look:
            self._growing = code_colours.GrowingCode(self._look)
            self._show(code_colours.lines(self.code, self._look))
        super(MarkdownFence, self).notify_style_update()

    def _show(self, lines: list[ColouredLine]) -> None:
        self._lines = lines
        for each in self.query(CodeLines):
            each.take(lines)

    async def grow(self, token: Token, is_waited_for: Callable[[], bool]) -> None:
        """Show the code of `token`, which usually extends the current code."""
        self.code, self.code_source = token.content.rstrip(), token.content.removesuffix("\n")
        if self.lexer != token.info:
            self.lexer = token.info
            for mark in self.query(CopyMark):
                mark.update(self._mark())
        if self._growing.look != self._look:
            self._growing = code_colours.GrowingCode(self._look)
        self._show(await self._growing.take(self.code, is_waited_for))

    async def finish(self, is_waited_for: Callable[[], bool]) -> None:
        """The block has ended: colour it as a whole."""
        if self._growing.in_parts:
            self._growing = code_colours.GrowingCode(self._look)
            self._show(await code_colours.prepare(self.code, self._look, is_waited_for))

    def action_copy_turn(self) -> None:
        """Request a copy of the code."""
        self.post_message(CopyRequested(self.code_source))


class ReplyText(RepeatedRow, Markdown):
    """Markdown without HTML and guessed links, with code blocks that can be copied.

    Few widgets draw all text that is not code; when text is added or replaced, only changed parts are redrawn.
    """

    BLOCKS = {**Markdown.BLOCKS, "fence": CodeBlock, "code_block": CodeBlock}  # noqa: RUF012 - as in its base

    def __init__(self, text: str = "") -> None:
        super().__init__(text, parser_factory=markdown_parser, open_links=False)
        self._pieces: list[ProseOrOther] = []
        self._shown: list[list[ProseOrOther]] = []  # blocks of each child
        self._grown: CodeBlock | None = None  # code block that may still grow

    def update(self, markdown: str) -> AwaitComplete:
        """Replace the text."""
        self._markdown = markdown

        async def draw() -> None:
            async with self.lock:
                tokens, self._pieces = await _parsed(markdown)
                self._last_parsed_line = last_line(tokens)
                await self._draw()

        return AwaitComplete(draw())

    def append(self, markdown: str) -> AwaitComplete:
        """Append to the text; the last block may change."""
        self._markdown = self.source + markdown

        async def draw() -> None:
            async with self.lock:
                tail = self._markdown.splitlines(keepends=True)[self._last_parsed_line :]
                tokens = markdown_parser().parse("".join(tail))
                if tokens:
                    self._pieces[-1:] = READER.blocks(tokens)
                    self._last_parsed_line += last_line(tokens)
                    await self._draw()

        return AwaitComplete(draw())

    async def settle(self, text: str) -> None:
        """Set the final text; redraw only if the streamed blocks differ from those of the whole text.

        A full redraw of a long reply would block many keys.
        """
        if self.source != text or (await _parsed(text))[1] != self._pieces:
            await self.update(text)
        async with self.lock:
            await self._finish()

    async def _draw(self) -> None:
        """Draw the changes: update the first child that differs, replace later ones."""
        wanted = _together(self._pieces)
        same = 0
        while same < min(len(wanted), len(self._shown)) and wanted[same] == self._shown[same]:
            same += 1
        children = list(self.children)
        if same < min(len(wanted), len(children)) and await self._changed(children[same], wanted[same]):
            same += 1
        await self._colour(wanted[same:])
        added = [self._widget(each) for each in wanted[same:]]
        self._shown = wanted
        with self.app.batch_update():
            if same < len(children):
                await self.remove_children(children[same:])
            if added:
                await self.mount_all(added)
        if added:
            await self._finish()

    def _is_waited_for(self) -> bool:
        """Return whether a key is waiting."""
        input_priority: InputPriority | None = getattr(self.app, "input_priority", None)
        return input_priority is not None and input_priority.is_waiting

    async def _colour(self, wanted: list[list[ProseOrOther]]) -> None:
        """Colour code blocks in slices of time: 400 lines take 0.08 s."""
        for token in (
            token for group in wanted for each in group if isinstance(each, OpaqueBlock) for token in each.tokens
        ):
            if token.type in ("fence", "code_block"):  # as in Textual
                code = token.content.rstrip()
                await code_colours.prepare(code, look(self.app, token.info), self._is_waited_for)

    async def _changed(self, child: Widget, wanted: list[ProseOrOther]) -> bool:
        """Show `wanted` in `child` if it can; return whether it did."""
        first = wanted[0]
        if isinstance(child, Prose) and not isinstance(first, OpaqueBlock):
            child.take(_prose(wanted))
        elif isinstance(child, CodeBlock) and isinstance(first, OpaqueBlock) and first.is_code:
            await child.grow(first.tokens[0], self._is_waited_for)
            self._grown = child
        else:
            return False
        return True

    async def _finish(self) -> None:
        """Finish the code block that has grown."""
        child, self._grown = self._grown, None
        if child is not None and child.is_attached:
            await child.finish(self._is_waited_for)

    def _widget(self, wanted: list[ProseOrOther]) -> Widget:
        if isinstance(wanted[0], OpaqueBlock):
            return next(iter(self._parse_markdown(wanted[0].tokens)))
        return Prose(_prose(wanted))


def look(app: App[Any], language: str) -> Look:
    """The current `Look`."""
    return Look(language, app.native_ansi_color, app.current_theme.dark)


async def _parsed(text: str) -> tuple[list[Token], list[ProseOrOther]]:
    parser = markdown_parser()  # created here: two threads must not make it at once

    def parse() -> tuple[list[Token], list[ProseOrOther]]:
        tokens = parser.parse(text)
        return tokens, READER.blocks(tokens)

    return await asyncio.get_running_loop().run_in_executor(None, parse)


def _together(found: list[ProseOrOther]) -> list[list[ProseOrOther]]:
    """Group blocks that one widget draws; later blocks do not change earlier groups."""
    groups: list[list[ProseOrOther]] = []
    for piece in found:
        last = groups[-1] if groups else []
        if (
            last
            and len(last) < MOST_TOGETHER
            and not isinstance(piece, OpaqueBlock)
            and not isinstance(last[0], OpaqueBlock)
        ):
            last.append(piece)
        else:
            groups.append([piece])
    return groups


def _prose(found: list[ProseOrOther]) -> list[ProseBlock]:
    return [each for each in found if not isinstance(each, OpaqueBlock)]
