"""The client of an upload: the token and the files go only where they may."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.hub import connection
from localq.files.publish import plan as plans
from localq.files.publish import upload, upload_client
from localq.files.publish.plan import PushRequest
from tests.support.files.fake_hub import FakeHub
from tests.support.files.hub_server import TOKEN, refused

REPO = "someone/tiny-llama-nf4"
HUB = "https://hub.example"


@pytest.fixture
def other():
    with FakeHub() as other:
        yield other


def send(method: str, address: str, **headers: str) -> LocalqError | None:
    """The refusal of a request; None for one that goes out, to a server that there is not."""
    with upload_client.checked_client(REPO):
        session = connection.open_session()
        session._transport_for_url = lambda url: _Nowhere()
        try:
            session.request(method, address, headers=headers)
        except LocalqError as error:
            return error
        except _NowhereError:
            return None
    raise AssertionError("a request without an end")


class _NowhereError(Exception):
    """The request passed all checks."""


class _Nowhere:
    location = ""  # of a redirect

    def handle_request(self, request: Any) -> Any:
        if not self.location:
            raise _NowhereError
        response = importlib.import_module(type(request).__module__.partition(".")[0]).Response
        return response(307, headers={"location": self.location}, request=request)


@pytest.mark.parametrize(
    ("address", "hub", "is_sent"),
    [
        (f"{HUB}/api/complete", HUB, True),
        (f"{HUB}:443/api/complete", HUB, True),
        ("https://other.example/verify", HUB, False),
        (f"{HUB}:8443/verify", HUB, False),
        ("http://hub.example/verify", HUB, False),
        ("http://127.0.0.1:9/verify", HUB, False),
        ("https://hub.example/verify", "http://hub.example", False),
    ],
)
def test_the_token_goes_to_the_hub_alone(monkeypatch, address, hub, is_sent):
    monkeypatch.setenv("HF_ENDPOINT", hub)
    error = send("POST", address, authorization=f"Bearer {TOKEN}")
    assert (error is None) == is_sent
    assert error is None or (error.exit_code, TOKEN in str(error)) == (ExitCode.NETWORK, False)


@pytest.mark.parametrize(
    ("address", "hub", "is_sent"),
    [
        ("https://store.example/x", HUB, True),
        ("http://store.example/x", HUB, False),
        ("http://localhost:9/x", HUB, True),
        ("http://127.0.0.1:9/x", HUB, True),
        ("http://store.example/x", "http://hub.example", True),
    ],
)
def test_files_are_not_sent_unencrypted(monkeypatch, address, hub, is_sent):
    monkeypatch.setenv("HF_ENDPOINT", hub)
    error = send("PUT", f"{address}?X-Amz-Signature=secret")
    assert (error is None) == is_sent
    assert error is None or "http://store.example, which is not encrypted" in error.why
    assert "secret" not in str(error)


def test_a_verification_on_another_host_gets_no_token(made, server, other):
    server.store.verify = f"{other.url}/verify"
    error = refused(upload.push, plans.plan(PushRequest(made, REPO)))
    assert error.exit_code == ExitCode.NETWORK
    assert "access token to another server, 127.0.0.1" in error.why
    assert other.requests == []
    assert server.store.committed == []


def test_the_hubs_own_verification_is_done(made, server):
    server.store.verify = f"{server.url}/{REPO}.git/info/lfs/objects/verify"
    upload.push(plans.plan(PushRequest(made, REPO)))
    assert [each.headers["authorization"] for each in server.seen("POST", "/verify")] == [f"Bearer {TOKEN}"]


def test_a_redirect_is_checked_too(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", HUB)
    monkeypatch.setattr(_Nowhere, "location", "http://store.example/x")
    error = send("PUT", "https://store.example/x")
    assert error is not None
    assert "not encrypted" in error.why


def test_timeouts_hold_for_an_upload_and_the_factory_comes_back(made, server):
    library = connection.library()
    seen = []

    def note(what: str, done: int, total: int) -> None:
        seen.append(connection.open_session().timeout)

    before = library.utils._http._GLOBAL_CLIENT_FACTORY
    upload.push(plans.plan(PushRequest(made, REPO)), note)
    assert {(each.connect, each.read, each.write) for each in seen} == {(10.0, 300.0, 60.0)}
    assert library.utils._http._GLOBAL_CLIENT_FACTORY is before
    assert connection.open_session().timeout != seen[0]
    server.fail("POST /api/repos", 401)
    refused(upload.push, plans.plan(PushRequest(made, "someone/another")))
    assert library.utils._http._GLOBAL_CLIENT_FACTORY is before
