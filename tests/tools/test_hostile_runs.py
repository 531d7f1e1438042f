"""Hostile runs: some of the campaign's own, and what its rules say of programs that break them."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools import hostile_process, hostile_runs, process_tree
from tests.tools.hostile_judge import judge
from tests.tools.hostile_process import Plan
from tests.tools.hostile_scratch import Scratch, Secrets

SEEDS = range(60_000, 60_040)  # of all kinds in turn


@pytest.fixture
def scratch(tmp_path: Path) -> Scratch:
    return Scratch(tmp_path / "scratch", Secrets.draw(random.Random(1))).plant()


@pytest.fixture
def broken(scratch: Scratch, monkeypatch: pytest.MonkeyPatch):
    """The rules that a program of Python code, run in the place of localq, breaks."""

    def judged(code: str, **fields: object) -> list[str]:
        monkeypatch.setattr(hostile_process, "command", lambda: [sys.executable, "-c", code])
        plan = Plan([], "code", **fields)
        before = scratch.snapshot()
        found = judge(plan, scratch, before, hostile_process.run(plan, scratch))
        return sorted({each.partition(":")[0] for each in found})

    return judged


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"{hostile_runs.kind_of(seed)}-{seed}")
def test_a_hostile_run_breaks_no_rule(seed, tmp_path):
    result = hostile_runs.run_one(seed, tmp_path)
    assert result.broken == [], (result.trap, result.command)


def test_all_kinds_are_among_them():
    counts = [sum(hostile_runs.kind_of(seed) == kind for seed in SEEDS) for kind in hostile_runs.KINDS]
    assert min(counts) >= len(SEEDS) // len(counts)


def test_a_seed_is_the_same_run_again(tmp_path):
    def drawn(folder: str) -> tuple[object, ...]:
        found = []
        for seed in range(700, 724):
            rng = random.Random(f"hostile run {seed}")
            scratch = Scratch(tmp_path / folder, Secrets.draw(rng)).plant()
            plan = hostile_runs.KINDS[hostile_runs.kind_of(seed)](rng, scratch)
            plan.close()
            found.append((plan.argv, plan.trap, plan.keys, plan.stdin, plan.signal, plan.limits))
            scratch.remove()
        return tuple(found)

    first = repr(drawn("first"))
    assert repr(drawn("other")).replace("/other/", "/first/") == first.replace("/other/", "/first/")


def test_a_harmless_program_breaks_none(broken):
    assert broken("print('hello'); import sys; sys.exit(8)") == []
    assert broken("print('hello')", keys=["x"]) == []


@pytest.mark.parametrize(
    ("code", "rules"),
    [
        ("1 / 0", ["traceback"]),
        ("import os; print(open(os.environ['HOME'] + '/.cache/huggingface/token').read())", ["secret"]),
        ("import os; print(os.environ['HF_ENDPOINT'])", ["secret"]),
        ("import os; print(' '.join(os.environ['HF_ENDPOINT']))", ["secret"]),
        ("import os; t = os.environ['HF_ENDPOINT']; open(os.environ['TMPDIR'] + '/x', 'w').write(t)", ["secret"]),
        ("import os, sys; os.execl(sys.executable, 'x', '-c', 'import time; time.sleep(0.5)', "
         "os.environ['HF_ENDPOINT'])",
         ["secret"]),
        ("import os; d = os.environ['HOME'] + '/.local/share/localq/'; os.link(d + 'sessions.db', d + '../copy')",
         ["foreign file", "secret"]),
        ("import sqlite3, os; print(*sqlite3.connect(os.environ['HOME'] + '/.local/share/localq/sessions.db')"
         ".execute('SELECT content FROM turns'))", ["secret"]),
        ("open('notes.txt', 'w')", ["foreign file"]),
        ("open('link', 'a').write('x')", ["foreign file"]),
        ("import os; os.unlink('link')", ["foreign file"]),
        ("import os; os.chmod('../foreign/keep.txt', 0o600)", ["foreign file"]),
        ("open('new.txt', 'w')", ["foreign file"]),
        ("import sys; sys.exit(77)", ["exit code"]),
        ("import sys; sys.exit(130)", ["exit code"]),
        ("import os; os.kill(os.getpid(), 11)", ["exit code"]),
        ("print('\\x1b]0;ZQtitle\\x07')", ["terminal"]),
        ("print('\\u202e')", ["terminal"]),
        ("import subprocess; subprocess.Popen(['sleep', '300'], stdout=-3, stderr=-3)", ["process"]),
        ("import os; d = os.environ['HOME'] + '/.local/state/localq'; os.makedirs(d); "
         "open(d + '/errors.log', 'w').write('TypeError')", ["traceback"]),
    ],
)  # fmt: skip
def test_a_broken_rule_is_seen(broken, code, rules):
    assert broken(code) == rules


def test_what_hangs_is_seen_and_ended(broken, monkeypatch):
    monkeypatch.setattr(hostile_process, "LIMIT_S", 0.5)
    assert broken("import time; time.sleep(60)") == ["hang"]
    assert broken("while True: pass") == ["hang"]
    assert "hang" in broken("import signal, time\nfor n in (1, 2, 15): signal.signal(n, 1)\ntime.sleep(60)", keys=[])


def test_waiting_for_a_processor_is_no_hang(monkeypatch):
    """The clock of a run that is ready and gets none stands still, else it goes on."""
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while set(process_tree.states_of(process.pid)) != {"S"}:
            time.sleep(0.01)
        clock = hostile_process.Clock(process.pid, hostile_process.Outcome())
        clock.tick()
        assert 0.2 <= _given(clock) < 2.0
        monkeypatch.setattr(hostile_process, "states_of", lambda process: ["S", "R"])
        assert _given(clock) < 0.1
        process.communicate(b"\n")


def _given(clock: hostile_process.Clock) -> float:
    before = clock.tick()
    time.sleep(0.2)
    return clock.tick() - before


def test_the_terminal_must_be_put_back(broken):
    assert broken("print('\\x1b[?1049h', end='')", keys=[]) == ["terminal"]
    assert broken("import tty; tty.setraw(0)", keys=[]) == ["terminal"]
