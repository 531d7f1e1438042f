"""Extrapolated times of a model that does not fit: two cuts of it are timed, and a straight line gives the rest.

All layers of a decoder read the same number of bytes, so a step takes t(layers) = t(few) + slope * (layers - few); the
slope comes from the two cuts, and t(few) includes embedding, head and sampling.
"""

from __future__ import annotations

from collections.abc import Callable

from localq.bench.models.measure import Measurement, Run
from localq.errors import ExitCode, LocalqError

# Numbers of layers to time, the most accurate first; smaller pairs for smaller cards. Six is gemma3's pattern.
PAIRS = ((6, 12), (2, 4), (1, 2))
Timed = dict[str, list[Measurement]]  # subject -> its cases


def extrapolate(layers: int, timed: Callable[[int], Timed]) -> tuple[Timed, tuple[int, int]]:
    """Extrapolate `timed(n)`, which measures the model cut to n layers, to `layers`; returns the pair used as well.

    Tries the next pair if one does not fit. Raises LocalqError: exit 3 if none fits, 1 for too few layers.
    """
    failure: LocalqError | None = None
    for few, more in PAIRS:
        if more >= layers:
            continue
        try:
            at_few, at_more = timed(few), timed(more)
        except LocalqError as error:
            if error.exit_code != ExitCode.DOES_NOT_FIT:
                raise
            failure = error.with_traceback(None)  # its frames hold a half-loaded model
            continue
        both = [name for name in at_few if name in at_more]
        pairs = {name: zip(at_few[name], at_more[name], strict=True) for name in both}
        return {name: [_line(a, b, few, more, layers) for a, b in pair] for name, pair in pairs.items()}, (few, more)
    if failure is not None:
        raise failure
    raise LocalqError("bench", f"the model has only {layers} layers, too few to extrapolate from", "")


def _line(at_few: Measurement, at_more: Measurement, few: int, more: int, layers: int) -> Measurement:
    """Extrapolate the medians, as one run: the spread of two medians is not the spread of the result."""
    tokens = at_few.case.tokens
    seconds = line(at_few.seconds_per_token * tokens, at_more.seconds_per_token * tokens, few, more, layers)
    return Measurement(at_few.case, (Run(seconds),), extrapolated=True)


def line(at_few: float, at_more: float, few: int, more: int, layers: int) -> float:
    """Return the value at `layers` of the line through (few, at_few) and (more, at_more)."""
    return at_few + (at_more - at_few) / (more - few) * (layers - few)
