"""`ModelNames`: which model a request means. Nothing is downloaded, and no path of a request is opened.

With `switch`, every complete model of this machine can be asked for by its name in `localq ls`; else the one that the
server was started with. A request without a name means the model that is open.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from localq.files import local_models
from localq.server.api_error import ApiError
from localq.server.model import ModelRequest

LISTED_S = 5.0  # a listing of the disk is used so long
MOST_NAMED = 20  # in an error


@dataclass(frozen=True)
class ListedModel:
    """A model that can be asked for: its name, and when it was last used (Unix seconds)."""

    name: str
    used: float


class ModelNames:
    """The names that requests may use. first: the model of the server; name: as it shows it; aliases mean it too."""

    def __init__(self, first: ModelRequest, name: str, aliases: Sequence[str] = (), switch: bool = False) -> None:
        self.first, self.name, self.switch = first, name, switch
        self._own = {each.casefold() for each in (name, first.name, *aliases)}
        self.aliases = tuple(aliases)
        self._listed: tuple[float, list[ListedModel]] = (-LISTED_S, [])
        self._started = time.time()

    def is_own(self, name: str) -> bool:
        """Return whether `name` means the model of the server."""
        return name.strip().casefold() in self._own

    def find(self, name: str, now: ModelRequest | None) -> ModelRequest:
        """The request for the model `name`; now: of the model that is open. Looks at the disk for another name.

        Raises ApiError (404) for a model that cannot be asked for, with the names of those that can.
        """
        if not name.strip():
            return now or self.first
        if self.is_own(name):
            return self.first
        known = {each.name.casefold(): each.name for each in self.models()}
        found = known.get(name.strip().casefold())
        if found is None:
            raise self._unknown(name, sorted(known.values()))
        if "/" in found and os.path.lexists(found):
            found = f"hf.co/{found}"  # not the folder of that name where the server was started
        settings = self.first.settings.replace(model=found, offline=True)
        return ModelRequest(found, settings)

    def _unknown(self, name: str, known: list[str]) -> ApiError:
        shown = "".join(letter if letter.isprintable() else "?" for letter in name[:80])
        names = ", ".join(known[:MOST_NAMED]) + (", ..." if len(known) > MOST_NAMED else "")
        where = "on this machine" if self.switch else "served"
        step = "" if self.switch else " To serve every model on this machine, use `localq serve --switch`."
        why = f"The model '{shown}' is not {where}. Available: {names}.{step}"
        return ApiError(404, why, "model", "model_not_found")

    def models(self) -> list[ListedModel]:
        """The models that can be asked for, that of the server first."""
        own = [ListedModel(self.name, self._started)]
        if not self.switch:
            return own
        at, listed = self._listed
        if time.monotonic() - at > LISTED_S:
            here = [each for each in local_models.list_local() if each.complete]
            listed = [ListedModel(each.name, each.last_used) for each in here]
            self._listed = time.monotonic(), listed
        return own + [each for each in listed if not self.is_own(each.name)]
