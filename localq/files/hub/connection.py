"""The connection to the hub: access token, requests, redirects, and limits of size and time.

The client library provides the access token (saved by `hf auth login`, never read here) and the HTTP session, with the
user's proxies and certificates. The token goes only to the configured hub, and only into the request itself: no header
that code holds has it. Redirects to unencrypted addresses are refused. An answer is limited in bytes, also after
decompression, in the time until its headers, and (for what is not shown while it arrives) in its rate; the HTTP library
limits the bytes of headers. Whatever that library raises becomes one of the errors of `errors`.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from localq import __version__
from localq.errors import ExitCode, LocalqError
from localq.files.hub import proxies, token_files
from localq.files.hub.errors import (
    RefusedError,
    SlowError,
    UnreadableError,
    endpoint,
    is_of_transport,
    no_hub,
    no_model_hub,
)
from localq.sanitize import Address, Secret

HEADERS_S = 40.0  # from a request to the headers of its answer: name look-up, connection, proxy, encryption
LEAST_BYTES_PER_S = 1000  # on average, for answers that nobody sees arriving
MAX_REDIRECTS = 5
MAX_ADDRESS = 8192  # characters of an address that a redirect leads to; signed ones take about 1500
MAX_HOST = 80  # characters of a host name in an error
_REDIRECTS = (301, 302, 303, 307, 308)
_INFLATE = {"gzip": 31, "x-gzip": 31, "deflate": 47}  # zlib's window bits


class Answer:
    """The answer to a request, with the status and the headers; `pieces` reads the body."""

    def __init__(self, response: Any) -> None:
        self._response = response
        self.status_code: int = response.status_code
        self.headers: Any = response.headers

    def pieces(self) -> Iterator[bytes]:
        """The body as it arrives, still compressed if it is. Raises errors of transport, and UnreadableError."""
        pieces = self._response.iter_raw()
        while True:
            with _library_errors():
                try:
                    piece: bytes = next(pieces)
                except StopIteration:
                    return
            yield piece

    def read(self, what: str, max_bytes: int, stall_s: float) -> bytes:
        """The whole body, decompressed.

        Raises as `pieces`, SlowError, and LocalqError (exit 6) for more than `max_bytes`, also before decompression.
        """
        raw = paced(self.pieces(), stall_s)
        found = bytearray()
        for piece in self._decompressed(what, raw, max_bytes):
            found += piece
            if len(found) > max_bytes:
                raise _too_large(what, max_bytes)
        return bytes(found)

    def _decompressed(self, what: str, raw: Iterable[bytes], max_bytes: int) -> Iterator[bytes]:
        kind = self.headers.get("content-encoding", "identity").strip().casefold() or "identity"
        if kind == "identity":
            yield from raw
            return
        if kind not in _INFLATE:
            raise UnreadableError("unexpected content encoding")
        inflate, received = zlib.decompressobj(_INFLATE[kind]), 0
        for piece in raw:
            received += len(piece)
            if received > max_bytes:
                raise _too_large(what, max_bytes)
            try:
                yield inflate.decompress(piece, max_bytes + 1)
            except zlib.error as error:
                raise UnreadableError("the data does not match the Content-Encoding header") from error
            if inflate.unconsumed_tail:
                raise _too_large(what, max_bytes)
        if not inflate.eof:
            raise UnreadableError("unexpected end of data")


def paced(pieces: Iterable[bytes], stall_s: float) -> Iterator[bytes]:
    """`pieces`, of an answer that nobody sees arriving.

    Raises SlowError for less than `LEAST_BYTES_PER_S` on average after `stall_s`.
    """
    begun, received = time.monotonic(), 0
    for piece in pieces:
        received += len(piece)
        if time.monotonic() - begun > stall_s + received / LEAST_BYTES_PER_S:
            raise SlowError("is responding too slowly")
        yield piece


def _too_large(what: str, max_bytes: int) -> LocalqError:
    return no_model_hub(what, f"the response is too large (limit: {max_bytes // 2**20} MiB)")


@contextlib.contextmanager
def get(what: str, address: Address, headers: dict[str, str], *, connect_s: float, stall_s: float) -> Iterator[Answer]:
    """The answer to a GET request, redirects followed. `what` is in errors.

    Raises RefusedError for a status of 400 and more, the HTTP library's errors for timeouts and broken connections,
    SlowError, UnreadableError, and LocalqError (exit 6) for refused redirects.
    """
    utils: Any = library().utils  # it does not declare its exports
    plain = utils.build_hf_headers(token=False, library_name="localq", library_version=__version__)
    timeouts = (connect_s, stall_s, connect_s, connect_s)  # connect, read, write, wait for a connection
    for _ in range(MAX_REDIRECTS + 1):
        response = _send(address, {**plain, **headers}, timeouts)
        try:
            if response.status_code >= 400:
                raise RefusedError(response)
            if response.status_code not in _REDIRECTS:
                yield Answer(response)
                return
            location = response.headers.get("location", "")
        finally:
            with contextlib.suppress(Exception):  # of closing a connection that is broken
                response.close()
        address = next_address(what, address, location)
    raise no_hub(what, f"too many redirects from the hub (limit: {MAX_REDIRECTS})", "Try again later.")


def _send(address: Address, headers: dict[str, str], timeouts: tuple[float, ...]) -> Any:
    """The library's answer, with the headers. The thread is abandoned when that takes too long, or on Ctrl-C."""
    session = open_session()
    token = access_token() if origin(address) == origin(endpoint()) else None
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    abandoned = threading.Event()

    def work() -> None:
        try:
            with _library_errors():
                request = session.build_request("GET", address.reveal(), headers=headers, timeout=timeouts)
                if token is not None:
                    request.headers["authorization"] = f"Bearer {token.reveal()}"
                response = session.send(request, stream=True, follow_redirects=False)
        except BaseException as error:  # raised again by the caller
            answers.put(error)
            return
        answers.put(response)
        if abandoned.is_set():
            response.close()

    threading.Thread(target=work, name="localq-request", daemon=True).start()
    try:
        found = answers.get(timeout=HEADERS_S)
    except queue.Empty:
        abandoned.set()  # the session stays open: other threads may use it
        raise SlowError() from None
    except BaseException:
        abandoned.set()
        raise
    if isinstance(found, BaseException):
        raise found
    return found


