"""The script `localq` of an environment: Ctrl-C at any moment of a start ends with 130, without a traceback."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from localq.cli.registry import VERBS
from localq.kernels.setup import launcher

ROOT = Path(__file__).parents[2]
SEED, RUNS = 26, 60
pytestmark = pytest.mark.skipif(not launcher._blocks_signals(), reason="env cannot block signals")


@pytest.fixture
def program(tmp_path) -> Path:
    """The script in an environment that has the packages of this one."""
    folder = tmp_path / "venv/bin"
    folder.mkdir(parents=True)
    (folder / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (folder / "python").chmod(0o755)
    (folder / "localq").write_text("#!/bin/sh\n")  # as pip's
    assert launcher.write(folder / "localq")
    return folder / "localq"


def environment(tmp_path: Path) -> dict[str, str]:
    places = {f"LOCALQ_{name}": str(tmp_path / name) for name in ("CONFIG", "DATA", "CACHE", "MODELS")}
    return {
        **os.environ,
        **places,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }


def run(program: Path, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program, *arguments], env=environment(tmp_path), capture_output=True, text=True, check=False, timeout=120
    )


def test_it_starts_where_path_leads_nowhere(program, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(program)
    for each in (program, link):
        odd = {**environment(tmp_path), "PATH": "/nonexistent"}
        done = subprocess.run([each, "--version"], env=odd, capture_output=True, text=True, check=False, timeout=120)
        assert (done.returncode, done.stderr) == (0, "")


def test_it_is_localq_with_its_arguments(program, tmp_path):
    assert run(program, tmp_path, "--version").stdout.startswith("localq ")
    done = run(program, tmp_path, "show", "a b'c\"$HOME")
    assert (done.returncode, "a b'c\"$HOME" in done.stderr) == (4, True)
    assert stat.S_IMODE(program.stat().st_mode) == 0o755


def test_it_works_through_links(program, tmp_path):
    (tmp_path / "near").symlink_to(program)
    (tmp_path / "far").symlink_to("near")
    assert run(tmp_path / "far", tmp_path, "--version").stdout.startswith("localq ")


def test_it_is_written_once(program):
    def written() -> tuple[int, int, int]:  # reading changes the time of the last access
        found = program.stat()
        return found.st_ino, found.st_mtime_ns, found.st_ctime_ns

    before = written()
    assert launcher.write(program)
    assert written() == before
    assert sorted(each.name for each in program.parent.iterdir()) == ["localq", "python"]


def test_pips_script_stays_where_this_one_would_not_work(tmp_path, monkeypatch):
    assert not launcher.write(tmp_path / "localq")  # nothing is installed
    (tmp_path / "a=b").mkdir()
    script = tmp_path / "a=b/localq"
    script.write_text("pip's")
    assert not launcher.write(script)
    monkeypatch.setattr(launcher, "_blocks_signals", lambda: False)
    (tmp_path / "localq").write_text("pip's")
    assert not launcher.write(tmp_path / "localq")
    assert (script.read_text(), (tmp_path / "localq").read_text()) == ("pip's", "pip's")


def interrupt(command: list[str | Path], tmp_path: Path, delay_s: float) -> tuple[int, str]:
    """The exit code and stderr of a command that gets a Ctrl-C after `delay_s`."""
    process = subprocess.Popen(
        command, env=environment(tmp_path), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    time.sleep(delay_s)
    with contextlib.suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    return process.returncode, said


def test_a_ctrl_c_in_the_first_50_ms_ends_with_130(program, tmp_path):
    """Of any verb. Before the script is there, the shell that runs it is ended by the signal, which is 130 as well."""
    rng = random.Random(SEED)
    for number in range(RUNS):
        verb, delay_s = VERBS[number % len(VERBS)], rng.uniform(0, 0.05)
        code, said = interrupt([program, verb], tmp_path, delay_s)
        assert (code, said) in ((130, ""), (-signal.SIGINT, "")), (verb, delay_s, said)


def test_a_later_ctrl_c_ends_without_a_traceback(program, tmp_path):
    """While the verb is imported and works; it may have ended by then, with its own code."""
    rng = random.Random(SEED)
    for number in range(RUNS // 2):
        verb, delay_s = VERBS[number % len(VERBS)], rng.uniform(0.05, 0.6)
        code, said = interrupt([program, verb], tmp_path, delay_s)
        assert "Traceback" not in said, (verb, delay_s, said)
        assert code in (130, 0, 1, 2, 4, 6, 7, -signal.SIGINT), (verb, delay_s, said)
