"""Download one file of a repository into a cache, safe against kills and power cuts.

    bytes -> fsync -> state -> ... -> hash right -> fsync -> renamed to blobs/HASH -> fsync of the folder
          -> linked from snapshots/COMMIT -> fsync of the folder -> recorded (`hub_records`)

The hash is taken from the bytes as they come in. A transfer that breaks off goes on with Range and If-Range where it
stopped, in this process or in the next (`download_parts`). What a server sends instead of the rest is never appended.
Any number of processes may ask for the same file: one fetches it. Content that another tool put into the cache is
hashed and used, and never written to.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import disk
from localq.errors import LocalqError, bad_file
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import errors as hub_errors
from localq.files.hub import parts as download_parts
from localq.files.hub import records as hub_records
from localq.files.hub.client import Listing, RemoteFile
from localq.files.hub.parts import Part
from localq.files.hub.records import Store
from localq.wording import Say

TRIES = len(hub_errors.PAUSES_S) + 1  # without a byte more than before
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")

OnBytes = Callable[[int], None]  # bytes that are here since the last call; negative when a file starts again


class _OtherContentError(Exception):
    """The server has something else under this name than the hub's records say."""


class _UnusableError(Exception):
    """An answer that the rest of the file cannot be taken from: it is begun again."""


class _ShortError(Exception):
    """An answer that ended before its file did."""


def _nobody(what: object) -> None:
    """Nobody watches."""


def get(
    listing: Listing, file: RemoteFile, on_bytes: OnBytes = _nobody, store: Store | None = None, tell: Say = _nobody
) -> Path:
    """`file` in the snapshot of `store` (the user's, unless one is given), with the right content.

    tell  gets what is done when it is not a transfer: checking, waiting

    Raises LocalqError: as `hub_errors` says, exit 8 for content that stays wrong, 9 for the disk.
    """
    store = store or hub_records.users()
    pointer, said = store.pointer(listing.repo, listing.commit, file.name), False

    def waiting() -> None:
        nonlocal said
        if not said:
            tell(f"{file.name} (another process is downloading it)")
            said = True

    with disk.disk_errors(store.cache):
        if not _is_here(store, listing, file, tell):
            with download_parts.claim(store.parts, file.content_id, waiting) as stem:
                if not _is_here(store, listing, file, tell):  # nobody was quicker
                    _fetch(store, listing, file, stem, on_bytes)
    return pointer


def missing_bytes(listing: Listing, files: list[RemoteFile], store: Store | None = None) -> int:
    """Bytes of disk that fetching `files` will take: of those that are not here, what no part has yet."""
    store, missing = store or hub_records.users(), 0
    for file in files:
        had = _size(store.parts / f"{file.content_id}.part")  # looked at first: the part becomes the blob meanwhile
        blob = store.blob(listing.repo, file.content_id)
        if not blob.is_file() and not store.pointer(listing.repo, listing.commit, file.name).is_file():
            missing += max(file.size - had, 0)
    return missing


def _size(path: Path) -> int:
    """Bytes of a file, none where there is none: another process may take it away at any time."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _is_here(store: Store, listing: Listing, file: RemoteFile, tell: Say) -> bool:
    """The right content is in the cache and is linked. Wrong content of ours is removed; another tool's is refused."""
    pointer = store.pointer(listing.repo, listing.commit, file.name)
    blob = store.blob(listing.repo, file.content_id)
    found = next((path for path in (pointer, blob) if path.is_file()), None)
    if found is None:
        return False
    if not is_right(store, listing.repo, file.content_id, found, tell):
        discard_or_refuse(store, listing.repo, file.content_id, found)
        return False
    if found == blob:
        hub_cache.link(pointer, blob)
    return True


def is_right(store: Store, repo: str, content_id: str, path: Path, tell: Say = _nobody) -> bool:
    """The content of `path` is what `content_id` names: as recorded, or hashed now."""
    if hub_records.is_known(store, repo, content_id, path):
        return True
    tell(f"checking {path.name}")
    return hub_records.check(store, repo, content_id, path)


def discard_or_refuse(store: Store, repo: str, content_id: str, path: Path) -> None:
    """Remove wrong content that localq put there; LocalqError (exit 8) for another tool's. Raises OSError."""
    if not hub_records.is_ours(store, repo, content_id, path):
        raise foreign(repo, path)
    hub_cache.discard(path)
    hub_records.forget(store, repo, content_id)


