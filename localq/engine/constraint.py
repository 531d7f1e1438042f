"""Constraint on a reply, token by token: a grammar, or the forced end of a thought, as the engine sees it. Ids only.

The engine requests the mask of the next token while the device computes the pass before it, so the mask costs nothing
as long as it is faster than a pass. No lookahead: the mask of a token depends on the token before it. Tokens that a
constraint lets go (`free`) have no mask, and are decoded as in a reply without a constraint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from localq.errors import LocalqError

FREE = 2**62  # of `Constraint.free`: all that follow


class Constraint(Protocol):
    """A constraint on one reply. Calls: `mask` (`accept` `mask`)*, and no `mask` once it has `stopped`.

    No `mask` either for a token that is `free`; `accept` is called for every token.
    """

    def free(self) -> int:
        """Return how many of the next tokens may be any, whatever they are; 0: the next one needs a `mask`.

        A lower bound: it may grow with `accept`, and shrinks by at most one with each token.
        """

    def mask(self) -> Tensor:
        """Return i32 [ceil(vocab / 32)] on the CPU: bit i % 32 of word i // 32 = token i is allowed now.

        `vocab` is that of the model (its logits); bits past it are ignored. At least one token is allowed, a stop id
        where the reply may end. The engine copies the mask before its next call.
        """

    def accept(self, token: int) -> None:
        """Advance by `token`, which the mask allowed. Not called for a stop id, which ends the reply."""

    @property
    def stopped(self) -> bool:
        """True when nothing can follow: the reply ends with reason "stop"."""

    def draft(self) -> list[int]:
        """Return ids that probably come next, because little else is allowed; empty where nothing is known.

        They are drafts: the reply has them only if the model chooses them.
        """

    def fork(self) -> Constraint:
        """Return a copy that advances on its own, for the masks along a draft. It may share what does not change."""


def only(token: int, vocab: int) -> Tensor:
    """Return the mask i32 [ceil(vocab / 32)] that allows `token` alone."""
    mask = torch.zeros(mask_words(vocab), dtype=torch.int32)
    bit = 1 << token % 32
    mask[token // 32] = bit - (1 << 32) if bit >> 31 else bit
    return mask


def mask_words(vocab: int) -> int:
    """Return the number of words of a mask."""
    return -(-vocab // 32)


def masks_along(constraint: Constraint, draft: Sequence[int], vocab: int) -> list[Tensor]:
    """Return the masks of the next token and of those behind the tokens of `draft`, i32 [ceil(vocab / 32)] each.

    They end at the first drafted token that is not allowed, where the constraint has stopped, and where it lets go.
    Copies: the constraint does not advance. Raises as `next_mask`.
    """
    ahead = constraint.fork() if draft else constraint
    masks = [next_mask(ahead, vocab).clone()]
    for token in draft:
        word = int(masks[-1][token // 32])
        if not word >> token % 32 & 1:
            break
        ahead.accept(token)
        if ahead.stopped or ahead.free():
            break
        masks.append(next_mask(ahead, vocab).clone())
    return masks


def next_mask(constraint: Constraint, vocab: int) -> Tensor:
    """Return the current mask of `constraint`, i32 [ceil(vocab / 32)], checked.

    Raises LocalqError for a mask that allows nothing, ValueError for one of the wrong shape.
    """
    mask = constraint.mask()
    if mask.dtype != torch.int32 or mask.shape != (mask_words(vocab),) or mask.device.type != "cpu":
        found = f"{mask.dtype} {tuple(mask.shape)} on {mask.device}"
        raise ValueError(f"mask is {found}, must be torch.int32 ({mask_words(vocab)},) on the CPU")
    last = (1 << (vocab - 1) % 32 + 1) - 1  # the bits of the last word that mean a token
    if not (mask[:-1].any() or int(mask[-1]) & last):
        why = "the grammar allows no next token, but the reply is incomplete"
        raise LocalqError(
            "grammar", why, "The model's vocabulary cannot express what the grammar requires; relax the grammar."
        )
    return mask


def unpack_mask(mask: Tensor, vocab: int) -> Tensor:
    """Unpack mask i32 [ceil(vocab / 32)] to bool [vocab], on the same device."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[:, None] >> bits) & 1).bool().flatten()[:vocab]
