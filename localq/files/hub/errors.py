"""Failures of the hub as LocalqErrors that name the cause.

Gated (exit 5), unknown (4), network (6), disk (9). Messages of the client library are never shown, because they may
contain signed addresses. Also: which failures are temporary, and the pause before a retry.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from typing import Any

from localq import places
from localq.disk import disk_error
from localq.errors import ExitCode, LocalqError
from localq.files.hub import pauses, proxies
from localq.sanitize import Address

PAUSES_S = (1.0, 2.0, 4.0, 8.0)  # before each retry, unless the server states a time
LONGEST_PAUSE_S = 300.0
SERVER_ERRORS = 500  # HTTP statuses from here on
PASSING_STATUS = (408, 429, 500, 502, 503, 504)
DEFAULT_ENDPOINT = "https://huggingface.co"
# The client's version decides which one; socksio is theirs for SOCKS proxies.
UNREACHED = ("ConnectError", "ProxyError")  # of the HTTP library: there was no connection
_HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "httpcore2", "socksio")


class RefusedError(Exception):
    """A request was refused. Only status and headers are used; the body is untrusted."""

    def __init__(self, response: Any) -> None:
        super().__init__(f"status {response.status_code}")
        self.response = response


class SlowError(Exception):
    """The hub is slower than any connection that can be used: with its answer, or with the bytes of one."""

    def __init__(self, what: str = "is not responding") -> None:
        super().__init__(what)


class RangeError(Exception):
    """The hub sent other bytes of a file than the one requested."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the server sent the wrong byte range of {name}")


class UnreadableError(Exception):
    """The HTTP library failed at an answer, or at an address, in a way that its own errors do not cover."""


