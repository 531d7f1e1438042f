"""Files that were hashed and right, and are unchanged since; and the hashes of models that were made here.

A file is unchanged while its size, owner, inode, time of writing and time of change are those of its record. A program
can set the time of writing back, but not the time of change. Other files are hashed again before they are used.

    <model folder>/localq.sha256   the hashes of a model's files, written by `localq quantize`; `sha256sum -c` reads it
    <data>/checked/HASH.json       the record of one folder (HASH: sha256 of its path), of this user alone

Models from the hub have their records in `hub.records`. Torch-free.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from localq import disk, places
from localq.errors import LocalqError, bad_file
from localq.files import json_files, own_files

SUMS_NAME = "localq.sha256"
SCHEMA = 1
MAX_BYTES = 2**20  # of the hashes of a model, and of a record
_LINE = re.compile(r"(?P<sha256>[0-9a-f]{64})  (?P<name>[A-Za-z0-9_][A-Za-z0-9._-]{0,127})")

OnFile = Callable[[str, int], None]  # name and bytes of the file that is hashed next
Stamp = dict[str, int]


def _ignore(name: str, size: int) -> None:
    """Ignore a report."""


def stamp(path: Path) -> Stamp:
    """Return a stamp that changes when the file is written, replaced or changes owner. Raises OSError."""
    return stamp_of(os.stat(path))


def stamp_of(found: os.stat_result) -> Stamp:
    """`stamp` of a file whose stat is known."""
    return {
        "size": found.st_size, "mtime_ns": found.st_mtime_ns, "ctime_ns": found.st_ctime_ns, "inode": found.st_ino,
        "uid": found.st_uid,
    }  # fmt: skip


MOST_TRIES = 8  # to hash a file that is being replaced


def right_stamp(path: Path, content_id: str) -> Stamp | None:
    """The stamp of `path` if it has the content `content_id` (`disk.has_content`); None for other content.

    A file that is replaced while it is hashed, as by another process without locks, is hashed again. Raises OSError.
    """
    for _ in range(MOST_TRIES):
        before = stamp(path)
        if not disk.has_content(path, content_id):
            return None
        if stamp(path) == before:
            return before
    return None


def read_record(path: Path, max_bytes: int = MAX_BYTES) -> dict[str, Any]:
    """The record at `path`; {} without one, for a damaged one, and for another user's."""
    with own_files.reading(path, _owner_of_records(path)) as descriptor:
        if descriptor is None:
            return {}
        raw = os.pread(descriptor, max_bytes + 1, 0)
    try:
        return json_files.parse_object(raw.decode("utf-8"), str(path)) if len(raw) <= max_bytes else {}
    except (UnicodeDecodeError, LocalqError):
        return {}


def _owner_of_records(path: Path) -> int:
    """This user; on a drive that keeps no owners, the one that it gives to all files."""
    try:
        return own_files.owner_in(path.parent)
    except OSError:  # no folder yet, another user's, or read-only
        return os.geteuid()


# ---- models made here


def sums_text(sums: Mapping[str, str]) -> str:
    """The text of `SUMS_NAME` for name -> sha256."""
    return "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))


def recorded_sums(folder: Path) -> dict[str, str]:
    """Name -> sha256 of the files of a model that was made here; {} for other folders, and those of older versions.

    Raises LocalqError (exit 8) for a damaged list.
    """
    path = json_files.inside(folder, SUMS_NAME)
    if path is None:
        return {}
    lines = json_files.read_text(path, MAX_BYTES).splitlines()
    found = [_LINE.fullmatch(line) for line in lines]
    if not lines or None in found:
        raise bad_file(str(folder / SUMS_NAME), "the list of hashes is damaged", "Quantize the model again.")
    return {match["name"]: match["sha256"] for match in found if match is not None}


def damaged(what: str, path: Path, command: str | None) -> LocalqError:
    """The error (exit 8) about `what` for a file with a wrong hash, or without one; command: repairs it."""
    sums = path.parent / SUMS_NAME
    step = f"Run `{command}` to repair it." if command else "Quantize the model again."
    if sums.exists():
        step += f" If you changed the file on purpose, delete {sums}."
    state = "damaged: its hash does not match the recorded one" if path.exists() else "missing"
    return bad_file(what, f"{path} is {state}", step)


# ---- what was checked


def wrong_files(folder: Path, sums: Mapping[str, str], on_file: OnFile = _ignore, *, again: bool = False) -> list[Path]:
    """The files of `sums` (name -> sha256) in `folder` that are missing, no regular files, or have another hash.

    Files that are unchanged since they were right are not read, unless `again`. Raises OSError of reading.
    """
    if not sums:
        return []
    place = _record_of(folder)
    known = read_record(place).get("files") if place is not None else None
    before: dict[str, Any] = known if isinstance(known, dict) else {}
    now = {name: each for name, each in before.items() if name not in sums}
    wrong = []
    for name, digest in sums.items():
        path = folder / name
        if not _is_file(path):  # a device or a pipe has no end
            wrong.append(path)
            continue
        seen = stamp(path)
        found: Stamp | None = seen
        if again or before.get(name) != {**seen, "sha256": digest}:
            on_file(name, seen["size"])
            found = right_stamp(path, digest)
        if found is None:
            wrong.append(path)
        else:
            now[name] = {**found, "sha256": digest}
    if now != before:
        _write(folder, now)
    return wrong


def _is_file(path: Path) -> bool:
    """Return whether `path`, after following links, is a regular file. Raises OSError if access is denied."""
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False


def remember(folder: Path, sums: Mapping[str, str]) -> None:
    """Record the files of `sums` in `folder`, which were hashed as they were written. Raises OSError."""
    _write(folder, {name: {**stamp(folder / name), "sha256": digest} for name, digest in sums.items()})


def _write(folder: Path, files: dict[str, Any]) -> None:
    body, place = {"schema": SCHEMA, "folder": str(disk.resolve(folder)), "files": files}, _record_of(folder)
    if place is not None:
        with contextlib.suppress(OSError):  # on a read-only disk files are hashed each time
            disk.write_durably(place, json.dumps(body).encode())


def forget(folder: Path) -> None:
    """Remove the record of a folder. Raises OSError."""
    if (place := _record_of(folder)) is not None:
        place.unlink(missing_ok=True)


def _record_of(folder: Path) -> Path | None:
    """The path of the record of `folder`; None without a home folder, where files are hashed each time."""
    name = hashlib.sha256(os.fsencode(disk.resolve(folder))).hexdigest()
    try:
        return places.checked_dir() / f"{name}.json"
    except LocalqError:
        return None
