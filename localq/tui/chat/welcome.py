"""Content of an empty conversation: the model and the first keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.content import Content
from textual.widgets import Static

from localq.tui.chat.status_line import short_name
from localq.tui.instruments.card_line import short_device
from localq.tui.key_line import KEY_STYLE, chosen_keys, hints

if TYPE_CHECKING:
    from localq.worker.messages import Loaded

FIRST_KEYS = ("palette", "models", "sidebar", "instruments", "settings", "help")
TYPED = (("/", "commands"), ("@FILE", "attach a file"))


class Welcome(Static):
    """Shown while no turn is drawn. loaded: the model, None until it is loaded."""

    ALLOW_SELECT = False

    def __init__(self) -> None:
        super().__init__(markup=False)
        self._loaded: Loaded | None = None

    def show_model(self, loaded: Loaded) -> None:
        """Show the loaded model."""
        self._loaded = loaded
        self.refresh(layout=True)

    def render(self) -> Content:
        """Name, model and keys, one below the other."""
        return Content("\n").join(
            [Content.styled("localq", "bold $text-primary"), *self._model(), Content(), *self._keys()]
        )

    def _model(self) -> list[Content]:
        if self._loaded is None:
            return []
        loaded = self._loaded
        device = short_device(loaded.device_name)
        parts = (loaded.format, device, f"{loaded.context_size:,} tokens of context")
        return [Content.assemble((short_name(loaded.name), "bold"), *(f" · {each}" for each in parts))]

    def _keys(self) -> list[Content]:
        return rows(chosen_keys(self.app))


def rows(chosen: Mapping[str, str]) -> list[Content]:
    """A line for each of the first keys, as the user chose them, and for what a message may begin with."""
    found = [*TYPED, *((key, label) for key, label, _ in hints(chosen, FIRST_KEYS))]
    width = max(cell_len(key) for key, _ in found)
    return [Content.assemble((key.rjust(width), KEY_STYLE), f"  {label}") for key, label in found]
