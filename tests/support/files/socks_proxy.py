"""A SOCKS5 proxy on the loopback address (RFC 1928, without authentication), and one that answers with other bytes."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator


class _Proxy(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server = self.server
        assert isinstance(server, SocksProxy)
        _, count = self.rfile.read(2)
        self.rfile.read(count)
        if server.other:
            self.wfile.write(server.other)
            return
        self.wfile.write(b"\x05\x00")
        kind = self.rfile.read(4)[3]
        host = socket.inet_ntoa(self.rfile.read(4)) if kind == 1 else self.rfile.read(self.rfile.read(1)[0]).decode()
        port = int.from_bytes(self.rfile.read(2), "big")
        server.asked.append((host, port))
        with socket.create_connection((host, port)) as there:
            self.wfile.write(b"\x05\x00\x00\x01" + bytes(6))
            back = threading.Thread(target=_copy, args=(there, self.connection), daemon=True)
            back.start()
            _copy(self.connection, there)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


class SocksProxy(socketserver.ThreadingTCPServer):
    """asked: (host, port) of each connection. other: the answer to everyone, instead of SOCKS."""

    daemon_threads = True

    def __init__(self, other: bytes = b"") -> None:
        super().__init__(("127.0.0.1", 0), _Proxy)
        self.asked: list[tuple[str, int]] = []
        self.other = other

    @property
    def place(self) -> str:
        """HOST:PORT."""
        return f"127.0.0.1:{self.server_address[1]}"


@contextlib.contextmanager
def running(other: bytes = b"") -> Iterator[SocksProxy]:
    """A proxy while the context lasts."""
    with SocksProxy(other) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()
