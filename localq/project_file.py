"""A project's own settings: `localq.toml` in the folder where localq is started, or above it in the same checkout.

Whoever wrote the file need not be the user: it came with a clone or an archive. So it may say how replies are made, and
nothing that reaches further: no path, no repository, no program, no network, no disk, no keys of the screen.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from localq.disk import text_of
from localq.errors import usage_error

NAME = "localq.toml"
SWITCH = "LOCALQ_NOPROJECT"
# Besides how tokens are chosen (`settings.SAMPLING`). Left out: what the machine has, what is private, what costs disk.
MAY_SET = ("model", "system", "ctx", "kv", "head", "think", "max_tokens")
_CATALOGUE_NAME = re.compile(r"\w[\w.+:-]*(@[\w.+-]+)?")


def find(environment: Mapping[str, str] = os.environ) -> Path | None:
    """The nearest file, from this folder up to the top of the git checkout; outside of one in this folder alone.

    None where there is none, where LOCALQ_NOPROJECT is set, and for a file that another user (but root) owns: a folder
    that many may write to, such as /tmp, is no project.
    """
    if environment.get(SWITCH, "0") not in ("", "0"):
        return None
    try:
        here = Path.cwd()
        found = next((each / NAME for each in _folders(here) if (each / NAME).is_file()), None)
        return found if found is not None and found.stat().st_uid in (os.getuid(), 0) else None
    except OSError:  # the folder is gone, or may not be read
        return None


def _folders(here: Path) -> list[Path]:
    above = [here, *here.parents]
    top = next((number for number, each in enumerate(above) if (each / ".git").exists()), 0)
    return above[: top + 1]


def text(path: Path) -> str:
    """What stands in it. Raises LocalqError (exit 2) for what is no text of at most a megabyte."""
    return text_of(path)


def check(path: Path, sampling: tuple[str, ...], name: str, value: object) -> None:
    """Raise a usage error for a setting that a project has no say in, or a model that is no name of the catalogue.

    sampling   the settings of sampling, which it may all set
    """
    where = f"{name} in {path}"
    if name not in (*MAY_SET, *sampling):
        why = "a project's file may not set it: it is about your machine, your data or your screen"
        raise usage_error(where, why, f"`localq config set {name} VALUE` sets it for you; {SWITCH}=1 ignores the file.")
    if name == "model" and not _is_name(value):
        why = "a project's file may name models of the catalogue, no paths and no repositories"
        raise usage_error(
            where, why, f"Give it as an argument, or in your own models.toml; {SWITCH}=1 ignores the file."
        )


def _is_name(value: object) -> bool:
    """Text that the catalogue alone can mean."""
    if not isinstance(value, str) or not _CATALOGUE_NAME.fullmatch(value):
        return False
    return not value.casefold().endswith(".gguf") and not Path(value).is_dir()
