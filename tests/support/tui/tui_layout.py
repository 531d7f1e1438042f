"""Whether a screen is laid out soundly, without pictures of it: nothing overlaps, nothing lies where nobody gets to.

For every widget that is shown: it has room; it lies within its parent, unless that scrolls; it does not overlap its
neighbours; and the text of a `Static` is no higher, and its words no wider, than the place it has.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from textual.geometry import Region
from textual.screen import Screen
from textual.scrollbar import ScrollBar, ScrollBarCorner
from textual.widget import Widget
from textual.widgets import Static, Tooltip

from localq.tui.instruments.instrument_widget import Instrument


def assert_sound(screen: Screen) -> None:
    """Fails naming what is wrong."""
    assert (found := problems(screen)) == [], "\n".join(found)


def problems(screen: Screen) -> list[str]:
    """In words; empty where all is well."""
    return [*_of_children(screen, screen.region), *_off_screen(screen)]


def _of_children(parent: Widget, room: Region) -> Iterator[str]:
    shown = [each for each in parent.children if _is_shown(each)]
    for each in shown:
        scrolls = _scrolls(parent)
        if not each.region.area and not scrolls:
            yield f"{_name(each)} has no room in {_name(parent)}"
        elif not scrolls and not room.contains_region(each.region):
            yield f"{_name(each)} at {each.region} leaves {_name(parent)} at {room}"
        if isinstance(each, Static) and (cut := _cut(each)):
            yield cut
        yield from _of_children(each, each.region)
    for one, other in itertools.combinations(shown, 2):
        if one.layer == other.layer and one.region.overlaps(other.region):
            yield f"{_name(one)} at {one.region} overlaps {_name(other)} at {other.region}"


def _off_screen(screen: Screen) -> Iterator[str]:
    for each in screen.walk_children():
        if _is_shown(each) and not screen.region.contains_region(each.region):
            reached = any(isinstance(above, Widget) and _scrolls(above) for above in each.ancestors)
            if not reached:
                yield f"{_name(each)} at {each.region} is beyond the screen"


def _cut(shown: Static) -> str:
    size = shown.content_size
    needed = shown.get_content_height(shown.container_size, shown.app.size, size.width)
    text = str(shown.visual) if size.width else ""
    if needed > size.height:
        return f"{_name(shown)} shows {size.height} of {needed} lines: {text[:60]!r}"
    return ""


def _is_shown(widget: Widget) -> bool:
    over = widget.styles.overlay == "screen"  # a list that drops down lies over others
    return (
        widget.display
        and widget.visible
        and not (over or _is_mute(widget) or isinstance(widget, ScrollBar | ScrollBarCorner | Tooltip))
    )


def _is_mute(widget: Widget) -> bool:
    """Whether an instrument, or a column of them, has nothing to tell."""
    if isinstance(widget, Instrument):
        return not widget.lines(1)
    return bool(widget.children) and all(isinstance(each, Instrument) and _is_mute(each) for each in widget.children)


def _scrolls(widget: Widget) -> bool:
    return widget.is_scrollable and (widget.allow_vertical_scroll or widget.allow_horizontal_scroll)


def _name(widget: Widget) -> str:
    return f"#{widget.id}" if widget.id else type(widget).__name__
