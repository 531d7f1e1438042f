"""Decode steps of a model: run as replays of captured graphs, launch by launch, or through its modules.

A step is a pass of one token and a choice; with a draft, of 2, 4 or 8 tokens, and as many choices as agree with the
draft, and one more. For one token the graphs hold both, where the choice is a plain one; with DRY, XTC, a mask or
logit options, and for several tokens, a graph of the pass alone is replayed and the choices are launched behind it.
Ids only.

A step with drafts moves recurrent states on by its first token; the step behind it first replays those drafted tokens
that were accepted, and so does `replay` where no step follows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localq.drafts import ROWS
from localq.engine.constraint import Constraint, next_mask
from localq.engine.load.load import LoadedModel, free_memory
from localq.engine.sampler import SamplerState
from localq.engine.step.fused import FusedStep
from localq.engine.step.graph import CapturedPass, StepGraphs
from localq.engine.step.rows import StepBuffers
from localq.engine.step.state import ModuleStep, Readback, StepState
from localq.sampling import Sampling

ALL = Sampling(temperature=1.0, top_k=2, top_p=0.5, dry_multiplier=1.0, xtc_probability=1.0)


class Steps:
    """The buffers of a step, what runs it, and how its tokens come back.

    state      what a step hands to the next
    readback   brings chosen ids to the host
    fused      None until `fuse`: then the modules run
    lookahead  how many passes are launched before the host has seen the token before them
    rows       of a step, at most; more than one where drafts are verified
    no_drafts  why there is one row only, if the kernels are the reason
    """

    def __init__(self, model: LoadedModel, rows: int = 1, slots: int = 2) -> None:
        """Allocates buffers. slots: steps whose tokens may be on their way to the host, at most."""
        self._model = model
        self.rows, self.no_drafts = rows, ""
        self.sampler = SamplerState(model.vocab, model.ctx, model.device)
        self.state = StepState(self.sampler, model.device)
        self.readback = Readback(self.state.choices, slots)
        self.lookahead = 1 if model.device.type == "cuda" else 0
        self.fused: FusedStep | None = None
        self.graphs: StepGraphs | None = None
        # By rows, more than one; and a step of one row that replays drafted tokens, where states read them.
        self._verifying: dict[int, FusedStep] = {}
        self._passes: dict[int, CapturedPass] = {}  # the same as graphs
        self._modules = ModuleStep(model.model, model.cache, self.state)
        self._read = 0  # tokens that the states have read, where the cache keeps drafted ones behind them

    # ---- at load

    def fuse(self) -> dict[str, int]:
        """Take the fused launches from now on; component -> bytes of what they need."""
        model, cache = self._model.model, self._model.cache
        buffers = StepBuffers(self.rows)
        self.fused = FusedStep(model, cache, self.state, buffers=buffers)
        self._verifying = {
            rows: FusedStep(model, cache, self.state, rows, buffers) for rows in ROWS[1:] if rows <= self.rows
        }
        if cache.states and self.rows > 1:
            self._verifying[1] = FusedStep(model, cache, self.state, 1, buffers, replays=True)
        every = (self.fused, *self._verifying.values())
        return {
            "step_buffers": buffers.bytes() + sum(each.own_bytes() for each in every),
            "attention_workspace": self.fused.workspace_bytes(),
        }

    def capture(self) -> int:
        """Take graphs of them from now on; their bytes.

        What graphs and the code of their kernels take is the driver's: it is read from the device.
        """
        assert self.fused is not None
        free_memory()
        before = torch.cuda.mem_get_info(self._model.device)[0]
        self.graphs = StepGraphs(self.fused)
        try:
            self._passes = {rows: CapturedPass(step) for rows, step in self._verifying.items()}
        except ValueError as error:  # a kernel that does not take several rows of these weights
            self.rows, self.no_drafts = 1, f"a multi-token step failed ({error})"
            self._verifying, self._passes = {}, {}
        free_memory()
        return max(0, before - torch.cuda.mem_get_info(self._model.device)[0])

    def drop(self) -> None:
        """Give back what `fuse` and `capture` took."""
        self.graphs = self.fused = None
        self._verifying, self._passes = {}, {}

    def warm_up(self, logits: Tensor) -> None:
        """Every kind of step and of choice once, the latter also from logits f32 [vocab], which are written over."""
        last = self._model.ctx - 1
        for greedy in (True, False):
            self.state.rewind()
            self.state.choose(logits, greedy)
            self.state.rewind(last)
            self.launch(last, greedy)
            for rows in (each for each in ROWS[1:] if each <= min(self.rows, self._model.ctx)):
                self.state.rewind(self._model.ctx - rows)
                self.launch(self._model.ctx - rows, greedy, rows)
        self.sampler.reset(ALL, torch.zeros(1, dtype=torch.int64), 1)
        self.sampler.allow(torch.full_like(self.sampler.mask, -1, device="cpu"))
        self.state.choose(logits, greedy=False)
        self.readback.forget()
        self.state.rewind()

    # ---- in a reply

    def obey(self, constraint: Constraint) -> None:
        """Limit the next token to those that `constraint` allows, if it limits any. Raises as `next_mask`."""
        if constraint.free():
            self.sampler.masked = False
        else:
            self.sampler.allow(next_mask(constraint, self._model.vocab))

    def begin(self, logits: Tensor, position: int, greedy: bool) -> None:
        """Choose the first token from logits f32 [vocab] of the prompt's last one, which is at `position`."""
        self.state.position.fill_(position)
        self.state.choose(logits, greedy)
        self._send()

    def draft(self, ids: Sequence[int], rows: int) -> None:
        """Draft `ids` for a step of `rows` rows, before it is launched. No other step may be on its way."""
        self.state.draft(ids, rows)

    @torch.inference_mode()
    def launch(self, position: int, greedy: bool, rows: int = 1, count: int | None = None) -> None:
        """One step at `position`, whose first `count` rows (None: all) are chosen, with its result on the way to the
        host."""
        plain = self.sampler.plain and self.state.options is None
        if rows == 1 and self.graphs is not None and plain and not self._model.cache.replayable:
            self.graphs.replay(greedy)
            self.readback.push()
        else:
            self.forward(position, rows)
            self.choose(greedy, rows, rows if count is None else count)

    @torch.inference_mode()
    def forward(self, position: int, rows: int = 1) -> None:
        """A step at `position` up to its logits."""
        cache = self._model.cache
        if self.fused is None:
            if cache.replayable:
                self.replay(max(0, position - self._read))
            self._modules.forward(position + rows, rows)
        elif rows == 1 and not cache.replayable:
            (self.graphs or self.fused).forward()
        else:
            step = self._verifying[rows]
            if cache.states and not cache.replayable:
                step.forget_drafts()
            (self._passes.get(rows) or step).forward()
        if cache.states:
            cache.replayable, self._read = rows - 1, position + 1

    @torch.inference_mode()
    def replay(self, count: int) -> None:
        """Move recurrent states on by the first `count` of the drafted tokens behind them, and drop the others."""
        cache = self._model.cache
        if count and self.fused is not None:
            self._verifying[1].replay(count)
        else:
            self._modules.replay(min(count, cache.replayable))
        cache.replayable = 0

    @torch.inference_mode()
    def choose(self, greedy: bool, rows: int = 1, count: int = 1) -> None:
        """The rest of a step of `rows` rows, whose first `count` are chosen, with its result on the way to the host."""
        step = self._modules if self.fused is None else self._fused(rows)
        step.choose(greedy, count)
        self._send(count)

    def _send(self, count: int = 1) -> None:
        if self.state.options is not None:
            self.state.options.send()
        self.readback.push(count)

    def _fused(self, rows: int) -> FusedStep:
        step = self.fused if rows == 1 else self._verifying[rows]
        assert step is not None
        return step
