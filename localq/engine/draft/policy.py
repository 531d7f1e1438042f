"""Length of a draft: the number of tokens that yields the most tokens per second, or none.

A pass over 1 + K rows yields one token and the accepted tokens of the draft. Its expected rate follows from the
acceptance of each token, by source and length of match, divided by the time of such a pass. Both are running averages.
Acceptance is tracked without drafting, too: the token that would have been drafted is compared with the one that was
sampled. So K falls to 0 where drafts cost more than they gain, and rises again when they pay.

The tokens of a draft model cost time of their own, which counts like that of the pass. What it would have drafted is
not known without running it: while its drafts do not pay, one token is drafted now and then, so rarely that it costs
little (`Trials`).
"""

from __future__ import annotations

from collections.abc import Sequence

from localq.drafts import ROWS, rows_for

RATIOS = {1: 1.0, 2: 1.2, 4: 1.5, 8: 2.3}  # time of a pass over that of one row, until it is measured
GAIN = 1.05  # expected gain from which tokens are drafted
MEMORY = 0.96  # share of the weight of an outcome that is left behind the next one
PRIOR_WEIGHT = 4.0  # outcomes
DRIFT = 0.002  # share by which each pass of one row moves the times of the others back to RATIOS
SMOOTHING = 0.2  # weight of the newest time
MODEL_PRIORS = {"model": 0.6, "mtp": 0.7}  # acceptance of a token of a draft model, and of an MTP block
LEAST_PLAIN = 3  # passes of one row that are timed before a draft model is judged
TRIAL_SHARE = 0.01  # share of the time that trials of a draft model may cost
MOST_CREDIT = 8.0  # passes of one row that a trial may cost
OUTLIER = 4.0  # times that exceed the known one by this factor count as that: the front end waited, or the machine

Kind = tuple[str, int]  # source, class of the length of a match
# Prior acceptance of a looked-up token by the bits of the length of its match, from 3 tokens on.
_PRIOR = {2: 0.35, 3: 0.5, 4: 0.75, 5: 0.9, 6: 0.95}


def kind_of(source: str, length: int) -> Kind:
    """Return the class of a drafted token behind a match of `length` tokens."""
    return source, min(length.bit_length(), 6) if length else 0


def prior(kind: Kind) -> float:
    """Return the acceptance that is assumed at first."""
    source, bits = kind
    if source in MODEL_PRIORS:
        return MODEL_PRIORS[source]
    return _PRIOR.get(bits, 0.3) if source == "lookup" else 0.95


class Acceptance:
    """Running acceptance of drafted tokens by kind."""

    def __init__(self) -> None:
        self._counts: dict[Kind, tuple[float, float]] = {}  # accepted, all: weighted

    def of(self, kind: Kind) -> float:
        """Return the share that is expected to be accepted."""
        accepted, total = self._counts.get(kind, (0.0, 0.0))
        return (accepted + PRIOR_WEIGHT * prior(kind)) / (total + PRIOR_WEIGHT)

    def record(self, kind: Kind, accepted: bool) -> None:
        """Count a token that was drafted or would have been."""
        before, total = self._counts.get(kind, (0.0, 0.0))
        self._counts[kind] = (MEMORY * before + accepted, MEMORY * total + 1)


class PassTimes:
    """Running averages of pass times by rows; what is not yet measured is estimated from a pass of one row.

    Also of the time in which a draft model drafts a token, and reads a token of the text it has missed; until they are
    measured, `share` of a pass of one row is assumed for the former, and nothing for the latter.
    """

    def __init__(self, share: float = 1.0) -> None:
        self._seconds: dict[int, float] = {}
        self._share = share
        self._drafting: float | None = None  # seconds of a token
        self._reading = 0.0  # the same
        self._plain = 0  # passes of one row

    @property
    def is_settled(self) -> bool:
        """True once enough passes of one row were timed to compare others with."""
        return self._plain >= LEAST_PLAIN

    def record_drafting(self, tokens: int, seconds: float) -> None:
        """Record the time in which a draft model has drafted `tokens` tokens."""
        self._drafting = _averaged(self._drafting, seconds / tokens)

    def record_reading(self, tokens: int, seconds: float) -> None:
        """Record the time in which a draft model has read `tokens` tokens that it had missed."""
        self._reading = _averaged(self._reading or None, seconds / tokens)

    def drafting(self, tokens: int) -> float:
        """Return the time in which a draft model drafts `tokens` tokens, over that of a pass of one row."""
        one = self._seconds.get(1)
        return tokens * (self._share if one is None or self._drafting is None else self._drafting / one)

    def reading(self, tokens: int) -> float:
        """Return the time in which a draft model reads `tokens` tokens, over that of a pass of one row."""
        one = self._seconds.get(1)
        return 0.0 if one is None else tokens * self._reading / one

    def record(self, rows: int, seconds: float) -> None:
        """Record a pass over `rows` rows, timed from the previous pass's tokens to its own, less that of the draft."""
        self._plain += rows == 1
        known = self._seconds.get(rows)
        if known is None:
            self._seconds[rows] = seconds if 1 not in self._seconds else min(seconds, OUTLIER * self._prior(rows))
            return
        self._seconds[rows] = known + SMOOTHING * (min(seconds, OUTLIER * known) - known)
        if rows == 1:
            for other in self._seconds:
                if other != 1:
                    self._seconds[other] += DRIFT * (self._prior(other) - self._seconds[other])

    def ratio(self, rows: int) -> float:
        """Return the time of a pass over `rows` rows over that of one row; at least that of fewer rows."""
        one = self._seconds.get(1)
        if one is None:
            return RATIOS[rows]
        least = 1.0
        for each in ROWS:
            least = max(least, self._seconds.get(each, self._prior(each)) / one)
            if each == rows:
                break
        return least

    def _prior(self, rows: int) -> float:
        return RATIOS[rows] * self._seconds[1]


class Trials:
    """Schedule of drafts by a model whose drafts do not pay: a share of each plain token's time is saved up until it
    covers the expected loss of drafting one token."""

    def __init__(self) -> None:
        self._credit = 1.0  # passes of one row

    def count(self) -> None:
        """Count a token that the model has not drafted."""
        self._credit = min(self._credit + TRIAL_SHARE, MOST_CREDIT)

    def may_cost(self, loss: float) -> bool:
        """True if a trial that is expected to lose the time of so many passes of one row is due."""
        return loss <= self._credit

    def spend(self, loss: float) -> None:
        """Pay for a trial."""
        self._credit = max(0.0, self._credit - max(0.0, loss))


def best_draft(chances: Sequence[float], times: PassTimes, *, modelled: bool = False) -> tuple[int, float]:
    """Return how many of the tokens with these chances of acceptance are worth a pass, and the expected gain in speed.

    (0, 1.0): none are. modelled: a draft model drafts them. Only lengths that fill a pass, and the whole draft, are
    considered.
    """
    best, most = 0, GAIN
    expected, chance = 1.0, 1.0
    for count, each in enumerate(chances, 1):
        chance *= each
        expected += chance
        if count + 1 in ROWS or count == len(chances):
            gain = expected / (times.ratio(rows_for(count + 1)) + (times.drafting(count) if modelled else 0.0))
            if gain > most:
                best, most = count, gain
    return best, most if best else 1.0


def _averaged(known: float | None, seconds: float) -> float:
    return seconds if known is None else known + SMOOTHING * (min(seconds, OUTLIER * known) - known)
