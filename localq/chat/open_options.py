"""What is said of a model besides its name, where one is opened."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpenOptions:
    """Weights in this format (None = as the catalogue or the name says), and a load that the plan advises against."""

    format: str | None = None
    force: bool = False
