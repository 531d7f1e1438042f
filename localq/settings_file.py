"""Writes `config.toml`: some settings, keeping comments and order, or the whole text that a user edited.

Writers take turns: each reads the file again under a lock and changes that. The file is replaced by a synced copy;
links, mode, owner, line endings and a byte order mark stay as they are.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from localq import disk, places, settings, toml_files
from localq.errors import ExitCode, LocalqError, usage_error

WAIT_S = 10.0  # for another writer, which takes milliseconds
_POLL_S = 0.01
_BOM = "\ufeff"


def write(name: str, text: str | None) -> Any:
    """Set `name` in `config.toml` (None = remove), keeping comments. Returns the stored value."""
    return write_all({name: text})[name]


def write_all(texts: Mapping[str, str | None]) -> dict[str, Any]:
    """Set settings in `config.toml` (None = remove), all or none, keeping comments. Returns the stored values.

    Raises LocalqError: exit 2 for a wrong setting, 8 for a file that cannot be read, 9 where it cannot be written.
    """
    values = dict[str, Any]()
    for name, text in texts.items():
        settings.check_name(name)
        values[name] = None if text is None else settings.parse(name, text, "the command line")

    def change(before: str) -> str:
        where = str(places.config_file())
        known = settings.parse_file(before, where)  # a broken file must not be overwritten
        expected = {name: value for name, value in {**known, **values}.items() if value is not None}
        settings.Settings(**expected)
        text = _with_values(before, {name: texts[name] if values[name] is None else values[name] for name in values})
        _encode(text)
        found = settings.parse_file(text, "the new text")
        if {name: value for name, value in found.items() if value is not None} != expected:
            raise _unchangeable("the edit would change other values")
        return text

    if texts:
        _change(change)
    return values


def write_file(text: str, before: str) -> int:
    """Replace `config.toml`, which was `before`, by `text`. Returns its number of settings.

    Settings that others have set or removed meanwhile stay so. Raises as `settings.read_config`, and exit 1 where the
    file has changed in another way; then writes nothing, but keeps the text in a file beside.
    """
    lines = text if text.endswith("\n") else text + "\n"
    try:
        settings.parse_file(lines, "the edited text")
        return len(_change(lambda now: _merged(before, lines, now)))
    except LocalqError as error:
        kept = _keep(lines)
        step = f"{error.next_step} The edited text was saved in {kept}.".strip() if kept else error.next_step
        raise LocalqError(error.what, error.why, step, error.exit_code) from error


def _with_values(text: str, values: Mapping[str, Any]) -> str:
    """The TOML `text` with other values; None removes a setting."""
    import tomlkit  # start-up cost: only writing needs it

    try:
        document = tomlkit.parse(text)
        for name, value in values.items():
            if value is None:
                document.pop(name, None)
            elif isinstance(value, dict) and isinstance(table := document.get(name), dict):
                _fill(table, value)  # in place, for its comments
            else:
                document[name] = value
        return tomlkit.dumps(document)
    except (ValueError, KeyError, RecursionError, tomlkit.exceptions.TOMLKitError) as error:
        raise _unchangeable(str(error)) from error


def _fill(table: MutableMapping[str, Any], values: Mapping[str, Any]) -> None:
    for key in [key for key in table if key not in values]:
        del table[key]
    for key, value in values.items():
        if table.get(key) != value:
            table[key] = value


def _unchangeable(why: str) -> LocalqError:
    why = f"cannot be edited safely ({why})"
    return LocalqError(str(places.config_file()), why, "Change it with `localq config edit`.")


def _merged(before: str, edited: str, now: str) -> str:
    """`edited`, with what others have changed from `before` to `now`. Raises LocalqError where that is not clear."""
    if now == before:
        return edited
    was, new, mine = (settings.parse_file(each, str(places.config_file())) for each in (before, now, edited))
    theirs = {name: new.get(name) for name in {*was, *new} if was.get(name) != new.get(name)}
    disputed = [name for name in theirs if mine.get(name) not in (was.get(name), theirs[name])]
    if disputed or _with_values(before, theirs) != now:  # or a comment has changed
        why = f"{', '.join(sorted(disputed)) or 'the file'} changed while you were editing"
        raise LocalqError(str(places.config_file()), why, "Edit it again.")
    return _with_values(edited, theirs)


def _keep(text: str) -> Path | None:
    """Keep an edited text beside `config.toml`, under a free name; None where that fails."""
    try:
        path, content = disk.resolve(places.config_file()), text.encode()
        for number in itertools.count(1):  # earlier ones stay
            kept = path.with_name(f"{path.name}.edited{'' if number == 1 else f'.{number}'}")
            with contextlib.suppress(FileExistsError), disk.new_file(kept) as file:
                file.write(content)
                return kept
    except (OSError, ValueError):
        return None
    return None


# ---- the file


def _change(change: Callable[[str], str]) -> dict[str, Any]:
    """Replace the text of `config.toml` by `change` of it, under a lock; returns the settings of the new text.

    Line endings are \\n for `change`. Raises what it raises, and LocalqError (exit 9) where the disk refuses.
    """
    named = places.config_file()
    with disk.disk_errors(named):
        path = disk.resolve(named)  # links stay
        path.parent.mkdir(parents=True, exist_ok=True)
    with _lock(path.parent):
        while True:
            stored = toml_files.read(path) or ""
            mark, dos = stored.startswith(_BOM), "\r\n" in stored and "\n" not in stored.replace("\r\n", "")
            text = change(stored.removeprefix(_BOM).replace("\r\n", "\n") if dos else stored.removeprefix(_BOM))
            content = _encode((_BOM if mark else "") + (text.replace("\n", "\r\n") if dos else text))
            found = settings.parse_file(text, "the new text")  # what is written can be read
            if content == stored.encode():
                return found
            with disk.disk_errors(named):
                if _replace(path, content, stored.encode()):
                    return found


def _encode(text: str) -> bytes:
    try:
        content = text.encode()
    except UnicodeEncodeError:
        raise usage_error("the new text", "not valid UTF-8", "Check the terminal's encoding.") from None
    if len(content) > toml_files.MOST_BYTES:
        why = f"the file would become too large (limit: {toml_files.MOST_BYTES / 1e6:.1f} MB)"
        raise usage_error("the new text", why, "Use a shorter text.")
    return content


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """A lock on `folder`, so that nothing is left there; none on a file system that has none."""
    with disk.disk_errors(folder):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        end_s = time.monotonic() + WAIT_S
        while not _take_lock(descriptor):
            if time.monotonic() > end_s:
                why = f"another program has held the lock on the folder for {WAIT_S:.0f} s"
                raise LocalqError(str(folder), why, "Try again.", ExitCode.DISK)
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int) -> bool:
    """Take the lock; True also where there are no locks. False: another has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # the file system has none; `_replace` looks again
        return True
    return True


