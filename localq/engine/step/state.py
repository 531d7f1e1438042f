"""One decode step on fixed buffers: a token in, the next token out, everything kept on the device.

The step feeds itself: it writes the token it chose, the next position and the sampler's history where the next step
reads them, so that nothing but one id has to come back to the host. On a GPU the step is `fused.FusedStep`, where its
kernels serve; `ModuleStep` is the reference, and what runs on the CPU and in float32. Ids only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from localq.engine.cache import KVCache
from localq.engine.logit_options import RequestLogits
from localq.engine.sampler import SamplerState, sample
from localq.kernels import logit_adjust, sampling
from localq.kernels.gemv import ROWS
from localq.models.decoder import Block, Decoder
from localq.models.layers import RecurrentMixer

SKIPPED = -2  # in place of the choice of a row behind a token that was not drafted


class StepState:
    """State that one step hands to the next, and the drafted tokens that a step verifies.

    tokens     i64 [ROWS]  the input of the step, and behind it the tokens drafted to follow it
    position   i64 [1]     of the input
    positions  i64 [ROWS]  of the rows of a pass (`place_rows`)
    choices    i64 [ROWS]  the choice of every row, NON_FINITE included; SKIPPED behind one that was not drafted
    token, chosen  i64 [1]  the first of `tokens` and of `choices`
    """

    def __init__(self, sampler: SamplerState, device: torch.device) -> None:
        self.sampler = sampler
        self.tokens, self.positions, self.choices = (
            torch.zeros(ROWS, dtype=torch.int64, device=device) for _ in range(3)
        )
        self.position = torch.zeros(1, dtype=torch.int64, device=device)
        self.token, self.chosen = self.tokens[:1], self.choices[:1]
        self.options: RequestLogits | None = None  # of the reply
        self._diverged = torch.zeros(1, dtype=torch.int32, device=device)
        self._ahead = torch.arange(ROWS, dtype=torch.int64, device=device)
        self._staged = torch.zeros(ROWS - 1, dtype=torch.int64, pin_memory=device.type == "cuda")

    def draft(self, ids: Sequence[int], rows: int) -> None:
        """Draft `ids` for a step of `rows` rows; rows without one draft token 0. The copy before must have finished."""
        count = rows - 1
        self._staged[:count] = torch.tensor([*ids, *[0] * (count - len(ids))], dtype=torch.int64)
        self.tokens[1:rows].copy_(self._staged[:count], non_blocking=True)

    def place(self, token: int, position: int) -> None:
        """Make `token` at `position` the next input. No host synchronisation."""
        self.token.fill_(token)
        self.position.fill_(position)

    def place_rows(self, rows: int) -> None:
        """Set `positions` of a pass over `rows` rows."""
        torch.add(self._ahead[:rows], self.position, out=self.positions[:rows])

    def choose(self, logits: Tensor, greedy: bool, softcap: float = 0.0) -> None:
        """Choose from logits f32 [vocab], make the choice the next input, and move on by one position.

        `softcap`: cap * tanh(logits / cap) first, 0 = off (the module path has done it). No host synchronisation. On a
        GPU, DRY and a mask write over the logits.
        """
        if logits.is_cuda:
            self._choose_on_gpu(logits, greedy, softcap, 0, 1)
        else:
            self._choose_on_cpu(logits, greedy, softcap, 0)

    def follow(self, logits: Tensor, greedy: bool, softcap: float = 0.0) -> None:
        """Choose from logits f32 [rows, vocab] as long as each choice is the token drafted for the next row.

        The last choice becomes the next input. What is chosen is what as many steps of one row would have chosen from
        these logits: the sampler's state advances with every choice. Arguments as of `choose`.
        """
        rows = logits.shape[0]
        if rows > 1:
            self.choices.fill_(SKIPPED)
        for row in range(rows):
            if logits.is_cuda:
                self._choose_on_gpu(logits[row], greedy, softcap, row, rows)
                continue
            self._choose_on_cpu(logits[row], greedy, softcap, row)
            if row + 1 < rows and int(self.choices[row]) != int(self.tokens[row + 1]):
                return

    def _choose_on_cpu(self, logits: Tensor, greedy: bool, softcap: float, row: int) -> None:
        capped = torch.tanh(logits / softcap) * softcap if softcap else logits
        if self.options is not None:
            self.options.apply(capped)
        chosen = sample(capped, self.sampler, greedy, row)
        self.choices[row : row + 1] = chosen
        self.token.copy_(chosen.clamp(min=0))  # NON_FINITE ends the reply; until then it must stay an index
        self.sampler.advance(self.token)
        self.position.add_(1)
        if self.options is not None:
            self.options.record(chosen)

    def _choose_on_gpu(self, logits: Tensor, greedy: bool, softcap: float, row: int, rows: int) -> None:
        if self.options is not None:
            self.options.apply(logits, softcap)
            softcap = 0.0
        adjusted = self.sampler.dry or self.sampler.masked
        diverged = self._diverged if row else None
        if self.sampler.dry:
            logit_adjust.dry_match(self.sampler, self.token, diverged=diverged)
        if adjusted:
            mask = self.sampler.masks[row]
            logit_adjust.adjust(logits, self.sampler, softcap=softcap, mask=mask, diverged=diverged)
        sampling.sample(
            logits,
            self.sampler,
            greedy=greedy,
            softcap=0.0 if adjusted else softcap,
            adjusted=adjusted,
            chosen=self.choices[row : row + 1],
            token=self.token,
            position=self.position,
            follows=row > 0,
            draft=self.tokens[row + 1 : row + 2] if row + 1 < rows else None,
            diverged=self._diverged if rows > 1 else None,
        )
        if self.options is not None:
            self.options.record(self.choices[row : row + 1])

    def rewind(self, position: int = 0) -> None:
        """Token 0 at `position`, step 0 of a reply without options: warm-up runs and measurements start there."""
        self.options = None
        self.position.fill_(position)
        self.tokens.zero_()
        self.sampler.rewind()

    def bytes(self) -> int:
        """Device memory of the buffers, the sampler's included."""
        own = (self.tokens, self.positions, self.choices, self.position, self._ahead, self._diverged)
        return self.sampler.bytes() + sum(each.nbytes for each in own)


