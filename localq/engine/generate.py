"""Prefill and decode: token ids in, token ids out. Knows neither text nor processes.

The engine remembers the text in the cache (`cached_text`), so that the next prompt computes only its new part. Where
the cache cannot be cut, checkpoints are kept: at lengths of the prompt that the front end names, and at the end of a
reply.

A model with longrope has other rotary tables for long texts than for short ones (`models.rope.LengthSwitch`). A pass
uses those of the whole text up to its last token. Keys cached with other tables are not shared: a prompt on the other
side of the limit is computed from its first token, and a reply that crosses the limit pauses once, while the
conversation is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from localq.drafts import MOST, rows_for
from localq.engine import profile, snapshot
from localq.engine.cached_text import CachedText
from localq.engine.constraint import Constraint
from localq.engine.decode_loop import DecodeLoop
from localq.engine.draft.drafter import Drafter
from localq.engine.draft.head import open_draft_model
from localq.engine.load.load import LoadedModel, free_memory, out_of_memory
from localq.engine.logit_options import RequestLogits
from localq.engine.reply import ReplyStats, Step, check_request
from localq.engine.sampler import NON_FINITE
from localq.engine.step import fused
from localq.engine.step.steps import Steps
from localq.errors import ExitCode, LocalqError, usage_error
from localq.planner import footprint
from localq.sampling import LogitOptions, Sampling
from localq.stats import Stats, StepProfile
from localq.wording import OnProgress


class Engine:
    """A loaded model and the conversation in its cache. One reply at a time."""

    def __init__(
        self,
        model: LoadedModel,
        use_graphs: bool = True,
        chunk: int | None = None,
        on_progress: OnProgress = lambda stage, done, total: None,
        draft_tokens: int = 0,
        draft: LoadedModel | None = None,
    ) -> None:
        """Allocate buffers and, on a GPU, run everything once and capture the graphs.

        chunk: tokens of a prefill pass, at most those that the cache has room for.
        use_graphs False: the launches of the graphs one by one, with the same results bit for bit.
        draft_tokens: of a draft that a step can verify, at most; 0 where kernels take one row only, and no more than
        its cache keeps the inputs of. draft: a model that drafts (`engine.load.draft`).
        """
        self.model = model
        on_cuda = model.device.type == "cuda"
        self.chunk = min(chunk or footprint.prefill_chunk(on_cuda), model.cache.longest_pass)
        self.no_drafts = ""  # why, where the kernels cannot verify drafts
        most = model.cache.rows - 1 if model.cache.states else MOST
        self.draft_tokens = min(draft_tokens, most)
        self._steps = Steps(model, rows_for(1 + self.draft_tokens))
        self._text = CachedText(model.cache, model.checkpoint_bytes, self._steps.replay)
        self._loop: DecodeLoop | None = None  # of the last reply
        self._ledger = {**model.ledger, "sampler": self._steps.state.bytes()}
        self.notes = model.notes
        self._draft_model = open_draft_model(draft, model, self._text, use_graphs) if self.draft_tokens else None
        self._drafter = Drafter(self._draft_model)
        if self._draft_model is not None:
            self._ledger |= self._draft_model.ledger()
            self.notes = (*self.notes, *self._draft_model.notes)
        if on_cuda:
            reason = fused.why_not(model.model, model.cache.bits)
            if reason:
                self.notes = (*self.notes, f"decoding is slow because the fused kernels cannot be used: {reason}")
            self._prepare(not reason, use_graphs, on_progress)

    @property
    def graphs(self) -> bool:
        """True where decode steps replay captured graphs."""
        return self._steps.graphs is not None

    @property
    def draft_model(self) -> str:
        """The name of the draft model; empty without one."""
        return "" if self._draft_model is None or not self.draft_tokens else self._draft_model.name

    @property
    def cached_tokens(self) -> int:
        """The number of positions in the cache that the next prompt may share."""
        return len(self._text)

    def ledger(self) -> dict[str, int]:
        """Return component -> bytes allocated on the device."""
        return dict(self._ledger)

    @torch.inference_mode()
    def _prepare(self, fuse: bool, use_graphs: bool, on_progress: OnProgress) -> None:
        """Build and capture the decode step, then run the first and the last prefill pass of a full context.

        In this order, because a capture releases cached memory, and that of prefill must stay. Afterwards the allocator
        holds everything that a reply needs.
        """
        try:
            if fuse:
                self._ledger |= self._steps.fuse()
            if fuse and use_graphs:
                on_progress("capturing graphs", 0, 0)
                self._ledger["graphs"] = self._ledger.get("graphs", 0) + self._steps.capture()
                self._check_drafts()
            on_progress("warming up", 0, 0)
            self._reserve()
            self._warm_up()
            if self.model.vram is not None:
                self._ledger = self.model.vram.settle(self._ledger, self.model.plan.name or "model")
            return
        except torch.OutOfMemoryError as error:
            failure = out_of_memory(self.model.plan.name or "model", "while warming up", error)
        self._steps.drop()
        free_memory()
        raise failure

    def _check_drafts(self) -> None:
        """Take no drafts where the kernels cannot verify them."""
        if reason := self._steps.no_drafts:
            self.no_drafts, self.draft_tokens = reason, 0
            self.notes = (*self.notes, f"speculative decoding is off: {reason}")

    def _reserve(self) -> None:
        """Make the allocator hold the planned memory of prefill in one block, which passes split."""
        planned = self.model.plan.ledger.components["scratch"] - self._ledger.get("scratch", 0) - footprint.SPARE_BYTES
        free_memory()
        if self.model.vram is not None:
            self.model.vram.reserve(planned)

    def _warm_up(self) -> None:
        rows = min(self.chunk, self.model.ctx)
        for first in (0, self.model.ctx - rows):
            logits = self._pass([0] * rows, first)
        self._steps.warm_up(logits[0])
        self._invalidate()

    # ---- a reply

    def generate(
        self,
        prompt: list[int],
        sampling: Sampling,
        stop_ids: frozenset[int] = frozenset(),
        max_tokens: int | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        constraint: Constraint | None = None,
        breakers: frozenset[int] = frozenset(),
        marks: Sequence[int] = (),
        draft_tokens: int = 0,
        ask_draft_model: bool = True,
        logits: LogitOptions | None = None,
    ) -> Iterator[Step]:
        """Continue `prompt` until a stop id, `max_tokens`, a full context, or `cancelled()` (asked at every step).

        constraint: of the reply, which ends when that has stopped; breakers: ids that end a repetition, for DRY; marks:
        lengths of the prompt that a later one may go back to; draft_tokens: of a draft, at most, up to those of the
        engine; ask_draft_model: these may be of the draft model, if there is one. Drafts do not change the reply.
        logits: bias, penalties and log probabilities; on a GPU such a reply is made without drafts.

        Raises LocalqError at once for a prompt that is empty or has unknown ids (exit 2), or is longer than the context
        (exit 2), and while decoding for a non-finite logit.
        """
        check_request(prompt, max_tokens, self.model.vocab, self.model.ctx)
        self._steps.state.options = options = RequestLogits.of(logits, self.model.vocab, self.model.device)
        most = 0 if options is not None and self.model.device.type == "cuda" else min(draft_tokens, self.draft_tokens)
        drafter = self._drafter_for(prompt, most, ask_draft_model)
        reply = self._reply(prompt, sampling, stop_ids, max_tokens, cancelled, constraint, breakers, marks, drafter)
        return self._settled(reply)

    def _drafter_for(self, prompt: list[int], most: int, ask_model: bool) -> Drafter | None:
        if not most:
            return None
        self._drafter.begin(prompt, most, ask_model)
        return self._drafter

    def _reply(
        self,
        prompt: list[int],
        sampling: Sampling,
        stop_ids: frozenset[int],
        max_tokens: int | None,
        cancelled: Callable[[], bool],
        constraint: Constraint | None,
        breakers: frozenset[int],
        marks: Sequence[int],
        drafter: Drafter | None,
    ) -> Iterator[Step]:
        room = self.model.ctx - len(prompt) + 1  # the last token of a reply needs no slot
        limit = room if max_tokens is None else min(max_tokens, room)
        at_limit = "context" if limit == room and max_tokens != room else "length"
        self._choose_length(len(prompt))
        reply = ReplyStats(prompt, sampling.greedy, limit, self._text.reuse(prompt), self.model.ctx)
        self._steps.readback.forget()
        self._steps.sampler.reset(sampling, torch.tensor(prompt), limit, breakers)
        if constraint is not None:
            if constraint.stopped:
                yield reply.end("stop")
                return
            self._steps.obey(constraint)
        for first, stop in self._passes(reply.kept, len(prompt), marks):
            if cancelled():
                yield reply.end("cancelled")
                return
            self._prefill(reply, first, stop, keep=stop in marks)
            yield Step((), reply.record_prefill(len(self._text)))
            if stop in marks and (stop < len(prompt) or constraint is not None):
                self._text.checkpoint()
        loop = DecodeLoop(self.model, self._steps, self._text, reply, constraint, drafter, self._recompute)
        self._loop = loop
        for token in loop.tokens(keep=constraint is None and len(prompt) in marks):
            if isinstance(token, Stats):  # the conversation is computed again
                yield Step((), token)
                if cancelled():
                    yield reply.end("cancelled")
                    return
                continue
            if token == NON_FINITE:
                self._invalidate()
                why = f"non-finite logits at token {reply.count}"
                raise LocalqError("model", why, "The weights are damaged, or values overflow in the selected --dtype.")
            if token in stop_ids:
                yield reply.end("stop")
                return
            if constraint is not None:
                constraint.accept(token)
            yield Step((token,), reply.record_token(), logprobs=() if loop.logprob is None else (loop.logprob,))
            if constraint is not None and constraint.stopped:
                yield reply.end("stop")
                return
            if reply.count == limit or cancelled():
                yield reply.end(at_limit if reply.count == limit else "cancelled")
                return

    def _settled(self, reply: Iterator[Step]) -> Iterator[Step]:
        """Yield the steps of a reply, at whose end the text is what the model has read, with a checkpoint there.

        Not after an error, which the device may repeat.
        """
        self._loop = None
        try:
            yield from reply
        except GeneratorExit:
            self._settle()
            raise
        self._settle()

    def _settle(self) -> None:
        """Take the last token into the text if states have read it: a step was launched ahead."""
        unread = None if self._loop is None else self._loop.unread
        if self.model.cache.states and unread is not None and self._text.read == len(self._text) + 1:
            self._text.ids.append(unread)
        self._text.checkpoint()

    def _passes(self, first: int, end: int, marks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield start and end of the passes from `first` on, which end at `marks` where a checkpoint can be kept."""
        ends = sorted({*marks, end}) if self._text.checkpoints.are_useful() else [end]
        while first < end:
            stop = min(first + self.chunk, next(mark for mark in ends if mark > first))
            yield first, stop
            first = stop

    @torch.inference_mode()
    def _choose_length(self, length: int) -> None:
        """Adapt the model to a text of `length` tokens; empties the cache where it holds other keys."""
        if self.model.model.choose_length(length):
            self._text.clear()

    def _recompute(self, reply: ReplyStats, length: int) -> Iterator[Stats]:
        """Adapt the model to a text of `length` tokens, and compute all cached tokens again; yields progress."""
        ids = list(self._text.ids)
        self._choose_length(length)
        for first in range(0, len(ids), self.chunk):
            part = ids[first : first + self.chunk]
            self._recompute_pass(part, first)
            yield reply.recomputing(len(self._text), len(ids))

    @torch.inference_mode()
    def _recompute_pass(self, part: list[int], first: int) -> None:
        self._pass(part, first)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()
        self._text.ids.extend(part)

    @torch.inference_mode()
    def _prefill(self, reply: ReplyStats, first: int, stop: int, keep: bool) -> None:
        """Run one pass of the prompt, over positions first..stop; the last pass samples the first token.

        keep: a checkpoint is saved after it.
        """
        part = reply.prompt[first:stop]
        logits = self._pass(part, first)
        if stop == len(reply.prompt):
            self._steps.begin(logits[0], len(reply.prompt) - 1, reply.greedy)
        if keep:
            self._text.checkpoints.reserve(stop)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # for correct progress, and so that Cancel does not wait for queued passes
        self._text.ids.extend(part)

    def _pass(self, ids: list[int], first: int) -> torch.Tensor:
        """Run ids at positions from `first`; returns logits f32 [1, vocab] of the last."""
        device, end = self.model.device, first + len(ids)
        tokens = torch.tensor(ids, dtype=torch.int64).to(device)
        positions = torch.arange(first, end, dtype=torch.int64, device=device)
        with self._text.passing(first, len(ids)):
            logits: torch.Tensor = self.model.model(tokens, positions, self.model.cache, end)
        return logits

    # ---- snapshots

    def save_cache(self, path: Path, weights: str) -> int:
        """Write the cache to a file; returns its bytes. weights: `snapshot.weights_id`; raises as `snapshot.save`."""
        self._text.back_to(len(self._text))
        if not self._text.ids:
            raise usage_error("snapshot", "the cache is empty", "Send a message first.")
        return snapshot.save(path, self.model, weights, self._text.ids)

    def restore_cache(self, path: Path, weights: str) -> int:
        """Restore the cache from a file; returns its tokens. A refused file leaves the old content, or none."""
        with snapshot.Snapshot(path, self.model, weights) as found:
            self._text.clear()
            self.model.model.choose_length(len(found.ids))
            found.restore()
            self._text.restored(found.ids)
        return len(self._text)

    # ---- measuring

    @torch.inference_mode()
    def profile_step(self, position: int | None = None, greedy: bool = True, keep: bool = True) -> StepProfile:
        """Time every operation of one decode step at `position`, at most near the end of the context.

        None: after the cached positions. keep: slots before the position stay, for the next prompt to share; without it
        the cache is cleared. Needs a GPU and the fused kernels (else LocalqError, exit 7).
        """
        steps = self._steps
        if steps.fused is None:
            why = "profiling requires the fused decode step, which this device or model does not support"
            raise LocalqError("profile", why, "Use --device cuda and --dtype auto.", ExitCode.NO_DEVICE)
        first = profile.clamp_position(len(self._text) if position is None else position, self.model.ctx)
        kept = self._text.before(first) if keep else 0
        steps.readback.forget()
        steps.state.rewind()  # measure plain sampling, whatever the last reply used
        try:
            with self._text.passing(first, min(profile.REPEATED, self.model.ctx - first)):
                return profile.profile_step(steps.fused, steps.readback, self.model.ctx, first, greedy)
        finally:
            steps.state.rewind()
            self.model.cache.clear(kept)
            self._text.back_to(kept)

    @torch.inference_mode()
    def pass_seconds(self, rows: int, count: int) -> float:
        """Return the median wall time of a decode step of `rows` rows, as `profile.pass_seconds`; clears the cache."""
        first = self.model.ctx - rows
        try:
            with self._text.passing(first, rows):
                return profile.pass_seconds(self._steps, self.model.ctx, rows, count)
        finally:
            self._invalidate()

    def drafting_seconds(self, count: int) -> float | None:
        """Return the median time in which the draft model drafts a token; None without one."""
        return None if self._draft_model is None else self._draft_model.token_seconds(count)

    @torch.inference_mode()
    def logits_after(self, ids: list[int]) -> torch.Tensor:
        """Return logits f32 [vocab] of the token behind `ids`, on the CPU; clears the cache."""
        self._text.clear()
        self._choose_length(len(ids))
        try:
            for first in range(0, len(ids), self.chunk):
                logits = self._pass(ids[first : first + self.chunk], first)
            return logits[0].float().cpu()
        finally:
            self._invalidate()

    def _invalidate(self) -> None:
        """Clear the cache: NaN in a slot reaches later replies even through a mask."""
        self._text.clear()
        self.model.cache.clear()
