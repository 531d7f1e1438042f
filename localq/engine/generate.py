"""Prefill and decode: token ids in, token ids out. Knows neither text nor processes.

The ids whose keys and values are in the cache are kept, so that the next prompt computes only what is new. They are
shortened before anything is written over and extended only after a pass has run, so that they are right whatever
interrupts a reply: an error, a cancel, or a consumer that walks away.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from localq.engine import profile, snapshot
from localq.engine.constraint import Constraint
from localq.engine.load.load import LoadedModel, free_memory, out_of_memory
from localq.engine.reply import Reply
from localq.engine.reply import Step as Step
from localq.engine.sampler import NON_FINITE
from localq.engine.step import fused
from localq.engine.step.steps import Steps
from localq.errors import ExitCode, LocalqError, usage_error
from localq.planner import footprint
from localq.sampling import Sampling
from localq.stats import StepProfile
from localq.wording import OnProgress

CUDA_CHUNK = footprint.PREFILL_CHUNK  # tokens of one prefill pass
CPU_CHUNK = 128  # 0.16 s for SmolLM2-135M on two cores, so that Cancel is heard; 256 would be 10 % faster


class Engine:
    """A loaded model and the conversation in its cache. One reply at a time."""

    def __init__(
        self,
        model: LoadedModel,
        use_graphs: bool = True,
        chunk: int | None = None,
        on_progress: OnProgress = lambda stage, done, total: None,
    ) -> None:
        """Allocates buffers and, on a GPU, runs everything once and captures the graphs. `chunk`: tokens of a pass.

        `use_graphs` False: the launches that the graphs would hold, one by one, with the same results bit for bit.
        """
        self.model = model
        on_cuda = model.device.type == "cuda"
        self.chunk = chunk or (CUDA_CHUNK if on_cuda else CPU_CHUNK)
        self._steps = Steps(model)
        self._cached: list[int] = []
        self._ledger = {**model.ledger, "sampler": self._steps.state.bytes()}
        self.notes = model.notes
        if on_cuda:
            reason = fused.why_not(model.model)
            if reason:
                self.notes = (*self.notes, f"decoding without the fused kernels, which is slow: {reason}")
            self._prepare(not reason, use_graphs, on_progress)

    @property
    def graphs(self) -> bool:
        """Decode steps are replays of captured graphs."""
        return self._steps.graphs is not None

    @property
    def cached_tokens(self) -> int:
        """Positions of the cache that the next prompt may share."""
        return len(self._cached)

    def ledger(self) -> dict[str, int]:
        """Component -> bytes on the device, as allocated."""
        return dict(self._ledger)

    @torch.inference_mode()
    def _prepare(self, fuse: bool, use_graphs: bool, on_progress: OnProgress) -> None:
        """Build and capture the decode step, then run the first and the last prefill pass of a full context.

        In this order, because a capture gives cached memory back, and what prefill needs shall stay. From here on the
        allocator has all that a reply takes.
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
                self._ledger = self.model.vram.settled(self._ledger, self.model.plan.name or "model")
            return
        except torch.OutOfMemoryError as error:
            failure = out_of_memory(self.model.plan.name or "model", "while warming up", error)
        self._steps.drop()
        free_memory()
        raise failure

    def _reserve(self) -> None:
        """Make the allocator hold what the plan has for prefill in one block, which passes then cut up."""
        planned = self.model.plan.ledger.components["scratch"] - self._ledger.get("scratch", 0) - footprint.SPARE_BYTES
        free_memory()
        if self.model.vram is not None:
            self.model.vram.reserve(planned)

    def _warm_up(self) -> None:
        rows = min(self.chunk, self.model.ctx)
        for first in (0, self.model.ctx - rows):
            logits = self._pass([0] * rows, first)
        self._steps.warm_up(logits[0])
        self.model.cache.clear()

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
    ) -> Iterator[Step]:
        """Continue `prompt` until a stop id, `max_tokens`, a full context, or `cancelled()` (asked at every step).

        `constraint`: what the reply must keep to; it ends where that has stopped. `breakers`: ids that end a
        repetition, for DRY.

        Raises LocalqError at once for a prompt that is empty, holds unknown ids (exit 2) or is longer than the context
        (exit 3), and on the way when a logit is not finite.
        """
        self._check(prompt, max_tokens)
        return self._reply(prompt, sampling, stop_ids, max_tokens, cancelled, constraint, breakers)

    def _check(self, prompt: list[int], max_tokens: int | None) -> None:
        if not prompt:
            raise usage_error("prompt", "it has no tokens", "Say something.")
        for id in prompt:
            if type(id) is not int or not 0 <= id < self.model.vocab:
                why = f"the token {str(id)[:40]} is not in the vocabulary of {self.model.vocab}"
                raise usage_error("prompt", why, "The tokenizer does not belong to this model.")
        if max_tokens is not None and max_tokens < 1:
            raise usage_error("max_tokens", f"{max_tokens} is not allowed", "Use 1 or more.")
        if len(prompt) > self.model.ctx:
            why = f"it has {len(prompt)} tokens, the context holds {self.model.ctx}"
            next_step = "Shorten it, start anew with /clear, or load with a larger --ctx."
            raise LocalqError("prompt", why, next_step, ExitCode.DOES_NOT_FIT)

    def _reply(
        self,
        prompt: list[int],
        sampling: Sampling,
        stop_ids: frozenset[int],
        max_tokens: int | None,
        cancelled: Callable[[], bool],
        constraint: Constraint | None,
        breakers: frozenset[int],
    ) -> Iterator[Step]:
        room = self.model.ctx - len(prompt) + 1  # the last token of a reply needs no slot
        limit = room if max_tokens is None else min(max_tokens, room)
        at_limit = "context" if limit == room and max_tokens != room else "length"
        reply = Reply(prompt, sampling.greedy, limit, self._kept(prompt), self.model.ctx)
        self._steps.readback.forget()
        self._steps.sampler.reset(sampling, torch.tensor(prompt), limit, breakers)
        if constraint is not None:
            if constraint.stopped:
                yield reply.end("stop")
                return
            self._steps.allow(constraint)
        for first in range(reply.kept, len(prompt), self.chunk):
            if cancelled():
                yield reply.end("cancelled")
                return
            self._prefill(reply, first)
            yield Step((), reply.prefilled(len(self._cached)))
        for token in self._decoded(reply) if constraint is None else self._constrained(reply, constraint):
            if token == NON_FINITE:
                self._invalidate()
                why = f"non-finite logits at token {reply.count}"
                raise LocalqError("model", why, "The weights are damaged or overflow in this type (see --dtype).")
            if token in stop_ids:
                yield reply.end("stop")
                return
            if constraint is not None:
                constraint.accept(token)
            yield Step((token,), reply.decoded())
            if constraint is not None and constraint.stopped:
                yield reply.end("stop")
                return
            if reply.count == limit or cancelled():
                yield reply.end(at_limit if reply.count == limit else "cancelled")
                return

    def _kept(self, prompt: list[int]) -> int:
        """Shorten what is cached to what `prompt` shares; its last token is computed anew, for its logits."""
        pairs = zip(self._cached, prompt[:-1], strict=False)
        shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        del self._cached[shared:]
        return shared

    @torch.inference_mode()
    def _prefill(self, reply: Reply, first: int) -> None:
        """One chunk of the prompt, from position `first`; after the last one the first token is chosen."""
        part = reply.prompt[first : first + self.chunk]
        logits = self._pass(part, first)
        if first + len(part) == len(reply.prompt):
            self._steps.begin(logits[0], len(reply.prompt) - 1, reply.greedy)
        if self.model.device.type == "cuda":
            torch.cuda.synchronize()  # so that progress is true and Cancel is not stuck behind queued passes
        self._cached.extend(part)

    def _pass(self, ids: list[int], first: int) -> torch.Tensor:
        """ids at positions first... -> logits f32 [1, vocab] of the last."""
        device, end = self.model.device, first + len(ids)
        tokens = torch.tensor(ids, dtype=torch.int64).to(device)
        positions = torch.arange(first, end, dtype=torch.int64, device=device)
        logits: torch.Tensor = self.model.model(tokens, positions, self.model.cache, end)
        return logits

    def _decoded(self, reply: Reply) -> Iterator[int]:
        """Token after token, `reply.limit` at most, the first from the prefill. Keeps `_cached` true."""
        launched = 1
        token: int | None = None
        while reply.count < reply.limit:
            if launched < reply.limit and launched - reply.count <= self._steps.lookahead:
                self._steps.launch(len(reply.prompt) + launched - 1, reply.greedy)
                launched += 1
                continue
            token = self._take(reply, token)
            yield token

    def _constrained(self, reply: Reply, constraint: Constraint) -> Iterator[int]:
        """`_decoded` under a constraint, which knows a token by the time that the next one is asked for.

        On a GPU what may follow a token is found out while the device is in the pass of that token.
        """
        token: int | None = None
        while reply.count < reply.limit:
            position, last = len(reply.prompt) + reply.count, reply.count + 1 == reply.limit
            if self._steps.lookahead and not last:
                self._steps.forward(position)
            token = self._take(reply, token)
            yield token
            if not last:
                if not self._steps.lookahead:
                    self._steps.forward(position)
                self._steps.allow(constraint)
                self._steps.choose(reply.greedy)

    def _take(self, reply: Reply, previous: int | None) -> int:
        """The next token; `previous` was the input of the step that it ended."""
        token = self._steps.readback.take()
        if previous is not None:
            self._cached.append(previous)
        reply.count += 1
        return token

    # ---- leaving and taking up

    def save_cache(self, path: Path, weights: str) -> int:
        """Write the conversation in the cache to a file; its bytes. `weights`, and what it raises: see `snapshot`."""
        if not self._cached:
            raise usage_error("snapshot", "nothing is cached", "Say something first.")
        return snapshot.save(path, self.model, weights, self._cached)

    def restore_cache(self, path: Path, weights: str) -> int:
        """Take up the conversation in a file; its tokens. What is refused (see `snapshot`) leaves none or the old."""
        with snapshot.Snapshot(path, self.model, weights) as found:
            self._cached.clear()
            found.restore()
            self._cached.extend(found.ids)
        return len(self._cached)

    # ---- measuring

    @torch.inference_mode()
    def profile_step(self, position: int | None = None, greedy: bool = True, keep: bool = True) -> StepProfile:
        """The time of every operation of one decode step at `position` (or as far as the context goes).

        None: behind what is cached. `keep`: slots before the position stay as they are, the next prompt may share
        them, and the others are zeroed; without, the conversation is forgotten. Needs a GPU and the fused kernels
        (LocalqError, exit 7, without).
        """
        steps = self._steps
        if steps.fused is None:
            why = "only the fused decode step of a GPU is timed, and it does not run here"
            raise LocalqError("profile", why, "Load with --device cuda and --dtype auto.", ExitCode.NO_DEVICE)
        first = profile.placed(len(self._cached) if position is None else position, self.model.ctx)
        steps.readback.forget()
        steps.state.rewind()  # the choice that is measured is the plain one, whatever the last reply had
        try:
            return profile.profile_step(steps.fused, steps.readback, self.model.ctx, first, greedy)
        finally:
            steps.state.rewind()
            del self._cached[first if keep else 0 :]
            self.model.cache.clear(len(self._cached))

    def _invalidate(self) -> None:
        """Forget the conversation: NaN in a cache slot would reach later replies even through a mask."""
        self._cached.clear()
        self.model.cache.clear()
