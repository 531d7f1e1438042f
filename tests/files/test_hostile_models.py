"""Malformed model folders (reliability M1 to M6): each ends in its exit code, quickly, and nothing outside is touched.

The corpus and random damage are driven by one child process, which records what Python opens, imports and runs; see
`support/hostile_drive.py`, by which a larger campaign is run: `--fuzz 20000 --seed 7`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.common.pace import within
from tests.support.files.hostile_models import Case, cases, write_sound
from tests.tools.mutations import CHARACTERS, CPU_SECONDS

ROOT = Path(__file__).parents[2]
CASES = {case.name: case for case in cases()}
MUTATIONS, SEED = 400, 0
WALL_SECONDS = 10.0  # of a machine that does other things too; a wait for ever would end the child
LARGEST_GROWTH = 200 * 2**20
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT),
               "OMP_NUM_THREADS": "1", "RUST_BACKTRACE": "0", "LOCALQ_CACHE": "/nonexistent"}  # fmt: skip


def drive(*arguments: str) -> list[dict[str, Any]]:
    """The lines of a child process."""
    command = [sys.executable, "-m", "tests.tools.hostile_drive", *arguments]
    done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:].decode()
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def driven() -> dict[str, Any]:
    """Case -> what came of it; "mutations" -> the lines of the campaign."""
    lines = drive("--fuzz", str(MUTATIONS), "--seed", str(SEED))
    return {line["case"]: line for line in lines if "case" in line} | {
        "mutations": [line for line in lines if "case" not in line]
    }


def test_the_corpus_is_as_large_as_it_should_be() -> None:
    assert len(CASES) == len(cases())  # no name twice
    assert sum(case.exit_code != 0 for case in CASES.values()) >= 400
    for part in ("M1", "M2", "M3", "M4", "M5", "M6"):
        assert sum(name.startswith(part) for name in CASES) >= 9, part


@pytest.mark.parametrize("name", CASES)
def test_a_malformed_model_ends_in_its_exit_code(driven: dict[str, Any], name: str) -> None:
    case, came = CASES[name], driven[name]
    assert came["run"] == case.exit_code, came["run_text"]
    assert came["show"] in (0, case.exit_code), came["show_text"]
    for way in ("show", "run"):
        assert came[f"{way}_cpu_s"] < CPU_SECONDS or within(CPU_SECONDS, lambda way=way: alone_s(name, way))
        assert came[f"{way}_s"] < WALL_SECONDS
        assert came[f"{way}_characters"] < CHARACTERS
    assert came["seen"] == []
    assert came["ran"] is False
    assert came["peak_bytes"] < LARGEST_GROWTH


def alone_s(name: str, way: str) -> float:
    """CPU time of one case, driven once more."""
    (found,) = (line for line in drive("--only", name) if line["case"] == name)
    return found[f"{way}_cpu_s"]


def test_random_damage_is_taken_or_refused(driven: dict[str, Any]) -> None:
    *misbehaved, total = driven["mutations"]
    assert misbehaved == []
    assert total["mutations"] == MUTATIONS
    assert total["refused"] > MUTATIONS / 2
    assert total["taken"] > 0


def test_the_recorder_sees_what_it_must(tmp_path: Path) -> None:
    """Each of these, done by a model's files, would be a break-in."""
    script = (
        "import pathlib, pickle, socket, subprocess, sys\n"
        "from tests.tools import hostile_drive as h\n"
        "import safetensors, safetensors.numpy, numpy\n"
        "folder, out = map(pathlib.Path, sys.argv[1:])\n"
        "safetensors.numpy.save_file({'a': numpy.zeros(1)}, out)\n"
        "recorder = h.Recorder(); h.record_safetensors(recorder)\n"
        "acts = [lambda: open(folder / 'config.json').close(), lambda: open(out).close(), lambda: __import__('this'),\n"
        "        lambda: exec('1'), lambda: pickle.loads(pickle.dumps(pathlib.Path('x'))),\n"
        "        lambda: subprocess.run(['true']), lambda: socket.socket(), lambda: safetensors.safe_open(out, 'np'),\n"
        "        lambda: open(folder / 'link').close()]\n"
        "for act in acts:\n"
        "    with recorder.watching(folder.resolve()) as seen: act()\n"
        "    print('RESULT', len(seen))\n"
    )
    folder = write_sound(tmp_path / "model")
    (folder / "link").symlink_to("/etc/hostname")
    command = [sys.executable, "-c", script, str(folder), str(tmp_path / "outside.safetensors")]
    done = subprocess.run(command, capture_output=True, env=ENVIRONMENT, timeout=60, check=True)
    counts = [int(line.split()[1]) for line in done.stdout.decode().splitlines() if line.startswith("RESULT")]
    assert counts[0] == 0
    assert len(counts) == 9
    assert all(counts[1:])


@pytest.mark.parametrize("name", ["M1 header: overlap", "M4 nf4: blob is deep", "M6 model: negative id"])
def test_the_command_line_says_so_in_one_line(tmp_path: Path, name: str) -> None:
    case: Case = CASES[name]
    folder = write_sound(tmp_path / "model", case.format)
    case.change(folder)
    command = [sys.executable, "-m", "localq", "run", str(folder), "hello", "--device", "cpu"]
    places = {f"LOCALQ_{each}": str(tmp_path / each) for each in ("CONFIG", "DATA", "CACHE")}
    done = subprocess.run(
        command, capture_output=True, env=ENVIRONMENT | places, cwd=folder, timeout=120, stdin=subprocess.DEVNULL
    )
    assert (done.returncode, done.stdout) == (8, b"")
    assert len(done.stderr.decode().splitlines()) == 1, done.stderr.decode()
    assert done.stderr.startswith(b"localq: ")
