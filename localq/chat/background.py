"""Starts the background process of the setting `keep_alive` (`localq.server.background`), and connects to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from localq import places
from localq.disk import disk_errors, open_to_append, part_file
from localq.processes import child_environment
from localq.settings import OF_ENGINE, Settings
from localq.wording import parse_duration
from localq.worker import shared
from localq.worker.shared import SharedEngine

MODULE = "localq.server.background"
LOG = "server.log"
START_S = 30.0  # for the socket of a new process, on a busy machine
_LOOK_S = 0.02


def is_wanted(settings: Settings) -> bool:
    """Return whether the settings request a background process."""
    return settings.keep_alive is not None and parse_duration(settings.keep_alive) != 0


def log_file() -> Path:
    """The log of the background process."""
    return places.runtime_dir() / LOG


def start(name: str, format: str | None, settings: Settings) -> SharedEngine | None:
    """A connection to a new background process for the model `name`, or to one that another front end has just started.

    None where it does not come up; the reason is in the log. Raises LocalqError (exit 9).
    """
    with disk_errors(places.runtime_dir()):
        folder = shared.private_folder()  # else another user's `server.log` could be a link to a file of this one
        with _locked(folder):
            if (found := shared.find(name, format)) is not None:
                return found
            return _connect(_start(folder, name, format or "", settings), folder)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of those that start a background process; after START_S without it, where its owner hangs."""
    descriptor, end = open_to_append(folder / "start.lock"), time.monotonic() + START_S
    try:
        while time.monotonic() < end:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_LOOK_S)
        yield
    finally:
        os.close(descriptor)


def _start(folder: Path, name: str, format: str, settings: Settings) -> subprocess.Popen[bytes]:
    with part_file(folder / LOG, 0o600) as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE, name, format],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=_environment(settings),
            start_new_session=True,  # it outlives the terminal
        )


def _environment(settings: Settings) -> dict[str, str]:
    """The environment in which the settings of an engine are these."""
    environment = {
        **child_environment(),
        places.NO_PROJECT: "1",
        "LOCALQ_KEEP_ALIVE": settings.keep_alive or "0",
        "LOCALQ_OFFLINE": "1",  # the front end has fetched the files
    }
    for name in OF_ENGINE:
        value, variable = getattr(settings, name), f"LOCALQ_{name.upper()}"
        environment.pop(variable, None)
        if value is not None:
            environment[variable] = str(value)
    return environment


def _connect(process: subprocess.Popen[bytes], folder: Path) -> SharedEngine | None:
    path, end = shared.socket_path(folder, process.pid), time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        if path.exists() and (engine := shared.open_engine(path)) is not None:
            return engine
        time.sleep(_LOOK_S)
    return None
