"""What shows nothing of its own but what it holds: one row of it is drawn for all.

Textual (8.2) draws every row of whatever lies below others, each time something grows: for a reply, its turn and the
conversation that was a third of a frame.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

if TYPE_CHECKING:
    _Widget = Widget
else:
    _Widget = object  # a class with styles of its own would hide those of the widget that it is part of


class RepeatedRow(_Widget):
    """A container; stands before the widget among its bases."""

    def render_lines(self, crop: Region) -> list[Strip]:
        """Textual's rows: those between its edges are all alike, but for the first, where an empty text has its end."""
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