def _replace(path: Path, content: bytes, before: bytes) -> bool:
    """Replace the file durably; False, with nothing done, where it is not `before` any more. Raises OSError."""
    known = path.stat() if path.exists() else None
    if known is not None and not stat.S_ISREG(known.st_mode):
        raise OSError(None, "not a regular file")
    if known is not None and not os.access(path, os.W_OK):
        raise PermissionError(None, "the file is read-only")
    part = path.with_name(f".{path.name}.new")
    try:
        # There is one writer at a time: an earlier part is of a killed process.
        with disk.part_file(part, disk.NEW_FILE_MODE if known is None else 0o600) as file:
            descriptor = file.fileno()
            if known is not None:
                with contextlib.suppress(PermissionError):  # another group, or a user who may write but not give away
                    os.fchown(descriptor, known.st_uid, known.st_gid)
                os.fchmod(descriptor, stat.S_IMODE(known.st_mode))
                _copy_attributes(path, descriptor)
            disk.write_all(descriptor, content)
            os.fsync(descriptor)
        if _content(path) != before:
            return False
        _move(part, path, known is not None and known.st_nlink > 1, content)
    finally:
        part.unlink(missing_ok=True)
    disk.sync_folder(path.parent)
    return True


def _copy_attributes(path: Path, descriptor: int) -> None:
    """Copy extended attributes, access lists among them, as far as the system lets."""
    with contextlib.suppress(OSError):
        for name in os.listxattr(path):
            with contextlib.suppress(OSError):  # of the system
                os.setxattr(descriptor, name, os.getxattr(path, name))


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _move(part: Path, path: Path, has_names: bool, content: bytes) -> None:
    """Move the new file into place; one of several names, or a mount point, is written where it is."""
    if not has_names:
        try:
            os.replace(part, path)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        if content:
            os.posix_fallocate(descriptor, 0, len(content))  # a full disk must not leave half of it
        disk.write_all(descriptor, content)
        os.ftruncate(descriptor, len(content))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
