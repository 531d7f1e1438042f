"""A conversion into vq2 under faults: kills at every step and at any moment, full disks, foreign folders."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localq import disk, kernels
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import LOCK_NAME, open_model
from localq.quantize import by_layer
from localq.quantize.model import calibration_stream
from localq.quantize.output import shards as output_shards
from localq.quantize.settings import Effort, Tuning
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.conversions import digests
from tests.support.quantize.vq2_conversions import converted, request, windows

pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")

MOMENTS = 20
SHAPE = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2,
         "num_key_value_heads": 1}  # fmt: skip
SETTINGS: dict[str, Any] = {
    "windows": windows(3, 32),
    "effort": Effort(beam=2, columns=32),
    "tuning": Tuning(steps=2, sequences=2),
    "seed": 5,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make_checkpoint(tmp_path_factory.mktemp("source") / "llama", "llama", **SHAPE)


@pytest.fixture(scope="module")
def finished(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(llama, tmp_path_factory.mktemp("out") / "whole", **SETTINGS)


# ---- kills


@pytest.fixture(scope="module")
def trained(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All layers together at the end: what is killed is killed in the midst of that, too."""
    return converted(
        llama, tmp_path_factory.mktemp("out") / "trained", **SETTINGS, joint_tuning=Tuning(steps=2, sequences=2)
    )


# One process that has loaded everything makes children: each converts and is killed, and another goes on.
KILLED = """
import gc, json, os, pathlib, random, signal, sys, time
sys.path.insert(0, sys.argv[1])
import torch
from tests.support.quantize.conversions import digests, kill_after
from tests.support.quantize.vq2_conversions import converted, windows
from localq.errors import LocalqError
from localq.files.model_folder import open_model
from localq.quantize.codebooks import joint_training
from localq.quantize.settings import Effort
from localq.quantize.settings import Tuning
torch.set_num_threads(1)
joint_training.KEPT_EVERY = 1
source, folder = map(pathlib.Path, sys.argv[2:4])
training = dict(tuning=Tuning(steps=2, sequences=2), joint_tuning=Tuning(steps=2, sequences=2))
settings = dict(windows=windows(3, 32), effort=Effort(2, 32), seed=5, **training)

converted(source, folder / "first", **settings)  # what is imported on the way is imported once
begun = time.process_time()
converted(source, folder / "whole", **settings)
whole = time.process_time() - begun
gc.collect()
gc.freeze()  # a child that looks for garbage would copy all that is here

def child(out, die_at=None):
    number = os.fork()
    if number:
        return number
    left, replace = die_at, os.replace
    def count():
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    if die_at is not None:  # before every rename, and after it
        os.replace = lambda *names: (count(), replace(*names), count())
    try:
        converted(source, out, **settings)
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(0)

def ended(number):
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])

def gone_on(out, was):
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("model-*.safetensors")} if out.exists() else {}
    code = ended(child(out))
    same = [name for name, made in kept.items() if (out / name).stat().st_mtime_ns == made]
    print(json.dumps([was, code, digests(out), len(kept), len(same)]), flush=True)

for number in range(10**6):
    out = folder / f"rename {number}"
    code = ended(child(out, number))
    if code == 0:
        break
    gone_on(out, code)
print("null", flush=True)
moments = random.Random(11)
for number in range(int(sys.argv[4])):
    out = folder / f"moment {number}"
    running = child(out)
    kill_after(running, whole * moments.random())
    gone_on(out, ended(running))
"""


@pytest.fixture(scope="module")
def killed(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[Any]], list[list[Any]]]:
    """How conversions killed around renames, and at `MOMENTS` moments, went on.

    Each: [its exit, that of the second, digests, shards before, those kept].
    """
    support, folder = str(Path(__file__).parents[2]), tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-c", KILLED, support, str(llama), str(folder), str(MOMENTS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=280)
    lives = [json.loads(line) for line in run.stdout.splitlines()]
    end_of_renames = lives.index(None)
    return lives[:end_of_renames], lives[end_of_renames + 1 :]


@pytest.mark.slow
def test_kills_around_every_rename_change_nothing(killed: tuple[list[Any], list[Any]], trained: Path) -> None:
    ended, _ = killed
    assert len(ended) >= 2 * (
        2 * (4 + 2) + 2
    )  # of shards and drafts with their records, the training, the first record
    for first, second, found, before, kept in ended:
        assert (first, second) == (-9, 0)
        assert found == digests(trained)
        assert kept >= before - 1  # what was recorded is not made again; the last one may have missed its record
    assert max(each[4] for each in ended) == 4


@pytest.mark.slow
def test_kills_at_random_moments_change_nothing(killed: tuple[list[Any], list[Any]], trained: Path) -> None:
    _, ended = killed
    assert len(ended) == MOMENTS
    for first, second, found, *_ in ended:
        assert first in (-9, 0)  # a moment near the end may come too late
        if first == -9:
            assert second == 0
        assert found == digests(trained)
    assert sum(each[0] == -9 for each in ended) >= MOMENTS // 2


