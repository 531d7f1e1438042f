"""Sampling: the next token from the logits, chosen on the device. Ids only; settings: `localq.sampling.Sampling`.

Every setting is a small device tensor and nothing is read back, so one captured CUDA graph serves all settings. Order
and meaning are those of transformers (RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper,
TopPLogitsWarper, MinPLogitsWarper). All three filters keep a prefix of the tokens sorted by logit, XTC removes a prefix
of that, and the draw takes the first token whose cumulated weight exceeds u * total. u, and whether XTC acts, come from
tables filled on the CPU, so a seed draws the same tokens on every device. Equal logits are ordered by id.

DRY, XTC and a mask are host decisions (`dry`, `xtc`, `masked`): unused, they run no code.

`sample` is the reference and runs on the CPU; on a GPU `kernels.logit_adjust` and `kernels.sampling` do the same.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

import torch
from torch import Tensor

from localq.engine.constraint import mask_words, unpack_mask
from localq.kernels.gemv import ROWS
from localq.kernels.sampling import workspace_elements
from localq.sampling import LONGEST_MATCH, Sampling

NON_FINITE = -1  # returned in place of a token id when a logit is NaN or infinite
LARGEST_SCORE = 1e38  # limit of penalized scores, so that masked tokens stay below all others
FORBIDDEN = torch.finfo(torch.float32).min  # score of masked tokens; finite: only damaged weights give infinity


class SamplerState:
    """Settings and history of one reply, as tensors with fixed addresses.

    seen       bool [vocab]          tokens of the prompt and of the reply so far
    uniforms   f64  [capacity]       the random number in [0, 1) of every step
    step       i64  [1]              number of tokens in the reply
    floats     f64  [5]              temperature, top_p, min_p, repeat_penalty, xtc_threshold
    top_k      i64  [1]              vocab when off
    workspace  i64  [...]            workspace of the GPU kernels (empty on the CPU)
    excludes   bool [capacity]       XTC acts at this step
    history    i32  [capacity + 1]   tokens of the prompt, then of the reply; on a GPU the last one arrives late
    prompt     i64  [1]              number of tokens in the prompt
    window     i64  [1]              number of last tokens that DRY looks at
    penalties  f32  [51]             penalty by length of a repetition; 0 where it is allowed
    breakers   bool [vocab]          tokens that end a repetition
    matches    i32  [vocab]          workspace between the GPU kernels; zeros otherwise
    masks      i32  [ROWS, ceil(vocab/32)] bit i % 32 of word i // 32: token i is allowed, for each row of a step
    """

    def __init__(self, vocab: int, capacity: int, device: torch.device) -> None:
        self.vocab = vocab
        self.dry = self.xtc = self.masked = False

        def zeros(size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.seen = zeros(vocab, torch.bool)
        self.uniforms = zeros(capacity, torch.float64)
        self.step = zeros(1, torch.int64)
        self.floats = zeros(5, torch.float64).fill_(1)
        self.top_k = zeros(1, torch.int64).fill_(vocab)
        on_cuda = device.type == "cuda"
        self.workspace = zeros(workspace_elements(vocab) if on_cuda else 0, torch.int64)
        self.excludes = zeros(capacity, torch.bool)
        self.history = zeros(capacity + 1, torch.int32)
        self.prompt = zeros(1, torch.int64)
        self.window = zeros(1, torch.int64)
        self.penalties = zeros(LONGEST_MATCH + 1, torch.float32)
        self.breakers = zeros(vocab, torch.bool)
        self.matches = zeros(vocab, torch.int32)
        self.masks = torch.zeros(ROWS, mask_words(vocab), dtype=torch.int32, device=device)
        self._staged = torch.zeros(ROWS, mask_words(vocab), dtype=torch.int32, pin_memory=on_cuda)

    @property
    def mask(self) -> Tensor:
        """The mask of a step of one row."""
        return self.masks[0]

    @property
    def plain(self) -> bool:
        """True without DRY, XTC and mask."""
        return not (self.dry or self.xtc or self.masked)

    def reset(self, sampling: Sampling, prompt: Tensor, steps: int, breakers: Iterable[int] = ()) -> None:
        """Start a reply of at most `steps` tokens, without a mask; prompt i64 [T] on the CPU or on the device.

        breakers: ids that end a repetition; those past the vocabulary are ignored.
        """
        self.rewind()
        self.seen.zero_()
        self.seen[prompt.to(self.seen.device)] = True
        floats = (sampling.temperature, sampling.top_p, sampling.min_p, sampling.repeat_penalty, sampling.xtc_threshold)
        self.floats.copy_(torch.tensor(floats, dtype=torch.float64))
        self.top_k.fill_(min(sampling.top_k, self.vocab) or self.vocab)
        if sampling.has_dry:
            self._remember(sampling, prompt, breakers)
        if not sampling.greedy:
            self._draw_uniforms(sampling, steps)

    def rewind(self) -> None:
        """Go back to step 0, with plain sampling, as captured graphs do it."""
        self.step.zero_()
        self.dry = self.xtc = self.masked = False

    def _remember(self, sampling: Sampling, prompt: Tensor, breakers: Iterable[int]) -> None:
        """Set up DRY."""
        self.dry = True
        self.history[: len(prompt)].copy_(prompt)
        self.prompt.fill_(len(prompt))
        whole = self.history.numel()
        self.window.fill_(whole if sampling.dry_penalty_last_n < 0 else min(sampling.dry_penalty_last_n, whole))
        over = torch.arange(LONGEST_MATCH + 1, dtype=torch.float64) - sampling.dry_allowed_length
        penalties = sampling.dry_multiplier * sampling.dry_base**over * (over >= 0)
        self.penalties.copy_(penalties.clamp(max=LARGEST_SCORE))
        self.breakers.zero_()
        known = [id for id in breakers if 0 <= id < self.vocab]
        self.breakers[torch.tensor(known, dtype=torch.int64).to(self.breakers.device)] = True

    def _draw_uniforms(self, sampling: Sampling, steps: int) -> None:
        """Draw one number for every step; with XTC two, of which the first decides whether it acts."""
        generator = torch.Generator()
        generator.manual_seed(secrets.randbits(63) if sampling.seed is None else sampling.seed)
        self.xtc = sampling.has_xtc
        drawn = torch.rand(steps, 2 if self.xtc else 1, dtype=torch.float64, generator=generator)
        self.uniforms[:steps].copy_(drawn[:, -1])
        if self.xtc:
            self.excludes[:steps].copy_(drawn[:, 0] < sampling.xtc_probability)

    def allow(self, *masks: Tensor) -> None:
        """Restrict the next and all later choices to masks i32 [ceil(vocab/32)], on the CPU, one for each row.

        On a GPU the masks are copied in stream order without waiting; the previous copy must have finished.
        """
        self.masked = True
        for row, mask in enumerate(masks):
            self.masks[row].copy_(self._staged[row].copy_(mask), non_blocking=True)

    def advance(self, token: Tensor) -> None:
        """Count `token` i64 [1] (an id, not NON_FINITE) as part of the reply."""
        self.seen.index_fill_(0, token, True)
        if self.dry:
            self.history.index_copy_(0, self.prompt + self.step, token.int())
        self.step.add_(1)

    def bytes(self) -> int:
        """Return the device memory of the tensors above."""
        return sum(tensor.nbytes for tensor in vars(self).values() if isinstance(tensor, Tensor)) - self._staged.nbytes


def sample(logits: Tensor, state: SamplerState, greedy: bool, row: int = 0) -> Tensor:
    """Choose a token i64 [1] from logits f32 [vocab]; NON_FINITE if any logit is NaN or infinite.

    `greedy` is a host decision (its graph is much cheaper); without it temperature must be above 0. row: of the step,
    for its mask.
    """
    scores = adjust(logits, state, row) if state.dry or state.masked else penalize(logits, state)
    return torch.where(torch.isfinite(logits).all(), choose(scores, state, greedy), NON_FINITE)


def choose(scores: Tensor, state: SamplerState, greedy: bool) -> Tensor:
    """Choose a token i64 [1] from scores f32 [vocab]."""
    return scores.argmax(dim=-1, keepdim=True) if greedy else _draw(scores, state)


def penalize(logits: Tensor, state: SamplerState) -> Tensor:
    """Apply the repetition penalty to logits f32 [vocab]; a penalty of 1 leaves them unchanged."""
    penalty = state.floats[3]
    return torch.where(state.seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def adjust(logits: Tensor, state: SamplerState, row: int = 0) -> Tensor:
    """Apply penalty, DRY and mask to logits f32 [vocab]; the scores are finite where the logits are."""
    scores = penalize(logits, state)
    if state.dry:
        scores = scores - state.penalties[repeated_lengths(state)]
    scores = scores.clamp(-LARGEST_SCORE, LARGEST_SCORE)
    return scores.where(unpack_mask(state.masks[row], state.vocab), FORBIDDEN) if state.masked else scores


def repeated_lengths(state: SamplerState) -> Tensor:
    """Return i64 [vocab]: the longest suffix of the history, up to LONGEST_MATCH, that this token followed earlier.

    0 = none. A suffix does not extend over a breaker, and a breaker is never penalized.
    """
    count = int(state.prompt + state.step)
    history = state.history[max(0, count - int(state.window)) : count].long()
    lengths = torch.zeros(state.vocab, dtype=torch.int64, device=history.device)
    ends = (history[:-1] == history[-1:]).nonzero().flatten()  # earlier places of the last token
    matched, goes_on = torch.zeros_like(ends), torch.ones_like(ends, dtype=torch.bool)
    for back in range(min(LONGEST_MATCH, len(history))):
        token = history[-1 - back]
        goes_on &= (ends >= back) & (history[(ends - back).clamp(min=0)] == token) & ~state.breakers[token]
        if not goes_on.any():
            break
        matched += goes_on
    lengths.scatter_reduce_(0, history[ends + 1], matched, "amax")
    return lengths.masked_fill_(state.breakers, 0)


def sampling_weights(scores: Tensor, state: SamplerState) -> tuple[Tensor, Tensor]:
    """Return weights f64 [vocab] and ids i64 [vocab] of scores f32 [vocab], both by descending score.

    A weight is exp((score - largest) / temperature), 0 for tokens that top-k, top-p, min-p or XTC removes.
    """
    temperature, top_p, min_p = state.floats[0], state.floats[1], state.floats[2]
    ordered, ids = torch.sort(scores, descending=True, stable=True)
    kth = ordered.index_select(0, state.top_k - 1)
    weights = torch.exp((ordered - ordered[:1]).double() / temperature) * (ordered >= kth)
    before = weights.cumsum(0) - weights  # mass of the likelier tokens
    in_top_p = (before < top_p * weights.sum()) | (top_p >= 1)
    weights = weights * in_top_p * (weights >= min_p)
    return without_top_choices(weights, state) if state.xtc else weights, ids


def without_top_choices(weights: Tensor, state: SamplerState) -> Tensor:
    """Apply XTC to descending weights f64 [vocab]: 0 for all above its threshold but the least likely, if it acts."""
    likely = (weights > 0) & (weights >= state.floats[4] * weights.sum())
    excluded = torch.arange(len(weights), device=weights.device) < likely.sum() - 1
    return weights.masked_fill(excluded & state.excludes.index_select(0, state.step), 0)


def _draw(scores: Tensor, state: SamplerState) -> Tensor:
    weights, ids = sampling_weights(scores, state)
    cumulated = weights.cumsum(0)
    threshold = state.uniforms.index_select(0, state.step) * cumulated[-1:]
    place = (cumulated <= threshold).sum(0, keepdim=True).clamp(max=scores.shape[0] - 1)
    return ids.index_select(0, place)
