"""Conversion under faults: kills, full disks, damaged shards, foreign folders, weights that are not finite, memory."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from localq import disk
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import LOCK_NAME, open_model
from localq.quantize import by_tensor
from localq.quantize.output import shards as output_shards
from localq.quantize.request import TensorwiseRequest
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests, quantized


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama")


@pytest.fixture(scope="module")
def finished(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return quantized(llama, tmp_path_factory.mktemp("out") / "llama-nf4")


# ---- kills, resumes, determinism
CONVERT_AND_DIE = """
import os, pathlib, signal, sys
from localq.files.model_folder import open_model
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
left = int(sys.argv[4])
def count(*_):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "tensor":
    on_progress = count
else:  # die around a rename: before it and after it in turn
    on_progress, replace = None, os.replace
    os.replace = lambda *names: (count(), replace(*names), count())
source, out = map(pathlib.Path, sys.argv[1:3])
by_tensor.convert(TensorwiseRequest(open_model(source), "nf4", out, shard_bytes=60_000), on_progress)
"""


@pytest.mark.parametrize(
    ("where", "count"), [("tensor", 0), ("tensor", 13), ("rename", 0), ("rename", 5), ("rename", 6)]
)
def test_a_killed_conversion_goes_on(llama: Path, finished: Path, tmp_path: Path, where: str, count: int) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-c", CONVERT_AND_DIE, str(llama), str(out), where, str(count)]
    died = subprocess.run(command, check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    with pytest.raises(LocalqError):
        open_model(out)  # what is there does not pass for a model
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    progress: list[tuple[str, int, int]] = []
    quantized(llama, out, on_progress=lambda *step: progress.append(step))
    assert digests(out) == digests(finished)
    recorded = {name for name, time in kept.items() if (out / name).stat().st_mtime_ns == time}
    if (where, count) in {("tensor", 13), ("rename", 6)}:
        assert recorded  # finished shards were not made again
        assert progress[0][1] > 0
    assert progress[-1][1] == progress[-1][2]


def test_twice_gives_the_same_bytes(llama: Path, finished: Path, tmp_path: Path) -> None:
    assert digests(quantized(llama, tmp_path / "again")) == digests(finished)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_finished_shard_is_made_again(
    llama: Path, finished: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _fail_at_fsync(monkeypatch, 12)
    with pytest.raises(LocalqError):
        quantized(llama, out)
    monkeypatch.undo()
    first = min(out.glob("*.safetensors"))
    raw = bytearray(first.read_bytes())
    if damage == "flip":
        raw[-1] ^= 1
        first.write_bytes(raw)
    elif damage == "truncate":
        first.write_bytes(raw[:-1])
    else:
        first.unlink()
    quantized(llama, out)
    assert digests(out) == digests(finished)


def _fail_at_fsync(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    real: Callable[[int], None] = os.fsync
    left = [count]

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(output_shards.os, "fsync", fsync)


@pytest.mark.parametrize("count", [0, 3, 9, 20])
def test_a_full_disk_is_named_and_loses_nothing(
    llama: Path, finished: Path, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    _fail_at_fsync(monkeypatch, count)
    with pytest.raises(LocalqError, match="disk is full") as caught:
        quantized(llama, out)
    assert caught.value.exit_code == ExitCode.DISK
    monkeypatch.undo()
    quantized(llama, out)
    assert digests(out) == digests(finished)


@pytest.mark.parametrize("kept", [None, [], ["notes.md"]])
def test_too_little_space_is_seen_before_the_first_byte_and_nothing_is_left(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: list[str] | None
) -> None:
    """kept: what the folder holds before; None where there is none."""
    out = tmp_path / "out"
    if kept is not None:
        out.mkdir()
        for name in kept:
            (out / name).write_text("mine")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(
        LocalqError, match=r"not enough free disk space in .*: .* bytes plus a reserve are needed, but only 1,000 "
    ) as caught:
        quantized(llama, out, force=bool(kept))
    assert caught.value.exit_code == ExitCode.DISK
    assert ([path.name for path in out.iterdir()] if out.exists() else None) == kept


def test_an_output_that_cannot_be_made(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalqError) as caught:
        quantized(llama, tmp_path / "file" / "out")
    assert caught.value.exit_code == ExitCode.DISK


# ---- what is refused


def test_a_folder_in_use_is_not_overwritten(llama: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("keep me")
    (out / "model.safetensors").write_text("of an earlier model")
    with pytest.raises(LocalqError, match="not empty") as caught:
        quantized(llama, out)
    assert caught.value.exit_code == ExitCode.USAGE
    quantized(llama, out, force=True)
    assert (out / "thesis.txt").read_text() == "keep me"
    assert digests(out).items() >= digests(finished).items()
    assert not (out / "model.safetensors").exists()


def test_another_conversion_is_not_continued(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    _fail_at_fsync(monkeypatch, 9)
    with pytest.raises(LocalqError):
        quantized(llama, out)
    monkeypatch.undo()
    other = make_checkpoint(tmp_path / "other", "llama", seed=5)
    with pytest.raises(LocalqError, match="a different unfinished conversion") as caught:
        quantized(other, out)
    assert caught.value.exit_code == ExitCode.USAGE
    assert digests(quantized(other, out, force=True)) == digests(quantized(other, tmp_path / "fresh"))


def test_the_source_is_never_the_output(llama: Path) -> None:
    before = digests(llama)
    for force in (False, True):
        with pytest.raises(LocalqError, match="source") as caught:
            quantized(llama, llama / ".." / "llama", force=force)
        assert caught.value.exit_code == ExitCode.USAGE
    assert digests(llama) == before


def test_usage_errors(llama: Path, finished: Path, tmp_path: Path) -> None:
    refused = (
        (llama, "nf5", "tensor-by-tensor quantization does not support this format"),
        (finished, "nf4", "bitsandbytes"),
    )
    for source, format, why in refused:
        with pytest.raises(LocalqError, match=why) as caught:
            by_tensor.convert(TensorwiseRequest(open_model(source), format, tmp_path / "out"))
        assert caught.value.exit_code == ExitCode.USAGE


def test_a_second_conversion_into_the_same_folder_waits_for_nobody(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (out / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LocalqError, match="another localq"):
            quantized(llama, out)


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
@pytest.mark.parametrize(
    "name",
    [
        *(LOCK_NAME, "conversion.state.json", "conversion.state.json.part", "config.json", "config.json.part"),
        *("model.safetensors", "model-00001-of-00002.safetensors.part", "tokenizer.json", "localq.sha256"),
    ],
)
def test_a_link_of_another_in_the_folder_leads_nowhere(llama: Path, tmp_path: Path, name: str, force: bool) -> None:
    """The folder may be one in /tmp that another user has prepared."""
    victim, out = tmp_path / "authorized_keys", tmp_path / "out"
    victim.write_text("ssh-ed25519 AAAA\n")
    out.mkdir()
    (out / name).symlink_to(victim)
    with pytest.raises(LocalqError) as caught:
        quantized(llama, out, force=force)
    assert caught.value.exit_code == ExitCode.USAGE
    assert victim.read_text() == "ssh-ed25519 AAAA\n"
    (out / name).unlink()
    os.link(victim, out / name)
    with pytest.raises(LocalqError):
        quantized(llama, out, force=force)
    assert victim.read_text() == "ssh-ed25519 AAAA\n"


def test_a_link_that_appears_later_leads_nowhere(llama: Path, finished: Path, tmp_path: Path) -> None:
    """Each file is made anew under a name of its own, then renamed."""
    victim, out = tmp_path / "authorized_keys", tmp_path / "out"
    victim.write_text("ssh-ed25519 AAAA\n")
    names = [path.name for path in finished.iterdir()]

    def planted(what: str, done: int, total: int) -> None:
        left = (
            [name for name in names if not (out / name).is_file() or (out / name).is_symlink()] if done < total else []
        )
        for name in (each for known in left for each in (known, f"{known}.part")):
            if not os.path.lexists(out / name):
                (out / name).symlink_to(victim)

    quantized(llama, out, on_progress=planted)
    assert victim.read_text() == "ssh-ed25519 AAAA\n"
    assert digests(out) == digests(finished)


@pytest.mark.parametrize("force", [False, True], ids=["", "force"])
def test_what_another_finishes_just_before_the_lock_is_kept(llama, finished, tmp_path, monkeypatch, force) -> None:
    """Its lock is removed and gone: ours is of a new file, and the folder is looked at again."""
    out, tries = tmp_path / "out", []

    def flock(file, operation) -> None:
        tries.append(os.fstat(file.fileno()).st_nlink)
        if len(tries) == 1:
            shutil.copytree(finished, out, dirs_exist_ok=True)
            (out / LOCK_NAME).unlink()

    monkeypatch.setattr("localq.quantize.output.folder.fcntl.flock", flock)
    if force:
        quantized(llama, out, force=True)
    else:
        with pytest.raises(LocalqError, match="the folder is not empty") as caught:
            quantized(llama, out)
        assert caught.value.exit_code == ExitCode.USAGE
    assert digests(out) == digests(finished)
    assert tries == [1, 1]


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "m", "llama", shard_bytes=10**9)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(LocalqError, match="NaN") as caught:
        quantized(source, tmp_path / "out")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert caught.value.what == "model.layers.1.mlp.up_proj.weight"


def test_a_model_without_known_linears_is_refused(tmp_path: Path) -> None:
    save_file({"encoder.block.0.weight": torch.ones(64, 64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(LocalqError, match="no decoder weight matrices found"):
        quantized(tmp_path, tmp_path / "out")


# ---- memory

MEASURE = """
import pathlib, sys, torch
from localq.files.model_folder import open_model
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
torch.set_num_threads(1)
def anonymous():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024
files = open_model(pathlib.Path(sys.argv[1]))
peak, start = 0, anonymous()
def watch(*_):
    global peak
    peak = max(peak, anonymous() - start)
by_tensor.convert(TensorwiseRequest(files, "nf4", pathlib.Path(sys.argv[2])), watch)
print(peak)
"""


def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    source = tmp_path / "m"
    source.mkdir()
    matrix = torch.randn(1024, 2048).bfloat16()  # 4 MiB
    tensors = {f"model.layers.{i}.mlp.up_proj.weight": matrix.clone() for i in range(24)}
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text('{"model_type": "llama"}')
    command = [sys.executable, "-c", MEASURE, str(source), str(tmp_path / "out")]
    peak = int(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    written = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert written > 24 * 2**20
    assert peak < 16 * 2**20  # one matrix, its codes, temporaries of 2^18 elements, the allocator's slack
