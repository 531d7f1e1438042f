"""Options for opening a model: weight format, and loading against the plan.

A module of its own so that a front end can draw before `open_model` is imported.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OpenOptions:
    """Weight format (None: as the catalogue or the name says); force: load although the plan says it does not fit."""

    format: str | None = None
    force: bool = False
