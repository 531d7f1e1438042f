"""The order in which a layer-by-layer conversion reads a source downloaded file by file (`files/hub/shards.py`).

Step 0 is the embedding, steps from 1 are the layers, and the last one is an untied head. Measuring a mixture reads the
layers forwards and backwards, and quantizing reads them again: deleted files are downloaded again, so that no more
files are on disk at once than with one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from localq.files.hub.shards import AHEAD, Shards
from localq.quantize.model.source import SourceModel
from localq.wording import Say

Release = Callable[[Sequence[int]], None]  # called before each step, with the steps that are left


def release_while_quantizing(
    shards: Shards | None, model: SourceModel, rest: Sequence[str], numbers: Sequence[int], say: Say
) -> Release:
    """Keep the files on disk that these steps read next; `rest`: tensors that are copied with the embedding."""
    if shards is None:
        return lambda left: None
    shards.say = say
    shards.clean(shards.holding(_conversion_order(model, rest, numbers)))
    return lambda left: shards.keep(shards.holding(_conversion_order(model, rest, left)))


def release_while_measuring(shards: Shards | None, model: SourceModel, rest: Sequence[str], say: Say) -> Release:
    """Keep the files on disk that `sensitivity.sensitivities` and the conversion after it read next."""
    if shards is None:
        return lambda left: None
    made = list(_conversion_order(model, rest, range(model.layers + 2)))
    cleaned = False

    def release(left: Sequence[int]) -> None:
        nonlocal cleaned
        now = shards.holding(_measuring_order(model, left[:1]))
        needed = shards.holding([*_measuring_order(model, left), *made])[: max(AHEAD, len(now))]
        if not cleaned:
            shards.clean(needed)
            cleaned = True
        shards.keep(needed)

    shards.say = say
    return release


def _conversion_order(model: SourceModel, rest: Sequence[str], numbers: Iterable[int]) -> Iterator[str]:
    """Tensors of the source, in reading order."""
    for number in numbers:
        layer = number - 1 if 0 < number <= model.layers else None
        yield from model.tensor_names(layer, head=number > model.layers)
        yield from rest if number == 0 else ()


def _measuring_order(model: SourceModel, numbers: Iterable[int]) -> Iterator[str]:
    """The same for measuring, which reads a tied head again after the layers."""
    for number in numbers:
        layer = number - 1 if 0 < number <= model.layers else None
        yield from model.tensor_names(layer, head=number > model.layers) or model.tensor_names(None)
