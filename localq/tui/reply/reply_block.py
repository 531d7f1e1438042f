"""`SizedByContent`: a part of a reply whose height depends on its content and width only."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from textual.box_model import BoxModel
from textual.geometry import Size
from textual.widget import Widget

if TYPE_CHECKING:
    _Widget = Widget
else:
    _Widget = object  # a base with styles would hide those of the widget


class SizedByContent(_Widget):
    """Mixin of a part of a reply, listed before the widget class: its size does not depend on the container's height.

    Textual (8.2) caches the size of a widget by that of its container, so each part of a growing reply would be
    measured again at every step.
    """

    def _get_box_model(
        self, container: Size, viewport: Size, width_fraction: Fraction, height_fraction: Fraction,
        constrain_width: bool = False, greedy: bool = True,
    ) -> BoxModel:  # fmt: skip
        high = viewport.height
        return super()._get_box_model(
            Size(container.width, high), viewport, width_fraction, Fraction(high), constrain_width, greedy
        )
