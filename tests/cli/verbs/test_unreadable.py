"""A cache that users share has parts that this user may not read: each is one line, and never the end of the others."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from localq import cli, places
from localq.files import catalog, local_models, removal
from localq.files.hub import cache as hub_cache
from localq.files.hub import records as hub_records
from localq.planner import recommend
from localq.settings import Settings
from localq.tui.models import picker_rows
from tests.support.common.privileges import closed
from tests.support.files import cached_models, fake_hub

FILES = fake_hub.model_files(shards=2)
OPEN, PRIVATE, COMMIT = "maker/open", "maker/private", fake_hub.COMMIT


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    for name, place in (("HF_HUB_CACHE", "hub"), ("LOCALQ_DATA", "data"), ("LOCALQ_CACHE", "cache"),
                        ("LOCALQ_CONFIG", "config.toml"), ("LOCALQ_MODELS", "models.toml")):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / place))
    for repo in (OPEN, PRIVATE):
        cached_models.put(repo, FILES)
    for name in ("open@nf4", "private@nf4"):
        (places.quantized_dir() / name).mkdir(parents=True)
        for file, content in FILES.items():
            (places.quantized_dir() / name / file).write_bytes(content)
    places.embedded_dir().mkdir()


def repo_folder() -> Path:
    return hub_cache.repo_folder(PRIVATE)


# What is closed -> the name that the line begins with.
CLOSED: dict[str, tuple[Callable[[], Path], str]] = {
    "repository": (repo_folder, PRIVATE),
    "snapshots": (lambda: repo_folder() / "snapshots", PRIVATE),
    "snapshot": (lambda: repo_folder() / "snapshots" / COMMIT, PRIVATE),
    "blobs": (lambda: repo_folder() / "blobs", PRIVATE),
    "refs": (lambda: repo_folder() / "refs", PRIVATE),
    "quantized": (lambda: places.quantized_dir() / "private@nf4", "private@nf4"),
    "embedded": (places.embedded_dir, "embedded models"),
}


def localq(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    assert cli.execute(list(arguments)) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return said.out, said.err


def lines_about(name: str, text: str) -> list[str]:
    return [line for line in text.splitlines() if f"{name}: " in line and "cannot be read (Permission denied)" in line]


@pytest.mark.parametrize("what", CLOSED)
def test_ls_verify_and_prune_list_the_others_and_name_it(capsys, what):
    path, name = CLOSED[what]
    with closed(path()):
        for verb in (["ls"], ["verify"], ["verify", "-q"]):
            out, err = localq(capsys, *verb)
            assert OPEN in out
            assert "open@nf4" in out
            assert len(lines_about(name, err)) == 1, err
        body = json.loads(localq(capsys, "ls", "--json")[0])
        assert [each["name"] for each in body["unreadable"]] == [name]
        assert OPEN in [each["name"] for each in body["models"]]
        body = json.loads(localq(capsys, "verify", "--json")[0])
        assert [each["name"] for each in body["unreadable"]] == [name]
        out, err = localq(capsys, "prune", "--dry-run")
        assert len(lines_about(name, err)) == (0 if name != PRIVATE or what == "refs" else 1), err


@pytest.mark.parametrize("what", CLOSED)
def test_rm_and_verify_by_name_say_why_not_and_others_go(capsys, what):
    path, name = CLOSED[what]
    with closed(path()):
        if " " not in name:
            assert "Permission denied" in localq(capsys, "verify", name, code=9)[1]
            assert "Permission denied" in localq(capsys, "rm", "-y", name, code=9)[1]
        localq(capsys, "rm", "-y", OPEN)
        localq(capsys, "rm", "-y", "open@nf4")
        assert not hub_cache.repo_folder(OPEN).exists()
        assert not (places.quantized_dir() / "open@nf4").exists()
    assert hub_cache.is_complete(repo_folder() / "snapshots" / COMMIT)
    assert hub_cache.is_complete(places.quantized_dir() / "private@nf4")


@pytest.mark.parametrize("above", [False, True], ids=["cache", "the folder above it"])
def test_the_whole_cache_may_be_closed(capsys, tmp_path, monkeypatch, above):
    if above:
        (tmp_path / "home").mkdir()
        shutil.move(places.hub_cache(), tmp_path / "home" / "hub")
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    with closed(tmp_path / "home" if above else places.hub_cache()):
        out, err = localq(capsys, "ls")
        assert "open@nf4" in out
        assert len(lines_about("Hugging Face cache", err)) == 1
        localq(capsys, "prune", "--dry-run")
        localq(capsys, "rm", "-y", "open@nf4")


@pytest.mark.parametrize("name", ["model-00002-of-00002.safetensors", "tokenizer.json"])
def test_a_file_of_which_the_content_is_closed_is_one_line_of_verify(capsys, name):
    with closed((repo_folder() / "snapshots" / COMMIT / name).resolve()):
        assert PRIVATE in localq(capsys, "ls")[0]
        out, err = localq(capsys, "verify")
        assert OPEN in out
        assert len(lines_about(PRIVATE, err)) == 1
        assert "Permission denied" in localq(capsys, "verify", PRIVATE, code=9)[1]


@pytest.mark.parametrize("what", CLOSED)
def test_nothing_else_that_looks_at_models_ends(capsys, what):
    path, name = CLOSED[what]
    with closed(path()):
        for verb in (["show", OPEN], ["fit", "--vram", "24"], ["doctor"], ["pull", OPEN, "--offline"]):
            localq(capsys, *verb)
        rows = {row.name: row for row in picker_rows.name_rows()}
        assert rows[OPEN].local is not None
        row = rows[name]
        assert (row.verdict, row.group, row.place) == (picker_rows.UNREADABLE, picker_rows.ON_DISK, "on disk")
        assert "Permission denied" in row.sentence
        recommend.best_here(Settings())


def test_a_catalogued_model_that_is_closed_is_an_error_of_that_model_alone(capsys):
    repo = catalog.find("llama-3.1-8b").source("nf4").repo
    cached_models.put(repo, FILES)
    with closed(hub_cache.repo_folder(repo)):
        localq(capsys, "fit", "--vram", "24")
        assert "Permission denied" in localq(capsys, "pull", "llama-3.1-8b", "--offline", code=9)[1]
        assert "Permission denied" in localq(capsys, "verify", "llama-3.1-8b", code=9)[1]


def test_a_revision_goes_where_the_client_cannot_scan_the_cache(capsys):
    other = "a" * 40
    cached_models.put(OPEN, {**FILES, "tokenizer_config.json": b"[1]"}, other, ref="old")
    [old] = [each for each in local_models.list_local() if each.commit == other]
    with closed(repo_folder()):
        assert removal.remove([old]) == len(b"[1]")
    folder = hub_cache.repo_folder(OPEN)
    assert [path.name for path in (folder / "snapshots").iterdir()] == [COMMIT]
    assert os.listdir(folder / "refs") == ["main"]
    assert hub_cache.is_complete(folder / "snapshots" / COMMIT)


def test_content_is_not_pruned_while_a_snapshot_that_may_use_it_is_closed(capsys):
    folder = repo_folder()
    for blob in (folder / "blobs").iterdir():
        hub_records.remember(hub_records.users(), PRIVATE, blob.name, blob, ours=True)
    with closed(folder / "snapshots"):
        localq(capsys, "prune", "-y")
    assert hub_cache.is_complete(folder / "snapshots" / COMMIT)


# File of the user or of a model -> a command that reads it.
FILES_READ = {
    "config.toml": ["config", "get", "model"],
    "models.toml": ["show", "smollm2-135m"],
    "model/config.json": ["show", "MODEL"],
    "model/model.safetensors.index.json": ["show", "MODEL"],
    "model/model-00001-of-00002.safetensors": ["show", "MODEL"],
    "model": ["show", "MODEL"],
    "model.gguf": ["show", "MODEL"],
}


@pytest.mark.parametrize("name", FILES_READ)
def test_a_file_that_this_user_may_not_read_is_no_damaged_one(capsys, tmp_path, name):
    (tmp_path / "model").mkdir()
    for file, content in FILES.items():
        (tmp_path / "model" / file).write_bytes(content)
    if not (tmp_path / name).exists():
        (tmp_path / name).write_text("")
    model = tmp_path / Path(name).parts[0]
    with closed(tmp_path / name) as path:
        _, err = localq(capsys, *(str(model) if word == "MODEL" else word for word in FILES_READ[name]), code=9)
    assert f"localq: {path}: cannot be read (Permission denied). Check its owner and permissions." in err
