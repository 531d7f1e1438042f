"""Windows of token ids of a text, in the two conventions of published perplexities.

They differ by several percent; a perplexity is meaningful only with its convention, window and tokenizer:

GPTQ (AQLM and others)  the lines of the text joined by two newlines (a blank line as "", others with their own
                        newline), tokenized once, with BOS where the tokenizer adds it; windows without overlap, the
                        tail dropped; every token but the first of a window is predicted
llama.cpp               the text unchanged; BOS replaces the first token of every window where the tokenizer adds it;
                        only tokens in the second half of a window are predicted (default window: 512)
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass

from localq.errors import usage_error
from localq.text.tokenizer import Tokenizer

LEAST_WINDOW = 4  # smaller windows predict nothing in one of the conventions


@dataclass(frozen=True)
class Windows:
    """Token ids of every window; the first prediction that counts is that of token `first` + 1."""

    ids: list[list[int]]
    first: int = 0


def gptq(tokenizer: Tokenizer, text: str, size: int, most: int | None, name: str) -> Windows:
    """At most `most` windows in GPTQ's convention. Raises LocalqError (exit 2) for a short text, named `name`."""
    ids = tokenizer.encode("\n\n".join(rows(text)), special=True)
    return Windows(list(_windows(ids, size, most, name)))


def llamacpp(tokenizer: Tokenizer, text: str, size: int, most: int | None, name: str) -> Windows:
    """At most `most` windows in llama.cpp's convention; otherwise as `gptq`."""
    cut = list(_windows(tokenizer.encode(text, special=True), size, most, name))
    bos = bos_id(tokenizer)
    if bos is not None:
        cut = [[bos, *window[1:]] for window in cut]
    return Windows(cut, size // 2)


def rows(text: str) -> Iterator[str]:
    """The lines of `text`, each with its newline; blank ones as ""."""
    return (line if line.strip() else "" for line in io.StringIO(text, newline="\n"))


def bos_id(tokenizer: Tokenizer) -> int | None:
    """The token that the tokenizer puts before a text; None where it adds none."""
    plain, framed = tokenizer.encode("a"), tokenizer.encode("a", special=True)
    return framed[0] if framed[:1] != plain[:1] else None


def _windows(ids: list[int], size: int, most: int | None, name: str) -> Iterator[list[int]]:
    """Windows of `size` without the tail. Raises LocalqError (exit 2) where there is none."""
    count = len(ids) // size
    if count == 0:
        why = f"the text has only {len(ids)} tokens, fewer than one window of {size}"
        raise usage_error(name, why, "Use a longer text, or a smaller --window.")
    return (ids[index * size : (index + 1) * size] for index in range(count if most is None else min(count, most)))
