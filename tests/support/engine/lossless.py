"""Seeded replies with and without drafts: cases of every kind of sampling, constraint and end, and how they compare."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from localq.engine.draft import policy
from localq.engine.draft.drafter import Draft, Drafter
from localq.engine.generate import Engine
from localq.sampling import Sampling
from tests.support.engine.engine_runs import ids_of, prompt_of
from tests.support.engine.scripted_constraint import VOCAB, Script

SAMPLINGS = {
    "greedy": {},
    "T 0.7": {"temperature": 0.7},
    "T 1.0": {"temperature": 1.0},
    "filters": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalty": {"temperature": 0.7, "repeat_penalty": 1.3},
    "greedy with penalty and DRY": {"repeat_penalty": 1.2, "dry_multiplier": 0.8},
    "DRY": {"temperature": 1.0, "dry_multiplier": 0.8},
    "XTC": {"temperature": 1.0, "xtc_probability": 0.5},
    "all": {"temperature": 0.9, "repeat_penalty": 1.1, "dry_multiplier": 0.5, "xtc_probability": 0.3, "top_k": 40},
}
CONSTRAINTS = ("none", "none", "few words", "forced", "free between")
ENDS = ("length", "stop id", "cancel", "close")


class Oracle(Drafter):
    """Drafts what plain decoding says next, with wrong tokens here and there."""

    def __init__(self, reply: Sequence[int], seed: int) -> None:
        super().__init__()
        self._reply, self._rng, self._count = list(reply), random.Random(seed), 0

    def begin(self, prompt: Sequence[int], most: int = 7, ask_model: bool = True) -> None:
        self._most, self._count = most, 0

    def push(self, token: int, drafted: bool = False) -> None:
        self._count += 1

    def engages(self) -> bool:
        return self._rng.random() < 0.5

    def expects_forced(self) -> bool:
        return self._rng.random() < 0.5

    def draft(self, most: int, forced: Sequence[int] = (), masked: bool = False) -> Draft:
        count = self._rng.randint(0, min(most, self._most))
        ids = self._reply[self._count : self._count + count]
        ids = [(id + self._rng.randrange(1, VOCAB)) % VOCAB if self._rng.random() < 0.15 else id for id in ids]
        return Draft(tuple(ids), "oracle", (("oracle", 0),) * len(ids))


class EagerTimes(policy.PassTimes):
    """Passes of any number of rows cost the same and a draft model nothing, so that whatever there is is drafted."""

    is_settled = True

    def ratio(self, rows: int) -> float:
        return 0.5 if rows > 1 else 1.0

    def drafting(self, tokens: int) -> float:
        return 0.0


@dataclass
class Case:
    """One seeded reply."""

    number: int
    sampling: Sampling
    prompt: list[int]
    constraint: str
    end: str
    length: int
    rng: random.Random = field(repr=False)

    def script(self) -> Script | None:
        """A new constraint."""
        rng = random.Random(self.number)
        if self.constraint == "none":
            return None
        words = [rng.randrange(VOCAB) for _ in range(7)]
        steps: list[object] = []
        while len(steps) < self.length + 20:
            if self.constraint == "few words":
                steps.append(words)
            elif self.constraint == "forced":
                steps += [[rng.randrange(VOCAB)] for _ in range(rng.randint(1, 6))] + [range(VOCAB)] * rng.randint(0, 3)
            else:
                steps += [None] * rng.randint(0, 5) + [words] * rng.randint(0, 4)
        return Script(*steps)


def case_of(number: int) -> Case:
    """The case of this number; small numbers go through all kinds of sampling."""
    rng = random.Random(1000 + number)
    names = list(SAMPLINGS)
    settings = SAMPLINGS[names[number % len(names)]]
    seed = None if "temperature" not in settings else rng.randrange(2**31)
    words = prompt_of(rng.randint(3, 9), seed=number)
    prompt = [rng.choice(words) for _ in range(rng.randint(2, 90))]
    return Case(
        number,
        Sampling(**settings, seed=seed),
        prompt,
        rng.choice(CONSTRAINTS),
        rng.choice(ENDS),
        rng.randint(1, 70),
        rng,
    )


def reply_of(engine: Engine, case: Case, tokens: int, stop: int | None = None, at: int | None = None) -> list[int]:
    """The ids of the reply; stop: an id that ends it; at: the number of tokens after which it is cut."""
    ids: list[int] = []
    settings = {"max_tokens": case.length, "constraint": case.script(), "draft_tokens": tokens}
    if stop is not None:
        settings["stop_ids"] = frozenset({stop})
    if at is not None and case.end == "cancel":
        settings["cancelled"] = lambda: len(ids) >= at
    reply = engine.generate(case.prompt, case.sampling, **settings)
    for step in reply:
        ids += step.ids
        if at is not None and case.end == "close" and len(ids) >= at:
            reply.close()
            break
    return ids


class PlainReplies:
    """Replies of plain decoding, each made once for all drafts that are compared with it.

    engine: gives the engine for a reply. Of a model that other tests use between replies it is a new one each time.
    """

    def __init__(self, engine: Callable[[], Engine]) -> None:
        self.engine = engine
        self._made: dict[tuple[object, ...], list[int]] = {}

    def once(self, make: Callable[[], list[int]], *key: object) -> list[int]:
        """The reply that `make` gives, or gave for the same key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


def compare(plain: PlainReplies, drafting: Engine, case: Case, source: str) -> dict[str, int]:
    """Asserts that the reply, a second one to the same prompt and the next turn are those of plain decoding.

    Returns the tokens drafted and accepted. source: "oracle", or what the engine has: look-up, and its draft model.
    """
    free = plain.once(lambda: reply_of(plain.engine(), case, 0), case.number)
    stop = case.rng.choice(free) if case.end == "stop id" and free else None
    at = case.rng.randint(1, len(free)) if case.end in ("cancel", "close") and free else None
    expected = plain.once(lambda: reply_of(plain.engine(), case, 0, stop, at), case.number, stop, at)
    drafting._drafter = Oracle(free, case.number) if source == "oracle" else Drafter(drafting._draft_model)
    drafting._drafter.times = EagerTimes()
    found = {"drafted": 0, "accepted": 0}
    for _ in range(2):  # the second is a regenerated one
        assert reply_of(drafting, case, case.rng.choice((1, 2, 3, 5, 7)), stop, at) == expected, case
    turn = [*case.prompt, *expected, *prompt_of(3, seed=case.number)]
    following = plain.once(
        lambda: ids_of(plain.engine(), turn, case.sampling, max_tokens=12, draft_tokens=0), case.number, "following"
    )
    assert ids_of(drafting, turn, case.sampling, max_tokens=12, draft_tokens=7) == following, case
    steps = list(
        drafting.generate(case.prompt, case.sampling, max_tokens=case.length, constraint=case.script(), draft_tokens=7)
    )
    stats = steps[-1].stats
    found["drafted"] += sum(stats.drafted.values())
    found["accepted"] += sum(stats.accepted.values())
    assert [id for step in steps for id in step.ids] == free, case
    return found
