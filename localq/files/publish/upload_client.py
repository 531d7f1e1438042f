"""The HTTP client of the library during an upload: with timeouts, and with checks of every address.

The hub's answers name the addresses that files go to, and the library sends the token to some of them. So every request
is checked, redirected ones too: the token goes to the hub alone, and nothing is sent unencrypted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from localq.errors import LocalqError
from localq.files.hub import connection
from localq.files.hub import errors as hub_errors
from localq.sanitize import Address

CONNECT_S, READ_S, WRITE_S = 10.0, 300.0, 60.0  # a store takes minutes to put a large file together
_INTERCEPTED = "Check HF_ENDPOINT and the network; the connection may have been intercepted."


@contextlib.contextmanager
def checked_client(repo: str) -> Iterator[None]:
    """Let the library use a client with timeouts and checks; afterwards the one that it had. repo: in errors.

    Raises LocalqError (exit 6) for a proxy or certificates that the HTTP library cannot use.
    """
    connection.open_session()  # for its errors
    library: Any = connection.library()
    http: Any = library.utils._http
    before = http._GLOBAL_CLIENT_FACTORY  # the library has no function that tells it

    def make() -> Any:
        client = before()
        client.timeout = (CONNECT_S, READ_S, WRITE_S, CONNECT_S)
        client.event_hooks["request"].append(lambda request: _check(repo, request))
        return client

    library.set_client_factory(make)
    try:
        yield
    finally:
        library.set_client_factory(before)


def _check(repo: str, request: Any) -> None:
    """Check where a request goes. Raises LocalqError (exit 6), which names only the host: addresses may be signed."""
    there, hub = connection.origin(Address(str(request.url))), connection.origin(hub_errors.endpoint())
    scheme, host = there[0], there[1][: connection.MAX_HOST]
    if "authorization" in request.headers and there != hub:
        raise _refusal(repo, f"the hub asks to send the access token to another server, {host}")
    if scheme != "https" and not (scheme == "http" and (hub[0] == "http" or connection.is_loopback(host))):
        raise _refusal(repo, f"the hub asks to send files to {scheme}://{host}, which is not encrypted")


def _refusal(repo: str, why: str) -> LocalqError:
    return hub_errors.no_hub(repo, why, _INTERCEPTED)
