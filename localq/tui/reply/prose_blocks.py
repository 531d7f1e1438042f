"""What a reply says, as blocks that are no widgets: made of the tokens of a Markdown parser, compared by what is seen.

What is not among them (code, tables within lists, and so on) is left as the tokens that it came as.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from markdown_it.token import Token
from textual.content import Content
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownBlock

ORDERED = ". "  # behind the number of an item


@dataclass(frozen=True)
class ProseText:
    """kind: "paragraph", or "h1" to "h6"."""

    kind: str
    content: Content = field(compare=False)
    seen: tuple[Any, ...]  # of the content: its equality is that of the characters only


@dataclass(frozen=True)
class ProseList:
    """Items: the mark before each, and what it says. nested: in another list."""

    items: tuple[tuple[str, tuple[ProseBlock, ...]], ...]
    nested: bool


@dataclass(frozen=True)
class ProseQuote:
    """What somebody else says."""

    blocks: tuple[ProseBlock, ...]


@dataclass(frozen=True)
class ProseTable:
    """Rows of as many cells each; the first is the heading."""

    rows: tuple[tuple[ProseText, ...], ...]


@dataclass(frozen=True)
class ProseRule:
    """A line across."""


@dataclass(frozen=True)
class OpaqueBlock:
    """What a widget of its own draws. is_code: a block of code and nothing else."""

    tokens: tuple[Token, ...] = field(compare=False)
    is_code: bool
    seen: tuple[Any, ...]


ProseBlock = ProseText | ProseList | ProseQuote | ProseTable | ProseRule
ReplyBlock = ProseBlock | OpaqueBlock


def reply_blocks(tokens: Sequence[Token]) -> list[ReplyBlock]:
    """The blocks that are in no other, in their order."""
    found: list[ReplyBlock] = []
    start = 0
    for end, token in enumerate(tokens, 1):
        if token.level == 0 and token.nesting <= 0:
            found.append(_piece(tokens[start:end]))
            start = end
    return found


def last_line(tokens: Sequence[Token]) -> int:
    """Where the last of them begins, in lines from the first."""
    return next((each.map[0] for each in reversed(tokens) if each.level == 0 and each.map is not None), 0)


def _piece(tokens: Sequence[Token]) -> ReplyBlock:
    first = tokens[0].type
    if first == "hr":
        return ProseRule()
    try:
        return _table(tokens) if first == "table_open" else _blocks(list(tokens), 0)[0]
    except KeyError:
        return OpaqueBlock(tuple(tokens), first in ("fence", "code_block"), tuple(map(_seen, tokens)))


def _seen(token: Token) -> tuple[Any, ...]:
    within = tuple(map(_seen, token.children or ()))
    return token.type, token.tag, token.content, token.info, token.markup, str(token.attrs), within


def _blocks(tokens: list[Token], bulleted: int, in_list: bool = False) -> list[ProseBlock]:
    """Of `tokens`, all of which are taken. bulleted: lists without numbers around them. KeyError: what is no block."""
    found: list[ProseBlock] = []
    while tokens:
        within = _within(tokens)
        kind = within[0].type
        if kind in ("paragraph_open", "heading_open"):
            found.append(_text("paragraph" if kind == "paragraph_open" else within[0].tag, within[1]))
        elif kind == "blockquote_open":
            found.append(ProseQuote(tuple(_blocks(within[1:-1], bulleted, in_list))))
        elif kind in ("bullet_list_open", "ordered_list_open"):
            found.append(_listed(within[1:-1], bulleted, kind == "ordered_list_open", in_list))
        else:
            raise KeyError(kind)
    return found


def _within(tokens: list[Token]) -> list[Token]:
    """Takes the first of `tokens` away, with all up to what closes it."""
    end, depth = 0, 0
    while True:
        depth += tokens[end].nesting
        end += 1
        if depth == 0:
            break
    taken, tokens[:end] = tokens[:end], []
    return taken


def _listed(tokens: list[Token], bulleted: int, is_ordered: bool, in_list: bool) -> ProseList:
    items = []
    while tokens:
        within = _within(tokens)
        blocks = _blocks(within[1:-1], bulleted if is_ordered else bulleted + 1, in_list=True)
        items.append((within[0].info, tuple(blocks)))
    if not is_ordered:
        bullet = Markdown.BULLETS[bulleted % len(Markdown.BULLETS)]
        return ProseList(tuple((bullet, blocks) for _, blocks in items), in_list)
    first = int(items[0][0])
    marks = [f"{number}{ORDERED}" for number in range(first, first + len(items))]
    width = max(map(len, marks)) + 1
    return ProseList(tuple((mark.rjust(width), blocks) for mark, (_, blocks) in zip(marks, items, strict=True)), in_list)


def _table(tokens: Sequence[Token]) -> ProseTable:
    rows: list[list[ProseText]] = []
    for token in tokens:
        if token.type == "tr_open":
            rows.append([])
        elif token.type == "inline":
            rows[-1].append(_text("cell", token))
    return ProseTable(tuple(map(tuple, rows)))


def _text(kind: str, token: Token) -> ProseText:
    content = MarkdownBlock._token_to_content(None, token)  # type: ignore[arg-type]  # it asks nothing of its block
    return ProseText(kind, content, (content.plain, tuple(content.spans)))
