"""Machines that lack something: a command works, or ends with one line and a documented exit code."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from localq import processes
from localq.errors import ExitCode, LocalqError
from localq.processes import shortage
from tests.support.cli.degraded_machine import ENGINE, LOCALQ, QUICK, WORKS, environment_in, model_in, run, words


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    return environment_in(tmp_path)


def limit(kind: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (most, most))


def check(done: subprocess.CompletedProcess[str], verb: tuple[str, ...], codes: set[int]) -> None:
    """Either it works, or its last line says what is lacking; `codes`: of such an end."""
    said = done.stderr or ""
    assert "Traceback" not in said, said
    assert "unexpected" not in said, said
    if done.returncode != WORKS.get(verb[0], 0):
        assert done.returncode in codes, (verb, said)
        errors = [line for line in said.splitlines() if line.startswith("localq: ")]
        assert len(errors) == 1, said
        assert errors[0] == said.splitlines()[-1]


@pytest.mark.parametrize(("descriptors", "verbs"), [(5, QUICK), (6, ENGINE), (11, ENGINE)])
def test_few_descriptors(model, environment, tmp_path, descriptors, verbs):
    for verb in verbs:
        command = [*LOCALQ, *words(verb, model, tmp_path / "out")]
        done = run(command, environment, preexec_fn=limit(resource.RLIMIT_NOFILE, descriptors))
        check(done, verb, {1, 3, 8, 9})


@pytest.mark.parametrize(("mebibytes", "verbs"), [(20, QUICK[:4]), (28, QUICK), (48, ENGINE), (400, ENGINE)])
def test_little_address_space(model, environment, tmp_path, mebibytes, verbs):
    for verb in verbs:
        command = [*LOCALQ, *words(verb, model, tmp_path / "out")]
        done = run(command, environment, preexec_fn=limit(resource.RLIMIT_AS, mebibytes * 2**20))
        check(done, verb, {ExitCode.DOES_NOT_FIT})


@pytest.mark.slow
def test_a_deleted_working_folder(model, environment, tmp_path):
    for verb in (*QUICK, *ENGINE):
        gone = tmp_path / "gone"
        gone.mkdir()
        command = ["sh", "-c", 'rmdir "$PWD" && exec "$0" "$@"', *LOCALQ, *words(verb, model, tmp_path / "out")]
        check(run(command, environment, cwd=gone), verb, {ExitCode.USAGE})


@pytest.mark.slow
def test_a_temporary_folder_that_cannot_be_written(model, environment, tmp_path):
    environment |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), "/proc")
    for verb in (*QUICK, *ENGINE):
        check(run([*LOCALQ, *words(verb, model, tmp_path / "out")], environment), verb, {ExitCode.DISK})


@pytest.mark.slow
@pytest.mark.parametrize("home", [None, "/nonexistent", "/proc"])
def test_no_home(model, environment, tmp_path, home):
    """Where all that is kept has other places it is of no use; else it is named."""
    codes = {int(ExitCode.DISK), int(ExitCode.USAGE)}
    environment.pop("HOME", None)
    if home is None:
        for verb in (*QUICK, *ENGINE):
            check(run([*LOCALQ, *words(verb, model, tmp_path / "out")], environment), verb, codes)
        return
    kept = ("LOCALQ_CONFIG", "LOCALQ_DATA", "LOCALQ_CACHE", "LOCALQ_MODELS", "HF_HUB_CACHE", "XDG_STATE_HOME")
    environment = {name: value for name, value in environment.items() if name not in kept} | {"HOME": home}
    for verb in (*QUICK[2:10], *ENGINE[:2]):
        check(run([*LOCALQ, *words(verb, model, tmp_path / "out")], environment), verb, codes)


def test_limits_of_torch_are_seen_before_it_is_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**29, 2**29))
    with pytest.raises(LocalqError, match="limited to 512 MiB") as refused:
        processes.check_torch()
    assert refused.value.exit_code == ExitCode.DOES_NOT_FIT
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    processes.check_torch()


@pytest.mark.parametrize(
    ("error", "code", "what"),
    [
        (OSError(24, "Too many open files"), 1, "open files"),
        (OSError(23, "Too many open files in system"), 1, "open files"),
        (MemoryError(), 3, "memory"),
        (OSError(12, "Cannot allocate memory"), 3, "memory"),
        (RuntimeError("can't start new thread"), 3, "memory"),
        (ImportError("libx.so: failed to map segment from shared object"), 3, "memory"),
        (FileNotFoundError(2, "No usable temporary directory found in ['/tmp']"), 9, "temporary folder"),
        (FileNotFoundError(2, "No such file or directory"), 2, "working folder"),
        (RuntimeError("Could not determine home directory."), 9, "home folder"),
    ],
)
def test_what_is_lacking_is_named(error, code, what):
    found = shortage(error)
    assert found is not None
    assert (found.exit_code, found.what) == (code, what)
    outer = ValueError("a consequence")
    outer.__cause__ = error
    assert str(shortage(outer)) == str(found)


@pytest.mark.parametrize("error", [ValueError("x"), FileNotFoundError(2, "No such file", "a.txt"), RuntimeError("x")])
def test_a_bug_is_no_shortage(error):
    assert shortage(error) is None
