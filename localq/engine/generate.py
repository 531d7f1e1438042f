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

from localq.engine import profile, snapshot
from localq.engine.cached_text import CachedText
from localq.engine.constraint import Constraint
from localq.engine.load.load import LoadedModel, free_memory, out_of_memory
from localq.engine.reply import ReplyStats, Step
from localq.engine.sampler import NON_FINITE
from localq.engine.step import fused
from localq.engine.step.steps import Steps
from localq.errors import ExitCode, LocalqError, usage_error
from localq.planner import footprint
from localq.sampling import Sampling
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
    ) -> None:
        """Allocate buffers and, on a GPU, run everything once and capture the graphs; chunk: tokens of a prefill pass.

        At most those that the cache has room for.

        use_graphs False: the launches of the graphs one by one, with the same results bit for bit.
        """
        self.model = model
        on_cuda = model.device.type == "cuda"
        self.chunk = min(chunk or footprint.prefill_chunk(on_cuda), model.cache.longest_pass)
        self._steps = Steps(model)
        self._text = CachedText(model.cache, model.checkpoint_bytes)
        self._unread: int | None = None  # the last token of the reply, which need not be in the text
        self._ledger = {**model.ledger, "sampler": self._steps.state.bytes()}
        self.notes = model.notes
        if on_cuda:
            reason = fused.why_not(model.model)
            if reason:
                self.notes = (*self.notes, f"decoding is slow without the fused kernels: {reason}")
            self._prepare(not reason, use_graphs, on_progress)

    @property
    def graphs(self) -> bool:
        """True where decode steps replay captured graphs."""
        return self._steps.graphs is not None

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
                self._ledger["graphs"] = self._steps.capture()
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
    ) -> Iterator[Step]:
        """Continue `prompt` until a stop id, `max_tokens`, a full context, or `cancelled()` (asked at every step).

        constraint: of the reply, which ends when that has stopped; breakers: ids that end a repetition, for DRY; marks:
        lengths of the prompt that a later one may go back to.

        Raises LocalqError at once for a prompt that is empty or has unknown ids (exit 2), or is longer than the context
        (exit 2), and while decoding for a non-finite logit.
        """
        self._check(prompt, max_tokens)
        reply = self._reply(prompt, sampling, stop_ids, max_tokens, cancelled, constraint, breakers, marks)
        return self._settled(reply)

    def _check(self, prompt: list[int], max_tokens: int | None) -> None:
        if not prompt:
            raise usage_error("prompt", "the prompt is empty", "Enter some text.")
        for id in prompt:
            if type(id) is not int or not 0 <= id < self.model.vocab:
                why = f"token {str(id)[:40]} is outside the vocabulary of {self.model.vocab} tokens"
                raise usage_error("prompt", why, "The tokenizer does not match this model.")
        if max_tokens is not None and max_tokens < 1:
            raise usage_error("max_tokens", f"{max_tokens} is too small", "Use 1 or more.")
        if len(prompt) > self.model.ctx:
            why = f"{len(prompt)} tokens long, but the context is only {self.model.ctx} tokens"
            raise usage_error("prompt", why, "Shorten it, or load with a larger --ctx.")

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
        for token in self._decode(reply, constraint, keep=constraint is None and len(prompt) in marks):
            if isinstance(token, Stats):  # the conversation is computed again
                yield Step((), token)
                if cancelled():
                    yield reply.end("cancelled")
                    return
                continue
            if token == NON_FINITE:
                self._invalidate()
                why = f"non-finite logits at token {reply.count}"
                raise LocalqError("model", why, "The weights are damaged, or they overflow with this --dtype.")
            if token in stop_ids:
                yield reply.end("stop")
                return
            if constraint is not None:
                constraint.accept(token)
            yield Step((token,), reply.record_token())
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
        self._unread = None
        try:
            yield from reply
        except GeneratorExit:
            self._settle()
            raise
        self._settle()

    def _settle(self) -> None:
        """Take the last token into the text if states have read it: a step was launched ahead."""
        if self.model.cache.states and self._unread is not None and self._text.read == len(self._text) + 1:
            self._text.ids.append(self._unread)
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

    def _decode(self, reply: ReplyStats, constraint: Constraint | None, keep: bool) -> Iterator[int | Stats]:
        """Yield tokens, at most `reply.limit`, the first from the prefill. Keeps the ids of the text in step.

        Yields progress where the cache is computed again (`_recompute`). A constraint must accept a token before the
        next one is requested. On a GPU the mask after a token is computed while the device runs that token's pass.
        keep: save a checkpoint of the prompt after the first token; only for a reply without a constraint.
        """
        launched = 1
        token: int | None = None
        if keep:  # the user has the first token before the copy is made
            token = self._take(reply, None)
            yield token
            self._text.checkpoint()
        same_until = self.model.model.same_tables_until(len(reply.prompt))
        while reply.count < reply.limit:
            position, waiting = len(reply.prompt) + launched - 1, launched - reply.count
            crosses = position == same_until  # first all launched tokens are taken: the pass needs them as ids
            more, lookahead = launched < reply.limit, 0 if crosses else self._steps.lookahead
            is_free = constraint is None or waiting < constraint.free()
            masked = constraint is not None and not is_free and waiting == 1 and more
            if more and is_free and waiting <= lookahead:
                if crosses:
                    yield from self._recompute(reply, position + 1)
                    same_until = self.model.model.same_tables_until(position + 1)
                with self._text.passing(position, 1):
                    self._steps.launch(position, reply.greedy)
                launched += 1
                continue
            if masked and lookahead:
                self._steps.forward(position)
            token = self._take(reply, token)
            yield token
            if masked and constraint is not None:
                if crosses:
                    yield from self._recompute(reply, position + 1)
                    same_until = self.model.model.same_tables_until(position + 1)
                if not lookahead:
                    self._steps.forward(position)
                self._steps.obey(constraint)
                self._steps.choose(reply.greedy)
                launched += 1

    def _take(self, reply: ReplyStats, previous: int | None) -> int:
        """Return the next token; `previous` is the input of the step that produced it."""
        token = self._steps.readback.take()
        if previous is not None:
            self._text.ids.append(previous)
        self._unread = token
        reply.count += 1
        return token

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
            why = "profiling needs the fused decode step, which this device or model does not support"
            raise LocalqError("profile", why, "Load with --device cuda and --dtype auto.", ExitCode.NO_DEVICE)
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

    def _invalidate(self) -> None:
        """Clear the cache: NaN in a slot reaches later replies even through a mask."""
        self._text.clear()
        self.model.cache.clear()