@contextlib.contextmanager
def _library_errors() -> Iterator[None]:
    """Turn what the HTTP library raises besides its own errors into UnreadableError."""
    try:
        yield
    except (LocalqError, OSError, MemoryError):
        raise
    except Exception as error:
        if is_of_transport(error):
            raise
        raise UnreadableError(type(error).__name__) from error


def next_address(what: str, address: Address, location: str) -> Address:
    """The address that a redirect from `address` leads to. Raises LocalqError (exit 6) for one that is not followed."""
    try:
        following = Address(urljoin(address.reveal(), location) if location else "")
        urlsplit(following.reveal()).port  # noqa: B018 - raises for an address that is none
    except ValueError:
        raise _lost(what) from None
    if len(following.reveal()) > MAX_ADDRESS or not following.reveal().isprintable():
        raise _lost(what)
    _refuse_unencrypted(what, following)
    return following


def _lost(what: str) -> LocalqError:
    step = "Check HF_ENDPOINT and the network; the connection may have been intercepted."
    return no_hub(what, "the hub redirected to an invalid address", step)


def _refuse_unencrypted(what: str, address: Address) -> None:
    """Raises LocalqError (exit 6) unless `address` is https, local, or on the http host of HF_ENDPOINT.

    The error names only the host, because addresses may be signed.
    """
    scheme, host, _ = origin(address)
    chosen = origin(endpoint())
    plain = scheme == "http" and (is_loopback(host) or (chosen[0] == "http" and chosen[1] == host))
    if not host or not (scheme == "https" or plain):
        why = f"the hub redirects to {scheme[:MAX_HOST] or 'no'}://{host[:MAX_HOST]}, which is not encrypted"
        raise no_hub(what, why, "Check HF_ENDPOINT and the network; the connection may have been intercepted.")


def origin(address: Address) -> tuple[str, str, int | None]:
    """Scheme, host and port of `address`; empty for one that is not valid."""
    try:
        parts: SplitResult = urlsplit(address.reveal())
        port = parts.port or {"https": 443, "http": 80}.get(parts.scheme)
        return parts.scheme, (parts.hostname or "").casefold(), port
    except ValueError:  # not a valid URL
        return "", "", None


def is_loopback(host: str) -> bool:
    """Return whether `host` is this machine."""
    import ipaddress  # start-up cost: only redirects and uploads need it

    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def access_token() -> Secret | None:
    """The access token of the user; None without one.

    Raises LocalqError (exit 5) for one that is no token, or whose file cannot be read.
    """
    step = token_files.STEP
    found = token_files.find(library())
    if found is None:
        return None
    token = Secret(found)
    if not token.reveal().isascii() or not token.reveal().isprintable() or " " in token.reveal():
        raise LocalqError(
            "access token", "not a valid access token (must be ASCII without spaces)", step, ExitCode.GATED
        )
    return token


def open_session() -> Any:
    """The library's HTTP session.

    Raises LocalqError (exit 6) for a proxy or certificates that the HTTP library cannot use.
    """
    utils: Any = library().utils  # as in `get`
    proxies.use_known_schemes()
    proxies.check_files()
    try:
        return utils.get_session()
    except Exception as error:  # of many kinds: ImportError, ValueError, OSError, and of the HTTP library
        raise proxies.setup_error(error) from error


def library() -> Any:
    """huggingface_hub, without telemetry or warnings. Loaded late: it takes 0.4 s.

    Raises LocalqError (exit 6) where it does not accept its environment variables.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # localq sends none, nor may its libraries
    import logging

    try:
        import huggingface_hub
        from huggingface_hub.utils import logging as hub_logging

        utils: Any = huggingface_hub.utils  # it does not declare its exports
        utils.build_hf_headers(token=False)  # its parts are imported at their use: now, for the error
    except ValueError as error:  # a number or an address that is none
        if origin(endpoint()) == ("", "", None):
            step = "Set it to a URL such as https://HOST, or unset it."
            raise LocalqError("HF_ENDPOINT", "not a valid URL", step, ExitCode.NETWORK) from error
        why = "huggingface_hub rejected the value of an environment variable"
        raise LocalqError("environment", why, "Check the variables that start with HF_.", ExitCode.NETWORK) from error
    hub_logging.set_verbosity(logging.CRITICAL)  # what it logs quotes addresses, and files with tokens
    return huggingface_hub