class ModuleStep:
    """A step through the modules of the model: one pass of one token, or of one and those drafted, and a choice."""

    def __init__(self, model: Decoder, cache: KVCache, state: StepState) -> None:
        self.model, self.cache, self.state = model, cache, state
        self._logits: Tensor | None = None

    def forward(self, live: int, rows: int = 1) -> None:
        """Feed the token at its position, and those drafted, all below `live`. No host synchronisation."""
        if rows == 1:
            self._logits = self.model(self.state.token, self.state.position, self.cache, live)
            return
        self.state.place_rows(rows)
        tokens, positions = self.state.tokens[:rows], self.state.positions[:rows]
        with self.cache.with_drafts():
            self._logits = self.model(tokens, positions, self.cache, live, last_only=False)

    def replay(self, count: int) -> None:
        """Move the states of recurrent layers on by the first `count` drafted tokens whose inputs the cache keeps."""
        for index, state in self.cache.states.items():
            block = self.model.layers[index]
            assert isinstance(block, Block)
            net = block.mixer()
            assert isinstance(net, RecurrentMixer)
            net.replay(self.cache.drafted_inputs[index], count, state)

    def choose(self, greedy: bool, count: int = 1) -> None:
        """Choose from the first `count` rows, after `forward`. No host synchronisation on a GPU."""
        assert self._logits is not None
        self.state.follow(self._logits[:count], greedy)
        self._logits = None


class Readback:
    """Brings chosen ids to the host in order, without stopping the device: pinned slots, one event each."""

    def __init__(self, choices: Tensor, slots: int = 2) -> None:
        self._choices = choices
        self._on_cuda = choices.is_cuda
        self._slots = [torch.zeros(len(choices), dtype=torch.int64, pin_memory=self._on_cuda) for _ in range(slots)]
        count = slots if self._on_cuda else 0
        self._events = [torch.cuda.Event() for _ in range(count)]  # type: ignore[no-untyped-call]  # torch's gap
        self._waiting: deque[tuple[int, int]] = deque()  # slot, rows
        self._next = 0

    def push(self, rows: int = 1) -> None:
        """Enqueue the copy of the ids chosen last, by a step of `rows` rows."""
        slot = self._next
        self._next = (slot + 1) % len(self._slots)
        self._slots[slot][:rows].copy_(self._choices[:rows], non_blocking=True)
        if self._on_cuda:
            self._events[slot].record()
        self._waiting.append((slot, rows))

    def take(self) -> list[int]:
        """The ids of the oldest step that was pushed and not taken, one or more; waits for it."""
        slot, rows = self._waiting.popleft()
        if self._on_cuda:
            self._events[slot].synchronize()
        return [id for id in self._slots[slot][:rows].tolist() if id != SKIPPED]

    def forget(self) -> None:
        """Drop what was pushed and not taken."""
        self._waiting.clear()
