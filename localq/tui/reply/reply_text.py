"""The text of a reply as Markdown, which grows while it streams; its blocks of code can be copied as they were written.

HTML is shown as the text that it is, and a link opens nothing: where it leads is a message for the screen to show.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, ClassVar

from markdown_it import MarkdownIt
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

from localq.tui.keys import bindings
from localq.tui.reply import code_colours
from localq.tui.reply.code_colours import ColouredLine, Look
from localq.tui.reply.code_lines import CodeLines
from localq.tui.reply.prose import Prose
from localq.tui.reply.prose_blocks import OpaqueBlock, ProseBlock, ReplyBlock, last_line, reply_blocks
from localq.tui.reply.repeated_row import RepeatedRow
from localq.tui.reply.reply_block import SizedByContent

MOST_TOGETHER = 16  # blocks in one widget, all of which are broken into lines again where one grows


class CopyRequested(Message):
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


class CodeBlock(SizedByContent, RepeatedRow, MarkdownFence, can_focus=True):
    """A block of code. `source` is what stood between the fences."""

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
        """Nothing: `CodeLines` shows the lines, and the block around them has no text of its own."""
        return Content("")

    def compose(self) -> ComposeResult:
        """A line to copy it by, and the code."""
        yield CopyMark(self._mark())
        yield CodeLines(self._lines, id="code-content")

    @property
    def _look(self) -> Look:
        return look(self.app, self.lexer)

    def _mark(self) -> Content:
        return Content(f"{self.lexer.split(' ')[0] or 'code'} · copy")

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Its lines are not broken: nothing needs to be laid out to count them."""
        gutters = sum(child.styles.gutter.height for child in self.children)
        return len(self._lines) + gutters + len(self.query_children(CopyMark))

    def notify_style_update(self) -> None:
        """The theme may be another."""
        if self._growing.look != self._look:
            self._growing = code_colours.GrowingCode(self._look)
            self._show(code_colours.lines(self.code, self._look))
        super(MarkdownFence, self).notify_style_update()

    def _show(self, lines: list[ColouredLine]) -> None:
        self._lines = lines
        for each in self.query(CodeLines):
            each.take(lines)

    async def grow(self, token: Token, is_waited_for: Callable[[], bool]) -> None:
        """Show the code of `token` instead, which mostly goes on with what is shown."""
        self.code, self.code_source = token.content.rstrip(), token.content.removesuffix("\n")
        if self.lexer != token.info:
            self.lexer = token.info
            for mark in self.query(CopyMark):
                mark.update(self._mark())
        if self._growing.look != self._look:
            self._growing = code_colours.GrowingCode(self._look)
        self._show(await self._growing.take(self.code, is_waited_for))

    async def finish(self, is_waited_for: Callable[[], bool]) -> None:
        """No more will come: colours are those of the whole now."""
        if self._growing.in_parts:
            self._growing = code_colours.GrowingCode(self._look)
            self._show(await code_colours.prepare(self.code, self._look, is_waited_for))

    def action_copy_turn(self) -> None:
        """Ask for a copy of the source."""
        self.post_message(CopyRequested(self.code_source))


class ReplyText(RepeatedRow, Markdown):
    """Markdown without HTML, without guessed links, with blocks of code that can be copied.

    What is no code is drawn by few widgets: of a part that grows or is set anew only what differs is drawn again.
    """

    BLOCKS = {**Markdown.BLOCKS, "fence": CodeBlock, "code_block": CodeBlock}  # noqa: RUF012 - as its base has it

    def __init__(self, text: str = "") -> None:
        super().__init__(text, parser_factory=_parser, open_links=False)
        self._pieces: list[ReplyBlock] = []
        self._shown: list[list[ReplyBlock]] = []  # by each child
        self._grown: CodeBlock | None = None  # that may go on to grow

    def update(self, markdown: str) -> AwaitComplete:
        """Show `markdown` in place of what there is."""
        self._markdown = markdown

        async def draw() -> None:
            async with self.lock:
                tokens, self._pieces = await _parsed(markdown)
                self._last_parsed_line = last_line(tokens)
                await self._draw()

        return AwaitComplete(draw())

    def append(self, markdown: str) -> AwaitComplete:
        """Show `markdown` behind what there is, the last piece of which may become another by it."""
        self._markdown = self.source + markdown

        async def draw() -> None:
            async with self.lock:
                tail = self._markdown.splitlines(keepends=True)[self._last_parsed_line :]
                tokens = _parser().parse("".join(tail))
                if tokens:
                    self._pieces[-1:] = reply_blocks(tokens)
                    self._last_parsed_line += last_line(tokens)
                    await self._draw()

        return AwaitComplete(draw())

    async def settle(self, text: str) -> None:
        """`text` is all of it: where what streamed is not that, it is set anew.

        The ends of a stream may mean something else than the whole; drawing all of a long reply once more would take
        the time of many keys.
        """
        if self.source != text or (await _parsed(text))[1] != self._pieces:
            await self.update(text)
        async with self.lock:
            await self._finish()

    async def _draw(self) -> None:
        """What differs from what is shown: of the first such child what it shows, the others anew."""
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
        """By a key."""
        input_priority = getattr(self.app, "input_priority", None)
        return input_priority is not None and input_priority.wait

    async def _colour(self, wanted: list[list[ReplyBlock]]) -> None:
        """Code among them, in pieces of time: 400 lines take 0.08 s."""
        for token in (token for group in wanted for each in group if isinstance(each, OpaqueBlock) for token in each.tokens):
            if token.type in ("fence", "code_block"):  # as Textual reads one
                code = token.content.rstrip()
                await code_colours.prepare(code, look(self.app, token.info), self._is_waited_for)

    async def _changed(self, child: Widget, wanted: list[ReplyBlock]) -> bool:
        """Whether `child` could show these instead, and does."""
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
        """The block of code that has grown is complete."""
        child, self._grown = self._grown, None
        if child is not None and child.is_attached:
            await child.finish(self._is_waited_for)

    def _widget(self, wanted: list[ReplyBlock]) -> Widget:
        if isinstance(wanted[0], OpaqueBlock):
            return next(iter(self._parse_markdown(wanted[0].tokens)))
        return Prose(_prose(wanted))


def look(app: App[Any], language: str) -> Look:
    """What colours depend on."""
    return Look(language, app.native_ansi_color, app.current_theme.dark)


async def _parsed(text: str) -> tuple[list[Token], list[ReplyBlock]]:
    parser = _parser()  # here: several at once are not made in threads

    def parse() -> tuple[list[Token], list[ReplyBlock]]:
        tokens = parser.parse(text)
        return tokens, reply_blocks(tokens)

    return await asyncio.get_running_loop().run_in_executor(None, parse)


def _together(found: list[ReplyBlock]) -> list[list[ReplyBlock]]:
    """Those that one widget draws: the same at the beginning, whatever comes behind."""
    groups: list[list[ReplyBlock]] = []
    for piece in found:
        last = groups[-1] if groups else []
        if last and len(last) < MOST_TOGETHER and not isinstance(piece, OpaqueBlock) and not isinstance(last[0], OpaqueBlock):
            last.append(piece)
        else:
            groups.append([piece])
    return groups


def _prose(found: list[ReplyBlock]) -> list[ProseBlock]:
    return [each for each in found if not isinstance(each, OpaqueBlock)]


def _parser() -> MarkdownIt:
    return MarkdownIt("gfm-like", {"html": False, "linkify": False})
