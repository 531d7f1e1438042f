"""The next token from the logits, on the GPU. `engine/sampler.py` is the reference and says what the settings mean.

Same state, same token as the reference, but for draws (and edges of top-p) that come within vocab/2 units of 2^-(62 -
bits of vocab) of the boundary between two tokens: the kernel sums exact integers, torch rounds f64 sums.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from localq import kernels
from localq.kernels.checks import check, check_cuda, place

LARGEST_VOCAB = 2**24 - 1  # ids share 64 bits with scores
_WORK_BYTES = 1024 * (8 + 4) + 256  # csrc/step/sample.cu, struct Work and room for more


class SamplingState(Protocol):
    """State read and advanced by sampling: `engine.sampler.SamplerState`, all on the device of the logits.

    seen       bool [vocab]     the choice is marked
    uniforms   f64  [capacity]  uniforms[step] is used
    step       i64  [1]         goes up by one
    floats     f64  [5]         temperature, top_p, min_p, repeat_penalty, xtc_threshold
    top_k      i64  [1]         vocab when off
    workspace  i64  [...]       `workspace_elements(vocab)` zeros before the first call, then the kernel's own
    xtc        host             `excludes` is looked at
    excludes   bool [capacity]  XTC acts at this step
    """

    seen: Tensor
    uniforms: Tensor
    step: Tensor
    floats: Tensor
    top_k: Tensor
    workspace: Tensor
    xtc: bool
    excludes: Tensor


def workspace_elements(vocab: int) -> int:
    """int64 elements of the workspace: histograms, and room to list every token once."""
    return _WORK_BYTES // 8 + vocab


def sample(
    logits: Tensor,
    state: SamplingState,
    *,
    greedy: bool,
    softcap: float = 0.0,
    adjusted: bool = False,
    chosen: Tensor,
    token: Tensor,
    position: Tensor | None = None,
    follows: bool = False,
    draft: Tensor | None = None,
    diverged: Tensor | None = None,
) -> None:
    """Choose from logits f32 [vocab]: the id, or -1 if a logit is not finite, goes to `chosen`, the id or 0 to `token`.

    chosen, token, position i64 [1]. `softcap` > 0: softcap * tanh(logits / softcap) first. `adjusted`: the logits went
    through `logit_adjust.adjust`, with the penalty. The token is marked as seen, step and position go up by one.
    `greedy`, `adjusted` and `xtc` of the state are host decisions; all other settings are read from the device when the
    kernels run, so one captured graph serves them all. The same bits every time. Bound by latency.

    Of a row of a step: diverged i32 [1] becomes nonzero where the choice is not `draft` i64 [1], the token of the next
    row, or there is none; a row that `follows` does nothing where it is nonzero.
    """
    op, device, vocab = "sample", logits.device, logits.numel()
    check(op, "logits", logits, device, (torch.float32,), vocab)
    if not 1 <= vocab <= LARGEST_VOCAB:
        raise ValueError(f"{op}: logits has shape {tuple(logits.shape)}, must have 1 to {LARGEST_VOCAB} elements")
    if not softcap >= 0:
        raise ValueError(f"{op}: softcap = {softcap}, must be 0 (off) or positive")
    _check_state(op, state, device, vocab)
    for name, one in (("step", state.step), ("top_k", state.top_k), ("chosen", chosen), ("token", token)):
        check(op, name, one, device, (torch.int64,), 1)
    for name, given in (("position", position), ("draft", draft)):
        if given is not None:
            check(op, name, given, device, (torch.int64,), 1)
    _check_diverged(op, diverged, device, follows)
    check_cuda(op, "logits", logits)
    kernels.module().sample(
        logits=logits.data_ptr(),
        vocab=vocab,
        softcap=softcap,
        seen=state.seen.data_ptr(),
        uniforms=state.uniforms.data_ptr(),
        capacity=state.uniforms.numel(),
        step=state.step.data_ptr(),
        floats=state.floats.data_ptr(),
        top_k=state.top_k.data_ptr(),
        chosen=chosen.data_ptr(),
        token=token.data_ptr(),
        position=0 if position is None else position.data_ptr(),
        workspace=state.workspace.data_ptr(),
        excludes=state.excludes.data_ptr() if state.xtc else 0,
        adjusted=adjusted,
        follows=follows,
        draft=0 if draft is None else draft.data_ptr(),
        diverged=0 if diverged is None else diverged.data_ptr(),
        greedy=greedy,
        **place(logits),
    )


def _check_state(op: str, state: SamplingState, device: torch.device, vocab: int) -> None:
    check(op, "seen", state.seen, device, (torch.bool,), vocab)
    check(op, "uniforms", state.uniforms, device, (torch.float64,), state.uniforms.numel())
    check(op, "floats", state.floats, device, (torch.float64,), 5)
    check(op, "workspace", state.workspace, device, (torch.int64,), workspace_elements(vocab))
    check(op, "excludes", state.excludes, device, (torch.bool,), state.uniforms.numel())


def _check_diverged(op: str, diverged: Tensor | None, device: torch.device, follows: bool) -> None:
    if diverged is not None:
        check(op, "diverged", diverged, device, (torch.int32,), 1)
    elif follows:
        raise ValueError(f"{op}: diverged is None, must be given for a row that follows another")


def sample_bytes(vocab: int) -> int:
    """Bytes that must move: the logits and what was seen, once."""
    return vocab * (4 + 1)
