"""Perplexity of a model on given tokens, and its divergence from a reference on the same tokens.

Both models read the text some tokens at a time, so that one piece of logits of each is held. Log-probabilities and sums
are f64: the KL of two good kernels is below the resolution of f32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from localq.engine.scoring import LogitSource, rows_at_a_time
from localq.errors import LocalqError
from localq.text.token_windows import Windows

JUDGED_BYTES = 32 * 2**20  # limit of one model's f64 log-probabilities at a time
OnWindow = Callable[[int, int], None]  # windows done, windows in total


@dataclass(frozen=True)
class Scores:
    """Means over all predicted tokens; None without a reference.

    kl     KL(reference || model) in nats per token
    top1   fraction of tokens where both have the same top token
    """

    perplexity: float
    reference_perplexity: float | None = None
    kl: float | None = None
    top1: float | None = None


def score(
    tested: LogitSource,
    reference: LogitSource | None,
    text: Windows,
    vocab: int,
    on_window: OnWindow = lambda done, total: None,
) -> Scores:
    """Score `tested` on the tokens of `text`, and against `reference`; both have `vocab` logits on one device.

    Raises LocalqError (exit 1) for a non-finite logit.
    """
    tally = Tally()
    rows = rows_at_a_time(vocab)
    for index, window in enumerate(text.ids):
        on_window(index, len(text.ids))
        for first in range(0, len(window) - 1, rows):
            ids, targets = window[first : first + rows], window[first + 1 : first + 1 + rows]
            ids = ids[: len(targets)]  # nothing follows the last token
            skipped = min(max(0, text.first - first), len(ids))
            logits = tested.logits(ids, first)[skipped:]
            theirs = None if reference is None else reference.logits(ids, first)[skipped:]
            if skipped < len(ids):
                tally.add(logits, torch.tensor(targets[skipped:]), theirs)
        if not tally.finite:
            why = f"non-finite logits in window {index + 1}"
            raise LocalqError("model", why, "The weights are damaged, or values overflow in the selected --dtype.")
    on_window(len(text.ids), len(text.ids))
    return tally.scores(reference is not None)


class Tally:
    """Sums over a text."""

    def __init__(self) -> None:
        # -log p of the model and of the reference, KL, equal top tokens
        self._sums = torch.zeros(4, dtype=torch.float64)
        self._tokens = 0

    @property
    def finite(self) -> bool:
        """True without NaN and infinity so far."""
        return bool(torch.isfinite(self._sums).all())

    @torch.inference_mode()
    def add(self, logits: Tensor, targets: Tensor, reference: Tensor | None) -> None:
        """Add tokens: logits f32 [T, vocab]; targets int64 [T], the next tokens; reference: like the logits."""
        rows = max(1, JUDGED_BYTES // (8 * logits.shape[1]))
        targets = targets.to(logits.device)
        for first in range(0, len(targets), rows):
            part = slice(first, first + rows)
            known = None if reference is None else reference[part]
            self._sums += torch.stack(_judge(logits[part], targets[part], known)).cpu()
        self._tokens += len(targets)

    def scores(self, compared: bool) -> Scores:
        """Return the means; compared: with a reference."""
        nll, theirs, kl, same = (self._sums / self._tokens).tolist()
        return Scores(_exp(nll), _exp(theirs), kl, same) if compared else Scores(_exp(nll))


def _exp(nll: float) -> float:
    """Return a perplexity. Raises LocalqError (exit 1) where it overflows f64, which JSON cannot represent."""
    try:
        return math.exp(nll)
    except OverflowError:
        why = f"a loss of {nll:.0f} nats per token is implausible for a language model"
        raise LocalqError(
            "model", why, "The weights are damaged, or values overflow in the selected --dtype."
        ) from None


def _judge(logits: Tensor, targets: Tensor, reference: Tensor | None) -> list[Tensor]:
    """Return the summands of `Tally`, over T: f64 [] each."""
    ours = torch.log_softmax(logits.double(), -1)
    nll = -ours.gather(1, targets[:, None]).sum()
    if reference is None:
        return [nll, *(nll.new_zeros(()) for _ in range(3))]
    theirs = torch.log_softmax(reference.double(), -1)
    nll_reference = -theirs.gather(1, targets[:, None]).sum()
    same = (logits.argmax(-1) == reference.argmax(-1)).sum().double()
    return [nll, nll_reference, (theirs.exp() * (theirs - ours)).sum(), same]
