"""A Markdown block as terminal rows, drawn by Rich.

Copying keeps the original: code has no frame and no padding. Links and images show their text and URL; HTML stays as
text. Decoded entities (`&#27;`) pass the sanitizer again.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import ClassVar

from markdown_it.token import Token
from rich import box
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import (
    BlockQuote,
    CodeBlock,
    Heading,
    HorizontalRule,
    Markdown,
    MarkdownElement,
    Paragraph,
    TableElement,
)
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

from localq.cli.markdown.wrap import wrap
from localq.sanitize import sanitize
from localq.text.markdown.parser import markdown_parser
from localq.text.markdown.split import FlatBlock

LONGEST = 20_000  # characters of a block; longer ones stay raw
_NARROWEST = 10  # columns, however deep the list
_RULE = 40
_QUOTED = "▌ "
_UNKNOWN = Style(color="cyan")  # code in an unknown language
_STYLES = {
    "markdown.h1": "bold underline",
    "markdown.h2": "bold",
    "markdown.h3": "bold",
    "markdown.h4": "bold italic",
    "markdown.h5": "italic",
    "markdown.h6": "italic",
    "markdown.code": "bold cyan",
    "markdown.block_quote": "magenta",
    "markdown.hr": "none",
    "markdown.table.border": "none",
    "markdown.table.header": "bold",
}


class _Paragraph(Paragraph):
    """A paragraph, wrapped by `wrap`."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _wrap(self.text, options)


class _Heading(Heading):
    """A heading, always left-aligned."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from _wrap(self.text, options)


class _Quote(BlockQuote):
    """A quote; the terminal wraps rows that are too wide."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        within = options.update(width=max(_NARROWEST, options.max_width - len(_QUOTED)))
        for line in Segment.split_lines(console.render(self.elements, within)):
            yield Segment(_QUOTED, self.style)
            yield from line
            yield Segment.line()


class _Rule(HorizontalRule):
    """A short rule, which stays intact in a narrower terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text("─" * min(_RULE, options.max_width))


class _Code(CodeBlock):
    """Code without decoration."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in str(self.text).rstrip("\n").split("\n"):
            yield Text(line, no_wrap=True, overflow="ignore")


class _Table(TableElement):
    """A table without a frame, with complete cells."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="markdown.table.header")
        for cell in self.header.row.cells if self.header is not None and self.header.row is not None else ():
            table.add_column(cell.content, overflow="fold", justify=cell.justify)
        for row in self.body.rows if self.body is not None else ():
            table.add_row(*(cell.content for cell in row.cells))
        yield table


class _Markdown(Markdown):
    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "paragraph_open": _Paragraph,
        "heading_open": _Heading,
        "blockquote_open": _Quote,
        "hr": _Rule,
        "fence": _Code,
        "code_block": _Code,
        "table_open": _Table,
    }

    def __init__(self, tokens: list[Token]) -> None:
        # Not that of Rich, which makes a parser of its own: 2 ms and reference cycles of 0.1 MB for each block.
        self.markup, self.parsed = "", tokens
        self.code_theme = self.inline_code_theme = "monokai"
        self.justify, self.style, self.hyperlinks, self.inline_code_lexer = None, "none", True, None


class Renderer:
    """Draws blocks. colour: allow colours; bold and italics are always used."""

    def __init__(self, colour: bool) -> None:
        self._colour = colour
        self._console = Console(
            file=io.StringIO(), force_terminal=True, color_system="standard", width=80, no_color=not colour,
            legacy_windows=False, highlight=False, markup=False, emoji=False, theme=Theme(_STYLES),
        )  # fmt: skip
        self._parser = markdown_parser(references=False)  # a block is parsed alone
        self._syntaxes: dict[str, Syntax] = {}

    def rows(self, block: FlatBlock, columns: int) -> list[str] | None:
        """The block in `columns`, one string per row; None if it is too long or drawing would lose text."""
        if len(block.source) > LONGEST:
            return None
        tokens = self._parser.parse(block.source)
        has_table = any(token.type == "table_open" for token in tokens)  # Rich drops cells beyond the header
        wanted = _letters(block.source) if has_table else sum(map(_letters, _texts(tokens)))
        options = self._console.options.update(width=max(_NARROWEST, columns - cell_len(block.first)))
        lines = list(Segment.split_lines(self._console.render(_Markdown(_plain_links(tokens)), options)))
        if sum(_letters(segment.text) for line in lines for segment in line) < wanted:
            return None
        rows = [self._row(line) for line in lines]
        rows = "\n".join(rows).strip("\n").split("\n")
        return [f"{block.rest if number else block.first}{row}".rstrip(" ") for number, row in enumerate(rows)]

    def code(self, lines: list[str], language: str, before: list[str]) -> list[str] | None:
        """Lines of code with syntax colours; None if they must stay as they are. before: the lines above them."""
        if not self._colour:
            return None
        syntax = self._syntaxes.setdefault(language, Syntax("", language or "text", theme="ansi_dark", tab_size=0))
        if not language or syntax.lexer is None:
            return [self._row([Segment(line, _UNKNOWN)]) for line in lines]
        drawn = syntax.highlight("\n".join([*before, *lines])).split("\n", allow_blank=True)
        found = drawn[len(before) : len(before) + len(lines)]
        if [each.plain for each in found] != lines:
            return None
        return [self._row([each for each in line.render(self._console) if not each.control]) for line in found]

    def _row(self, line: Iterable[Segment]) -> str:
        """One row, without trailing blanks; each part resets its style."""
        parts = [(sanitize(text), style) for text, style, control in line if not control and text != "\n"]
        while parts and not parts[-1][0].rstrip(" "):
            parts.pop()
        if parts:
            parts[-1] = parts[-1][0].rstrip(" "), parts[-1][1]
        row = []
        for text, style in parts:
            style = style.without_color if style is not None and not self._colour else style
            row.append(text if style is None else style.render(text, color_system=ColorSystem.STANDARD))
        return "".join(row)


def _wrap(text: Text, options: ConsoleOptions) -> Iterable[Text]:
    for row in wrap(text, options.max_width):
        row.no_wrap, row.overflow = True, "ignore"
        yield row


def _texts(tokens: Iterable[Token]) -> Iterable[str]:
    """Texts that must be visible."""
    for token in tokens:
        if token.children:
            yield from _texts(token.children)
        elif token.type in ("text", "code_inline", "fence", "code_block"):
            yield sanitize(token.content)


def _letters(text: str) -> int:
    return sum(map(str.isalnum, text))


def _plain_links(tokens: list[Token]) -> list[Token]:
    """The tokens, with each link's and image's URL as text after it."""
    for token in tokens:
        if token.type == "inline" and token.children:
            token.children = list(_inline(token.children))
    return tokens


def _inline(tokens: Iterable[Token]) -> Iterable[Token]:
    opened: list[tuple[str, list[str]]] = []  # (URL, texts so far) of open links
    for token in tokens:
        if token.type == "link_open":
            opened.append((str(token.attrs.get("href", "")), []))
            continue
        if token.type == "link_close" and opened:
            address, parts = opened.pop()
            shown = "".join(parts)
            token = _text("" if address in (shown, f"mailto:{shown}") else f" ({address})")
        elif token.type == "image":
            token = _text(f"{token.content} ({token.attrs.get('src', '')})")
        for _, parts in opened:
            parts.append(token.content)
        yield token


def _text(content: str) -> Token:
    return Token("text", "", 0, content=content)
