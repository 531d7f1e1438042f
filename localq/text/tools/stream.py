"""`ToolStream`: the answer of a reply in, text and tool calls out.

A call is held back until it is whole: a front end cannot take back the beginning of one. A call that is broken off, or
is none, is given back as text, to the letter. White space beside a call is part of the call; other text before and
behind it stays. An opening mark in a code block between fences is text: there a model explains the form.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Protocol

from localq.text.tools.declaration import Tool, ToolCall
from localq.text.tools.fences import CodeFences
from localq.text.tools.pieces import CallArguments, CallEnd, CallStart, Piece, TextPiece
from localq.text.tools.reader import CallReader, NotACall, Reading

Tools = Mapping[str, Tool]
_MOST_BROKEN = 64  # calls that are tried at the end of a reply, each from its mark to the end


class CallSyntax(Protocol):
    """The syntax of calls. openings: texts with which they begin; bare: also with these, at the start of a reply.

    marks: texts of a call that may be special tokens.
    """

    @property
    def openings(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> tuple[str, ...]: ...
    @property
    def marks(self) -> tuple[str, ...]: ...
    def read(self, reader: CallReader, tools: Tools) -> Reading[list[ToolCall]]: ...
    def read_message(self, recipient: str, text: str, tools: Tools) -> list[ToolCall]: ...


class ToolStream:
    """Reads one reply's answer; thoughts are split off before. The result does not depend on how the text is cut.

    calls     so far
    held      text of a call that is being written, for those who show that one is
    """

    def __init__(self, syntax: CallSyntax, tools: Tools) -> None:
        self._syntax, self._tools = syntax, tools
        marks = sorted(syntax.openings, key=len, reverse=True)
        self._openings = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        self._fences = CodeFences()
        self._text = ""  # not given out
        self._from = 0  # no call begins before
        self._behind = False  # the last piece is a call
        self._begun = False  # something else than white space was read
        self._space, self._opening = "", 0  # white space before the call that is read, length of its opening mark
        self._reader: CallReader | None = None
        self._reading: Reading[list[ToolCall]] | None = None
        self._broken = 0  # calls that the end of the reply broke off
        self._pieces: list[Piece] = []
        self._calls: list[ToolCall] = []

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that a detokenizer must show, also where they are special tokens (`Tokenizer.stream`)."""
        return self._syntax.marks

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """The calls so far."""
        return tuple(self._calls)

    @property
    def held(self) -> str:
        """The text of the call that is being written; "" outside."""
        return self._reader.text if self._reader is not None else ""

    @staticmethod
    def text_of(pieces: Iterable[Piece]) -> str:
        """The text beside calls."""
        return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))

    def push(self, text: str) -> list[Piece]:
        """Add text; return what is final now."""
        if self._reader is None:
            self._text += text
        else:
            self._reader.text += text
        return self._run(ended=False)

    def push_message(self, recipient: str, text: str) -> list[Piece]:
        """Add a message to a tool, of a reply in channels; one that is no call becomes text."""
        try:
            self._add(self._syntax.read_message(recipient, text, self._tools))
        except NotACall:
            self._give(text)
        return self._take()

    def finish(self) -> list[Piece]:
        """End the reply; return what is held. A call that is not whole becomes text."""
        return self._run(ended=True)

    def _run(self, ended: bool) -> list[Piece]:
        while self._broken < _MOST_BROKEN and (self._reading is not None or self._find(ended)):
            if self._go_on(ended):
                break
        if ended:
            self._give(self._text)
            self._text = ""
        return self._take()

    def _take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # ---- text

    def _find(self, ended: bool) -> bool:
        """Give out text up to where a call begins, and begin to read that; False where none does yet."""
        if (opening := self._bare_opening(ended)) is not None:
            place, length = opening
        else:
            found = self._next_opening()
            if found is None:
                self._give_certain(ended)
                return False
            place, length = found
        before = self._text[:place]
        stripped = before.rstrip()
        self._give(stripped)
        self._space, rest = before[len(stripped) :], self._text[place:]
        self._text, self._from, self._opening = "", 0, length
        self._reader = CallReader(rest)
        self._reading = self._syntax.read(self._reader, self._tools)
        return True

    def _bare_opening(self, ended: bool) -> tuple[int, int] | None:
        """Place and length of a bare opening at the start of the reply."""
        if self._begun or not self._syntax.bare:
            return None
        start = len(self._text) - len(self._text.lstrip())
        rest = self._text[start:]
        found = next((mark for mark in self._syntax.bare if rest.startswith(mark)), None)
        if found is None:
            self._begun = bool(rest) and (ended or not any(mark.startswith(rest) for mark in self._syntax.bare))
            return None
        self._begun = True
        return start, len(found)

    def _next_opening(self) -> tuple[int, int] | None:
        """Place and length of the next opening mark outside code blocks."""
        while (found := self._openings.search(self._text, self._from)) is not None:
            fences = self._fences.copy()
            fences.push(self._text[: found.start()])
            if not fences.inside:
                return found.start(), found.end() - found.start()
            self._from = found.end()
        return None

    def _give_certain(self, ended: bool) -> None:
        """Give out text in which no call can begin; white space at its end may belong to one."""
        if ended or (not self._begun and self._syntax.bare):
            return
        end = len(self._text) - self._unfinished()
        end = max(len(self._text[:end].rstrip()), 0)
        self._give(self._text[:end])
        self._text, self._from = self._text[end:], max(0, self._from - end)

    def _unfinished(self) -> int:
        """Length of the longest end of the text that may begin an opening mark."""
        most = min(len(self._text) - self._from, max(map(len, self._syntax.openings), default=1) - 1)
        return next((size for size in range(most, 0, -1) if self._begins(self._text[-size:])), 0)

    def _begins(self, end: str) -> bool:
        return any(len(end) < len(mark) and mark.startswith(end) for mark in self._syntax.openings)

    def _give(self, text: str) -> None:
        self._fences.push(text)
        if self._behind:
            text = text.lstrip()
        if not text:
            return
        self._behind = False
        if self._pieces and isinstance(self._pieces[-1], TextPiece):
            text = self._pieces[-1].text + text
            self._pieces.pop()
        self._pieces.append(TextPiece(text))

    # ---- calls

    def _go_on(self, ended: bool) -> bool:
        """Read on in a call; True where it waits for more text."""
        assert self._reader is not None
        assert self._reading is not None
        reader, self._reader.ended = self._reader, ended
        try:
            next(self._reading)
            if not ended:
                return True
            raise NotACall
        except StopIteration as done:
            calls = done.value
        except NotACall:
            calls = []
        if calls:
            self._text = reader.rest
            self._fences.push("\n")
            self._add(calls)
        else:
            self._broken += ended
            self._text = self._space + reader.text
            self._from = len(self._space) + self._opening
        self._reader = self._reading = None
        return False

    def _add(self, calls: Iterable[ToolCall]) -> None:
        for call in calls:
            index = len(self._calls)
            self._calls.append(call)
            self._pieces += [CallStart(index, call.name), CallArguments(index, call.arguments), CallEnd(index)]
            self._behind = self._begun = True
