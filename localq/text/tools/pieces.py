"""Pieces of a reply with tools while it streams: text and calls."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TextPiece:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins. index: its place among the calls of the reply."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part of the arguments; the parts of one call together are the JSON text of an object."""

    index: int
    delta: str


@dataclass(frozen=True)
class CallEnd:
    """A call is whole."""

    index: int


Piece = TextPiece | CallStart | CallArguments | CallEnd
