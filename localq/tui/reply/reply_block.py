"""What stands below other such things in a reply, as high as what it says is at a width."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from textual.box_model import BoxModel
from textual.geometry import Size
from textual.widget import Widget

if TYPE_CHECKING:
    _Widget = Widget
else:
    _Widget = object  # a class with styles of its own would hide those of the widget that it is part of


class SizedByContent(_Widget):
    """A part of a reply, of which nothing depends on how high the reply is; stands before the widget among its bases.

    Textual (8.2) keeps the size of a widget by that of what holds it: of a reply that grows, every part was measured
    again at every step.
    """

    def _get_box_model(
        self, container: Size, viewport: Size, width_fraction: Fraction, height_fraction: Fraction,
        constrain_width: bool = False, greedy: bool = True,
    ) -> BoxModel:  # fmt: skip
        high = viewport.height
        return super()._get_box_model(
            Size(container.width, high), viewport, width_fraction, Fraction(high), constrain_width, greedy
        )