def foreign(repo: str, path: Path) -> LocalqError:
    """The error (exit 8) for wrong content of another tool, which stays where it is."""
    why = f"{path} does not have the hash that is recorded for it, and another tool put it there"
    return bad_file(
        repo, why, f"`localq rm {repo}` removes the model (it asks first), `localq pull` downloads it again."
    )


def _fetch(store: Store, listing: Listing, file: RemoteFile, stem: Path, on_bytes: OnBytes) -> None:
    about = {"repo": listing.repo, "name": file.name, "size": file.size}
    blob = store.blob(listing.repo, file.content_id)
    with Part(stem, file.content_id, about) as part:
        on_bytes(part.at)
        try:
            _Transfer(listing, file, part, on_bytes).run()
        except OSError as error:
            raise disk.disk_error(stem.parent, error, file.size - part.at) from error
        hub_cache.place(part.finish(), blob)
    pointer = store.pointer(listing.repo, listing.commit, file.name)
    hub_cache.link(pointer, blob)
    hub_records.remember(store, listing.repo, file.content_id, pointer, ours=True)


@dataclass
class _Transfer:
    """The bytes of one file into its part: tried again while more comes in, begun again once for other content."""

    listing: Listing
    file: RemoteFile
    part: Part
    on_bytes: OnBytes

    def run(self) -> None:
        """Raises LocalqError, and OSError for the disk."""
        failures, others, most = 0, 0, self.part.at
        while not self.part.is_right():
            try:
                if self.part.at == self.part.size:  # all is here, and the hash is another
                    raise _OtherContentError
                self._receive()
            except _OtherContentError as error:
                self._restart()
                others += 1
                if others > 1:
                    raise self._changed() from error
            except LocalqError:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno is not None:  # the disk's; the client's have no number
                    raise
                if isinstance(error, _UnusableError) or hub_errors.status_of(error) == 416:
                    self._restart()
                elif not (isinstance(error, _ShortError) or hub_errors.breaks_off(error)):
                    raise self._translated(error) from error
                failures = failures + 1 if self.part.at <= most else 1
                most = max(most, self.part.at)
                if failures >= TRIES:
                    raise self._translated(error) from error
                time.sleep(hub_errors.pause_after_s(error, hub_errors.PAUSES_S[failures - 1]))

    def _receive(self) -> None:
        part = self.part
        with hub_client.body(self.listing, self.file, part.at, etag=part.etag) as answer:
            if not self._goes_on(answer):
                self._restart()
            if part.at == 0:
                part.etag = answer.headers.get("etag")
            for piece in answer.iter_raw():
                if part.at + len(piece) > part.size:
                    raise _OtherContentError
                part.write(piece)
                self.on_bytes(len(piece))
        if part.at < part.size:
            raise _ShortError(f"the answer for {self.file.name} ended too early")

    def _goes_on(self, answer: Any) -> bool:
        """The answer holds the bytes behind those that are here; False where it holds the file from its beginning."""
        if answer.status_code != 206:
            length = answer.headers.get("content-length", "")
            if length.isascii() and length.isdigit() and int(length) != self.part.size:
                raise _OtherContentError
            return self.part.at == 0
        match = _RANGE.fullmatch(answer.headers.get("content-range", ""))
        if match is None or int(match[1]) != self.part.at:
            raise _UnusableError(f"the answer for {self.file.name} holds other bytes than were asked for")
        if int(match[3]) != self.part.size:
            raise _OtherContentError
        return True

    def _restart(self) -> None:
        self.on_bytes(-self.part.at)
        self.part.restart()

    def _changed(self) -> LocalqError:
        why = f"the content of {self.file.name} does not have the hash that the hub records for it, twice in a row"
        return bad_file(self.listing.repo, why, "Nothing was kept. Try again later, or use another revision.")

    def _translated(self, error: Exception) -> Exception:
        if isinstance(error, _UnusableError | _ShortError):
            return hub_errors.no_hub(self.listing.repo, str(error))
        return hub_errors.translate(error, self.listing.repo, self.listing.commit, self.file.name)
