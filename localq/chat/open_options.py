"""Options for opening a model: weight format, loading against the plan, and consent to a large download.

A module of its own so that a front end can draw before `open_model` is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from localq.settings import Settings


@dataclass(frozen=True)
class OpenOptions:
    """Options for opening a model.

    format  weight format; None: as the catalogue or the name says
    force   load although the plan says it does not fit
    agreed  download or quantize more than 1 GB without a question
    why     why this model was chosen, if the user did not name it; then opening it asks before any download
    fresh   start an engine of its own even where a server of this user holds the model
    """

    format: str | None = None
    force: bool = False
    agreed: bool = False
    why: str = ""
    fresh: bool = False


@dataclass(frozen=True)
class Opening:
    """A model to open: settings with its name, options, and a notice of why it was chosen."""

    settings: Settings
    wanted: OpenOptions
    notice: str = ""
