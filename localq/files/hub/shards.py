"""Weights of a repository, downloaded file by file when needed and removed after use.

The files go to a separate cache next to the output, in the layout of the Hugging Face cache. Its folder has the file
`MARK`; a folder without it is refused. Weights that are in the user's cache are read there and stay there. All files
come from the commit of the first run, so that a resumed run reads the same bytes. Every file is hashed before it is
read. Torch-free.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import IO, TypeVar

from localq import disk
from localq.errors import ExitCode, LocalqError, bad_file, usage_error
from localq.files import own_files
from localq.files.catalog import Source
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import download, layout, pauses
from localq.files.hub import errors as hub_errors
from localq.files.hub import fetch as hub
from localq.files.hub import records as hub_records
from localq.files.hub import remote as hub_remote
from localq.files.hub.client import Listing, RemoteFile
from localq.files.hub.records import Store
from localq.files.safetensors_headers import INDEX_NAME, SINGLE_NAME, Header, read_header, read_index
from localq.files.scratch import scratch_folder
from localq.wording import Say

AHEAD = 2  # files at a time: one is read while the next is fetched
LOOK_EVERY_S = 0.5
WAITS_S = (10.0, *[30.0] * 20)  # retries while the hub does not answer: a failure would stop hours of work
MARK = ".localq-source"  # file in a folder that localq made; locked while in use
Answer = TypeVar("Answer")


def _silent(what: str) -> None:
    """Ignore a report."""


class Shards:
    """The weights of one repository at one commit.

    folder  folder of the small files: configuration, tokenizer, index
    names   names of the files of weights
    say     called with a line of progress while a file is fetched
    """

    def __init__(self, listing: Listing, cache: Path, recorded: Mapping[str, str], mark: IO[bytes]) -> None:
        """`cache`: where to fetch to, a resolved path, removed by `close`; `mark`: its `MARK` file, locked.

        recorded: sha256 by name, from the catalogue. Raises LocalqError (exit 8) if the hub lists another hash.
        """
        self._listing, self._cache, self._recorded, self._mark = listing, cache, recorded, mark
        self._store = Store(cache, cache / ".parts", cache / ".records")
        for file in listing.files.values():
            hub.check_recorded_hash(listing.repo, file, recorded)
        self.say: Say = _silent
        self._owner: dict[str, str] = {}  # tensor -> its file
        self._headers: dict[str, Header] = {}
        self._good: dict[str, Path] = {}
        self._running: dict[str, Future[Path]] = {}
        self._turn, self._over = threading.Lock(), threading.Event()
        self.folder, self.names = self._small_files()

    def _small_files(self) -> tuple[Path, list[str]]:
        files = self._listing.files
        small = [name for name in sorted(files) if layout.SMALL_FILES.fullmatch(name)]
        index = [] if SINGLE_NAME in files else [INDEX_NAME]
        paths = [self._fetch(name, shared=False) for name in (*small, *index)]
        folder = paths[0].parent
        names = sorted(set(read_index(folder).values())) or [SINGLE_NAME]
        if absent := [name for name in names if name not in files]:
            why = f"{INDEX_NAME} lists {absent[0]}, which is not in the repository"
            raise bad_file(self._listing.repo, why, "Use another repository or revision.")
        return folder, names

    @property
    def facts(self) -> list[tuple[str, int, str]]:
        """Name, size and hash of every file of weights, which identify the source."""
        files = [self._listing.files[name] for name in self.names]
        return [(file.name, file.size, file.sha256 or file.git_sha1 or "") for file in files]

    def sha256(self, name: str) -> str:
        """The sha256 of a file of weights, from the hub's list, else from the fetched file. Raises as `path`."""
        if stated := self._listing.files[name].sha256:
            return stated
        found = disk.sha256_of(self.path(name))
        self.keep([])
        return found

    def headers(self) -> dict[str, Header]:
        """The headers of all files, fetched without the data. Raises LocalqError (exit 8) for invalid ones."""
        self._headers = {name: self._header(self._listing.files[name]) for name in self.names}
        self._owner = {tensor: name for name, header in self._headers.items() for tensor in header.tensors}
        return self._headers

    def holding(self, tensors: Iterable[str]) -> list[str]:
        """The files of these tensors, each once, in the order of the tensors. Call `headers` first."""
        return list(dict.fromkeys(self._owner[tensor] for tensor in tensors))

    def _header(self, file: RemoteFile) -> Header:
        self.say(f"{file.name} (header)")
        with scratch_folder("localq-header-") as folder:
            path = folder / file.name
            hub_remote.outline_file(self._listing, file, path, self._patiently)
            return read_header(path)

    def path(self, name: str) -> Path:
        """The file `name`, fetched and hashed if need be.

        Raises LocalqError: exit 6 if the hub cannot be reached, 8 for a wrong hash, 9 for the disk.
        """
        if name not in self._good:
            future = self._running.get(name) or self._start(name)
            while not future.done():
                self.say(f"{name}, {self._listing.files[name].size:,} bytes")
                wait([future], LOOK_EVERY_S)
            del self._running[name]
            self._good[name] = self._check_header(name, future.result())
        return self._good[name]

    def _check_header(self, name: str, path: Path) -> Path:
        """`path`, if its tensors are those of the header that was fetched first, which had no hash."""
        if name in self._headers and read_header(path).tensors != self._headers[name].tensors:
            why = f"the tensors in {name} do not match the header on the hub"
            raise bad_file(
                self._listing.repo, why, "Run the same command again; if it fails again, use another revision."
            )
        return path

    def keep(self, needed: Sequence[str]) -> None:
        """Remove fetched files that are not in `needed`, and fetch the next of `needed`, up to `AHEAD` files."""
        for name in [name for name in self._good if name not in needed]:
            self._remove(self._good.pop(name))
        for name in needed:
            held = {each for each, path in self._good.items() if self._is_ours(path)} | set(self._running)
            if len(held) >= AHEAD:
                return
            if name not in held and name not in self._good:
                self._start(name)

    def clean(self, needed: Sequence[str]) -> None:
        """Remove files and parts of an interrupted run, except the first `AHEAD` of `needed`.

        Files that this run has fetched or is fetching stay.
        """
        for name in self.names:
            if name not in needed[:AHEAD] and name not in self._good and name not in self._running:
                stem = self._store.parts / self._listing.files[name].content_id
                for suffix in (".part", ".state"):
                    stem.with_suffix(suffix).unlink(missing_ok=True)
                if (self.folder / name).exists():
                    self._remove(self.folder / name)

    def close(self, *, done: bool) -> None:
        """Stop fetching. `done`: remove all files."""
        self._over.set()
        if done:
            shutil.rmtree(self._cache, ignore_errors=True)
        self._mark.close()

    def _start(self, name: str) -> Future[Path]:
        """Fetch a file in a thread, one file at a time."""
        future: Future[Path] = Future()

        def run() -> None:
            try:
                with self._turn:
                    future.set_result(self._fetch(name))
            except BaseException as error:
                future.set_exception(error)  # raised by `path`

        self._running[name] = future
        threading.Thread(target=run, name="localq-fetch", daemon=True).start()  # not waited for at exit
        return future

    def _is_ours(self, path: Path) -> bool:
        return path.is_relative_to(self._cache)

    def _remove(self, path: Path) -> None:
        if self._is_ours(path):
            hub_cache.discard(path)

    def _fetch(self, name: str, shared: bool = True) -> Path:
        """The path of the verified file. `shared`: use the copy in the user's cache if there is one."""
        file, repo = self._listing.files[name], self._listing.repo
        there = hub_cache.repo_folder(repo) / "snapshots" / self._listing.commit / name
        if shared and there.is_file():
            with disk.disk_errors(there):
                if not download.is_right(hub_records.users(), repo, file.content_id, there):
                    raise download.foreign(repo, there)
            path = there
        else:
            path = self._downloaded(file)
        hub.check_content(self._store, repo, path, file, self._recorded.get(name))
        return path

    def _downloaded(self, file: RemoteFile) -> Path:
        disk.check_free(self._cache, download.missing_bytes(self._listing, [file], self._store), file.name)
        return self._patiently(lambda: download.get(self._listing, file, store=self._store))

    def _patiently(self, ask: Callable[[], Answer]) -> Answer:
        """Return `ask()`, with retries for some minutes while the hub cannot be reached."""
        for wait_s in (*WAITS_S, None):
            try:
                return ask()
            except LocalqError as error:
                if wait_s is None or error.exit_code != ExitCode.NETWORK:
                    raise
                if pauses.pause(wait_s, f"{error.what}: {error.why}", self._over.wait):
                    raise
        raise AssertionError("the last try returns or raises")


