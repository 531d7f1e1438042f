"""What a conversion of 2 bits reads of its source, in which order, where that comes file by file (`hub_shards.py`).

Numbers stand for the embedding, 0, for the layers, from 1, and for a head of its own behind them. Measuring a mixture
reads the layers there and back, and making reads them again: of what was removed meanwhile every file is fetched anew,
so that as few are on the disk as with one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from localq.files.hub.shards import AHEAD, Shards
from localq.quantize.model.source import Source

Tell = Callable[[str], None]  # what is waited for
Release = Callable[[Sequence[int]], None]  # to be called with the numbers that are left, before each of them


def making(shards: Shards | None, model: Source, rest: Sequence[str], numbers: Sequence[int], tell: Tell) -> Release:
    """For what is written under these numbers; with the embedding goes the `rest`, tensors that are copied."""
    if shards is None:
        return lambda left: None
    shards.tell = tell
    shards.clean(shards.holding(_made(model, rest, numbers)))
    return lambda left: shards.keep(shards.holding(_made(model, rest, left)))


def measuring(shards: Shards | None, model: Source, rest: Sequence[str], tell: Tell) -> Release:
    """For the way of `sensitivity.sensitivities`, behind which all is made."""
    if shards is None:
        return lambda left: None
    made = list(_made(model, rest, range(model.layers + 2)))
    cleaned = False

    def release(left: Sequence[int]) -> None:
        nonlocal cleaned
        now = shards.holding(_measured(model, left[:1]))
        needed = shards.holding([*_measured(model, left), *made])[: max(AHEAD, len(now))]
        if not cleaned:
            shards.clean(needed)
            cleaned = True
        shards.keep(needed)

    shards.tell = tell
    return release


def _made(model: Source, rest: Sequence[str], numbers: Iterable[int]) -> Iterator[str]:
    """Tensors of the source, in the order in which they are read."""
    for number in numbers:
        layer = number - 1 if 0 < number <= model.layers else None
        yield from model.read_for(layer, head=number > model.layers)
        yield from rest if number == 0 else ()


def _measured(model: Source, numbers: Iterable[int]) -> Iterator[str]:
    """The same where a head that is the embedding is read behind the layers again."""
    for number in numbers:
        layer = number - 1 if 0 < number <= model.layers else None
        yield from model.read_for(layer, head=number > model.layers) or model.read_for(None)
