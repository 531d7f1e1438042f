"""A project's settings: `localq.toml` in the current folder, or above it in the same git checkout.

The file may come from a clone or an archive, so its author is not trusted. It may set how replies are made and nothing
else: no path, repository, program, network, disk or keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from localq import disk
from localq.errors import usage_error

NAME = "localq.toml"
SWITCH = "LOCALQ_NOPROJECT"
MOST_BYTES = 2**18  # of the file: less than what takes seconds to parse
# In addition to the sampling settings. Excluded: settings of the machine, of private data, of the disk.
MAY_SET = ("model", "system", "ctx", "kv", "head", "think", "max_tokens")
_CATALOGUE_NAME = re.compile(r"\w[\w.+:-]*(@[\w.+-]+)?")


def find(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The nearest file from the current folder up to the top of the git checkout, if there is one.

    None without one, with LOCALQ_NOPROJECT, and for a file of another user than this one or root: a folder that many
    users can write, such as /tmp, is no project.
    """
    if environment.get(SWITCH, "0") not in ("", "0"):
        return None
    try:
        here = Path.cwd()
        found = next((each / NAME for each in _folders(here) if (each / NAME).is_file()), None)
        owners = set() if found is None else {found.lstat().st_uid, found.stat().st_uid}  # of a link, and of its target
        return found if owners <= {os.getuid(), 0} else None
    except OSError:  # the folder is gone or unreadable
        return None


def _folders(here: Path) -> list[Path]:
    above = [here, *here.parents]
    top = next((number for number, each in enumerate(above) if (each / ".git").exists()), 0)
    return above[: top + 1]


def text(path: Path) -> str:
    """The text of the file. Raises LocalqError (exit 2) unless it is UTF-8 text of at most MOST_BYTES."""
    found = disk.read_text(path)
    if len(found.encode()) > MOST_BYTES:
        why = f"larger than {MOST_BYTES / 1e6:.2f} MB"
        raise usage_error(str(path), why, f"Shorten it, or ignore the file with {SWITCH}=1.")
    return found


def check(path: Path, sampling: tuple[str, ...], name: str, value: object) -> None:
    """Raise a usage error for a setting that a project may not set, or a model outside the catalogue.

    sampling   names of the sampling settings, which a project may set
    """
    where = f"{name} in {path}"
    if name not in (*MAY_SET, *sampling):
        why = "a project file cannot set this, because it affects your machine, data or screen"
        raise usage_error(
            where, why, f"Set it with `localq config set {name} VALUE`, or ignore the file with {SWITCH}=1."
        )
    if name == "model" and not _is_name(value):
        why = "a project file can only select catalogue models"
        raise usage_error(
            where,
            why,
            f"Pass the model as an argument, add it to your models.toml, or ignore the file with {SWITCH}=1.",
        )


def summary(decided: Mapping[str, str]) -> str:
    """ "system, top_k: set by PATH", for settings and the path of the file that has decided each."""
    paths = {path: [name for name, each in decided.items() if each == path] for path in decided.values()}
    return "; ".join(f"{', '.join(names)}: set by {path}" for path, names in paths.items())


def _is_name(value: object) -> bool:
    """`value` can only be a catalogue name."""
    if not isinstance(value, str) or not _CATALOGUE_NAME.fullmatch(value):
        return False
    return not value.casefold().endswith(".gguf") and not Path(value).is_dir()
