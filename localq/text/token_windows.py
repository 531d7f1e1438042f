"""A text as windows of token ids, in the two conventions behind published perplexities. Torch-free.

They differ by several percent, and a figure means something only with its convention, window and tokenizer:

GPTQ (AQLM and others)  the rows of the text joined by two newlines (a blank row as nothing, others with their own
                        newline), tokenized once, with BOS where the tokenizer adds it; windows without overlap, the
                        tail dropped; every token but the first of a window is predicted
llama.cpp               the text as it is; BOS in place of the first token of every window where the tokenizer adds it;
                        only the tokens behind the middle of a window are predicted (its own default window is 512)
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from localq.errors import usage_error
from localq.text.tokenizer import Tokenizer

LEAST_WINDOW = 4  # both conventions predict something


@dataclass(frozen=True)
class Windows:
    """Token ids of every window, and the position of the first prediction that counts: that of token `first` + 1."""

    ids: list[list[int]]
    first: int = 0


def gptq(tokenizer: Tokenizer, text: str, size: int, most: int | None, name: str) -> Windows:
    """See the module. `most` windows at most; `name` is the text's. Raises LocalqError (exit 2) for a short text."""
    ids = tokenizer.encode("\n\n".join(rows(text)), special=True)
    return Windows(list(_cut(ids, size, most, name)))


def llamacpp(tokenizer: Tokenizer, text: str, size: int, most: int | None, name: str) -> Windows:
    """As `gptq`, in the other convention."""
    cut = list(_cut(tokenizer.encode(text, special=True), size, most, name))
    bos = bos_id(tokenizer)
    if bos is not None:
        cut = [[bos, *window[1:]] for window in cut]
    return Windows(cut, size // 2)


def rows(text: str) -> Iterator[str]:
    """The lines of `text`, each with its newline; blank ones as ""."""
    return (line if line.strip() else "" for line in io.StringIO(text, newline="\n"))


def bos_id(tokenizer: Tokenizer) -> int | None:
    """What the tokenizer puts before a text, None where it puts nothing there."""
    plain, framed = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    return framed[0] if framed[:1] != plain[:1] else None


def _cut(ids: list[int], size: int, most: int | None, name: str) -> Iterator[list[int]]:
    """Windows of `size`, the tail dropped. Raises LocalqError (exit 2) where there is not one."""
    count = len(ids) // size
    if count == 0:
        why = f"it has {len(ids)} tokens, fewer than one window of {size}"
        raise usage_error(name, why, "Give a longer text, or a smaller --window.")
    return (ids[index * size : (index + 1) * size] for index in range(count if most is None else min(count, most)))
