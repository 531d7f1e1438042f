"""Requests to the Hugging Face hub: the files of a repository at a commit, and the bytes of a file.

Answers come through `connection`, which limits them. What the hub states about a repository is checked before it is
used: names that are plain file names, sizes, hashes.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from localq.errors import ExitCode, LocalqError
from localq.files.hub import cache as hub_cache
from localq.files.hub import connection
from localq.files.hub.connection import Answer
from localq.files.hub.errors import RangeError, endpoint, no_model_hub, no_repository, with_retries
from localq.files.json_files import parse_object
from localq.sanitize import Address

TIMEOUT_S = 10.0  # for an answer of the hub's API, and for a connection
STALL_S = 30.0  # without a byte: the connection counts as dead
MAX_INFO_BYTES = 16 * 2**20  # what the hub states about a repository: about 300 bytes a file
MAX_FILE_BYTES = 2**63  # a size is one of a file system
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_ID = re.compile(r"[0-9a-f]{40}")
_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: `sha256` of its content for LFS files, else `git_sha1` (git's blob id)."""

    name: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None

    @property
    def content_id(self) -> str:
        """The hash that names its content in the cache."""
        found = self.sha256 or self.git_sha1
        assert found is not None, "_listing sets one of the two"
        return found


@dataclass(frozen=True)
class Listing:
    """The files of a repository at one commit, without names that are not plain file names.

    Only .gguf files may be in a folder: FOLDER/FILE.gguf.
    """

    repo: str
    commit: str
    gated: bool
    files: dict[str, RemoteFile] = field(default_factory=dict)


def is_offline() -> bool:
    """Return whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.strip().casefold() in ("1", "true", "yes", "on") for value in values)


def repo_info(repo: str, revision: str = "main") -> dict[str, Any]:
    """What the hub states about `repo` at `revision`, unchecked. Raises LocalqError as `list_files`."""
    library = connection.library()
    try:
        library.utils.validate_repo_id(repo)
    except ValueError:  # as the library's own error is
        raise no_repository(repo) from None

    def ask() -> dict[str, Any]:
        named = quote(revision, safe="", errors="surrogateescape")  # a command line may have any bytes
        address = Address(f"{endpoint().reveal()}/api/models/{repo}/revision/{named}?blobs=true")
        headers = {"Accept-Encoding": "gzip", "Accept": "application/json"}
        with connection.get(repo, address, headers, connect_s=TIMEOUT_S, stall_s=TIMEOUT_S) as answer:
            return _parse(repo, answer.read(repo, MAX_INFO_BYTES, STALL_S))

    found: dict[str, Any] = with_retries(ask, repo, revision)
    return found


def list_files(repo: str, revision: str) -> Listing:
    """The files of `repo` at the current commit of `revision` (branch, tag or commit). Raises LocalqError."""
    info = repo_info(repo, revision)
    try:
        return _listing(repo, info)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # JSON of another shape
        raise no_model_hub(repo) from error


def _parse(repo: str, body: bytes) -> dict[str, Any]:
    try:
        return parse_object(body.decode(), repo)
    except (LocalqError, ValueError) as error:
        raise no_model_hub(repo) from error


def first_bytes(listing: Listing, file: RemoteFile, count: int) -> bytes:
    """The first `count` bytes of `file`, or all of a shorter file. Raises LocalqError."""
    count = min(count, file.size)
    if count == 0:
        return b""  # an empty file has no valid range

    def get() -> bytes:
        found = bytearray()
        with body(listing, file, stop=count) as response:
            for piece in connection.paced(response.pieces(), STALL_S):  # a server without ranges sends the whole file
                found += piece
                if len(found) > count:
                    break
        return bytes(found[:count])

    found: bytes = with_retries(get, listing.repo, listing.commit, file.name)
    if len(found) < count:
        why = f"the response for {file.name} ended after only {len(found):,} bytes"
        raise LocalqError(listing.repo, why, "Try again later.", ExitCode.NETWORK)
    return found


@contextlib.contextmanager
def body(
    listing: Listing, file: RemoteFile, start: int = 0, stop: int | None = None, etag: str | None = None
) -> Iterator[Answer]:
    """The answer to a request for the bytes [start, stop) of `file`.

    etag: of the content before `start`; a server with other content answers with the whole file. Raises as
    `connection.get`, and RangeError for a part of the file (status 206) that does not begin at `start`.
    """
    where = f"{listing.repo}/resolve/{listing.commit}/{quote(file.name)}"
    headers = {"Accept-Encoding": "identity"}  # ranges, sizes and hashes refer to the uncompressed file
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    if start and etag and not etag.startswith("W/"):  # a weak etag does not guarantee the same bytes
        headers["If-Range"] = etag
    address = Address(f"{endpoint().reveal()}/{where}")
    with connection.get(listing.repo, address, headers, connect_s=TIMEOUT_S, stall_s=STALL_S) as answer:
        if answer.status_code == 206 and ((part := _range(answer)) is None or int(part[1]) != start):
            raise RangeError(file.name)
        yield answer


def stated_size(answer: Answer) -> int | None:
    """The size of the whole file, of which the answer (status 206) has a part."""
    part = _range(answer)
    return None if part is None else int(part[3])


def _range(answer: Answer) -> re.Match[str] | None:
    return _RANGE.fullmatch(answer.headers.get("content-range", ""))


def has_token() -> bool:
    """Return whether the user has an access token. Raises LocalqError (exit 5) if it is malformed."""
    return connection.access_token() is not None


def _is_listed(name: str) -> bool:
    """Return whether a file can be part of a model: a plain name, or a .gguf file one folder down."""
    folder, slash, file = name.rpartition("/")
    if slash and not (hub_cache.is_gguf(file) and hub_cache.PLAIN_NAME.fullmatch(folder)):
        return False
    return hub_cache.PLAIN_NAME.fullmatch(file) is not None


def _listing(repo: str, info: dict[str, Any]) -> Listing:
    if not hub_cache.COMMIT.fullmatch(info["sha"]):
        raise ValueError("the commit is not a git hash")
    files = {}
    for sibling in info.get("siblings") or ():
        name, lfs = sibling["rfilename"], sibling.get("lfs")
        if not _is_listed(name):
            continue
        if lfs:
            size, sha256, git_id = lfs["size"], lfs["sha256"], None
        else:
            size, sha256, git_id = sibling["size"], None, sibling.get("blobId")
        known = _SHA256.fullmatch(sha256) if sha256 is not None else _GIT_ID.fullmatch(git_id or "")
        if type(size) is not int or not 0 <= size < MAX_FILE_BYTES or known is None:
            raise ValueError(f"the size or the hash of {name}")
        files[name] = RemoteFile(name, size, sha256, git_id)
    return Listing(repo, info["sha"], bool(info.get("gated")), files)
