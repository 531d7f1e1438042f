"""The Hugging Face hub over huggingface_hub: what a repository holds at a commit, and one file of it at a time.

The only module that talks to the hub. Every failure is a LocalqError that names the cause: gated (exit 5), not there
(4), network (6), disk (9). The client library gives retries within a file, redirects that drop the token, locks and
the cache's layout; messages of its own, which may hold signed addresses, are never shown. Tokens come from where
`hf auth login` puts them and are never read here.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from localq import __version__, hub_cache, places
from localq.disk import disk_error
from localq.errors import ExitCode, LocalqError

TIMEOUT_S = 15.0  # for one answer of the hub's interface
PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # before each further try, where the server names none
LONGEST_PAUSE_S = 60.0
PASSING_STATUS = (408, 429, 500, 502, 503, 504)
DEFAULT_ENDPOINT = "https://huggingface.co"
_SHA256 = re.compile(r"[0-9a-f]{64}")

OnBytes = Callable[[int], None]  # bytes that came in since the last call; negative when a file starts again


@dataclass(frozen=True)
class RemoteFile:
    """A file of a repository: `sha256` of its content for LFS files, `git_sha1` (git's blob id) for the others."""

    name: str
    size: int
    sha256: str | None = None
    git_sha1: str | None = None


@dataclass(frozen=True)
class Listing:
    """The files at the top of a repository at one commit. Names that are not plain file names are left out."""

    repo: str
    commit: str
    gated: bool
    files: dict[str, RemoteFile] = field(default_factory=dict)


def endpoint() -> str:
    """The hub's address: HF_ENDPOINT, else the public hub's."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def is_offline() -> bool:
    """True when HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids the network."""
    values = (os.environ.get(name, "") for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    return any(value.strip().casefold() in ("1", "true", "yes", "on") for value in values)


def list_files(repo: str, revision: str) -> Listing:
    """What `repo` holds at `revision` (branch, tag or commit), at the commit that it stands for now."""
    client = _client()
    api = client.HfApi(endpoint=endpoint(), library_name="localq", library_version=__version__)

    def ask() -> Any:
        return api.model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT_S)

    try:
        info = _with_retries(ask, repo, revision)
        return _listing(repo, info)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # not JSON, or JSON of another shape
        raise _no_hub(repo, f"{endpoint()} does not answer as a model hub does") from error


def download(listing: Listing, file: RemoteFile, on_bytes: OnBytes, cache: Path | None = None) -> Path:
    """Fetch `file` into `cache` (the user's, unless it is given), unless it is there; the path of it in the snapshot.

    The client checks the size; whoever calls this checks the hash.
    """
    client = _client()

    def get() -> Any:
        return client.hf_hub_download(
            listing.repo,
            file.name,
            revision=listing.commit,
            cache_dir=cache or places.hub_cache(),
            endpoint=endpoint(),
            library_name="localq",
            library_version=__version__,
            tqdm_class=_progress_class(on_bytes),
        )

    return Path(_with_retries(get, listing.repo, listing.commit, file.name))


def first_bytes(listing: Listing, file: RemoteFile, count: int) -> bytes:
    """The first `count` bytes of `file`, or all of a shorter one."""
    client = _client()
    utils: Any = client.utils  # it does not say what it exports

    def get() -> Any:
        url = client.hf_hub_url(listing.repo, file.name, revision=listing.commit, endpoint=endpoint())
        headers = utils.build_hf_headers(library_name="localq", library_version=__version__)
        asked = {**headers, "Range": f"bytes=0-{count - 1}"}
        with utils.get_session().stream("GET", url, headers=asked, timeout=TIMEOUT_S) as response:
            utils.hf_raise_for_status(response)
            found = b""
            for piece in response.iter_bytes():  # a server that knows no ranges sends all of it
                found += piece
                if len(found) >= count:
                    break
            return found[:count]

    found: bytes = _with_retries(get, listing.repo, listing.commit, file.name)
    if len(found) < min(count, file.size):
        why = f"the answer for {file.name} ended after {len(found):,} bytes"
        raise LocalqError(listing.repo, why, "Try again later.", ExitCode.NETWORK)
    return found


def has_token() -> bool:
    """True when the client would send an access token."""
    return _client().get_token() is not None


def gated(repo: str, why: str = "the model is gated") -> LocalqError:
    """The error (exit 5) for a repository whose licence must be accepted by somebody who is logged in."""
    step = f"Accept its licence at {endpoint()}/{repo}, then `hf auth login` (or set HF_TOKEN)."
    return LocalqError(repo, why, step, ExitCode.GATED)


def _client() -> Any:
    """huggingface_hub, loaded late because that takes 0.4 s; told to report nothing and to print nothing."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # localq sends none, and neither shall its libraries
    import huggingface_hub
    from huggingface_hub.utils import logging as hub_logging

    hub_logging.set_verbosity(logging.ERROR)  # its warnings repeat what errors say here, with addresses in them
    return huggingface_hub


def _listing(repo: str, info: Any) -> Listing:
    if not hub_cache.COMMIT.fullmatch(info.sha):
        raise ValueError("no commit")
    files = {}
    for sibling in info.siblings or ():
        name, lfs = sibling.rfilename, sibling.lfs
        if not hub_cache.PLAIN_NAME.fullmatch(name):
            continue
        size, sha256 = (lfs.size, lfs.sha256) if lfs else (sibling.size, None)
        if type(size) is not int or size < 0 or not (sha256 is None or _SHA256.fullmatch(sha256)):
            raise ValueError(f"the size or the hash of {name}")
        files[name] = RemoteFile(name, size, sha256, None if lfs else sibling.blob_id)
    return Listing(repo, info.sha, bool(info.gated), files)


def _progress_class(on_bytes: OnBytes) -> type:
    """What the client takes for a progress bar (the interface of tqdm): one that only counts."""

    class Progress:
        def __init__(self, *args: Any, total: int | None = None, initial: int = 0, **options: Any) -> None:
            self.total, self.n = total, initial

        def update(self, count: float | None = 1) -> None:
            on_bytes(int(count or 0))

        def update_transfer(self, count: float | None = 1) -> None:
            """Bytes on the wire; `update` counts the bytes of the file."""

        def close(self) -> None: ...
        def refresh(self) -> None: ...
        def set_postfix_str(self, text: str = "", refresh: bool = True) -> None: ...
        def set_transfer_postfix_str(self, text: str = "", refresh: bool = True) -> None: ...
        def set_description_str(self, text: str = "", refresh: bool = True) -> None: ...

        def __enter__(self) -> Progress:
            return self

        def __exit__(self, *exception: object) -> None:
            self.close()

    return Progress


# ---- failures


def _with_retries(call: Callable[[], Any], repo: str, revision: str, name: str = "") -> Any:
    for pause_s in (*PAUSES_S, None):
        try:
            return call()
        except Exception as error:
            if pause_s is None or not _is_passing(error):
                known = _translated(error, repo, revision, name)
                if known is error:
                    raise
                raise known from error
            time.sleep(min(_retry_after_s(error) or pause_s, LONGEST_PAUSE_S))
    raise AssertionError("the last try returns or raises")


def _status(error: BaseException) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_passing(error: Exception) -> bool:
    """True for an answer that the next try may not get. (Broken connections are retried by the client itself.)"""
    return _status(error) in PASSING_STATUS or type(error).__name__ == "ReadTimeout"


def _retry_after_s(error: Exception) -> float | None:
    value = getattr(error, "response", None) and error.response.headers.get("Retry-After", "")  # type: ignore[attr-defined]
    return float(value) if value and value.isdigit() else None


def _translated(error: Exception, repo: str, revision: str, name: str) -> Exception:
    """The LocalqError for what the client raised; the error itself where it is a bug."""
    from huggingface_hub import errors

    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # why the file could not be had; the client then looked for it in the cache
    status = _status(error)
    if isinstance(error, errors.GatedRepoError):
        return gated(repo)
    if isinstance(error, errors.RevisionNotFoundError):
        return _not_there(repo, f"there is no revision {revision!r} of it", "Check the revision.")
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        why = "there is no such repository on the hub, or it is private"
        return _not_there(repo, why, "Check the name; for a private one, `hf auth login`.")
    if status == 401:
        return gated(repo, "the hub does not accept the access token")
    if status == 403:
        return gated(repo, "the access token may not read it, or its licence was not accepted")
    if status == 404:
        return _not_there(repo, f"it has no {name}" if name else "it is not there", "Check the name and the revision.")
    if status is not None:
        return _no_hub(repo, f"the hub answers with status {status}")
    return _of_transport(error, repo)


def _of_transport(error: Exception, repo: str) -> Exception:
    library = type(error).__module__.partition(".")[0]
    if library in ("httpx", "httpx2", "httpcore", "httpcore2"):  # which of them depends on the client's version
        return _no_hub(repo, f"{endpoint()} cannot be reached ({type(error).__name__})")
    if isinstance(error, RuntimeError) or library == "hf_xet":
        why = f"the transfer through Xet failed ({type(error).__name__})"
        return _no_hub(repo, why, "Try again; HF_HUB_DISABLE_XET=1 uses plain HTTP.")
    if isinstance(error, OSError):
        local = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
        if error.errno in local:
            return disk_error(places.hub_cache(), error)
        return _no_hub(repo, f"the transfer broke off ({type(error).__name__})")
    return error


def _no_hub(repo: str, why: str, step: str = "Check the connection and run the same command again.") -> LocalqError:
    return LocalqError(repo, why, step, ExitCode.NETWORK)


def _not_there(repo: str, why: str, step: str) -> LocalqError:
    return LocalqError(repo, why, step, ExitCode.UNKNOWN_MODEL)
