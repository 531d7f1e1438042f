"""The card as gauges: utilization, power, temperature; clocks and their limits, energy per token.

What the card does not report is left out. The energy is that of the whole card, including other programs.
"""

from __future__ import annotations

import math

from textual.content import Content

from localq.gpus import Reading
from localq.sanitize import sanitize
from localq.tui.gauge import GOOD, MUTED, Part, rising
from localq.tui.instruments.instrument_widget import UNKNOWN, Instrument, heading, line, meter

HOT, TOO_HOT, HOTTEST = 78, 86, 100  # °C
NEAR = 0.9  # of the power limit; at the limit the clocks fall, which is no fault


class CardLine(Instrument):
    """The GPU; nothing on the CPU."""

    def lines(self, width: int) -> list[Content]:
        """The lines; see `Instrument.lines`."""
        loaded, reading = self.facts.loaded, self.facts.reading
        if not self.facts.on_gpu or loaded is None:
            return []
        is_read = reading != Reading(reading.at_s)  # before, all of them are shown, so that nothing moves
        found = [heading(width, "GPU", short_device(loaded.device_name))]
        if reading.busy is not None or not is_read:
            found.append(meter(width, "busy", reading.busy, GOOD, _figure(reading.busy, ".0%")))
        if reading.watts is not None or not is_read:
            found.append(_power(width, reading))
        if reading.celsius is not None or not is_read:
            found.append(_heat(width, reading))
        if reading.sm_mhz is not None or not is_read:
            clocks = f"{_figure(reading.sm_mhz, ',d')} MHz, memory {_figure(reading.memory_mhz, ',d')}"
            found.append(line(width, f"{'clocks':<10}{clocks}"))
        if limits := _limits(reading, self.facts.joules_per_token):
            found.append(line(width, *limits))
        return found


def short_device(name: str) -> str:
    """The name of a GPU without its maker."""
    return sanitize(name).removeprefix("NVIDIA ").removeprefix("GeForce ")


def _power(width: int, reading: Reading) -> Content:
    watts, limit = reading.watts, reading.watts_limit
    share = watts / limit if watts is not None and limit else None
    text = f"{_figure(watts, '.0f')} of {limit:.0f} W" if limit else f"{_figure(watts, '.0f')} W"
    return meter(width, "power", share, GOOD if share is None else rising(share, NEAR, math.inf), text)


def _heat(width: int, reading: Reading) -> Content:
    celsius = reading.celsius
    share = None if celsius is None else celsius / HOTTEST
    style = GOOD if share is None else rising(share, HOT / HOTTEST, TOO_HOT / HOTTEST)
    return meter(width, "temp", share, style, f"{_figure(celsius, 'd')} °C")


def _limits(reading: Reading, joules: float | None) -> list[str | Part]:
    """Return what limits the clocks, and the energy per token; keeps its place once there is a reading."""
    energy = "" if joules is None else f"{joules:.2f} J/token"
    if reading.held_by is None:
        return [energy] if energy else []
    held = f"limited by {', '.join(reading.held_by)}" if reading.held_by else "clocks not limited"
    return [(held, "$text-warning" if reading.held_by else MUTED), f" · {energy}" if energy else ""]


def _figure(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
