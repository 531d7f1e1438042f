"""The link to `localq` in a folder of PATH, made by `make install` and removed by `make uninstall`."""

from __future__ import annotations

import os
from pathlib import Path


class LinkError(Exception):
    """The link cannot be made or removed; the text says why and what to do."""


def make_link(program: Path, folder: Path) -> list[str]:
    """Link `folder`/localq to `program`; lines for the user. Raises LinkError where another file is in the way."""
    link = folder / "localq"
    if _is_ours(link, program):
        lines = [f"{link} is already linked to {program}."]
    else:
        if os.path.lexists(link):
            other = f"it points to {os.readlink(link)}" if link.is_symlink() else "it is not a link"
            raise LinkError(
                f"{link} exists but does not belong to this clone ({other}); leaving it unchanged.\n"
                f"Remove it, or choose another folder with `make install BIN_DIR=FOLDER`."
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
            link.symlink_to(program)
        except OSError as error:
            raise LinkError(
                f"{link} cannot be created ({error.strerror}). For another folder, run `make install BIN_DIR=FOLDER`."
            ) from None
        lines = [f"{link} is linked to {program}."]
    if not is_on_path(folder):
        lines += [
            f"{folder} is not on your PATH. Add this line to ~/.profile (bash: ~/.bashrc), then open a new terminal:",
            f'  export PATH="{folder}:$PATH"',
        ]
    return lines


def remove_link(program: Path, folder: Path) -> list[str]:
    """Remove the link that `make_link` made; lines for the user. Raises LinkError for a file of another origin."""
    link = folder / "localq"
    if not os.path.lexists(link):
        return [f"{link} does not exist."]
    if not _is_ours(link, program):
        raise LinkError(f"{link} is not a link to this clone; leaving it unchanged.")
    link.unlink()
    return [f"Removed {link}. The clone itself is kept; run `localq doctor` there to see what else is on disk."]


def is_on_path(folder: Path) -> bool:
    """Return whether `folder` is on PATH."""
    listed = os.environ.get("PATH", "").split(os.pathsep)
    return any(each and Path(each).expanduser().resolve() == folder.resolve() for each in listed)


def _is_ours(link: Path, program: Path) -> bool:
    return link.is_symlink() and Path(os.path.abspath(link.parent / os.readlink(link))) == program
