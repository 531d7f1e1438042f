"""What a reply may say next, token by token: a grammar, as the engine sees it. Ids only.

The engine asks for the mask of the next token while the device computes the pass before it, so that finding out what is
allowed costs nothing as long as it is quicker than a pass. There is no looking ahead: the mask of a token needs the one
before it.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from localq.errors import LocalqError


class Constraint(Protocol):
    """What a reply must keep to. The calls of a reply: `mask` (`accept` `mask`)*, no `mask` once it has `stopped`."""

    def mask(self) -> Tensor:
        """i32 [ceil(vocab / 32)] on the CPU: bit i % 32 of word i // 32 = token i is allowed now.

        `vocab` is that of the model (its logits); bits past it mean nothing. At least one token is allowed, a stop id
        where the reply may end. The engine copies it before it calls again.
        """

    def accept(self, token: int) -> None:
        """The engine chose `token`, which `mask` allowed. Not called for a stop id, which ends the reply."""

    @property
    def stopped(self) -> bool:
        """Nothing can follow: the reply ends with reason "stop"."""


def words_of(vocab: int) -> int:
    """Elements of a mask."""
    return -(-vocab // 32)


def checked_mask(constraint: Constraint, vocab: int) -> Tensor:
    """The mask of `constraint` for now, i32 [ceil(vocab / 32)].

    Raises LocalqError where it allows nothing, ValueError where it is no mask of `vocab` tokens.
    """
    mask = constraint.mask()
    if mask.dtype != torch.int32 or mask.shape != (words_of(vocab),) or mask.device.type != "cpu":
        found = f"{mask.dtype} {tuple(mask.shape)} on {mask.device}"
        raise ValueError(f"mask is {found}, must be torch.int32 ({words_of(vocab)},) on the CPU")
    last = (1 << (vocab - 1) % 32 + 1) - 1  # the bits of the last word that mean a token
    if not (mask[:-1].any() or int(mask[-1]) & last):
        why = "it allows no token at this place, though the reply is not complete"
        raise LocalqError("grammar", why, "This model's vocabulary cannot write it: make it less strict.")
    return mask


def allowed(mask: Tensor, vocab: int) -> Tensor:
    """mask i32 [ceil(vocab / 32)] -> bool [vocab], on the same device."""
    bits = torch.arange(32, dtype=torch.int32, device=mask.device)
    return ((mask[:, None] >> bits) & 1).bool().flatten()[:vocab]
