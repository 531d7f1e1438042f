"""Installed packages that do not meet localq's requirements, looked up after an unexpected failure.

pip installs matching versions; `--no-deps`, a later install into the environment, or PYTHONPATH can break them.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, requires, version

from localq.errors import LocalqError

PACKAGE = "localq"


def find_unmet() -> LocalqError | None:
    """The first requirement that this environment does not meet; None if all are met or unknown."""
    from packaging.requirements import Requirement  # start-up cost: only needed after a failure

    try:
        stated = requires(PACKAGE) or []
    except PackageNotFoundError:  # run from a source folder that is not installed
        return None
    for each in map(Requirement, stated):
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        required = f"{each.name}{each.specifier}"
        try:
            installed = version(each.name)
        except PackageNotFoundError:
            return _unmet(f"{each.name} is not installed", required)
        if not each.specifier.contains(installed, prereleases=True):
            return _unmet(f"{each.name} {installed} is installed", required)
    return None


def _unmet(what: str, required: str) -> LocalqError:
    return LocalqError(what, f"localq needs {required}", f"Run `pip install '{required}'` in this environment.")
