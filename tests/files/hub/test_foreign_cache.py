"""What another tool fetched: used where it is sound, refused where it is damaged, and never written to."""

from __future__ import annotations

from pathlib import Path

import pytest

from localq import disk
from localq.errors import ExitCode
from localq.files.hub import fetch as hub
from tests.support.files import cached_models, fake_hub, hub_server
from tests.support.files.hub_server import REPO, refused, source


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        yield server


def everything(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_ino) for path in files}


def test_a_model_of_another_tool_is_hashed_once_used_and_never_written_to(server, monkeypatch):
    files = fake_hub.model_files(shards=2)
    folder = cached_models.put(REPO, files)
    before = everything(folder.parents[2])
    hashed = []
    monkeypatch.setattr(disk, "has_content", lambda path, content_id: not hashed.append(path.name))
    assert hub.fetch(source()) == folder
    assert sorted(hashed) == sorted(files)
    assert hub.fetch(source()) == folder
    assert len(hashed) == len(files)
    assert everything(folder.parents[2]) == before
    assert server.requests == []


@pytest.mark.parametrize("damage", ["flipped", "cut", "zeros"])
def test_a_damaged_model_of_another_tool_is_refused_and_left(server, damage):
    server.add(REPO, fake_hub.model_files(shards=2))
    folder = cached_models.put(REPO, fake_hub.model_files(shards=2))
    weights = (folder / "model-00002-of-00002.safetensors").resolve()
    content = bytearray(weights.read_bytes())
    wrong = {"flipped": content[:500] + bytes([content[500] ^ 16]) + content[501:], "cut": content[:-9],
             "zeros": content[:-300] + bytes(300)}[damage]  # fmt: skip
    weights.write_bytes(wrong)
    before = everything(folder.parents[2])
    error = refused(hub.fetch, source())
    assert error.exit_code == ExitCode.BAD_FILE
    assert "localq rm" in str(error)
    assert everything(folder.parents[2]) == before
    assert server.requests == []


def test_what_is_here_is_held_against_the_catalogue_too(server):
    cached_models.put(REPO, fake_hub.model_files())
    right = fake_hub.sha256(fake_hub.model_files()["model.safetensors"])
    assert hub.fetch(source(sha256={"model.safetensors": right}))
    error = refused(hub.fetch, source(sha256={"model.safetensors": "0" * 64}))
    assert error.exit_code == ExitCode.BAD_FILE
    assert "catalogue" in str(error)


def test_a_begun_model_of_another_tool_is_completed_around_what_it_has(server):
    files = fake_hub.model_files(shards=2)
    server.add(REPO, files)
    mine = {name: files[name] for name in ("tokenizer.json", "model-00001-of-00002.safetensors")}
    folder = cached_models.put(REPO, mine)
    before = everything(folder)
    assert hub.fetch(source()) == folder
    assert set(server.fetched()) == set(files) - set(mine)
    assert {path: now for path, now in everything(folder).items() if path in before} == before


def test_a_complete_model_is_used_where_nothing_can_be_written(server, monkeypatch, tmp_path):
    folder = cached_models.put(REPO, fake_hub.model_files())
    monkeypatch.setenv("LOCALQ_DATA", "/proc/nothing-can-be-written-here")
    monkeypatch.setenv("LOCALQ_CACHE", "/proc/nor-here")
    for path in (folder, folder.parents[1]):
        path.chmod(0o555)
    assert hub.fetch(source()) == folder
    assert hub.fetch(source(), offline=True) == folder
