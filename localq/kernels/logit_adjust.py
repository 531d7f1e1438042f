"""Adjustment of logits before a token is chosen, on the GPU: DRY and a mask. Reference: `engine/sampler.py`.

Same state, same scores as `engine.sampler.adjust`, bit for bit but for the soft cap's tanh.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from localq import kernels
from localq.kernels.checks import check, check_cuda, place


class AdjustmentState(Protocol):
    """State read and written by the adjustment: `engine.sampler.SamplerState`, all on the device of the logits.

    seen       bool [vocab]          tokens that the repetition penalty applies to
    floats     f64  [5]              floats[3] is that penalty
    step       i64  [1]              tokens of the reply
    history    i32  [size]           the prompt, then the reply; its last token is entered by `dry_match`
    prompt     i64  [1]              tokens of the prompt, 1 or more
    window     i64  [1]              how many of the last tokens DRY looks at
    breakers   bool [vocab]          tokens that end a repetition
    penalties  f32  [longest + 1]    what a repetition of that length takes off
    matches    i32  [vocab]          zeros but between `dry_match` and `adjust`
    mask       i32  [ceil(vocab/32)] bit i % 32 of word i // 32: token i is allowed; of a step of one row
    dry, masked  host decisions: which of these are looked at
    """

    dry: bool
    masked: bool
    seen: Tensor
    floats: Tensor
    step: Tensor
    history: Tensor
    prompt: Tensor
    window: Tensor
    breakers: Tensor
    penalties: Tensor
    matches: Tensor

    @property
    def mask(self) -> Tensor: ...


def dry_match(state: AdjustmentState, token: Tensor, *, diverged: Tensor | None = None) -> None:
    """Raise matches[t] to the length of the longest end of the history that stands earlier too and is followed by t.

    token i64 [1]: the last of the reply, where it has any; it goes to its place in the history, which the kernels that
    choose do not write. Every token of the history is below vocab. diverged i32 [1]: nothing is done where it is
    nonzero. The same bits every time. Bound by latency.
    """
    op, device, vocab = "dry_match", state.history.device, state.breakers.numel()
    size, longest = state.history.numel(), state.penalties.numel() - 1
    check(op, "history", state.history, device, (torch.int32,), size)
    check(op, "breakers", state.breakers, device, (torch.bool,), vocab)
    check(op, "matches", state.matches, device, (torch.int32,), vocab)
    for name, one in (("prompt", state.prompt), ("step", state.step), ("window", state.window), ("token", token)):
        check(op, name, one, device, (torch.int64,), 1)
    if diverged is not None:
        check(op, "diverged", diverged, device, (torch.int32,), 1)
    check_cuda(op, "history", state.history)
    kernels.module().dry_match(
        history=state.history.data_ptr(),
        size=size,
        prompt=state.prompt.data_ptr(),
        step=state.step.data_ptr(),
        token=token.data_ptr(),
        window=state.window.data_ptr(),
        breakers=state.breakers.data_ptr(),
        longest=longest,
        matches=state.matches.data_ptr(),
        diverged=0 if diverged is None else diverged.data_ptr(),
        **place(state.history),
    )


def adjust(
    logits: Tensor,
    state: AdjustmentState,
    *,
    softcap: float = 0.0,
    mask: Tensor | None = None,
    diverged: Tensor | None = None,
) -> None:
    """Make scores of logits f32 [vocab], in place: soft cap (as `sampling.sample`), repetition penalty, DRY, mask.

    DRY and the mask where the state says so; `matches` are zeros afterwards. Scores are within +-1e38, -FLT_MAX where
    forbidden; what is not finite stays so. mask: instead of that of the state; diverged i32 [1]: nothing is done where
    it is nonzero. Bound by latency.
    """
    op, device, vocab = "adjust", logits.device, logits.numel()
    mask = state.mask if mask is None else mask
    check(op, "logits", logits, device, (torch.float32,), vocab)
    if not softcap >= 0:
        raise ValueError(f"{op}: softcap = {softcap}, must be 0 (off) or positive")
    check(op, "seen", state.seen, device, (torch.bool,), vocab)
    check(op, "floats", state.floats, device, (torch.float64,), 5)
    check(op, "penalties", state.penalties, device, (torch.float32,), state.penalties.numel())
    check(op, "matches", state.matches, device, (torch.int32,), vocab)
    check(op, "mask", mask, device, (torch.int32,), -(-vocab // 32))
    if diverged is not None:
        check(op, "diverged", diverged, device, (torch.int32,), 1)
    check_cuda(op, "logits", logits)
    kernels.module().adjust(
        logits=logits.data_ptr(),
        vocab=vocab,
        softcap=softcap,
        seen=state.seen.data_ptr(),
        floats=state.floats.data_ptr(),
        penalties=state.penalties.data_ptr() if state.dry else 0,
        matches=state.matches.data_ptr(),
        mask=mask.data_ptr() if state.masked else 0,
        diverged=0 if diverged is None else diverged.data_ptr(),
        **place(logits),
    )


def dry_match_bytes(history: int) -> int:
    """Bytes that must move: the tokens of the history, once."""
    return 4 * history


def adjust_bytes(vocab: int, dry: bool) -> int:
    """Bytes that must move: logits in and out and what was seen; with DRY the matches."""
    return vocab * (4 + 4 + 1 + (4 if dry else 0))