def _stopped(source: Path, out: Path, after: int, **changes: Any) -> None:
    """A conversion that ends after so many groups."""

    def stop(what: str, done: int, total: int) -> None:
        nonlocal after
        after -= 1
        if after < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        by_layer.convert(request(source, out, **{**SETTINGS, **changes}), stop)


def test_what_is_unfinished_is_no_model_and_goes_on(llama: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _stopped(llama, out, 6)
    with pytest.raises(LocalqError):
        open_model(out)
    told: list[tuple[str, int, int]] = []
    by_layer.convert(request(llama, out, **SETTINGS), lambda *each: told.append(each))
    assert told[1][0] == by_layer.CATCHING_UP
    assert told[2][0] == by_layer.QUANTIZING
    assert told[-1][1] == told[-1][2]
    assert digests(out) == digests(finished)


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_streams_of_16_bit_go_on_as_they_were(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text too long for 32 bit, and fine-tuning, whose layers round where those that are read again do."""
    monkeypatch.setattr(calibration_stream, "HOST_BYTES", 0)
    source = make_checkpoint(tmp_path / "source", model_type, num_hidden_layers=3)
    changes = {**SETTINGS, "tuning": Tuning(steps=2, sequences=2)}
    whole = converted(source, tmp_path / "whole", **changes)
    _stopped(source, tmp_path / "out", 10, tuning=changes["tuning"])
    assert digests(converted(source, tmp_path / "out", **changes)) == digests(whole)


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_layer_is_made_again_before_those_behind_it_are_taken(
    llama: Path, finished: Path, tmp_path: Path, damage: str
) -> None:
    out = tmp_path / "out"
    _stopped(llama, out, 6)
    shard = out / "model-00002-of-00004.safetensors"
    if damage == "flip":
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
    else:
        shard.unlink()
    assert digests(converted(llama, out, **SETTINGS)) == digests(finished)


# ---- other settings, other folders


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 6},
        {"scheme": "s4l16+s4l16"},
        {"effort": Effort(beam=3, columns=32)},
        {"tuning": Tuning(steps=3, sequences=2)},
        {"correction": 0.1},
        {"windows": [[5, 6, 7, 8] * 16] * 3},
        {"format": "aqlm2x8"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_settings_do_not_go_on(llama: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    out = tmp_path / "out"
    _stopped(llama, out, 6)
    before = digests(out)
    with pytest.raises(LocalqError, match="a different unfinished conversion") as caught:
        converted(llama, out, **{**SETTINGS, **change})
    assert caught.value.exit_code == ExitCode.USAGE
    assert digests(out) == before


def test_force_begins_anew(llama: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _stopped(llama, out, 6, seed=6)
    assert digests(converted(llama, out, force=True, **SETTINGS)) == digests(finished)


def test_a_folder_of_something_else_is_kept(llama: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("keep me")
    with pytest.raises(LocalqError, match="not empty") as caught:
        converted(llama, out, **SETTINGS)
    assert caught.value.exit_code == ExitCode.USAGE
    converted(llama, out, force=True, **SETTINGS)
    assert (out / "thesis.txt").read_text() == "keep me"
    assert digests(out).items() >= digests(finished).items()
    with pytest.raises(LocalqError, match="source"):
        converted(llama, llama, force=True, **SETTINGS)


def test_a_second_conversion_into_the_same_folder_waits_for_nobody(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with (out / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(LocalqError, match="another localq"):
            converted(llama, out, **SETTINGS)


# ---- disks


@pytest.mark.parametrize("count", [0, 1, 4, 9])
def test_a_full_disk_is_named_and_loses_nothing(
    llama: Path, finished: Path, tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[int], None] = os.fsync
    left = [count]

    def fsync(descriptor: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    out = tmp_path / "out"
    monkeypatch.setattr(output_shards.os, "fsync", fsync)
    with pytest.raises(LocalqError, match="disk is full") as caught:
        converted(llama, out, **SETTINGS)
    assert caught.value.exit_code == ExitCode.DISK
    monkeypatch.undo()
    assert digests(converted(llama, out, **SETTINGS)) == digests(finished)


def test_too_little_space_is_seen_before_the_first_layer(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000}))
    with pytest.raises(
        LocalqError, match=r"not enough free disk space in .*: .* bytes plus a reserve are needed, but only 1,000 "
    ) as caught:
        by_layer.convert(request(llama, tmp_path / "out", **SETTINGS), lambda *each: pytest.fail("it began"))
    assert caught.value.exit_code == ExitCode.DISK


def test_an_output_that_cannot_be_made(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalqError) as caught:
        converted(llama, tmp_path / "file" / "out", **SETTINGS)
    assert caught.value.exit_code == ExitCode.DISK
