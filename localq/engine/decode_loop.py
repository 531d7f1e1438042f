"""The decode loop of one reply: which steps are launched, and the tokens that come back. Ids only.

While the device computes a token, the next pass is launched. A draft needs the tokens before it, so where one is likely
(`Drafter.engages`) the loop holds that pass back, takes the tokens in flight, and launches a step that verifies the
draft: it gives the draft tokens that agree, and one more. The step after it is launched before these tokens are
yielded.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

from localq.drafts import rows_for
from localq.engine.cached_text import CachedText
from localq.engine.constraint import Constraint, masks_along
from localq.engine.draft.drafter import Draft, Drafter
from localq.engine.load.load import LoadedModel
from localq.engine.reply import ReplyStats
from localq.engine.step.steps import Steps
from localq.stats import Stats, TokenLogprob

Recompute = Callable[[ReplyStats, int], Iterator[Stats]]


class DecodeLoop:
    """Decoding of one reply, from the token that the prefill has chosen."""

    def __init__(
        self,
        model: LoadedModel,
        steps: Steps,
        text: CachedText,
        reply: ReplyStats,
        constraint: Constraint | None,
        drafter: Drafter | None,
        recompute: Recompute,
    ) -> None:
        """recompute: computes the cached text again for a longer one. drafter None: one token a step."""
        self._model, self._steps, self._text, self._reply = model, steps, text, reply
        self._constraint, self._drafter, self._recompute = constraint, drafter, recompute
        self._same_until = model.model.same_tables_until(len(reply.prompt))
        self._waiting = 1  # steps on their way
        self._read: deque[int] = deque()  # tokens that have come and are not yielded
        self._logprobs: deque[TokenLogprob] = deque()  # theirs, where the reply has any
        self.logprob: TokenLogprob | None = None  # of the token that was yielded last
        self._previous: int | None = None
        self._draft, self._rows = Draft(), 1  # of the step on its way
        self._forwarded = False  # the pass behind the last token is launched, and its choice waits for a mask
        self._taken_at = time.perf_counter()

    def tokens(self, keep: bool) -> Iterator[int | Stats]:
        """Yield tokens, at most `reply.limit`, the first from the prefill. Keeps the ids of the text in step.

        Yields progress where the cache is computed again. A constraint must accept a token before the next one is
        requested. On a GPU the mask after a token is computed while the device runs that token's pass.
        keep: save a checkpoint of the prompt after the first token; only for a reply without a constraint.
        """
        reply = self._reply
        if keep:  # the user has the first token before the copy is made
            self._take()
            yield self._next()
            self._text.checkpoint()
        while reply.count < reply.limit:
            position = len(reply.prompt) + self._known + self._waiting - 1
            if self._read and not (self._launches_first() and position != self._same_until):
                yield self._next()
                continue
            if position == self._same_until and self._may_launch():  # the pass needs all tokens before it as ids
                if self._waiting:
                    self._take()
                    continue
                yield from self._recompute(reply, position + 1)
                self._same_until = self._model.model.same_tables_until(position + 1)
            if not self._waiting:
                self._launch_next(position)
            elif not self._launch_ahead(position):
                self._take()

    @property
    def unread(self) -> int | None:
        """The last token that was yielded, which need not be in the text; it is the input of the step behind it."""
        return self._previous

    @property
    def _known(self) -> int:
        """Tokens of the reply that have come."""
        return self._reply.count + len(self._read)

    def _launches_first(self) -> bool:
        """True if the next step is launched before the tokens that have come are yielded, whose use takes time."""
        if self._drafter is None or self._constraint is not None or not self._steps.lookahead:
            return False
        if self._model.cache.states and len(self._read) > 1:  # states can go back no further than one token
            return False
        return not self._waiting and self._may_launch()

    def _may_launch(self) -> bool:
        """True if the reply has room for a step behind those on their way."""
        return self._known + self._waiting < self._reply.limit

    def _is_free(self) -> bool:
        """True if no mask is needed for the step behind those on their way."""
        return self._constraint is None or self._waiting < self._constraint.free()

    def _launch_ahead(self, position: int) -> bool:
        """Launch the step behind those on their way, or its pass alone; False where a token must be taken first."""
        ahead = self._steps.lookahead
        if not ahead or self._draft or self._forwarded or not self._may_launch():
            return False
        if self._is_free():
            if self._waiting > ahead or (self._drafter is not None and self._drafter.engages()):
                return False
            with self._text.passing(position, 1):
                self._steps.launch(position, self._reply.greedy)
            self._waiting += 1
            return True
        if self._waiting == 1 and (self._drafter is None or not self._drafter.expects_forced()):
            with self._text.passing(position, 1):
                self._steps.forward(position)
            self._forwarded = True
        return False

    def _launch_next(self, position: int) -> None:
        """Launch the step behind the tokens that have come, all of which are known."""
        constraint, greedy = self._constraint, self._reply.greedy
        masked = not self._is_free()
        draft = self._propose(position, masked)
        rows = rows_for(1 + len(draft))
        if draft:
            self._steps.draft(draft.ids, rows)
        if not masked:
            if constraint is not None:
                self._steps.obey(constraint)
            if self._forwarded:  # the mask that it waited for is none: states must not read its token twice
                self._steps.choose(greedy)
            else:
                with self._text.passing(position, rows, rows - 1):
                    self._steps.launch(position, greedy, rows, 1 + len(draft))
        else:
            assert constraint is not None
            if not self._forwarded:
                with self._text.passing(position, rows, rows - 1):
                    self._steps.forward(position, rows)
            draft = self._obey(constraint, draft)
            self._steps.choose(greedy, rows, 1 + len(draft))
        self._draft, self._rows, self._forwarded = draft, rows, False
        self._waiting = 1

    def _obey(self, constraint: Constraint, draft: Draft) -> Draft:
        """Mask the rows of a step; returns the draft as far as the constraint allows it."""
        masks = masks_along(constraint, draft.ids, self._model.vocab)
        self._steps.sampler.allow(*masks)
        return draft.cut(len(masks) - 1)

    def _propose(self, position: int, masked: bool) -> Draft:
        """A draft that fits in the reply, the cache and the tables of the model."""
        drafter, constraint, reply = self._drafter, self._constraint, self._reply
        if drafter is None:
            return Draft()
        if self._forwarded:
            return drafter.draft(0, masked=masked)
        rows = min(self._steps.rows, reply.limit - self._known, self._model.cache.longest_pass)
        if self._same_until is not None:
            rows = min(rows, self._same_until - position)
        if constraint is not None and not masked:
            rows = min(rows, constraint.free())
        while rows > 1 and rows_for(rows) > rows:
            rows -= 1
        forced = constraint.draft() if constraint is not None and masked else ()
        return drafter.draft(rows - 1, forced, masked)

    def _take(self) -> None:
        """Take the tokens of the oldest step."""
        ids, options = self._steps.readback.take(), self._steps.state.options
        if options is not None:
            self._logprobs += options.take()
        now, drafter, draft = time.perf_counter(), self._drafter, self._draft
        if drafter is not None:
            if draft:
                drafter.record(draft, len(ids) - 1)
                self._reply.record_draft(draft.source, len(draft), len(ids) - 1)
            if self._reply.steps:
                drafter.times.record(self._rows if draft else 1, now - self._taken_at - draft.seconds)
        self._reply.steps += 1
        self._taken_at, self._draft = now, Draft()
        for count, token in enumerate(ids):
            self._read.append(token)
            if drafter is not None:
                drafter.push(token, drafted=count < len(draft))
        self._waiting -= 1

    def _next(self) -> int:
        """The next token that has come; those before it are in the text."""
        token = self._read.popleft()
        self.logprob = self._logprobs.popleft() if self._logprobs else None
        if self._previous is not None:
            self._text.ids.append(self._previous)
        self._previous = token
        self._reply.count += 1
        return token
