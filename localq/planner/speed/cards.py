"""Cards by name: published memory and bandwidth. Torch-free.

These figures are not measured, and `localq fit` states this. The share of the published bandwidth that a kernel reaches
is assumed to be that of an H200.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from localq.errors import usage_error
from localq.planner.speed import measurements

H200_PUBLISHED = 4.8e12


@dataclass(frozen=True)
class Card:
    """A card: nominal memory in GiB, published bandwidth, multiprocessors and their boost clock."""

    name: str
    gib: int
    published_gb_per_s: float
    multiprocessors: int
    boost_ghz: float

    @property
    def read_bytes_per_s(self) -> float:
        """Expected read bandwidth of a kernel."""
        reached = measurements.load().read_bytes_per_s / H200_PUBLISHED  # 0.92
        return self.published_gb_per_s * 1e9 * reached


CARDS = (
    Card("RTX 3060", 12, 360, 28, 1.78), Card("RTX 3060 Ti", 8, 448, 38, 1.67), Card("RTX 3070", 8, 448, 46, 1.73),
    Card("RTX 3070 Ti", 8, 608, 48, 1.77), Card("RTX 3080", 10, 760, 68, 1.71), Card("RTX 3080 Ti", 12, 912, 80, 1.67),
    Card("RTX 3090", 24, 936, 82, 1.70), Card("RTX 3090 Ti", 24, 1008, 84, 1.86),
    Card("RTX 4060", 8, 272, 24, 2.46), Card("RTX 4060 Ti", 16, 288, 34, 2.54), Card("RTX 4070", 12, 504, 46, 2.48),
    Card("RTX 4070 Super", 12, 504, 56, 2.48), Card("RTX 4070 Ti", 12, 504, 60, 2.61),
    Card("RTX 4070 Ti Super", 16, 672, 66, 2.61), Card("RTX 4080", 16, 717, 76, 2.51),
    Card("RTX 4080 Super", 16, 736, 80, 2.55), Card("RTX 4090", 24, 1008, 128, 2.52),
    Card("RTX 5060", 8, 448, 30, 2.50), Card("RTX 5060 Ti", 16, 448, 36, 2.57), Card("RTX 5070", 12, 672, 48, 2.51),
    Card("RTX 5070 Ti", 16, 896, 70, 2.45), Card("RTX 5080", 16, 960, 84, 2.62), Card("RTX 5090", 32, 1792, 170, 2.41),
    Card("RTX A6000", 48, 768, 84, 1.80), Card("RTX 6000 Ada", 48, 960, 142, 2.50), Card("L4", 24, 300, 58, 2.04),
    Card("L40S", 48, 864, 142, 2.52), Card("A100", 80, 2039, 108, 1.41), Card("H100", 80, 3350, 132, 1.83),
    Card("H200", 141, 4800, 132, 1.83),
)  # fmt: skip
# Size -> the card assumed if only the size is known; see `plan.CARD_TOTALS_MIB`.
TYPICAL = {8: "RTX 4060", 12: "RTX 4070", 16: "RTX 4080", 24: "RTX 4090", 32: "RTX 5090"}


def match_card(name: str) -> Card | None:
    """The card of a name such as "NVIDIA GeForce RTX 4090" or "4090": the longest match, or None.

    Laptop GPUs have the same names but other chips, so they are unknown.
    """
    words = _words(name)
    if not words or "laptop" in words:
        return None
    fitting = [card for card in CARDS if _is_in(_words(card.name), words) or _words(card.name)[1:] == words]
    return max(fitting, key=lambda card: len(card.name), default=None)


def find(name: str) -> Card:
    """As `match_card`. Raises LocalqError (exit 2), which lists the known cards, where there is none."""
    card = match_card(name)
    if card is None:
        names = ", ".join(card.name for card in CARDS)
        raise usage_error("--gpu", f"{name!r} is not a known card", f"Use --bandwidth, or {names}.")
    return card


def of_size(gib: int) -> list[Card]:
    """The consumer cards of that size, the fastest first."""
    sized = [card for card in CARDS if card.gib == gib and re.match(r"RTX \d{4}\b", card.name)]
    return sorted(sized, key=lambda card: -card.published_gb_per_s)


def typical(gib: float) -> Card | None:
    """The card assumed for that size; None if there is none."""
    name = TYPICAL.get(int(gib)) if gib == int(gib) else None
    return None if name is None else find(name)


def _words(name: str) -> list[str]:
    return re.sub(r"(\d)(ti|super)\b", r"\1 \2", name.casefold()).replace("geforce", "").split()


def _is_in(part: list[str], whole: list[str]) -> bool:
    return any(whole[start : start + len(part)] == part for start in range(len(whole)))
