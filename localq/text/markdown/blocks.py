"""The block model of a reply: paragraphs, lists, quotes, tables and rules from the tokens of a parser.

Inline content is made by the front end (`BlockReader`). Blocks that look the same compare equal. Code, tables within
lists and other blocks that a front end draws by other means stay tokens: `OpaqueBlock`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from markdown_it.token import Token

C = TypeVar("C")  # inline content
ORDERED = ". "  # after the number of an item


@dataclass(frozen=True)
class TextBlock(Generic[C]):
    """A paragraph, heading or cell. kind: "paragraph", "h1" to "h6", or "cell"."""

    kind: str
    content: C = field(compare=False)
    key: tuple[Any, ...]  # compared in place of the content


@dataclass(frozen=True)
class ListBlock(Generic[C]):
    """A list: for each item its mark and blocks. nested: within another list."""

    items: tuple[tuple[str, tuple[Block[C], ...]], ...]
    nested: bool


@dataclass(frozen=True)
class QuoteBlock(Generic[C]):
    """A block quote."""

    blocks: tuple[Block[C], ...]


@dataclass(frozen=True)
class TableBlock(Generic[C]):
    """A table; all rows have the same number of cells, the first is the heading."""

    rows: tuple[tuple[TextBlock[C], ...], ...]


@dataclass(frozen=True)
class RuleBlock:
    """A horizontal rule."""


@dataclass(frozen=True)
class OpaqueBlock:
    """A block outside this model, as tokens. is_code: it is a code block."""

    tokens: tuple[Token, ...] = field(compare=False)
    is_code: bool
    key: tuple[Any, ...]


Block = TextBlock[C] | ListBlock[C] | QuoteBlock[C] | TableBlock[C] | RuleBlock
ReplyBlock = Block[C] | OpaqueBlock


def last_line(tokens: Sequence[Token]) -> int:
    """The line where the last top-level block begins."""
    return next((each.map[0] for each in reversed(tokens) if each.level == 0 and each.map is not None), 0)


class BlockReader(Generic[C]):
    """Reads blocks from tokens.

    content   inline content of a token, and a key that is equal for content that looks the same
    bullets   marks of bullet lists, by nesting
    """

    def __init__(self, content: Callable[[Token], tuple[C, tuple[Any, ...]]], bullets: Sequence[str]) -> None:
        self._content, self._bullets = content, bullets

    def blocks(self, tokens: Sequence[Token]) -> list[ReplyBlock[C]]:
        """The top-level blocks of `tokens`."""
        found: list[ReplyBlock[C]] = []
        start = 0
        for end, token in enumerate(tokens, 1):
            if token.level == 0 and token.nesting <= 0:
                found.append(self._top(tokens[start:end]))
                start = end
        return found

    def _top(self, tokens: Sequence[Token]) -> ReplyBlock[C]:
        first = tokens[0].type
        if first == "hr":
            return RuleBlock()
        try:
            return self._table(tokens) if first == "table_open" else self._nested(list(tokens), 0)[0]
        except KeyError:
            return OpaqueBlock(tuple(tokens), first in ("fence", "code_block"), tuple(map(_key, tokens)))

    def _nested(self, tokens: list[Token], bulleted: int, in_list: bool = False) -> list[Block[C]]:
        """Blocks of `tokens`, which are consumed. bulleted: enclosing bullet lists. KeyError: another kind of block."""
        found: list[Block[C]] = []
        while tokens:
            within = _take_first(tokens)
            kind = within[0].type
            if kind in ("paragraph_open", "heading_open"):
                found.append(self._text("paragraph" if kind == "paragraph_open" else within[0].tag, within[1]))
            elif kind == "blockquote_open":
                found.append(QuoteBlock(tuple(self._nested(within[1:-1], bulleted, in_list))))
            elif kind in ("bullet_list_open", "ordered_list_open"):
                found.append(self._list(within[1:-1], bulleted, kind == "ordered_list_open", in_list))
            else:
                raise KeyError(kind)
        return found

    def _list(self, tokens: list[Token], bulleted: int, is_ordered: bool, in_list: bool) -> ListBlock[C]:
        items = []
        while tokens:
            within = _take_first(tokens)
            blocks = self._nested(within[1:-1], bulleted if is_ordered else bulleted + 1, in_list=True)
            items.append((within[0].info, tuple(blocks)))
        if not is_ordered:
            bullet = self._bullets[bulleted % len(self._bullets)]
            return ListBlock(tuple((bullet, blocks) for _, blocks in items), in_list)
        first = int(items[0][0])
        marks = [f"{number}{ORDERED}" for number in range(first, first + len(items))]
        width = max(map(len, marks)) + 1
        listed = zip(marks, items, strict=True)
        return ListBlock(tuple((mark.rjust(width), blocks) for mark, (_, blocks) in listed), in_list)

    def _table(self, tokens: Sequence[Token]) -> TableBlock[C]:
        rows: list[list[TextBlock[C]]] = []
        for token in tokens:
            if token.type == "tr_open":
                rows.append([])
            elif token.type == "inline":
                rows[-1].append(self._text("cell", token))
        return TableBlock(tuple(map(tuple, rows)))

    def _text(self, kind: str, token: Token) -> TextBlock[C]:
        return TextBlock(kind, *self._content(token))


def _key(token: Token) -> tuple[Any, ...]:
    within = tuple(map(_key, token.children or ()))
    return token.type, token.tag, token.content, token.info, token.markup, str(token.attrs), within


def _take_first(tokens: list[Token]) -> list[Token]:
    """Remove and return the first of `tokens`, up to the token that closes it."""
    end, depth = 0, 0
    while True:
        depth += tokens[end].nesting
        end += 1
        if depth == 0:
            break
    taken, tokens[:end] = tokens[:end], []
    return taken
