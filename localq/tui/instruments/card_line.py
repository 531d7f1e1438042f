"""The card: utilization, temperature, power, clocks and their limits, energy per token.

An unknown figure is a dash. The energy is that of the whole card, including other programs.
"""

from __future__ import annotations

from textual.content import Content

from localq.gpus import Reading
from localq.tui.instruments.instrument_widget import UNKNOWN, Instrument, line


class CardLine(Instrument):
    """Three lines about the GPU; none on the CPU."""

    def lines(self, width: int) -> list[Content]:
        """The lines; see `Instrument.lines`."""
        if not self.facts.on_gpu:
            return []
        reading, energy = self.facts.reading, self.facts.joules_per_token
        of_token = f"{_figure(energy, '.2f')} J/token"
        drawn = f"{_figure(reading.watts, '.0f')} of {_figure(reading.watts_limit, '.0f')} W"
        busy = None if reading.busy is None else 100 * reading.busy
        return [
            line(width, ("GPU", "bold"), f" {_figure(busy, '.0f')} %, {_figure(reading.celsius, 'd')} °C, {drawn}"),
            line(width, f"{_figure(reading.sm_mhz, ',d')} MHz, memory {_figure(reading.memory_mhz, ',d')} MHz"),
            line(width, *_held(reading), f", {of_token}"),
        ]


def _held(reading: Reading) -> tuple[str | tuple[str, str], ...]:
    if reading.held_by is None:
        return (f"clocks {UNKNOWN}",)
    return (("limited by " + ", ".join(reading.held_by), "$warning"),) if reading.held_by else ("clocks not limited",)


def _figure(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else format(value, form)
