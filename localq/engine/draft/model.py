"""A draft model: a small model of the same tokenizer, which proposes what it expects the large one to say next.

It has a KV cache and, on a GPU, graphs of its own. Its cache follows the text of the reply: tokens that were not
accepted are cut, and those it has not seen are read before the next draft. Always greedy. Ids only.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from localq.drafts import MOST
from localq.engine.cached_text import CachedText
from localq.engine.draft.drafter import MODEL, Proposal
from localq.engine.load.load import LoadedModel
from localq.engine.step import fused
from localq.engine.step.steps import Steps
from localq.planner import draft_cost, footprint

FEW = 2  # missed tokens that decode steps read, one by one; more are read in passes of a prompt


class RunningDraftModel:
    """The draft model of an engine; implements `drafter.DraftModel`.

    name   for messages
    notes  for the user
    """

    source = MODEL
    ahead = 0  # position p holds token p + ahead of the text
    few = FEW  # missed tokens whose time counts as that of the draft
    reads_by_steps = True  # these few

    def __init__(self, model: LoadedModel, target: LoadedModel, use_graphs: bool = True) -> None:
        """Allocate buffers and, on a GPU, run everything once and capture the graphs.

        Raises torch.OutOfMemoryError.
        """
        self.model, self.name = model, model.plan.name
        self.notes: tuple[str, ...] = ()
        self._known = min(model.vocab, target.vocab)  # ids from here on one of the two does not have
        self._text = CachedText(model.cache)
        self._agreed = 0  # the first tokens of the cached text that are known to be those of the reply
        self._steps = Steps(model, slots=MOST)
        self._ledger = {**model.ledger, "sampler": self._steps.state.bytes()}
        on_cuda = model.device.type == "cuda"
        self._chunk = min(footprint.prefill_chunk(on_cuda), model.cache.longest_pass)
        self._failed = False
        self._share = bytes_read(model) / max(1, bytes_read(target))
        if on_cuda:
            self._prepare(use_graphs)

    @property
    def share(self) -> float:
        """The expected time of a token over that of a pass of the target, by the bytes of their weights."""
        return self._share

    def ledger(self) -> dict[str, int]:
        """Return component -> bytes allocated on the device, as `planner.draft_cost` plans them."""
        return draft_cost.ledger(self._ledger, self._ledger.get("scratch", 0))

    @torch.inference_mode()
    def _prepare(self, use_graphs: bool) -> None:
        if reason := fused.why_not(self.model.model, self.model.cache.bits):
            self.notes = (f"drafting is slow because the fused kernels cannot be used: {reason}",)
        else:
            self._ledger |= self._steps.fuse()
            if use_graphs:
                self._ledger["graphs"] = self._steps.capture()
        rows = min(self._chunk, self.model.ctx)
        for first in (0, self.model.ctx - rows):
            logits = self._pass([0] * rows, first)
        self._steps.warm_up(logits[0])
        self._clear()

    # ---- in a reply

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a reply to `prompt`. Nothing is read before the first draft."""
        self._agreed = 0
        self._agree(prompt)

    def missed(self, ids: Sequence[int]) -> int:
        """Return the tokens of the text `ids` that are not cached, but for the last, with which a draft begins."""
        self._agree(ids)
        return len(ids) - self.ahead - 1 - self._agreed

    def room(self, ids: Sequence[int]) -> int:
        """Return how many tokens it can draft behind the text `ids`; 0 beyond its context."""
        if self._failed or len(ids) <= self.ahead:
            return 0
        return max(0, self.model.ctx - len(ids) + self.ahead + 1)

    @torch.inference_mode()
    def propose(self, ids: Sequence[int], count: int) -> Proposal:
        """Return the `count` tokens that it expects behind the text `ids`, fewer before one that the target lacks."""
        started = time.perf_counter()
        if self.model.model.choose_length(len(ids) + count - 1):  # keys with other rotary tables
            self._text.clear()
            self._agreed = 0
        self._agree(ids)
        self._text.back_to(self._agreed)
        self._agreed = len(self._text)  # less where windows have slid
        self._steps.readback.forget()
        self._steps.sampler.rewind()
        missed = len(ids) - self.ahead - 1 - self._agreed
        if missed > self.few or (missed and not self.reads_by_steps):
            self._read(ids[self._agreed + self.ahead : -1])
        if missed > self.few:
            self._finish()
        read_at = time.perf_counter()
        self._draft(ids, count)
        drafted = [self._steps.readback.take()[0] for _ in range(count)]
        self._text.ids += ids[len(self._text) + self.ahead :]
        self._agreed = len(self._text)
        if min(drafted) < 0:
            self._fail()
            drafted = []
        else:
            self._keep(drafted[:-1])
        known = next((place for place, id in enumerate(drafted) if id >= self._known), len(drafted))
        reading_s = read_at - started if missed > self.few else 0.0
        return Proposal(drafted[:known], reading_s, time.perf_counter() - started - reading_s)

    def token_seconds(self, count: int) -> float:
        """Return the median wall time of a drafted token, in drafts of `MOST` tokens; the cache is cleared."""
        text = [0] * max(1, min(64, self.model.ctx - MOST))
        self.begin(text)
        times = [self.propose(text, min(MOST, self.room(text))) for _ in range(count + 1)]
        self._clear()
        return statistics.median(each.drafting_s / max(1, len(each.ids)) for each in times[1:])

    def _agree(self, ids: Sequence[int]) -> None:
        """Extend what is known to be the same in the cached text and in `ids`, whose last token is left out."""
        cached, most, ahead = self._text.ids, min(len(self._text), len(ids) - self.ahead - 1), self.ahead
        while self._agreed < most and cached[self._agreed] == ids[self._agreed + ahead]:
            self._agreed += 1

    def _keep(self, drafted: list[int]) -> None:
        """Take drafted tokens into the cached text: those that are accepted need not be read."""
        self._text.ids += drafted

    def _read(self, ids: Sequence[int]) -> None:
        """Read `ids`, which follow the cached text, in passes."""
        for first in range(0, len(ids), self._chunk):
            part = ids[first : first + self._chunk]
            self._pass(part, len(self._text))
            self._text.ids += part

    def _draft(self, ids: Sequence[int], count: int) -> None:
        """Launch the steps of `count` tokens behind `ids`, of which all but the last few are cached."""
        last = len(ids) - self.ahead - 1
        for position in range(len(self._text), last):
            self._steps.state.place(self._id(ids[position + self.ahead]), position)
            with self._text.passing(position, 1):
                self._steps.forward(position)
        self._steps.state.place(self._id(ids[-1]), last)
        for position in range(last, last + count):
            with self._text.passing(position, 1):
                self._steps.launch(position, greedy=True)

    def _pass(self, ids: Sequence[int], first: int) -> Tensor:
        """Run ids at positions from `first`; returns logits f32 [1, vocab] of the last."""
        device, end = self.model.device, first + len(ids)
        tokens = torch.tensor([self._id(id) for id in ids], dtype=torch.int64).to(device)
        positions = torch.arange(first, end, dtype=torch.int64, device=device)
        with self._text.passing(first, len(ids)):
            logits: Tensor = self.model.model(tokens, positions, self.model.cache, end)
        return logits

    def _id(self, id: int) -> int:
        """The token to read for one of the text, which may be one of the padding of a larger vocabulary."""
        return min(id, self.model.vocab - 1)

    def _finish(self) -> None:
        """Wait for the device, so that reading and drafting are timed apart."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()

    def _fail(self) -> None:
        """Draft no more: a logit was not finite."""
        self._failed = True
        self._clear()

    def _clear(self) -> None:
        self._text.clear()
        self._agreed = 0
        self.model.cache.clear()


def bytes_read(model: LoadedModel) -> int:
    """Bytes of the weights that a token reads: without an embedding that is not the head, too."""
    head = model.ledger.get("head", 0) or model.ledger.get("embedding", 0)
    return model.ledger.get("weights", 0) + head
