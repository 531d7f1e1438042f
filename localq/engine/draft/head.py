"""The MTP block of a model as a draft model (`models.qwen3_5_mtp`): its cache follows that of the model.

The block reads what the last norm of the model gives (hidden states). Every pass of the model leaves those of its last
positions in a ring, and the block must read them before they are overwritten: at the latest when a pass needs their
slots (`make_room`), else with the next draft. Of a text that the model did not compute, as of a restored cache, there
are none: the block then reads zeros there, and its drafts are worse until that text is far enough back.

The block drafts the first token from the hidden state of the model, and further ones each from its own result of the
one before. Only what was read with the model's is kept in its cache. Ids only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from localq.drafts import MOST
from localq.engine.cached_text import CachedText
from localq.engine.draft.drafter import MTP
from localq.engine.draft.model import RunningDraftModel, bytes_read
from localq.engine.load.load import LoadedModel, free_memory, out_of_memory
from localq.models.qwen3_5_mtp import MultiTokenPrediction
from localq.planner.draft_cost import SPARE_SLOTS


class RunningHead(RunningDraftModel):
    """The MTP block of the model of an engine; implements `drafter.DraftModel` and `cached_text.Follower`."""

    source = MTP
    ahead = 1
    few = MOST
    reads_by_steps = False  # a step would overwrite the hidden state of the next position

    def __init__(self, model: LoadedModel, target: LoadedModel, use_graphs: bool = True) -> None:
        """model: of `load.draft_head`, which shares parts of `target`. As `RunningDraftModel`."""
        assert isinstance(model.model, MultiTokenPrediction)
        self._block = model.model
        self._slots = len(self._block.hiddens)
        self._known_from = self._known_to = 0  # positions of the text whose hidden states are in the ring
        self._first: int | None = None  # token of the cached text, which is at no position
        super().__init__(model, target, use_graphs)
        head = bytes_read(target) - target.ledger.get("weights", 0)
        self._share = (bytes_read(model) + head) / max(1, bytes_read(target))
        target.model.tap = self._block.take

    # ---- with the text of the model

    def make_room(self, ids: Sequence[int], first: int, count: int) -> None:
        """Read, of the text `ids`, what a pass over `count` positions from `first` on would overwrite."""
        self._agree(ids)
        if not ids or first + count - self._agreed <= self._slots - SPARE_SLOTS:
            return
        self._text.back_to(self._agreed)
        self._read(ids[self._agreed + 1 :])
        self._agreed = len(self._text)

    def passed(self, first: int, count: int) -> None:
        """Note that the ring holds the hidden states of such a pass."""
        if not self._known_from <= first <= self._known_to:
            self._known_from = first
        self._known_to = first + count
        self._known_from = max(self._known_from, self._known_to - (self._slots - SPARE_SLOTS))

    def cut(self, tokens: int) -> None:
        """Note that the text has been cut to its first `tokens` tokens; 0: or replaced."""
        self._known_to = min(self._known_to, tokens)
        self._known_from = min(self._known_from, self._known_to)
        self._agreed = min(self._agreed, max(0, tokens - 1))

    # ---- the cache

    def _agree(self, ids: Sequence[int]) -> None:
        if ids and ids[0] != self._first:
            self._text.clear()
            self._first, self._agreed = ids[0], 0
        super()._agree(ids)

    def _keep(self, drafted: list[int]) -> None:
        """Keep none: they are read again with the hidden states of the model."""

    @torch.inference_mode()
    def _read(self, ids: Sequence[int]) -> None:
        """Read `ids`, which follow the cached text, in passes: those with hidden states, and those without."""
        start = len(self._text)
        end, place = start + len(ids), start
        while place < end:
            known = self._known_from <= place < self._known_to
            stop = min(end, place + self._chunk, self._known_to if known else end)
            if place < self._known_from:
                stop = min(stop, self._known_from)
            self._remember(ids[place - start : stop - start], place, known)
            place = stop

    def _remember(self, ids: Sequence[int], first: int, known: bool) -> None:
        device, end = self.model.device, first + len(ids)
        tokens = torch.tensor([self._id(id) for id in ids], dtype=torch.int64).to(device)
        positions = torch.arange(first, end, dtype=torch.int64, device=device)
        with self._text.passing(first, len(ids)):
            self._block.remember(tokens, positions, self.model.cache, end, known)
        self._text.ids += ids

    def _pass(self, ids: Sequence[int], first: int) -> Tensor:
        if len(ids) > 1:  # the longest pass, and the last position, whose logits the warm-up needs
            self._remember(ids[:-1], first, known=True)
        logits = super()._pass(ids[-1:], first + len(ids) - 1)
        self._text.clear()
        return logits

    def _clear(self) -> None:
        super()._clear()
        self._known_from = self._known_to = 0


def open_draft_model(
    draft: LoadedModel | None, target: LoadedModel, text: CachedText, use_graphs: bool
) -> RunningDraftModel | None:
    """The draft model or MTP block ready to run, if there is one; text: that of the target, which a block follows.

    Raises LocalqError (exit 3) where memory runs out.
    """
    target.model.tap = None
    if draft is None:
        return None
    is_head = isinstance(draft.model, MultiTokenPrediction)
    try:
        if not is_head:
            return RunningDraftModel(draft, target, use_graphs)
        text.follower = head = RunningHead(draft, target, use_graphs)
        return head
    except torch.OutOfMemoryError as error:
        what = "the MTP block" if is_head else "the draft model"
        failure = out_of_memory(draft.plan.name, f"while preparing {what}", error)
    free_memory()
    raise failure
