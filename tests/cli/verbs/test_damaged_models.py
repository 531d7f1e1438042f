"""Models made here have recorded hashes: what changed is hashed before a load, damage is refused, `pull` mends it."""

from __future__ import annotations

import io
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from localq import cli, disk, places
from localq.bench.models import format_list
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, checked_files, packaged_model, verification
from localq.files.hub import fetch as hub
from localq.files.hub import records as hub_records
from localq.files.safetensors_headers import INDEX_NAME, SINGLE_NAME
from localq.planner import open_cost, prepare
from localq.settings import Settings
from tests.support.files import fake_hub, hub_server
from tests.support.files.hub_server import REPO
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests, quantized

NAME, OWN = "tiny@nf4", "mine@nf4"  # of the user's catalogue; and one that no catalogue has
CATALOGUE = f"""
[[model]]
name = "tiny"
title = "Tiny"
licence = "mit"
arch = {{model_type = "llama", layers = 3, hidden = 128, heads = 4, kv_heads = 2, head_dim = 32, intermediate = 192, \
vocab = 320, tied = false, max_context = 512}}
source = [{{format = "bf16", repo = "{REPO}", bytes = 1000000, revision = "{fake_hub.COMMIT}"}}]
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCALQ_DATA", str(tmp_path_factory.mktemp("data")))
        return quantized(source, tmp_path_factory.mktemp("made") / "nf4")


@pytest.fixture
def server(source: Path, made: Path, tmp_path, monkeypatch) -> Iterator[fake_hub.FakeHub]:
    with hub_server.running(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
        monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "models.toml"))
        (tmp_path / "models.toml").write_text(CATALOGUE)
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        server.add(REPO, {path.name: path.read_bytes() for path in source.iterdir()})
        for name in (NAME, OWN):
            shutil.copytree(made, places.quantized_dir() / name)
        yield server


def localq(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    capsys.readouterr()
    found = cli.execute(list(arguments))
    said = capsys.readouterr()
    assert found == code, said
    return said.out, said.err


def run(capsys: pytest.CaptureFixture[str], name: str, code: int = 0) -> str:
    return localq(capsys, "run", name, "a", "-n", "3", "--device", "cpu", code=code)[1]


def zeroed(path: Path) -> None:
    """The disk loses the end: the length stays, and the time of writing."""
    before = path.stat()
    os.truncate(path, before.st_size // 2)
    os.truncate(path, before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


FILES = ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json", INDEX_NAME,
         "model-00003-of"]  # fmt: skip


def file_of(folder: Path, start: str) -> Path:
    return next(path for path in sorted(folder.iterdir()) if path.name.startswith(start))


def test_all_that_is_read_is_recorded_and_sha256sum_agrees(made):
    sums = checked_files.recorded_sums(made)
    assert sums == {name: digest for name, digest in digests(made).items() if name in sums}
    assert {path.name for path in made.iterdir()} - set(sums) <= {checked_files.SUMS_NAME}
    assert {each.name for each in made.iterdir() if each.suffix == ".safetensors"} <= set(sums)
    if tool := shutil.which("sha256sum"):
        assert os.spawnl(os.P_WAIT, "/bin/sh", "sh", "-c", f"cd '{made}' && {tool} --quiet -c localq.sha256") == 0


def test_what_was_made_just_now_is_not_read_again(source, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))
    out = quantized(source, tmp_path / "out")
    monkeypatch.setattr(disk, "has_content", None)  # not callable
    assert checked_files.wrong_files(out, checked_files.recorded_sums(out)) == []
    monkeypatch.undo()


@pytest.mark.parametrize("damage", [zeroed, cut, flipped, Path.unlink])
@pytest.mark.parametrize("file", FILES)
def test_damage_is_refused_by_all_that_load_and_named_by_verify(server, capsys, damage: Callable, file):
    folder = places.quantized_dir() / OWN
    path = file_of(folder, file)
    prepare.source_path(str(folder), print)
    localq(capsys, "verify", OWN)
    damage(path)
    for _ in range(2):  # nothing is believed after the first time either
        with pytest.raises(LocalqError, match=re.escape(str(path))) as caught:
            prepare.source_path(str(folder), print)
        assert caught.value.exit_code == 8
    out, err = localq(capsys, "verify", OWN, code=8)
    assert "damaged" in out or "incomplete" in out
    assert f"{path} is {'missing' if damage is Path.unlink else 'wrong'}" in err
    assert f"run `localq rm {OWN}`" in err
    shutil.rmtree(folder)
    shutil.copytree(places.quantized_dir() / NAME, folder)
    prepare.source_path(str(folder), print)


def test_a_list_of_hashes_that_is_damaged_is_damage(server, capsys):
    folder = places.quantized_dir() / OWN
    flipped(folder / checked_files.SUMS_NAME)  # in a name
    run(capsys, str(folder), 8)
    (folder / checked_files.SUMS_NAME).write_bytes(b"")
    assert checked_files.SUMS_NAME in run(capsys, str(folder), 8)
    assert checked_files.SUMS_NAME in localq(capsys, "verify", OWN, code=8)[1]


def test_who_changed_a_file_on_purpose_deletes_the_list(server, capsys):
    folder = places.quantized_dir() / OWN
    (folder / "generation_config.json").write_text('{"temperature": 0.1}')
    assert f"delete {folder / checked_files.SUMS_NAME}" in run(capsys, str(folder), 8)
    (folder / checked_files.SUMS_NAME).unlink()
    assert prepare.source_path(str(folder), print) == folder
    assert "no recorded hashes" in localq(capsys, "verify", OWN)[0]


def test_pull_quantizes_a_damaged_one_again(server, capsys):
    folder = places.quantized_dir() / NAME
    assert "already on this machine" in localq(capsys, "pull", NAME)[1]
    assert server.requests == []
    path = file_of(folder, "model-00002-of")
    zeroed(path)
    err = run(capsys, NAME, 8)
    assert f"{path} is damaged" in err
    assert f"Run `localq pull {NAME}`" in err
    target = catalog.resolve(NAME)
    assert open_cost.of(target, Settings()) is None
    cost = open_cost.of(target, Settings(), again=True)  # what is asked about where it takes long
    assert cost is not None
    assert cost.make_s is not None
    err = localq(capsys, "pull", NAME, "-y")[1]
    assert f"{path} is damaged" in err
    assert "localq quantizes it again" in err
    assert re.search(rf"{NAME}: .*B, quantized\n", err)
    localq(capsys, "verify", NAME)
    run(capsys, NAME)
    assert "already on this machine" in localq(capsys, "pull", NAME)[1]


def test_rm_takes_the_record_along(server, capsys):
    prepare.source_path(NAME, print)
    assert list(places.checked_dir().iterdir())
    localq(capsys, "rm", "-y", NAME)
    assert list(places.checked_dir().iterdir()) == []


def test_damage_that_nothing_tells_of_is_named_after_the_load_that_failed(server, capsys):
    """As a disk does it: nothing that is recorded of the file tells. The header is what a load finds first."""
    folder = places.quantized_dir() / OWN
    path = file_of(folder, "model-00002-of")
    with path.open("r+b") as file:
        file.write(bytes(8))
    checked_files.remember(folder, checked_files.recorded_sums(folder))
    err = run(capsys, str(folder), 8)
    assert f"{path} is damaged: its hash does not match the recorded one" in err


def test_damage_from_the_hub_is_named_after_a_load_that_failed(server, capsys):
    folder = hub.fetch_repo(REPO)
    path = file_of(folder, "model-0") if (folder / INDEX_NAME).exists() else folder / SINGLE_NAME
    with path.resolve().open("r+b") as file:
        file.write(bytes(8))
    hub_records.remember(hub_records.users(), REPO, path.resolve().name, path, ours=True)
    err = run(capsys, REPO, 8)
    assert f"{path} is damaged: its hash does not match the recorded one" in err
    assert f"Run `localq pull {REPO}`" in err
    localq(capsys, "pull", REPO)
    run(capsys, REPO)


def test_without_a_home_folder_files_are_hashed_each_time(made, monkeypatch):
    def homeless() -> Path:
        raise LocalqError("home folder", "HOME is not set")

    monkeypatch.setattr(places, "data_dir", homeless)
    hashed, has_content = [], disk.has_content
    monkeypatch.setattr(disk, "has_content", lambda path, digest: hashed.append(path) or has_content(path, digest))
    sums = checked_files.recorded_sums(made)
    for _ in range(2):
        assert checked_files.wrong_files(made, sums) == []
    assert len(hashed) == 2 * len(sums)


def test_a_damaged_list_of_hashes_is_damage(server):
    folder = places.quantized_dir() / OWN
    (folder / checked_files.SUMS_NAME).write_text("no list")
    found = verification.find_damage(folder, OWN, again=True)
    assert found is not None
    assert found.exit_code == ExitCode.BAD_FILE
    with pytest.raises(LocalqError, match="the list of hashes is damaged"):
        verification.refuse_damaged(folder, OWN)
    assert verification.find_damage(folder / "none", OWN) is None


def test_a_load_that_fails_for_another_reason_keeps_its_error(server, capsys):
    folder = places.quantized_dir() / OWN
    (folder / checked_files.SUMS_NAME).unlink()
    file_of(folder, "model-00002-of").write_bytes(bytes(8))
    assert "hash" not in run(capsys, str(folder), 8)


def test_a_path_is_checked_as_its_name_is(server, capsys):
    """Of the hub's cache and of the embedded model, too."""
    folder = hub.fetch_repo(REPO)
    embedded = packaged_model.path_of(catalog.find("smollm2-135m").sources[0])
    embedded.parent.mkdir(parents=True)
    embedded.write_bytes(b"GGUF")
    prepare.source_path(str(folder), print)
    flipped((folder / "tokenizer.json").resolve())
    for path, file, name in ((folder, folder / "tokenizer.json", REPO), (embedded, embedded, "smollm2-135m")):
        err = run(capsys, str(path), 8)
        assert f"{file} is damaged" in err
        assert f"Run `localq pull {name}`" in err


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir])
def test_what_has_no_end_is_not_hashed(server, make):
    folder = places.quantized_dir() / OWN
    path = folder / "tokenizer_config.json"
    path.unlink()
    make(path)
    with pytest.raises(LocalqError, match=re.escape(str(path))) as caught:
        prepare.source_path(str(folder), print)
    assert caught.value.exit_code == 8


def test_formats_are_not_measured_with_damaged_weights(server):
    folder = places.quantized_dir() / NAME
    hub.fetch_repo(REPO)
    found = {each.format: each for each in format_list.find("tiny", print, None, False).candidates}
    assert found["nf4"].path == folder
    path = file_of(folder, "model-00002-of")
    zeroed(path)
    found = {each.format: each for each in format_list.find("tiny", print, None, False).candidates}
    assert found["nf4"].path is None
    assert f"{path} is damaged" in found["nf4"].reason
