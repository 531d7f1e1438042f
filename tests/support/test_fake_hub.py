"""The fake hub counts what it sends, also to clients that are gone."""

from __future__ import annotations

import http.client
import threading
import time
import urllib.parse

import pytest

from tests.support.files import fake_hub

REPO, NAME = "maker/tiny", "model.safetensors"


@pytest.fixture
def server():
    with fake_hub.FakeHub() as server:
        server.add(REPO, {NAME: bytes(2**20)})
        yield server


def ask(server: fake_hub.FakeHub) -> http.client.HTTPConnection:
    """A client that has asked for the file and has read nothing."""
    client = http.client.HTTPConnection(urllib.parse.urlsplit(server.url).netloc, timeout=30)
    client.request("GET", f"/{REPO}/resolve/main/{NAME}")
    return client


def test_settled_it_has_counted_what_it_sends_late(server, monkeypatch):
    """As beside other work: what a client asked for is sent after the client was looked at, perhaps after its end."""
    answer, go = fake_hub._Handler._answer, threading.Event()

    def late(self: fake_hub._Handler) -> None:
        go.wait(30)
        answer(self)

    monkeypatch.setattr(fake_hub._Handler, "_answer", late)
    client = ask(server)
    assert server.sent_of(NAME) == 0
    reader = threading.Thread(target=lambda: (client.getresponse().read(), client.close()))
    threading.Timer(0.05, go.set).start()
    reader.start()
    server.settle()
    assert server.sent_of(NAME) == 2**20
    reader.join()


def test_settling_does_not_end_before_a_client_has(server):
    client = ask(server)
    settled = threading.Thread(target=server.settle)
    settled.start()
    time.sleep(0.1)
    assert settled.is_alive()
    client.close()
    settled.join(30)
    assert not settled.is_alive()


def test_settling_without_clients_ends_at_once(server):
    server.settle()
    server.settle()
