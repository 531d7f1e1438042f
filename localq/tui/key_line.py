"""`KeyLine`: the bottom line of a screen, with its keys; and the same text for the border of a widget."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich.cells import cell_len
from textual.app import App
from textual.content import Content
from textual.style import Style
from textual.widget import Widget
from textual.widgets import Static

from localq import keymap
from localq.tui.keys import first_key

GAP = 2  # cells between two keys
KEY_STYLE = "bold $text-accent"


def hints(chosen: Mapping[str, str], names: Iterable[str], **labels: str) -> list[tuple[str, str, str]]:
    """(label of the key, label, key) of each of `names`: the first key as the user chose it.

    labels: other labels than those of `keymap`, by name
    """
    known = keymap.bindings(chosen)
    return [
        (first_key(known[name]), labels.get(name, known[name].label), known[name].keys.split(",")[0]) for name in names
    ]


def content(found: Sequence[tuple[str, str, str]], width: int, clickable: bool = True) -> Content:
    """The keys with their labels in at most `width` cells; the last ones are left out where there is no room.

    clickable: in a `KeyLine`, whose action `press` a click runs
    """
    parts: list[Content] = []
    room = width
    for shown, label, key in found:
        needed = cell_len(shown) + 1 + cell_len(label) + (GAP if parts else 0)
        if needed > room:
            break
        room -= needed
        text = Content.assemble(" " * GAP if parts else "", (shown, KEY_STYLE), f" {label}")
        parts.append(text.stylize(Style.from_meta({"@click": f"press('{key}')"})) if clickable else text)
    return Content("").join(parts)


class KeyLine(Static):
    """The keys `names` of a screen, in their order; a click is as good as the key."""

    DEFAULT_CSS = """
    KeyLine {
        height: 1;
        width: 1fr;
        padding: 0 1;
        background: $panel;
        color: $text-muted;
        text-wrap: nowrap;
    }
    """
    ALLOW_SELECT = False

    def __init__(self, *names: str, id: str | None = None, **labels: str) -> None:
        """labels: as for `hints`."""
        super().__init__(id=id, markup=False)
        self.auto_links = False  # they are keys, not links
        self._names, self._labels = names, labels

    def show(self, *names: str, **labels: str) -> None:
        """Show other keys."""
        if (names, labels) != (self._names, self._labels):
            self._names, self._labels = names, labels
            self.refresh()

    def render(self) -> Content:
        """The line for the current width."""
        return content(hints(chosen_keys(self.app), self._names, **self._labels), self.content_size.width)

    def action_press(self, key: str) -> None:
        """Send `key` to the focus beside this line; if that is elsewhere, to the first widget here that takes it."""
        beside, focused = self.parent, self.screen.focused
        if isinstance(beside, Widget) and (focused is None or beside not in focused.ancestors):
            self.screen.set_focus(next((each for each in beside.query(Widget) if each.focusable), focused))
        self.app.simulate_key(key)


def chosen_keys(app: App[object]) -> Mapping[str, str]:
    """Keys set by the user; none in an app without settings."""
    return getattr(getattr(app, "settings", None), "keys", {})
