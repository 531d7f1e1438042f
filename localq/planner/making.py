"""Time and disk that quantizing a model on this machine takes, estimated. Torch-free.

Searches (`Format.made_from == "text"`) run on a GPU where there is one; other formats on the CPU.
"""

from __future__ import annotations

import os

from localq import places
from localq.files import format_facts
from localq.planner.speed import cards, measurements
from localq.planner.speed.cards import Card

# First layer of smollm2-135m, 131,072 tokens: 77 s on two cores that had other work. A whole model was not timed.
SEARCH_PARAMETERS_PER_S_AND_CORE = 30e3
# On an idle H100, which has the multiprocessors and clock of an H200: a layer of llama-3.3-70b takes 46.7 s, so its 80
# layers 1.04 h (`quantizing` in results.toml), for 70.6 B parameters with embedding and head. All of smollm2-135m takes
# about 30 s, mostly launches for its small layers.
SEARCH_PARAMETERS_PER_S_ON_AN_H100, SEARCH_LAUNCHES_S = 18.9e6, 25
READY_S = 10.0  # from layers that localq includes


def seconds(format: str, parameters: int, card: Card | None = None) -> float:
    """Seconds to quantize so many parameters to `format`, a name of `format_facts.writable`.

    card   the GPU to search on; None: that of this machine, else its CPU
    """
    made, cores = format_facts.writable()[format], len(os.sched_getaffinity(0))
    if made.made_from == "text":
        share = _share_of_an_h100(card) if card else _share_here()
        if not share:
            return parameters / (SEARCH_PARAMETERS_PER_S_AND_CORE * cores)
        return parameters / (SEARCH_PARAMETERS_PER_S_ON_AN_H100 * share) + SEARCH_LAUNCHES_S
    return parameters / (made.parameters_per_s * (cores if made.per_core else 1))


def estimate(format: str, parameters: int, card: Card | None = None) -> str:
    """`seconds` in words: "about 40 min"."""
    return f"about {duration(seconds(format, parameters, card))}"


def duration(time_s: float) -> str:
    """A duration such as "40 min" or "3 h"."""
    minutes = max(1, round(time_s / 60))
    return f"{minutes} min" if minutes < 120 else f"{round(minutes / 60)} h"


def has_layers(model: str, format: str) -> bool:
    """Return whether localq ships the quantized layers of a catalogued model."""
    return (places.PACKAGE_DATA / f"{model}-{format}").is_dir()


def _share_here() -> float:
    """Speed of the GPU here relative to an H100; 1 for an unknown card, 0 without a GPU."""
    from localq import driver, gpus  # start-up cost: only searches need them

    found = driver.probe_driver()
    if not found.present or found.why_not:
        return 0.0
    here = gpus.first_visible(gpus.probe().gpus)
    card = cards.match_card(here.name, here.total) if here else None
    return _share_of_an_h100(card) if card else 1.0


def _share_of_an_h100(card: Card) -> float:
    """Speed of a GPU relative to an H100, by multiprocessors and clock, at most 1: no faster one was timed."""
    return min(1.0, card.multiprocessors * card.boost_ghz / measurements.load().multiprocessor_ghz)