def endpoint() -> Address:
    """The address of the hub: HF_ENDPOINT, else the public hub. Its text has no password."""
    return Address((os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/"))


def with_retries(call: Callable[[], Any], repo: str, revision: str, name: str = "") -> Any:
    """Return `call()`, with retries after temporary failures. Raises LocalqError."""
    for pause_s in (*PAUSES_S, None):
        try:
            return call()
        except Exception as error:
            if pause_s is None or not _is_passing(error):
                known = translate(error, repo, revision, name)
                if known is error:
                    raise
                raise known from error
            pause_after(error, pause_s)
    raise AssertionError("the last try returns or raises")


def breaks_off(error: Exception) -> bool:
    """Return whether a transfer can resume after `error`: a temporary refusal, a broken or slow connection."""
    return _is_passing(error) or is_of_transport(error) or isinstance(error, SlowError)


def is_of_transport(error: Exception) -> bool:
    """Return whether `error` comes from the HTTP library: a broken connection, a wrong protocol."""
    return type(error).__module__.partition(".")[0] in _HTTP_LIBRARIES


def pause_after(error: Exception, pause_s: float) -> None:
    """Wait after `error`, as the server asks, else `pause_s`. Shown, and ended by a stop (`pauses`)."""
    status = status_of(error)
    why = f"{endpoint()} returned HTTP status {status}" if status else f"{endpoint()} {_trouble(error)}"
    pauses.pause(pause_after_s(error, pause_s), why)


def _trouble(error: Exception) -> str:
    if isinstance(error, SlowError):
        return str(error)
    if isinstance(error, UnreadableError):
        return f"sent a response that cannot be read ({error})"
    if "Timeout" in type(error).__name__:
        return str(SlowError())
    name = type(error).__name__.lstrip("_")
    return f"cannot be reached ({name})" if name in UNREACHED else f"closed the connection ({name})"


def pause_after_s(error: Exception, pause_s: float) -> float:
    """Seconds to wait after `error`: the server's Retry-After (seconds or a date), else `pause_s`."""
    response = getattr(error, "response", None)
    asked = response.headers.get("Retry-After", "").strip() if response is not None else ""
    if asked.isascii() and asked.isdigit():
        pause_s = float(asked[:9])
    elif asked:
        import email.utils  # start-up cost: few servers send a date

        with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):  # not a date either
            pause_s = max(0.0, email.utils.parsedate_to_datetime(asked).timestamp() - time.time())
    return min(pause_s, LONGEST_PAUSE_S)


def gated_error(repo: str, why: str = "the model is gated") -> LocalqError:
    """The error (exit 5) for a repository that needs a token and an accepted licence."""
    step = f"Accept its licence at {endpoint()}/{repo}, then run `hf auth login` (or use --token or HF_TOKEN)."
    return LocalqError(repo, why, step, ExitCode.GATED)


def no_hub(repo: str, why: str, step: str = "Check the connection and run the same command again.") -> LocalqError:
    """The error (exit 6) for a hub that cannot be reached or gives a wrong answer."""
    return LocalqError(repo, why, step, ExitCode.NETWORK)


def no_model_hub(what: str, why: str = "") -> LocalqError:
    """The error (exit 6) for a response that no hub gives. why: what is wrong with it, "" if it is no hub's at all."""
    said = f"{endpoint()} does not appear to be a model hub"
    return no_hub(what, f"{said}: {why}" if why else said, "Check HF_ENDPOINT.")


def status_of(error: BaseException) -> int | None:
    """The HTTP status of a refusal; None for another failure."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def _is_passing(error: Exception) -> bool:
    """Return whether the failure is temporary."""
    return status_of(error) in PASSING_STATUS or type(error).__name__ == "ReadTimeout"


def translate(error: Exception, repo: str, revision: str, name: str) -> Exception:
    """The LocalqError for an error of a request; `error` itself if it is a bug."""
    if isinstance(error, RefusedError):
        return _of_refusal(error.response, repo, revision, name)
    if isinstance(error, RangeError):
        return no_hub(repo, str(error))
    if (status := status_of(error)) is not None:
        return _of_status(repo, status)
    return _of_transport(error, repo)


def _of_refusal(response: Any, repo: str, revision: str, name: str) -> LocalqError:
    """The error for a status of 400 and more, which the hub explains in a header."""
    status, code = response.status_code, response.headers.get("X-Error-Code", "")
    if code == "GatedRepo":
        return gated_error(repo)
    if code == "RevisionNotFound":
        return _not_there(repo, f"revision {revision!r} does not exist", "Check the revision.")
    if code == "RepoNotFound":
        return no_repository(repo)
    if status == 401:
        if not name and "authorization" not in response.request.headers:
            return no_repository(repo)
        return gated_error(repo, "the hub rejected the access token")
    if status == 403:
        return gated_error(repo, "the access token does not grant access, or the licence has not been accepted")
    if status == 404:
        return _not_there(
            repo,
            f"{name} does not exist in this repository" if name else "not found",
            "Check the name and the revision.",
        )
    return _of_status(repo, status)


def _of_status(repo: str, status: int) -> LocalqError:
    why = f"the hub returned HTTP status {status}"
    return no_hub(repo, why, "Try again later.") if status >= SERVER_ERRORS else no_hub(repo, why)


def no_repository(repo: str) -> LocalqError:
    """The error (exit 4) for a repository that the hub does not have, or does not show."""
    why = "the repository does not exist or is private"
    return _not_there(repo, why, "Check the name; if the repository is private, run `hf auth login`.")


def _of_transport(error: Exception, repo: str) -> Exception:
    if isinstance(error, SlowError):
        return no_hub(repo, f"{endpoint()} {_trouble(error)}")
    if isinstance(error, UnreadableError):
        why = f"the response from {endpoint()} cannot be read ({error})"
        return no_hub(repo, why, "Check HF_ENDPOINT and the network.")
    if is_of_transport(error):
        proxy = proxies.variable_for(endpoint().reveal())
        through = f" through the proxy in {proxy}" if proxy else ""
        return no_hub(repo, f"{endpoint()} cannot be reached{through} ({type(error).__name__})")
    if isinstance(error, OSError):
        local = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO)
        if error.errno in local:
            return disk_error(places.hub_cache(), error)
        return no_hub(repo, f"the connection was lost ({type(error).__name__})")
    return error


def _not_there(repo: str, why: str, step: str) -> LocalqError:
    return LocalqError(repo, why, step, ExitCode.UNKNOWN_MODEL)
