"""Streams that cannot be written: a lost stderr costs nothing, lost output is a failure."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cli.degraded_machine import ENGINE, LOCALQ, QUICK, WORKS, environment_in, model_in, run, words


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    return environment_in(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def sound(model, environment) -> Callable[[tuple[str, ...]], subprocess.CompletedProcess[str]]:
    """The end of a verb whose streams can be written; each verb is run once."""
    return functools.cache(lambda verb: run([*LOCALQ, *words(verb, model, model.parent / "out")], environment))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "verbs"), [("full", (*QUICK, *ENGINE)), ("closed", ENGINE[:2]), ("broken", ENGINE[:2])]
)
def test_stderr_that_cannot_be_written_costs_nothing(model, environment, sound, kind, verbs):
    for verb in verbs:
        command, well = [*LOCALQ, *words(verb, model, model.parent / "out")], sound(verb)
        if kind == "closed":
            done = run(["sh", "-c", 'exec "$0" "$@" 2>&-', *command], environment, stderr=None)
        else:
            reader, stream = os.pipe() if kind == "broken" else (None, os.open("/dev/full", os.O_WRONLY))
            if reader is not None:
                os.close(reader)
            done = run(command, environment, stderr=stream)
            os.close(stream)
        assert done.returncode == well.returncode == WORKS.get(verb[0], 0), (verb, well.stderr)
        if verb[0] not in ("bench", "eval", "doctor"):  # which print times and free memory
            assert done.stdout == well.stdout, verb
        assert bool(done.stdout) == bool(well.stdout)


@pytest.mark.parametrize("to", [">/dev/full", ">&-", ">&- <&-", "1</dev/null"])
def test_output_that_is_lost_is_a_failure(model, environment, to):
    """A full disk, a closed stdout, and one that is open for reading only: 9, but for commands without output."""
    lost = [("--version",), ("ls", "--json"), ("config", "path"), ("help", "exit-codes"), ("show", "MODEL")]
    if to != ">&- <&-":
        lost.append(("run", "MODEL", "hi", "--max-tokens", "2"))
    expected = {**dict.fromkeys(lost, 9), ("prune", "--yes"): 0, ("rm", "nobody/nothing", "-y"): 4}
    for verb, code in expected.items():
        command = ["sh", "-c", f'exec "$0" "$@" {to}', *LOCALQ, *words(verb, model, model)]
        done = run(command, environment)
        assert done.returncode == code, (verb, done.stderr)
        assert ("stdout: cannot write" in done.stderr) == (code == 9), verb
        assert "unexpected" not in done.stderr
