"""`rm` of a model that is a link, or in a cache that cannot be written: what stays, and what is said."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localq import cli, places
from localq.errors import ExitCode
from localq.files import local_models, removal
from localq.files.hub import cache as hub_cache
from tests.support.files import cached_models, fake_hub

ROOT = Path(__file__).parents[2]
FILES = fake_hub.model_files(shards=2)
REPO, COMMIT, OTHER = "maker/tiny", fake_hub.COMMIT, "b" * 40


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    for name, place in (("HF_HUB_CACHE", "hub"), ("LOCALQ_DATA", "data"), ("LOCALQ_CACHE", "cache"),
                        ("LOCALQ_CONFIG", "config.toml"), ("LOCALQ_MODELS", "models.toml")):  # fmt: skip
        monkeypatch.setenv(name, str(tmp_path / place))


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    (tmp_path / "another disk").mkdir()
    return tmp_path / "another disk"


def moved(path: Path, elsewhere: Path) -> Path:
    """`path` on another disk, with a link in its place; the link."""
    shutil.move(path, elsewhere / path.name)
    path.symlink_to(elsewhere / path.name)
    return path


def quantized(elsewhere: Path) -> tuple[str, Path]:
    folder = places.quantized_dir() / "my@nf4"
    folder.mkdir(parents=True)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return "my@nf4", moved(folder, elsewhere)


def embedded(elsewhere: Path) -> tuple[str, Path]:
    path = places.embedded_dir() / "SmolLM2-135M-Instruct.Q4_1.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF" * 9)
    return "smollm2-135m", moved(path, elsewhere)


def repository(elsewhere: Path) -> tuple[str, Path]:
    cached_models.put(REPO, FILES)
    return REPO, moved(hub_cache.repo_folder(REPO), elsewhere)


def revision(elsewhere: Path) -> tuple[str, Path]:
    cached_models.put(REPO, {**FILES, "tokenizer_config.json": b"[1]"}, OTHER, ref="old")
    folder = cached_models.put(REPO, FILES)
    for path in folder.iterdir():  # their content moves along
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
    [model] = [each for each in local_models.list_local() if each.commit == COMMIT]
    return model.name, moved(folder, elsewhere)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("make", [quantized, embedded, repository, revision])
def test_the_link_goes_and_what_it_leads_to_stays(capsys, elsewhere, make: Callable[[Path], tuple[str, Path]]):
    name, link = make(elsewhere)
    before = contents(elsewhere)
    assert before
    target = os.readlink(link)
    [model] = [each for each in local_models.list_local() if removal.link_of(each) == link]
    assert cli.execute(["rm", "-y", f"{REPO}@{COMMIT}" if make is revision else name]) == 0
    said = capsys.readouterr().err
    assert f"{link} (a link; its target {target} is kept)" in said
    assert "0 bytes freed" in said or "0 B freed" in said
    assert not os.path.lexists(link)
    assert contents(elsewhere) == before
    assert model.path not in [each.path for each in local_models.list_local()]
    if make is revision:  # the other one is whole, and no branch names what is gone
        assert hub_cache.is_complete(hub_cache.repo_folder(REPO) / "snapshots" / OTHER)
        assert os.listdir(hub_cache.repo_folder(REPO) / "refs") == ["old"]


@pytest.mark.parametrize("more", [False, True], ids=["the last revision", "one of two"])
def test_a_file_of_a_snapshot_that_the_user_made_a_link_stays_elsewhere(elsewhere, more):
    if more:
        cached_models.put(REPO, {**FILES, "tokenizer_config.json": b"[1]"}, OTHER, ref="old")
    folder = cached_models.put(REPO, {**FILES, "generation_config.json": b"{ }"})
    blob = (folder / "generation_config.json").resolve()
    mine = elsewhere / "mine.json"
    mine.write_bytes(bytes(5000))
    (folder / "generation_config.json").unlink()
    (folder / "generation_config.json").symlink_to(mine)
    blob.unlink()
    [model] = [each for each in local_models.list_local() if each.commit == COMMIT]
    freed = removal.remove([model])
    assert mine.read_bytes() == bytes(5000)
    assert freed < 5000
    assert not folder.exists()


def test_an_unpacked_folder_goes_whole_but_not_what_links_in_it_lead_to(elsewhere):
    name, link = quantized(elsewhere)
    link.unlink()
    shutil.move(elsewhere / "my@nf4", link)
    moved(link / "model-00001-of-00002.safetensors", elsewhere)
    before = contents(elsewhere)
    removal.remove(local_models.matching(name))
    assert not link.exists()
    assert contents(elsewhere) == before


WITHOUT_RIGHTS = """
import sys
from localq.cli import execute
from tests.support.common.privileges import bound_by_rights
with bound_by_rights():
    sys.exit(execute(["rm", sys.argv[1], "--yes"]))
"""


def removed(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`rm` in another process: the client reads its variables, and opens its log, when it is imported."""
    environment = {**os.environ, **variables}
    return subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_cache_that_cannot_be_written_is_one_error_without_what_the_client_logs():
    """As in a cache that many users share: its files are readable, and its folders not writable."""
    cached_models.put(REPO, FILES)
    folder = hub_cache.repo_folder(REPO)
    folders = [each for each in (folder, *folder.rglob("*")) if each.is_dir()]
    before = sorted(folder.rglob("*"))
    for each in folders:
        each.chmod(0o555)
    try:
        done = removed("-c", WITHOUT_RIGHTS, REPO)
    finally:
        for each in folders:
            each.chmod(0o755)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (ExitCode.DISK, "", 1)
    assert "cannot write (Permission denied)" in done.stderr
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("name", ["HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"])
def test_a_variable_that_the_client_does_not_accept_is_named(name):
    cached_models.put(REPO, FILES)
    done = removed("-m", "localq", "rm", REPO, "--yes", **{name: "soon"})
    assert (done.returncode, done.stderr.count("\n")) == (ExitCode.NETWORK, 1)
    assert "start with HF_" in done.stderr


def test_the_client_is_loaded_in_one_place_that_silences_it():
    loads = re.compile(r"^\s*(import|from) huggingface_hub", re.MULTILINE)
    found = [path for path in (ROOT / "localq").rglob("*.py") if loads.search(path.read_text())]
    assert [path.relative_to(ROOT).as_posix() for path in found] == ["localq/files/hub/connection.py"]