def _folder_of(repo: str) -> str:
    return f"models--{repo.replace('/', '--')}"


def _claim(cache: Path) -> IO[bytes]:
    """Create `cache` and lock its mark.

    Raises LocalqError (exit 2) for a folder that localq did not make, or that another user made.
    """
    try:
        empty = not cache.exists() or (cache.is_dir() and not any(cache.iterdir()))
        if not empty and not (cache / MARK).is_file():
            raise _foreign(cache, "it already exists and was not created by localq")
        cache.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        mark = os.fdopen(own_files.open_own(cache / MARK, flags, own_files.owner_in(cache)), "ab")
    except own_files.ForeignError as error:
        raise _foreign(cache, "it belongs to another user, or its marker file is a link") from error
    except OSError as error:
        raise disk.disk_error(cache, error) from error
    try:
        fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        mark.close()
        why = "another localq process is downloading to this folder"
        raise usage_error(str(cache), why, "Wait until it has finished, or choose a different --out folder.") from error
    return mark


def _foreign(cache: Path, why: str) -> LocalqError:
    why = f"localq needs this folder for temporary downloads, but {why}"
    return usage_error(str(cache), why, "Move the folder, or choose a different --out folder.")


def open_shards(source: Source, cache: Path) -> Shards | None:
    """The weights of `source`; None if it is not a repository of safetensors.

    Raises LocalqError as `hub.fetch` does, and exit 2 if localq did not make the folder `cache`.
    """
    if source.kind == "pypi" or source.files:
        return None
    cache = disk.resolve(cache)
    begun = sorted(cache.glob(f"{_folder_of(source.repo)}/snapshots/*"))
    pinned = hub_cache.COMMIT.fullmatch(source.revision or "") is not None
    listing = hub_client.list_files(source.repo, begun[0].name if begun and not pinned else source.revision)
    if SINGLE_NAME not in listing.files and INDEX_NAME not in listing.files:
        return None
    if listing.gated and not hub_client.has_token():
        raise hub_errors.gated_error(listing.repo)
    layout.check_layout(listing)
    mark = _claim(cache)
    try:
        for other in cache.glob("models--*"):  # of another source with the same output
            if other.name != _folder_of(source.repo):
                shutil.rmtree(other, ignore_errors=True)
        return Shards(listing, cache, source.sha256, mark)
    except BaseException:
        if [each.name for each in cache.iterdir()] == [MARK]:
            shutil.rmtree(cache, ignore_errors=True)
        mark.close()
        raise
