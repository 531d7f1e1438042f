"""The drafter of a conversation: proposes the next tokens: what a constraint forces, what the text itself repeats, or
what a draft model or the model's MTP block expects."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from localq.drafts import MOST
from localq.engine.draft.lookup import LookupIndex
from localq.engine.draft.policy import Acceptance, Kind, PassTimes, Trials, best_draft, kind_of

GRAMMAR, LOOKUP, MODEL, MTP = "grammar", "lookup", "model", "mtp"  # sources
PATIENCE = 16  # tokens under a mask without a draft, after which only every PATIENCE-th is held for one
LEAST_LOSS = 0.1  # passes of one row that a trial is assumed to lose
REFERENCE = 64  # drafts of a model, after which a pass of one row is timed again


class Proposal(NamedTuple):
    """Tokens proposed by a draft model, and the seconds to read the tokens it had missed, and to draft."""

    ids: Sequence[int]
    reading_s: float
    drafting_s: float


class DraftModel(Protocol):
    """A small model that follows the text (`draft.model`), or a block of the model itself (`draft.head`)."""

    @property
    def source(self) -> str:
        """MODEL or MTP."""

    @property
    def share(self) -> float:
        """The expected time in which it drafts a token, over that of a pass of one row of the model it drafts for."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Begin a reply to `prompt`."""

    def missed(self, ids: Sequence[int]) -> int:
        """Return the tokens of the text `ids` that it has to read before it can draft."""

    def room(self, ids: Sequence[int]) -> int:
        """Return how many tokens it can draft behind the text `ids`, at most."""

    def propose(self, ids: Sequence[int], count: int) -> Proposal:
        """Return the `count` tokens that it expects behind the text `ids`, or fewer."""


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next, and their source; no tokens where none are worth a pass.

    refused   the kind of the token behind them, which the constraint has refused
    seconds   that it took a draft model to draft them
    """

    ids: tuple[int, ...] = ()
    source: str = ""
    kinds: tuple[Kind, ...] = field(default=(), repr=False)
    refused: Kind | None = field(default=None, repr=False)
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.ids)

    def cut(self, length: int) -> Draft:
        """Return its first `length` tokens: a constraint refuses the next."""
        if length >= len(self):
            return self
        return Draft(self.ids[:length], self.source, self.kinds[:length], self.kinds[length], self.seconds)


class Drafter:
    """Proposes drafts for one reply after the other.

    Running averages carry over to the next reply, as does the index of the text that both share.
    """

    def __init__(self, model: DraftModel | None = None) -> None:
        """model: drafts what the text does not repeat; its text is that of the replies."""
        self.acceptance, self.times = Acceptance(), PassTimes(1.0 if model is None else model.share)
        self._model, self._asks_model = model, model is not None
        self._source = MODEL if model is None else model.source
        self._trials = Trials()
        self._most = MOST
        self._index = LookupIndex()
        self._undrafted = 0  # tokens under a mask since the last draft
        self._modelled = 0  # drafts of the model since a pass of one row
        self._more = False  # the next token is that behind a draft that was accepted as a whole

    def begin(self, prompt: Sequence[int], most: int = MOST, ask_model: bool = True) -> None:
        """Begin a reply to `prompt`, with drafts of at most `most` tokens. ask_model False: none of a draft model."""
        self._most, self._undrafted = most, 0
        self._asks_model = ask_model and self._model is not None
        self._index.begin(prompt)
        if self._model is not None:
            self._model.begin(prompt)

    def push(self, token: int, drafted: bool = False) -> None:
        """Take a token of the reply. drafted: its acceptance is counted by `record`."""
        match = self._index.match()
        if not drafted:
            self._modelled, self._more = self._modelled if self._more else 0, False
            self._trials.count()
            if match is not None:
                would_be = self._index.following(match, 1)[0]
                self.acceptance.record(kind_of(LOOKUP, match.length), would_be == token)
        self._index.push(token)

    def engages(self) -> bool:
        """True if a draft is likely after the next token, too: the next pass should wait for it."""
        return bool(self._looked_up(self._most)[0]) or self._model_length(self._most, masked=False)[0] > 0

    def expects_forced(self) -> bool:
        """True if the next token under a mask should be held for a draft."""
        if self._undrafted < PATIENCE or self._undrafted % PATIENCE == 0:
            return True
        return self._model_length(self._most, masked=True)[0] > 0

    def draft(self, most: int, forced: Sequence[int] = (), masked: bool = False) -> Draft:
        """Return a draft of at most `most` tokens; forced: what a constraint says comes next, if anything."""
        most = min(most, self._most)
        found = self._forced(forced, most) or self._likeliest(most, masked)
        if masked:
            self._undrafted = 0 if found else self._undrafted + 1
        return found

    def record(self, draft: Draft, accepted: int) -> None:
        """Count a verified draft whose first `accepted` tokens were accepted, before these are pushed."""
        self._modelled += draft.source == self._source
        self._more = accepted == len(draft)
        for kind in draft.kinds[:accepted]:
            self.acceptance.record(kind, True)
        if accepted < len(draft):
            self.acceptance.record(draft.kinds[accepted], False)
        elif draft.refused is not None:
            self.acceptance.record(draft.refused, False)

    def _forced(self, ids: Sequence[int], most: int) -> Draft:
        kind = kind_of(GRAMMAR, 0)
        return self._worth(ids[:most], GRAMMAR, [kind] * min(len(ids), most))[0]

    def _likeliest(self, most: int, masked: bool) -> Draft:
        """The draft that is expected to gain the most: of look-up, where that is as good as the model."""
        found, gain = self._looked_up(most)
        count, with_model = self._model_length(most, masked)
        if count and with_model > gain:
            return self._modelled_draft(count, masked)
        return found

    def _looked_up(self, most: int) -> tuple[Draft, float]:
        match = self._index.match()
        if match is None or most < 1:
            return Draft(), 1.0
        kinds = [kind_of(LOOKUP, match.length + ahead) for ahead in range(most)]
        return self._worth(self._index.following(match, most), LOOKUP, kinds)

    def _worth(self, ids: Sequence[int], source: str, kinds: Sequence[Kind]) -> tuple[Draft, float]:
        count, gain = best_draft([self.acceptance.of(kind) for kind in kinds], self.times)
        return (Draft(tuple(ids[:count]), source, tuple(kinds[:count])) if count else Draft()), gain

    # ---- the draft model

    def _model_length(self, most: int, masked: bool) -> tuple[int, float]:
        """Return how many tokens the model should draft, and the expected gain; one token if a trial is due."""
        if self._model is None or not self._asks_model or not self.times.is_settled or self._modelled >= REFERENCE:
            return 0, 1.0
        most = min(most, self._model.room(self._index.ids))
        if most < 1:
            return 0, 1.0
        chance = self.acceptance.of(kind_of(self._source, masked))
        count, gain = best_draft([chance] * most, self.times, modelled=True)
        if count:
            return count, gain
        return (1, 1.0 + 1e-9) if self._trials.may_cost(self._loss(masked)) else (0, 1.0)

    def _loss(self, masked: bool) -> float:
        """Return the expected loss of a trial, in passes of one row."""
        assert self._model is not None
        time = self.times.ratio(2) + self.times.drafting(1) + self.times.reading(self._model.missed(self._index.ids))
        return max(LEAST_LOSS, time - 1 - self.acceptance.of(kind_of(self._source, masked)))

    def _modelled_draft(self, count: int, masked: bool) -> Draft:
        assert self._model is not None
        kind = kind_of(self._source, masked)
        missed = self._model.missed(self._index.ids)
        if best_draft([self.acceptance.of(kind)] * count, self.times, modelled=True)[0] == 0:
            self._trials.spend(self._loss(masked))
        ids, reading_s, drafting_s = self._model.propose(self._index.ids, count)
        if reading_s:
            self.times.record_reading(missed, reading_s)
        if ids:
            self.times.record_drafting(len(ids), drafting_s)
        return Draft(tuple(ids), self._source, (kind,) * len(ids), seconds=reading_s + drafting_s)
