"""The card to plan for, named or in this machine: its memory and bandwidth.

Torch-free. The bandwidth of a GPU in this machine is measured once, in a separate process, and saved.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localq import gpus, processes
from localq.errors import usage_error
from localq.gpus import Gpu
from localq.planner import budget, room
from localq.planner import plan as memory_plan
from localq.planner.fit_rows import Memory
from localq.planner.speed import cards, local_measurements
from localq.planner.speed.cards import Card
from localq.planner.speed.predict import Machine

if TYPE_CHECKING:
    from localq.wording import Say

TIMEOUT_S = 60.0  # torch and CUDA start in 3 s, the measurement takes 0.2 s


def measure_bandwidth() -> float | None:
    """Measure the read bandwidth of the first visible GPU in a separate process; None if that fails."""
    command = [sys.executable, "-P", "-m", "localq.bench.bandwidth"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=TIMEOUT_S,
            env=processes.child_environment(),
        )  # fmt: skip
        found = json.loads(done.stdout)["read_bytes_per_s"] if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):  # no torch, no GPU, or other output
        return None
    return float(found) if isinstance(found, int | float) and found > 0 else None


BASIS = "based on H200 measurements; no consumer GPU measured yet"


@dataclass(frozen=True)
class PlanningCard:
    """The card: `gpu` is None if only its size is known, `machine` is None if no speed is predicted.

    basis   what the prediction is based on, or why there is none, for people
    card    the GPU that would quantize models; None: unknown
    desktop_assumed   `memory.desktop` is neither measured nor given
    is_here  it is the GPU of this machine
    """

    memory: Memory
    gpu: str | None
    machine: Machine | None
    basis: str
    card: Card | None = None
    desktop_assumed: bool = False
    is_here: bool = False

    @property
    def memory_text(self) -> str:
        """The memory for people: "24,564 MiB, less 668 MiB for the desktop (assumed; ...), 300 MiB reserved"."""
        memory = self.memory
        kept = f", {memory.reserve / room.MIB:,.0f} MiB reserved" if memory.reserve else ""
        held = room.desktop_text(memory.desktop, self.desktop_assumed)
        return f"{memory.total / room.MIB:,.0f} MiB{held}{kept}"


def planning_card(
    say: Say, vram: str | None, desktop: str | None, gpu: str | None, bandwidth_gb_per_s: float | None, reserve: int
) -> PlanningCard:
    """The card of the options, else the one of this machine. `say` gets a line before a measurement.

    desktop   what other programs hold; without it, it is measured on the card of this machine, else assumed

    Raises LocalqError (exit 2) without either.
    """
    card = cards.find(gpu) if gpu is not None else None
    given = bandwidth_gb_per_s * 1e9 if bandwidth_gb_per_s else None
    used, assumed = room.desktop_bytes(desktop)
    if vram is None and card is None:
        here, total, free = _here()
        memory = Memory(total, used if desktop else total - free, reserve)
        machine, basis = machine_here(here, say, given)
        card = cards.match_card(here.name, here.total)
        return PlanningCard(memory, here.name, machine, basis, card, is_here=True)
    total = budget.card_bytes(vram) if vram is not None else memory_plan.parse_card(str(card.gib if card else 0))
    usual = card or usual_card(total)
    looked = _elsewhere(card, usual, given)
    return PlanningCard(Memory(total, used, reserve), card.name if card else None, *looked, usual, assumed)


def machine_here(here: Gpu, say: Say, given: float | None = None) -> tuple[Machine | None, str]:
    """Speed of the GPU here, from a given, saved, measured or expected bandwidth; and its basis."""
    card = cards.match_card(here.name, here.total)
    if given:
        return Machine.of(card, given), f"predicted for {given / 1e9:,.0f} GB/s, {BASIS}"
    key = here.uuid or here.name
    found = local_measurements.bandwidth(key)
    if found is None:
        say(f"measuring the memory bandwidth of {here.name} (once)")
        found = measure_bandwidth()
        if found is not None:
            local_measurements.keep_bandwidth(key, found)
    if found is not None:
        return Machine.of(card, found), f"predicted for {here.name} ({found / 1e9:,.0f} GB/s, measured), {BASIS}"
    if card is None:
        return None, f"not predicted: the bandwidth of {here.name} could not be measured; use --bandwidth"
    rate = f"{card.read_bytes_per_s / 1e9:,.0f} GB/s, expected"
    return Machine.of(card), f"predicted for {card.name} ({rate}), {BASIS}"


def _here() -> tuple[Gpu, int, int]:
    """The GPU that localq would use, its memory, and the free part of it. Raises LocalqError (exit 2)."""
    found = gpus.probe()
    gpu = gpus.first_visible(found.gpus)
    if gpu is None or gpu.total is None or gpu.free is None:
        why = f"no usable NVIDIA GPU ({'; '.join(found.unavailable) or 'no GPU is visible'})"
        raise usage_error("fit", why, "Specify the card's memory, as in `localq fit --vram 24`.")
    return gpu, gpu.total, gpu.free


def _elsewhere(card: Card | None, usual: Card | None, given: float | None) -> tuple[Machine | None, str]:
    """Speed of a card that need not be here, and its basis.

    A card of known size only counts as the `usual` one.
    """
    if given:
        return Machine.of(card, given), f"predicted for {given / 1e9:,.0f} GB/s, {BASIS}"
    if usual is None:
        return None, "not predicted: no known card has this amount of memory; use --gpu or --bandwidth"
    other = "" if card else ". For another card, use --gpu"
    rate = f"{usual.read_bytes_per_s / 1e9:,.0f} GB/s"
    return Machine.of(usual), f"predicted for an {usual.name} ({rate}), {BASIS}{other}"


def usual_card(total: int) -> Card | None:
    """The card assumed where drivers of cards of that size report `total` bytes."""
    nominal = memory_plan.nominal_gib(total)
    return None if nominal is None else cards.typical(nominal)
