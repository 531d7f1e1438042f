"""Gauges in one row, the same on every screen: a heavy line for the share, a thin one for the rest.

The two lines differ in shape, so that a gauge can be read without colour.
"""

from __future__ import annotations

from typing import Any

from rich.style import Style
from textual.app import App
from textual.color import Color, ColorParseError

Part = tuple[str, str]  # text and style

REST_STYLE, MUTED = "$foreground 25%", "$foreground 60%"
GOOD, FAIR, BAD = "$success", "$warning", "$error"


def gauge(share: float, cells: int, style: str) -> list[Part]:
    """A line of `cells` cells of which `share` (0 to 1) is heavy, in halves of a cell; above 0 at least one half."""
    halves = round(min(max(share, 0.0), 1.0) * 2 * cells)
    if share > 0 and cells > 0:
        halves = max(1, halves)
    full, half = divmod(halves, 2)
    drawn = "━" * full + "╸" * half
    return [(drawn, style), ("─" * (cells - len(drawn)), REST_STYLE)]


def rising(share: float, fair: float, bad: float) -> str:
    """Style of a share that is better low: of memory, context, temperature."""
    return GOOD if share < fair else FAIR if share < bad else BAD


def falling(share: float, good: float) -> str:
    """Style of a share that is better high: of the bandwidth. A low one is a fact, no fault, and so without colour."""
    return GOOD if share >= good else MUTED


def rich_style(app: App[Any], name: str, bold: bool = False) -> Style:
    """A colour of the theme for text that Rich draws; none for "", and where there are no colours."""
    value = "" if app.no_color else app.theme_variables.get(name, "")
    try:
        return Style(color=Color.parse(value).rich_color if value else None, bold=bold or None)
    except ColorParseError:
        return Style(bold=bold or None)
