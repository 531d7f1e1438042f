"""A hub on loopback that answers with raw bytes, as no HTTP server of Python does."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator

from tests.support.files import fake_hub

Respond = Callable[[socket.socket, str], None]  # gets the connection, and the path that is asked for


class RawHub:
    """`url` is what HF_ENDPOINT must be; `requests` has the heads of all requests."""

    def __init__(self, respond: Respond) -> None:
        self._respond, self.requests = respond, list[bytes]()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listening.getsockname()[1]}"
        self.url = f"http://{self.place}"
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listening.accept()
                threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = b""
            while b"\r\n\r\n" not in received:
                piece = connection.recv(65536)
                if not piece:
                    return
                received += piece
            self.requests.append(received)
            self._respond(connection, received.split(b" ")[1].decode())


@contextlib.contextmanager
def running(respond: Respond) -> Iterator[RawHub]:
    hub = RawHub(respond)
    try:
        yield hub
    finally:
        hub.close()


def send(connection: socket.socket, head: bytes, body: bytes = b"") -> None:
    """One answer; `head` without the length."""
    length = b"" if b"ength" in head or b"hunked" in head else b"\r\nContent-Length: %d" % len(body)
    connection.sendall(b"HTTP/1.1 " + head + length + b"\r\nConnection: close\r\n\r\n" + body)


def drip(connection: socket.socket, head: bytes, piece: bytes, every_s: float = 0.05) -> None:
    """An answer of which a piece comes now and then, without an end."""
    connection.sendall(head)
    pause = threading.Event()  # not time.sleep, which tests of pauses replace
    while True:
        connection.sendall(piece)
        pause.wait(every_s)


def info(repo: str, files: dict[str, bytes]) -> bytes:
    """What a hub states about a repository."""
    siblings = [
        {"rfilename": name, "size": len(content), "lfs": {"size": len(content), "sha256": fake_hub.sha256(content)}}
        for name, content in files.items()
    ]
    return json.dumps({"id": repo, "sha": fake_hub.COMMIT, "gated": False, "siblings": siblings}).encode()
