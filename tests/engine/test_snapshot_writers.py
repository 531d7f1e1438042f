"""Writers of snapshots that are killed, find the disk full, or come two at a time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

from localq.engine import cache_blocks, snapshot
from localq.engine.generate import Engine
from localq.errors import ExitCode, LocalqError
from tests.support.engine.engine_runs import prompt_of
from tests.support.engine.snapshot_files import TOKENS, WEIGHTS, restored, stored, with_cache

WRITER = """
    import os, signal, sys
    from pathlib import Path
    import torch
    from localq.engine import cache_blocks, snapshot
    from localq.engine.generate import Engine
    from localq.engine.load.load import load
    from localq.planner.load_options import LoadOptions
    from localq.files.model_folder import open_model
    snapshot.BLOCK = cache_blocks.BLOCK = 4096
    torch.set_num_threads(1)
    engine = Engine(load(open_model(Path(sys.argv[1])), LoadOptions(device="cpu", dtype="float32")))

    def die_at(name, left):
        call = getattr(os, name)
        def dying(*arguments, **options):
            nonlocal left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **options)
        setattr(os, name, dying)

    for point in sys.argv[3:]:
        folder = Path(sys.argv[2]) / point
        engine._text.ids = list(range(1, 31))
        engine.save_cache(folder / "7.kv", "w" * 64)
        child = os.fork()
        if child == 0:
            die_at(point.split()[0], int(point.split()[1]))
            engine._text.ids = list(range(1, 200))
            engine.save_cache(folder / "7.kv", "w" * 64)
        print(os.WTERMSIG(os.waitpid(child, 0)[1]))
"""


def test_a_writer_that_is_killed_leaves_the_file_that_was_there(checkpoint, loaded, tmp_path, monkeypatch):
    points = ["pwrite 0", "pwrite 1", "pwrite 9", "fsync 0", "replace 0"]
    command = [sys.executable, "-c", textwrap.dedent(WRITER), str(checkpoint), str(tmp_path), *points]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.split() == [str(int(signal.SIGKILL))] * len(points), run.stderr
    for module in (snapshot, cache_blocks):
        monkeypatch.setattr(module, "BLOCK", 4096)
    for point in points:
        engine = Engine(loaded)
        assert engine.restore_cache(tmp_path / point / "7.kv", WEIGHTS) == 30
        assert len(list((tmp_path / point).glob("7.kv.*.part"))) == 1  # which the front end sweeps away


def test_a_full_disk_leaves_the_file_that_was_there(written, monkeypatch):
    path, model = written
    before = path.read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(LocalqError, match="the disk is full") as caught:
        snapshot.save(path, model, WEIGHTS, prompt_of(TOKENS, seed=3))
    assert caught.value.exit_code == ExitCode.DISK
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == ["7.kv"]


def test_two_writers_and_a_reader_see_whole_files(written, loaded):
    path, _ = written
    conversations = [prompt_of(20 + i, seed=i) for i in range(2)]
    models = [with_cache(loaded, torch.float32, 16, 64 + i) for i in range(2)]
    errors: list[BaseException] = []

    def write(number: int) -> None:
        try:
            for _ in range(15):
                snapshot.save(path, models[number], WEIGHTS, conversations[number])
        except BaseException as error:
            errors.append(error)

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    reader = with_cache(loaded, torch.float32, 16, 99)
    seen = 0
    while any(writer.is_alive() for writer in writers) or not seen:
        ids = restored(path, reader)
        if ids in conversations:
            seen += 1
            assert stored(reader, len(ids)) == stored(models[conversations.index(ids)], len(ids))
    for writer in writers:
        writer.join()
    assert not errors
    assert os.listdir(path.parent) == ["7.kv"]
