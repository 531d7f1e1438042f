"""What the model reads of a conversation that is longer than its context: the system prompt and the newest turns.

An exchange is a message of the user and the reply to it. When the prompt leaves no room for a reply, the oldest
exchanges are left out, down to TARGET of the context, so that the next ones need not be: whatever is left out makes the
model read the rest again. Nothing is deleted, and every time the user is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from localq.errors import usage_error

ROOM = 1 / 16  # of the context, for the reply; less where replies are limited to less. Below 1 - WARNING: told first
TARGET = 3 / 4
WARNING = 0.9  # share of the context at which the user is told, before it is full


@dataclass(frozen=True)
class Prompt:
    """Token ids of what the model reads, and how many of the oldest exchanges are not among it."""

    ids: list[int]
    left_out: int


def fitting(
    prompt: Callable[[int], list[int] | None], exchanges: int, left_out: int, size: int, max_tokens: int | None
) -> Prompt:
    """The prompt for a context of `size` tokens.

    prompt(n): the ids without the oldest n of `exchanges`, or None where that is far too long to be tokenized.
    left_out: how many were left out last time; as long as those are enough they stay the same, which keeps the KV
    cache, unless what is read has shrunk to half of TARGET. Raises LocalqError (exit 2) where not even the last message
    alone fits.
    """
    room = max(1, min(max_tokens or size, int(size * ROOM)))
    ids = prompt(left_out)
    enough = ids is not None and len(ids) + room <= size
    best = Prompt(ids, left_out) if ids is not None and enough else None
    if best is not None and (not left_out or len(best.ids) > size * TARGET / 2):
        return best
    low, high = (0, left_out - 1) if enough else (left_out + 1, exchanges)  # the fewest that are enough lie here
    while low <= high:
        middle = (low + high) // 2
        ids = prompt(middle)
        if ids is not None and len(ids) <= size * TARGET:
            best, high = Prompt(ids, middle), middle - 1
        else:
            low = middle + 1
    if best is not None:
        return best
    ids = prompt(exchanges)
    if ids is None or len(ids) >= size:
        has = f"{len(ids)} tokens" if ids is not None else "far more tokens than that"
        why = f"the context holds {size} tokens, and with the system prompt it has {has}"
        raise usage_error("the message", why, "Send less, or use a larger context (--ctx).")
    return Prompt(ids, exchanges)


def said(prompt: Prompt, left_out: int) -> str:
    """What to tell when `prompt` leaves out other exchanges than the `left_out` before; empty where it does not."""
    if prompt.left_out == left_out:
        return ""
    if prompt.left_out < left_out:
        again = left_out - prompt.left_out
        which = "an older exchange fits" if again == 1 else f"{again} older exchanges fit"
        return f"{which} into the context again: the model reads everything from there on anew"
    oldest = "exchange is" if prompt.left_out == 1 else f"{prompt.left_out} exchanges are"
    return (
        f"the context is full: the oldest {oldest} no longer read by the model, which reads the rest again; "
        "the conversation itself keeps them. /compact sums the oldest up instead"
    )


def warning(used: int, size: int) -> str:
    """That the context will soon be full."""
    return (
        f"the context is {used / size:.0%} full ({used} of {size} tokens): when it is full, the model "
        "reads only the system prompt and the newest turns; /compact sums the oldest up, /clear starts anew"
    )
