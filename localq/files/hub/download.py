"""Download one file of a repository into a cache, safe against kills and power cuts.

    bytes -> fsync -> state -> ... -> hash right -> fsync -> renamed to blobs/HASH -> fsync of the folder
          -> linked from snapshots/COMMIT -> fsync of the folder -> recorded (`records`)

The hash is computed from the bytes as they arrive. An interrupted transfer resumes with Range and If-Range, in this
process or a later one (`parts`). An answer with other content is never appended. Of several processes that need the
same file, one fetches it. Content from another tool in the cache is hashed and used, but never changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from localq import disk
from localq.errors import LocalqError, bad_file
from localq.files import checked_files
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import errors as hub_errors
from localq.files.hub import parts as download_parts
from localq.files.hub import records as hub_records
from localq.files.hub.client import Listing, RemoteFile
from localq.files.hub.connection import Answer
from localq.files.hub.parts import Part
from localq.files.hub.records import Store
from localq.wording import Say

TRIES = len(hub_errors.PAUSES_S) + 1  # without progress
_NUMBER = re.compile(r"[0-9]{1,18}")

OnBytes = Callable[[int], None]  # bytes received since the last call; negative when a file restarts


class _OtherContentError(Exception):
    """The server has other content for this name than the hub lists."""


class _ShortError(Exception):
    """The answer ended before the end of the file."""


def _ignore(what: object) -> None:
    """Ignore a report."""


def get(
    listing: Listing, file: RemoteFile, on_bytes: OnBytes = _ignore, store: Store | None = None, say: Say = _ignore
) -> Path:
    """The path of `file` in the snapshot of `store` (default: the user's), downloaded if need be.

    say   gets steps other than the transfer: checking, waiting

    Raises LocalqError: those of `hub_errors`, exit 8 for content that stays wrong, 9 for the disk.
    """
    store = store or hub_records.users()
    pointer, is_announced = store.pointer(listing.repo, listing.commit, file.name), False

    def waiting() -> None:
        nonlocal is_announced
        if not is_announced:
            say(f"{file.name} (another process is downloading it)")
            is_announced = True

    with disk.disk_errors(store.cache):
        if not _is_here(store, listing, file, say):
            with download_parts.claim(store.parts, file.content_id, waiting) as stem:
                if not _is_here(store, listing, file, say):  # not fetched meanwhile by another process
                    _fetch(store, listing, file, stem, on_bytes)
    return pointer


def missing_bytes(listing: Listing, files: list[RemoteFile], store: Store | None = None) -> int:
    """Bytes of disk that fetching `files` takes: of missing files, less what their parts have.

    Raises LocalqError (exit 9) for a repository that cannot be read.
    """
    store, missing = store or hub_records.users(), 0
    for file in files:
        # Read first, because the part may become the blob meanwhile.
        had = download_parts.size_so_far(store.parts, file.content_id)
        blob = store.blob(listing.repo, file.content_id)
        with disk.read_errors(blob, listing.repo):
            is_here = blob.is_file() or store.pointer(listing.repo, listing.commit, file.name).is_file()
        missing += 0 if is_here else max(file.size - had, 0)
    return missing


def _is_here(store: Store, listing: Listing, file: RemoteFile, say: Say) -> bool:
    """Return whether the right content is in the cache, and link it.

    Removes wrong content, or refuses if it is another tool's.
    """
    pointer = store.pointer(listing.repo, listing.commit, file.name)
    blob = store.blob(listing.repo, file.content_id)
    with disk.read_errors(pointer, listing.repo):
        found = next((path for path in (pointer, blob) if path.is_file()), None)
        if found is None:
            return False
        known = is_right(store, listing.repo, file.content_id, found, say)
    if not known:
        discard_or_refuse(store, listing.repo, file.content_id, found)
        return False
    if found == blob:
        hub_cache.link(pointer, blob)
    return True


def is_right(store: Store, repo: str, content_id: str, path: Path, say: Say = _ignore) -> bool:
    """Return whether `path` has the content `content_id`: from the records, else hashed now."""
    if hub_records.is_known(store, repo, content_id, path):
        return True
    say(f"checking {path.name}")
    return hub_records.check(store, repo, content_id, path)


def discard_or_refuse(store: Store, repo: str, content_id: str, path: Path) -> None:
    """Remove wrong content that localq fetched.

    Raises LocalqError (exit 8) for another tool's, and OSError.
    """
    if not hub_records.is_ours(store, repo, content_id, path):
        raise foreign(repo, path)
    hub_cache.discard(path)
    hub_records.forget(store, repo, content_id)


def foreign(repo: str, path: Path) -> LocalqError:
    """The error (exit 8) for wrong content from another tool, which localq does not remove."""
    why = f"{path} has the wrong hash and was downloaded by another tool"
    return bad_file(
        repo, why, f"Run `localq rm {repo}` (which asks for confirmation), then `localq pull` to download it again."
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
        disk.make_folder(blob.parent)
        hub_cache.place(part.finish(blob.parent), blob)
        pointer = store.pointer(listing.repo, listing.commit, file.name)
        hub_cache.link(pointer, blob)
        found = part.stat_at(pointer)
    if found is not None:
        stamp = checked_files.stamp_of(found)
        hub_records.remember(store, listing.repo, file.content_id, pointer, ours=True, stamp=stamp)
    elif not hub_records.check(store, listing.repo, file.content_id, pointer):  # replaced meanwhile by another process
        raise foreign(listing.repo, pointer)


@dataclass
class _Transfer:
    """The transfer of a file to its part: retried while it advances, restarted once for other content."""

    listing: Listing
    file: RemoteFile
    part: Part
    on_bytes: OnBytes

    def run(self) -> None:
        """Transfer until the part is complete. Raises LocalqError, and OSError for the disk."""
        failures, others, most = 0, 0, self.part.at
        while not self.part.is_right():
            try:
                if self.part.at == self.part.size:  # complete, but the hash is wrong
                    raise _OtherContentError
                self._receive()
            except _OtherContentError as error:
                self._restart()
                others += 1
                if others > 1:
                    raise self._changed_error() from error
            except LocalqError:
                raise
            except Exception as error:
                if (
                    isinstance(error, OSError) and error.errno is not None
                ):  # from the disk: errors of the client have no errno
                    raise
                if isinstance(error, hub_errors.RangeError) or hub_errors.status_of(error) == 416:
                    self._restart()
                elif not (isinstance(error, _ShortError) or hub_errors.breaks_off(error)):
                    raise self._translate(error) from error
                failures = failures + 1 if self.part.at <= most else 1
                most = max(most, self.part.at)
                if failures >= TRIES:
                    raise self._translate(error) from error
                hub_errors.pause_after(error, hub_errors.PAUSES_S[failures - 1])

    def _receive(self) -> None:
        part = self.part
        with hub_client.body(self.listing, self.file, part.at, etag=part.etag) as answer:
            if not self._goes_on(answer):
                self._restart()
            if part.at == 0:
                part.etag = download_parts.valid_etag(answer.headers.get("etag"))
            for piece in answer.pieces():
                if part.at + len(piece) > part.size:
                    raise _OtherContentError
                part.write(piece)
                self.on_bytes(len(piece))
        if part.at < part.size:
            raise _ShortError(f"the response for {self.file.name} ended early")

    def _goes_on(self, answer: Answer) -> bool:
        """Return whether the answer continues the part; False if it has the file from the beginning.

        Raises _OtherContentError for an answer with other content.
        """
        if answer.status_code != 206:
            length = answer.headers.get("content-length", "")
            if _NUMBER.fullmatch(length) and int(length) != self.part.size:
                raise _OtherContentError
            return self.part.at == 0
        if hub_client.stated_size(answer) != self.part.size:
            raise _OtherContentError
        return True

    def _restart(self) -> None:
        self.on_bytes(-self.part.at)
        self.part.restart()

    def _changed_error(self) -> LocalqError:
        why = f"the hash of {self.file.name} still differs from the one on the hub after a second download"
        return bad_file(
            self.listing.repo, why, "The downloaded file was deleted. Try again later, or use another revision."
        )

    def _translate(self, error: Exception) -> Exception:
        if isinstance(error, _ShortError):
            return hub_errors.no_hub(self.listing.repo, str(error))
        return hub_errors.translate(error, self.listing.repo, self.listing.commit, self.file.name)
