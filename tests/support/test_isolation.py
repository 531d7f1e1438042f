"""The rules of `conftest.py` hold: no test reaches past this machine."""

from __future__ import annotations

import socket

import pytest


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1", "example.invalid"])
def test_only_loopback_can_be_reached(host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as client, pytest.raises(RuntimeError, match="only loopback"):
        client.connect((host, 9))


def test_loopback_can_be_reached():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        assert client.getpeername() == server.getsockname()
