"""Files of access tokens that are no such files, and what the hub's library says about them."""

from __future__ import annotations

import logging
import os

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import _auth

from localq.errors import ExitCode
from localq.files.hub import connection, fetch, token_files
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO, TOKEN, refused, source

FILES = ("HF_TOKEN_PATH", "HF_STORED_TOKENS_PATH")
ODD = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "folder": os.mkdir,
    "huge": lambda path: path.touch() or os.truncate(path, 2**40),
    "one byte too large": lambda path: path.write_bytes(b"a" * (token_files.MOST_BYTES + 1)),
}
DAMAGED = {
    "no section": f"{TOKEN}\n",
    "a line that is none": f"[me]\nhf_token = x\n{TOKEN}\n",
    "a section twice": f"[{TOKEN}]\n[{TOKEN}]\n",
    "a name twice": f"[me]\n{TOKEN} = x\n{TOKEN} = y\n",
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as running:
        monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", str(tmp_path / "stored_tokens"))
        monkeypatch.setattr(_auth, "_OAUTH_REFRESH_CACHE", None)
        (tmp_path / "token").write_text("hf_in-its-file")
        yield running


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("odd", ODD)
def test_a_file_of_tokens_that_is_none_is_refused_before_it_is_read(server, tmp_path, name, odd):
    path = tmp_path / ("token" if name == "HF_TOKEN_PATH" else "stored_tokens")
    path.unlink(missing_ok=True)
    ODD[odd](path)
    error = refused(fetch.fetch, source())
    assert (error.what, error.exit_code) == ("access token", ExitCode.GATED)
    assert str(path) in error.why
    assert server.requests == []


def test_a_file_is_not_looked_at_where_a_variable_has_the_token(server, tmp_path, monkeypatch):
    (tmp_path / "token").unlink()
    os.mkfifo(tmp_path / "token")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server.add(REPO, fake_hub.model_files())
    assert fetch.fetch(source())


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_files_of_tokens_are_not_quoted(server, tmp_path, damage, capfd, caplog):
    (tmp_path / "stored_tokens").write_text(DAMAGED[damage])
    server.add(REPO, fake_hub.model_files())
    connection.library()
    with caplog.at_level(logging.DEBUG):
        assert fetch.fetch(source())
    shown = capfd.readouterr()
    assert TOKEN not in shown.out + shown.err + caplog.text
    assert "stored tokens" not in shown.err


@pytest.mark.parametrize("variables", [{}, {"HF_OIDC_ID_TOKEN": TOKEN}])
def test_a_token_that_a_job_cannot_get_is_an_error_of_its_variables(server, monkeypatch, variables):
    for name, value in {"HF_OIDC_RESOURCE": "models", "GITHUB_ACTIONS": "", **variables}.items():
        monkeypatch.setenv(name, value)
    error = refused(fetch.fetch, source())
    assert error.exit_code == ExitCode.GATED
    assert "HF_OIDC_RESOURCE" in error.why
    assert "HF_OIDC_RESOURCE" in error.next_step
