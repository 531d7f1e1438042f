"""Proxies and certificates of the environment: used, or an error that names the variable."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
from huggingface_hub.utils import close_session

from localq.errors import ExitCode
from localq.files.hub import cache as hub_cache
from localq.files.hub import client as hub_client
from localq.files.hub import fetch as hub
from localq.files.hub import proxies
from tests.support.files import fake_hub, hub_server, socks_proxy
from tests.support.files.hub_server import REPO, refused, source

NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A hub with a model; connections begin anew in each test, because they keep the proxies of their start."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    close_session()
    with hub_server.running(tmp_path, monkeypatch) as server:
        server.add(REPO, fake_hub.model_files())
        yield server
    close_session()


@pytest.mark.parametrize(
    ("name", "scheme"),
    [("HTTP_PROXY", "socks"), ("http_proxy", "socks5"), ("ALL_PROXY", "SOCKS"), ("all_proxy", "socks5h")],
)
def test_a_model_is_fetched_through_a_socks_proxy(server, monkeypatch, name, scheme):
    with socks_proxy.running() as proxy:
        monkeypatch.setenv(name, f"{scheme}://{proxy.place}/")
        assert hub_cache.is_complete(hub.fetch(source()))
        assert {f"http://{host}:{port}" for host, port in proxy.asked} == {server.url}


def test_no_proxy_excludes_the_hub(server, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert hub_cache.is_complete(hub.fetch(source()))
    assert proxies.variable_for(server.url) == ""


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("HTTP_PROXY", "socks4://h:1", "socks4:// proxies are not supported"),
        ("https_proxy", "ftp://h:1", "ftp:// proxies are not supported"),
        ("ALL_PROXY", "http://h:port", "not a valid URL"),
        ("HTTPS_PROXY", "http://[::1", "not a valid URL"),
        ("all_proxy", "://", ":// proxies are not supported"),
        ("ALL_PROXY", "http://h\x01:1", "control characters"),
        ("http_proxy", " http://h:1", "spaces"),
    ],
)
def test_a_proxy_that_cannot_be_used_is_named(server, monkeypatch, name, value, why):
    monkeypatch.setenv(name, value)
    error = refused(hub.fetch, source())
    assert (error.what, error.exit_code) == (name, ExitCode.NETWORK)
    assert why in error.why
    assert "HOST:PORT" in error.next_step


@pytest.mark.parametrize("value", ["http://me:secret@[::1", "ftp://me:secret@h"])
def test_a_proxy_s_password_is_never_shown(server, monkeypatch, value):
    monkeypatch.setenv("ALL_PROXY", value)
    assert "secret" not in str(refused(hub.fetch, source()))


def test_a_missing_package_for_socks_is_named(server, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "socksio" else find(name, *more)
    )
    monkeypatch.setitem(sys.modules, "socksio", None)  # as if it were not installed
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    error = refused(hub.fetch, source())
    assert (error.what, error.exit_code) == ("ALL_PROXY", ExitCode.NETWORK)
    assert "pip install socksio" in error.next_step


@pytest.mark.parametrize("other", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x05\xff", b"\x04", b"\x05\x00"])
def test_a_proxy_that_answers_otherwise_is_a_network_error(server, tmp_path, other):
    """In a process of its own, because the HTTP library leaves such a connection open."""
    with socks_proxy.running(other) as proxy:
        environment = {**os.environ, "ALL_PROXY": f"socks5://{proxy.place}", "LOCALQ_CONFIG": str(tmp_path / "none")}
        command = [sys.executable, "-m", "localq", "pull", REPO]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == ExitCode.NETWORK, run.stderr
    assert f"localq: {REPO}: {server.url} cannot be reached through the proxy in ALL_PROXY" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("address", ["http://127.0.0.1:9", "socks5://127.0.0.1:9"])
def test_a_proxy_that_is_not_there_is_named(server, monkeypatch, address):
    monkeypatch.setenv("all_proxy", address)
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")  # lower case takes precedence
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.NETWORK
    assert f"{server.url} cannot be reached through the proxy in all_proxy" in error.why


@pytest.mark.parametrize("content", [None, "no certificates"])
def test_certificates_that_cannot_be_read_are_named(server, monkeypatch, tmp_path, content):
    path = tmp_path / "certificates.pem"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    error = refused(hub.fetch, source())
    assert (error.what, error.exit_code) == ("SSL_CERT_FILE", ExitCode.NETWORK)


@pytest.mark.parametrize(
    "address", ["http://[::1", "hub.example", "ftp://hub.example", "http://h:port", "://", "http://"]
)
def test_an_address_of_the_hub_that_is_none_is_a_network_error(server, monkeypatch, address):
    monkeypatch.setenv("HF_ENDPOINT", address)
    assert refused(hub.fetch, source()).exit_code == ExitCode.NETWORK


def test_a_token_is_found_whatever_the_proxies(server, monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "socks4://h:1")
    monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
    assert hub_client.has_token()
