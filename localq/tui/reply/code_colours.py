"""Coloured lines of code blocks; a growing block is coloured in parts, each part once.

A part ends after a line that leaves no string or comment open. That guess fails for embedded languages (a script in
HTML), until the block has ended and is coloured as a whole.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pygments.lexer import Lexer  # type: ignore[import-untyped]
from pygments.lexers import get_lexer_by_name  # type: ignore[import-untyped]
from pygments.token import Text  # type: ignore[import-untyped]
from pygments.util import ClassNotFound  # type: ignore[import-untyped]
from textual.content import Content, Span
from textual.highlight import ANSIDarkHighlightTheme, ANSILightHighlightTheme, HighlightTheme

PART = 24  # lines after which a part may end before an unindented line; twice as many: before any line
TAB = 8  # cells, as in Textual
SLICE_S = 0.002  # of colouring, before keys are handled
WAIT_S = 0.002  # between two checks for waiting keys
KEPT = 16  # blocks in the cache


class Look(NamedTuple):
    """Inputs of the colours besides the code: the language named by the fence, and the theme."""

    language: str
    ansi: bool
    dark: bool


@dataclass(frozen=True, eq=False)
class ColouredLine:
    """A line of code. content: unchanged text; width: in cells with tabs; ends: a part may end after it."""

    content: Content
    width: int
    ends: bool


_ready: OrderedDict[tuple[str, Look], list[ColouredLine]] = OrderedDict()


def lines(code: str, look: Look) -> list[ColouredLine]:
    """The coloured lines of `code`; from the cache after `prepare`."""
    found = _ready.get((code, look))
    return _kept(code, look, list(_coloured(code, look))) if found is None else found


async def prepare(code: str, look: Look, is_waited_for: Callable[[], bool]) -> list[ColouredLine]:
    """Colour `code` for `lines`, in slices of time. is_waited_for: whether a key waits, which goes first."""
    found = _ready.get((code, look))
    return _kept(code, look, await _sliced(code, look, is_waited_for)) if found is None else found


class GrowingCode:
    """A code block to which lines are added."""

    def __init__(self, look: Look, found: Sequence[ColouredLine] = ()) -> None:
        """found: its lines so far."""
        self.look = look
        self._done, self._code = list[ColouredLine](), ""  # finished lines, and their code
        self._rest = list[ColouredLine]()  # later lines
        self._finish(list(found))

    @property
    def in_parts(self) -> bool:
        """True if the colours may differ from those of the whole block."""
        return bool(self._done)

    async def take(self, code: str, is_waited_for: Callable[[], bool]) -> list[ColouredLine]:
        """The lines of `code`; a beginning that is the same as before is not coloured again."""
        code = "\n".join(code.splitlines())
        if not code.startswith(self._code):
            self._done, self._code = [], ""
        rest = await _sliced(code[len(self._code) :], self.look, is_waited_for)
        for place, (old, new) in enumerate(zip(self._rest, rest, strict=False)):
            if (old.content.plain, old.content.spans, old.ends) == (new.content.plain, new.content.spans, new.ends):
                rest[place] = old  # the same object is not redrawn
        found = [*self._done, *rest]
        self._finish(found)
        return found

    def _finish(self, found: list[ColouredLine]) -> None:
        end = self._end(found)
        if end > len(self._done):
            self._code += "".join(f"{line.content.plain}\n" for line in found[len(self._done) : end])
            self._done = found[:end]
        self._rest = found[len(self._done) :]

    def _end(self, found: list[ColouredLine]) -> int:
        """The number of finished lines; the last two may still change."""
        begun = len(self._done)
        for end in range(len(found) - 2, begun + PART, -1):
            indented = found[end].content.plain[:1] in ("", " ", "\t", "}", ")", "]")
            if found[end - 1].ends and (not indented or len(found) - begun > 2 * PART):
                return end
        return begun


def _kept(code: str, look: Look, found: list[ColouredLine]) -> list[ColouredLine]:
    _ready[code, look] = found
    while len(_ready) > KEPT:
        _ready.popitem(last=False)
    return found


async def _sliced(code: str, look: Look, is_waited_for: Callable[[], bool]) -> list[ColouredLine]:
    await asyncio.get_running_loop().run_in_executor(None, _lexer, look.language)  # the first use imports it, 0.05 s
    found, until_s = list[ColouredLine](), time.monotonic() + SLICE_S
    for line in _coloured(code, look):
        found.append(line)
        if time.monotonic() >= until_s:
            await asyncio.sleep(0)
            while is_waited_for():
                await asyncio.sleep(WAIT_S)
            until_s = time.monotonic() + SLICE_S
    return found


def _coloured(code: str, look: Look) -> Iterator[ColouredLine]:
    """Lines with the colours of `textual.highlight.highlight` (8.2)."""
    styles = _styles(look.ansi, look.dark)
    left = "\n".join(code.splitlines()).count("\n") + 1
    text, spans = "", list[Span]()
    for kind, value in _lexer(look.language).get_tokens("\n".join(code.splitlines())):
        style = _style(styles, kind)
        for place, part in enumerate(value.split("\n")):
            if place:
                yield _line(text, spans, kind in Text)
                text, spans, left = "", [], left - 1
                if not left:  # the lexer adds a line end
                    return
            if part and style:
                spans.append(Span(len(text), len(text) + len(part), style))
            text += part
    if left:
        yield _line(text, spans, True)


def _line(text: str, spans: list[Span], ends: bool) -> ColouredLine:
    content = Content(text, spans=spans).stylize_before("$text")
    return ColouredLine(content, content.expand_tabs(TAB).cell_length if "\t" in text else content.cell_length, ends)


def _style(styles: dict[Any, str], kind: Any) -> str:
    while kind is not None:
        if style := styles.get(kind):
            return style
        kind = kind.parent
    return ""


def _styles(ansi: bool, dark: bool) -> dict[Any, str]:
    if not ansi:
        return HighlightTheme.STYLES
    return (ANSIDarkHighlightTheme if dark else ANSILightHighlightTheme).STYLES


@functools.lru_cache(maxsize=KEPT)
def _lexer(language: str) -> Lexer:
    """The lexer of a language; plain text without one, as guessing would try all lexers at every step."""
    try:
        return get_lexer_by_name(language or "text", stripnl=False, ensurenl=True)
    except ClassNotFound:
        return get_lexer_by_name("text", stripnl=False, ensurenl=True)
