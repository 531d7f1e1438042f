"""Requests to the Hugging Face hub: the files of a repository at a commit, and the bytes of a file.

The only module that talks to the hub. The client library provides metadata, the access token (saved by `hf auth login`,
never read here) and the connection, with the user's proxies and certificates. This module follows redirects of files:
the token goes only to the configured hub, and redirects to unencrypted addresses are refused.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from localq import __version__
from localq.errors import ExitCode, LocalqError
from localq.files.hub import cache as hub_cache
from localq.files.hub import proxies
from localq.files.hub.errors import RefusedError, endpoint, no_hub, with_retries

TIMEOUT_S = 15.0  # for an answer of the hub's API, and for a connection
STALL_S = 30.0  # without a byte: the connection counts as dead
MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_ID = re.compile(r"[0-9a-f]{40}")


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
    """The top-level files of a repository at one commit, without names that are not plain file names."""

    repo: str
    commit: str
    gated: bool
    files: dict[str, RemoteFile] = field(default_factory=dict)


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.strip().casefold() in ("1", "true", "yes", "on") for value in values)


def list_files(repo: str, revision: str) -> Listing:
    """The files of `repo` at the current commit of `revision` (branch, tag or commit). Raises LocalqError."""
    client = _client()
    api = client.HfApi(endpoint=endpoint(), library_name="localq", library_version=__version__)

    def ask() -> Any:
        return api.model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)

    try:
        info = with_retries(ask, repo, revision)
        return _listing(repo, info)
    except (
        AttributeError,
        KeyError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:  # not JSON, or JSON of another shape
        raise no_hub(repo, f"{endpoint()} does not respond like a model hub", "Check HF_ENDPOINT.") from error


def first_bytes(listing: Listing, file: RemoteFile, count: int) -> bytes:
    """The first `count` bytes of `file`, or all of a shorter file. Raises LocalqError."""
    count = min(count, file.size)
    if count == 0:
        return b""  # an empty file has no valid range

    def get() -> bytes:
        found = bytearray()
        with body(listing, file, stop=count) as response:
            for piece in response.iter_raw():  # a server without ranges sends the whole file
                found += piece
                if len(found) > count:
                    break
        return bytes(found[:count])

    found: bytes = with_retries(get, listing.repo, listing.commit, file.name)
    if len(found) < count:
        why = f"the response for {file.name} ended after {len(found):,} bytes"
        raise LocalqError(listing.repo, why, "Try again later.", ExitCode.NETWORK)
    return found


@contextlib.contextmanager
def body(
    listing: Listing, file: RemoteFile, start: int = 0, stop: int | None = None, etag: str | None = None
) -> Iterator[Any]:
    """The answer (of the client's HTTP library) to a request for the bytes [start, stop) of `file`.

    etag: of the content before `start`; a server with other content answers with the whole file. Raises RefusedError,
    the HTTP library's errors for timeouts and broken connections, and LocalqError (exit 6) for refused redirects.
    """
    client = _client()
    utils: Any = client.utils  # it does not declare its exports
    address = client.hf_hub_url(listing.repo, file.name, revision=listing.commit, endpoint=endpoint())
    headers = utils.build_hf_headers(library_name="localq", library_version=__version__)
    headers["Accept-Encoding"] = "identity"  # ranges, sizes and hashes refer to the uncompressed file
    if start or stop is not None:
        headers["Range"] = f"bytes={start}-{'' if stop is None else stop - 1}"
    if start and etag and not etag.startswith("W/"):  # a weak etag does not guarantee the same bytes
        headers["If-Range"] = etag
    timeouts = (TIMEOUT_S, STALL_S, TIMEOUT_S, TIMEOUT_S)  # connect, read, write, wait for a connection
    for _ in range(MAX_REDIRECTS + 1):
        asked = headers if _origin(address) == _origin(endpoint()) else _without_token(headers)
        with utils.get_session().stream(
            "GET", address, headers=asked, follow_redirects=False, timeout=timeouts
        ) as response:
            if response.status_code not in _REDIRECTS:
                if response.status_code >= 400:
                    raise RefusedError(response)
                yield response
                return
            address = _next_address(listing.repo, address, response.headers.get("location", ""))
    raise no_hub(
        listing.repo,
        f"the hub redirected the request for {file.name} more than {MAX_REDIRECTS} times",
        "Try again later.",
    )


def _next_address(repo: str, address: str, location: str) -> str:
    """The address that a redirect from `address` leads to.

    Raises LocalqError (exit 6) for an unencrypted one.
    """
    following = urljoin(address, location) if location else ""
    _refuse_unencrypted(repo, following)
    return following


def _refuse_unencrypted(what: str, address: str) -> None:
    """Raises LocalqError (exit 6) unless `address` is https, local, or on the http host of HF_ENDPOINT.

    The error names only the host, because addresses may be signed.
    """
    scheme, host, _ = _origin(address)
    chosen = _origin(endpoint())
    plain = scheme == "http" and (_is_loopback(host) or (chosen[0] == "http" and chosen[1] == host))
    if not host or not (scheme == "https" or plain):
        why = f"the hub redirects to {scheme or 'no'}://{host}, which is not encrypted"
        raise no_hub(what, why, "Check HF_ENDPOINT and the network: the connection may be intercepted.")


def _before_request(request: Any) -> None:
    """A hook of the HTTP library, for each request with which the client follows a redirect of metadata."""
    if request.url.scheme == "http":  # the library refuses schemes other than http and https
        _refuse_unencrypted(endpoint(), str(request.url))


def _origin(address: str) -> tuple[str, str, int | None]:
    try:
        parts: SplitResult = urlsplit(address)
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
        return parts.scheme, (parts.hostname or "").casefold(), port
    except ValueError:  # not a valid address
        return "", "", None


def _is_loopback(host: str) -> bool:
    import ipaddress  # start-up cost: only redirects need it

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_token(headers: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.casefold() not in ("authorization", "cookie")}


def has_token() -> bool:
    """Whether the client has an access token."""
    return _library().get_token() is not None


def _client() -> Any:
    """huggingface_hub, with a connection that checks redirects.

    Raises LocalqError (exit 6) for a proxy or certificates that the HTTP library cannot use.
    """
    library = _library()
    proxies.use_known_schemes()
    utils: Any = library.utils  # as in `body`
    try:
        hooks = utils.get_session().event_hooks["request"]
    except Exception as error:  # of many kinds: ImportError, ValueError, OSError, and of the HTTP library
        raise proxies.setup_error(error) from error
    if _before_request not in hooks:
        hooks.append(_before_request)
    return library


def _library() -> Any:
    """huggingface_hub, without telemetry or warnings. Loaded late: it takes 0.4 s."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # localq sends none, nor may its libraries
    import huggingface_hub
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity(logging.ERROR)  # its warnings repeat errors, with addresses
    return huggingface_hub


def _listing(repo: str, info: Any) -> Listing:
    if not hub_cache.COMMIT.fullmatch(info.sha):
        raise ValueError("the commit is not a git hash")
    files = {}
    for sibling in info.siblings or ():
        name, lfs = sibling.rfilename, sibling.lfs
        if not hub_cache.PLAIN_NAME.fullmatch(name):
            continue
        size, sha256, git_id = (lfs.size, lfs.sha256, None) if lfs else (sibling.size, None, sibling.blob_id)
        known = _SHA256.fullmatch(sha256) if sha256 is not None else _GIT_ID.fullmatch(git_id or "")
        if type(size) is not int or size < 0 or known is None:
            raise ValueError(f"the size or the hash of {name}")
        files[name] = RemoteFile(name, size, sha256, git_id)
    return Listing(repo, info.sha, bool(info.gated), files)
