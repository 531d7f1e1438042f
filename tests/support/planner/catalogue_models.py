"""Models of the catalogue, as tests of the planner need them."""

from __future__ import annotations

from localq.files import catalog
from localq.files.architecture import Architecture


def arch(name: str) -> Architecture:
    """Its shape."""
    return catalog.find(name).arch
