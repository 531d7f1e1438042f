"""`RepeatedRow`: a container that draws one row and repeats it.

Textual (8.2) draws every row of a container each time its content grows; for a reply, its turn and the conversation
that takes a third of a frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

if TYPE_CHECKING:
    _Widget = Widget
else:
    _Widget = object  # a base with styles would hide those of the widget


class RepeatedRow(_Widget):
    """Mixin of a container; listed before the widget class."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """As Textual's rows: those between the edges are equal, except the first, the end of an empty text."""
        gutter = self.styles.gutter
        first, last = gutter.top + 1, self.region.height - gutter.bottom
        inner = crop.intersection(Region(crop.x, first, crop.width, max(0, last - first)))
        if not inner.height:
            return super().render_lines(crop)
        rows = super().render_lines(Region(crop.x, inner.y, crop.width, 1)) * inner.height
        above, below = inner.y - crop.y, crop.bottom - inner.bottom
        if above:
            rows = super().render_lines(Region(crop.x, crop.y, crop.width, above)) + rows
        if below:
            rows += super().render_lines(Region(crop.x, inner.bottom, crop.width, below))
        return rows
