"""Progress display of the installation: the running steps, how far each is, and about how long the rest takes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from localq.kernels.setup.steps import SetupStep

HEARTBEAT_S = 10.0  # between two lines of a log
_COMPILED = re.compile(r"\[(\d+)/(\d+)\] (?:Building|Linking)")
_DOWNLOADING = re.compile(r"Downloading (\S+?) \(([\d.]+) (kB|MB|GB)\)")
_INSTALLING = re.compile(r"Installing collected packages: (.+)")
_COLLECTING = re.compile(r"Collecting (\S+)")
_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9}
_LEAST_BYTES = 5_000_000  # of a download that is counted


@dataclass
class StepProgress:
    """Progress of a running step, read from the lines of its command.

    fraction  done, 0 to 1; 0 where it is not known
    detail    such as "12 of 44 files"
    expected  bytes of the file that pip downloads, 0 = none
    """

    fraction: float = 0.0
    detail: str = ""
    expected: int = 0
    packages: int = 0

    def read(self, line: str) -> None:
        """Take in a line that ninja or pip wrote."""
        if found := _COMPILED.search(line):
            done, total = int(found[1]), int(found[2])
            self.fraction, self.detail = done / total, f"{done} of {total} files"
        elif found := _DOWNLOADING.search(line):
            self.expected = int(float(found[2]) * _UNITS[found[3]])
            self.detail = f"{_name_of(found[1])}, {found[2]} {found[3]}"
        elif found := _INSTALLING.search(line):
            count = found[1].count(",") + 1
            self.expected, self.detail = 0, f"unpacking {count} package{'s' if count > 1 else ''}"
        elif found := _COLLECTING.search(line):
            self.packages += 1
            self.expected, self.detail = 0, f"{self.packages} found, {re.split('[<>=!~;[]', found[1])[0]}"

    def look(self, folder: Path) -> None:
        """Update `detail` with how much of the file that pip downloads is in `folder`."""
        if self.expected < _LEAST_BYTES:
            return
        files = [path for path in folder.glob("pip-unpack-*/*") if path.is_file()]
        newest = max(files, key=lambda path: path.stat().st_mtime, default=None)
        if newest is not None:
            size, total = newest.stat().st_size / 1e6, self.expected / 1e6
            self.detail = f"{_name_of(newest.name)}, {min(size, total):,.0f} of {total:,.0f} MB"


def _name_of(file: str) -> str:
    """The package of a wheel's file name or address."""
    return file.rsplit("/", 1)[-1].split("-")[0]


def seconds_left(
    steps: Sequence[SetupStep], running: Mapping[str, tuple[float, float]], done: Mapping[str, float]
) -> float:
    """About how long all `steps` still take: the longest chain of steps that wait for each other.

    running  name -> (seconds under way, fraction done or 0)
    done     name -> seconds that it took
    """
    expected = sum(step.seconds for step in steps if done.get(step.name, 0) > 0)
    pace = min(max(sum(done.values()) / expected, 0.5), 10.0) if expected else 1.0
    ends: dict[str, float] = {}
    for step in steps:
        start = max((ends.get(each, 0.0) for each in step.needs), default=0.0)
        if step.name in done:
            left = 0.0
        elif step.name in running:
            elapsed, fraction = running[step.name]
            left = max(step.seconds * pace - elapsed, elapsed / 4, 1.0)
            if fraction:  # its own speed counts the more the further it is: the longest files are compiled first
                left = (1 - fraction) * left + fraction * (elapsed * (1 - fraction) / fraction)
        else:
            left = step.seconds * pace
        ends[step.name] = start + left
    return max(ends.values(), default=0.0)


def about(seconds: float) -> str:
    """Seconds as a user would say them: 8 s, 40 s, 3 min."""
    if seconds < 10:
        return f"{max(round(seconds), 1)} s"
    return f"{round(seconds / 5) * 5} s" if seconds < 90 else f"{round(seconds / 60)} min"


class Display:
    """One line that is redrawn at a terminal, a line every 10 s elsewhere; a line for each step that ends."""

    def __init__(self, out: TextIO, live: bool) -> None:
        self._out, self._live, self._last = out, live, 0.0

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._out.write(f"\r\x1b[K{text}\n" if self._live else f"{text}\n")
        self._out.flush()

    def status(self, text: str, now: float) -> None:
        """Show the current status. now: seconds since the start."""
        if self._live:
            width = shutil.get_terminal_size().columns - 1
            self._out.write(f"\r\x1b[K{text[:width]}")
        elif now - self._last >= HEARTBEAT_S:
            self._last = now
            self._out.write(f"{text}\n")
        self._out.flush()
