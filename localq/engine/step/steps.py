"""How the decode steps of a model run here: as replays of captured graphs, launch by launch, or through its modules.

A step is a pass of one token and a choice. The graphs hold both, where the choice is a plain one; with DRY, XTC or a
mask a graph of the pass alone is replayed and the choice is launched behind it. Ids only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.engine.constraint import Constraint, next_mask
from localq.engine.load.load import LoadedModel, free_memory
from localq.engine.sampler import SamplerState
from localq.engine.step.fused import FusedStep
from localq.engine.step.graph import StepGraphs
from localq.engine.step.state import ModuleStep, Readback, StepState
from localq.sampling import Sampling

ALL = Sampling(temperature=1.0, top_k=2, top_p=0.5, dry_multiplier=1.0, xtc_probability=1.0)


class Steps:
    """The buffers of a step, what runs it, and how its tokens come back.

    state      what a step hands to the next
    readback   brings chosen ids to the host
    fused      None until `fuse`: then the modules run
    lookahead  how many passes are launched before the host has seen the token before them
    """

    def __init__(self, model: LoadedModel) -> None:
        """Allocates buffers."""
        self._model = model
        self.sampler = SamplerState(model.vocab, model.ctx, model.device)
        self.state = StepState(self.sampler, model.device)
        self.readback = Readback(self.state.chosen)
        self.lookahead = 1 if model.device.type == "cuda" else 0
        self.fused: FusedStep | None = None
        self.graphs: StepGraphs | None = None
        self._modules = ModuleStep(model.model, model.cache, self.state)

    # ---- at load

    def fuse(self) -> dict[str, int]:
        """Take the fused launches from now on; component -> bytes of what they need."""
        self.fused = FusedStep(self._model.model, self._model.cache, self.state)
        return {"step_buffers": self.fused.bytes(), "attention_workspace": self.fused.workspace_bytes()}

    def capture(self) -> int:
        """Take graphs of them from now on; their bytes.

        What graphs and the code of their kernels take is the driver's: it is read from the device.
        """
        assert self.fused is not None
        free_memory()
        before = torch.cuda.mem_get_info(self._model.device)[0]
        self.graphs = StepGraphs(self.fused)
        free_memory()
        return max(0, before - torch.cuda.mem_get_info(self._model.device)[0])

    def drop(self) -> None:
        """Give back what `fuse` and `capture` took."""
        self.graphs = self.fused = None

    def warm_up(self, logits: Tensor) -> None:
        """Every kind of step and of choice once, the latter also from logits f32 [vocab], which are written over."""
        last = self._model.ctx - 1
        for greedy in (True, False):
            self.state.rewind()
            self.state.choose(logits, greedy)
            self.state.rewind(last)
            self.launch(last, greedy)
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
        self.readback.push()

    @torch.inference_mode()
    def launch(self, position: int, greedy: bool) -> None:
        """One step at `position`, with its result on the way to the host."""
        if self.graphs is not None and self.sampler.plain:
            self.graphs.replay(greedy)
            self.readback.push()
        else:
            self.forward(position)
            self.choose(greedy)

    @torch.inference_mode()
    def forward(self, position: int) -> None:
        """A step at `position` up to its logits."""
        if self.graphs is not None:
            self.graphs.forward()
        elif self.fused is not None:
            self.fused.forward()
        else:
            self._modules.forward(position + 1)

    @torch.inference_mode()
    def choose(self, greedy: bool) -> None:
        """The rest of the step, with its result on the way to the host."""
        (self.fused or self._modules).choose(greedy)
        self.readback.push()
