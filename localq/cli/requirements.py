"""Packages that are older or newer than localq asks for: why something failed that should not.

pip sees to it that they are right; `--no-deps`, another install into the same environment, or a folder on PYTHONPATH
do not.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from localq.errors import LocalqError

PACKAGE = "localq"


def unmet() -> LocalqError | None:
    """The first requirement of localq that this environment does not meet; None where all are met, or nobody knows."""
    from packaging.requirements import Requirement  # start-up cost: only what failed asks

    try:
        stated = requires(PACKAGE) or []
    except PackageNotFoundError:  # run out of a folder that was not installed
        return None
    for each in map(Requirement, stated):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        wanted = f"{each.name}{each.specifier}"
        try:
            there = version(each.name)
        except PackageNotFoundError:
            return _missed(f"{each.name} is not installed", wanted)
        if not each.specifier.contains(there, prereleases=True):
            return _missed(f"{each.name} {there} is installed", wanted)
    return None


def _missed(what: str, wanted: str) -> LocalqError:
    return LocalqError(what, f"localq needs {wanted}", f"Run `pip install '{wanted}'` in this environment.")
