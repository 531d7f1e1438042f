"""The card itself: how busy, how hot, at which clocks, what it draws, what holds it down, and the energy of a token.

What the driver does not tell is a dash. The energy is the whole card's, other programs included.
"""

from __future__ import annotations

from textual.content import Content

from localq.gpus import Reading
from localq.tui.instruments.instrument_widget import UNTOLD, Instrument, line


class CardLine(Instrument):
    """Three lines; none on the CPU."""

    def lines(self, width: int) -> list[Content]:
        """See `Instrument`."""
        if not self.facts.on_gpu:
            return []
        reading, energy = self.facts.reading, self.facts.joules_per_token
        of_token = f"{_told(energy, '.2f')} J/token"
        drawn = f"{_told(reading.watts, '.0f')} of {_told(reading.watts_limit, '.0f')} W"
        busy = None if reading.busy is None else 100 * reading.busy
        return [
            line(width, ("GPU", "bold"), f" {_told(busy, '.0f')} %, {_told(reading.celsius, 'd')} °C, {drawn}"),
            line(width, f"{_told(reading.sm_mhz, ',d')} MHz, memory {_told(reading.memory_mhz, ',d')} MHz"),
            line(width, *_held(reading), f", {of_token}"),
        ]


def _held(reading: Reading) -> tuple[str | tuple[str, str], ...]:
    if reading.held_by is None:
        return (f"clocks {UNTOLD}",)
    return (("held by " + ", ".join(reading.held_by), "$warning"),) if reading.held_by else ("clocks free",)


def _told(value: float | None, form: str) -> str:
    return UNTOLD if value is None else format(value, form)
