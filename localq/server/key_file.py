"""The API key of a server: in a file that only its user can read; never on a command line, where others see it.

`auto` is the file `server-key` beside `config.toml`, which is created with a random key.
"""

from __future__ import annotations

import re
import secrets
import stat
from pathlib import Path

from localq import disk, places
from localq.errors import usage_error
from localq.sanitize import Secret

AUTO = "auto"
_KEY = re.compile(r"[!-~]{16,256}")  # visible ASCII: it is sent in a header


def auto_file() -> Path:
    """The file of `--key auto`."""
    return places.config_file().parent / "server-key"


def read(given: str) -> tuple[Secret, Path]:
    """The key of `--key GIVEN` and its file. Raises LocalqError (exit 2) for one that others can read or that is weak.

    Creates the file of `auto` with mode 0600.
    """
    if given != AUTO:
        path = places.expand(given, "--key")
        return _read(path), path
    path = auto_file()
    if not path.exists():
        with disk.disk_errors(path.parent):
            disk.make_folder(path.parent)
            with disk.new_file(path) as file:
                file.write(f"lq-{secrets.token_urlsafe(32)}\n".encode())
    return _read(path), path


def _read(path: Path) -> Secret:
    with disk.read_errors(path, f"--key {path}"):
        mode = path.stat().st_mode
    if stat.S_ISREG(mode) and mode & (stat.S_IRGRP | stat.S_IROTH | stat.S_IWGRP | stat.S_IWOTH):
        raise usage_error(f"--key {path}", "other users can read or change this file", f"Run `chmod 600 {path}`.")
    try:
        text = disk.read_regular(path, 4096).decode("utf-8", "replace").strip()
    except disk.NotRegularError as error:
        raise usage_error(f"--key {path}", "not a regular file", "Use --key auto to create a key.") from error
    if not _KEY.fullmatch(text):
        why = "a key must be one line of 16 to 256 printable ASCII characters"
        raise usage_error(f"--key {path}", why, "Use --key auto to create one.")
    return Secret(text)
