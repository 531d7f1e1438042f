"""Outlines: their small files are those that the hub lists, or the error names the hub and not an edit of the user."""

from __future__ import annotations

import json

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.hub import client as hub_client
from localq.files.hub import remote
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO

FILES = fake_hub.model_files(shards=2)
INDEX = "model.safetensors.index.json"
SMALL = ("config.json", "generation_config.json", "tokenizer_config.json", INDEX)


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as running:
        yield running


def other(name: str) -> dict[str, bytes]:
    """Contents of the same length as the file has; the last is valid JSON."""
    content = FILES[name]
    valid = json.dumps({"x": "x" * (len(content) - 9)}).encode() if len(content) > 9 else b"[]"
    return {"no JSON": b"x" * len(content), "zeros": bytes(len(content)), "valid": valid}


def outlined(listing) -> None:
    with remote.outline(listing):
        pass


@pytest.mark.parametrize("use", [outlined, remote.to_fetch])
@pytest.mark.parametrize("how", ["no JSON", "zeros", "valid"])
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("lfs", [False, True])
def test_a_small_file_that_is_not_the_listed_one_is_named(server, name, how, lfs, use):
    repo = server.add(REPO, FILES)
    repo.lfs |= {name} if lfs else set()
    server.other_content[name] = other(name)[how]
    listing = hub_client.list_files(REPO, "main")
    if use is remote.to_fetch and name != INDEX:  # it asks for no other file
        use(listing)
        return
    with pytest.raises(LocalqError) as caught:
        use(listing)
    assert (caught.value.what, caught.value.exit_code) == (REPO, ExitCode.BAD_FILE)
    assert caught.value.why == f"the hash of {name} differs from the one on the hub"
