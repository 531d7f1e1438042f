"""Machines that lack something: a command works, or ends with one line and a documented exit code."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from localq import processes
from localq.errors import ExitCode, LocalqError
from localq.processes import shortage
from tests.support.files.hostile_models import write_sound

ROOT = Path(__file__).parents[2]
LOCALQ = (sys.executable, "-m", "localq")
QUICK = (
    ("--help",), ("--version",), ("ls",), ("show", "MODEL"), ("verify",), ("fit", "--vram", "24"), ("config", "path"),
    ("help",), ("prune", "--yes"), ("doctor",), ("rm", "nobody/nothing", "-y"), ("pull", "nobody/nothing"), ("tui",),
)  # fmt: skip
ENGINE = (
    ("run", "MODEL", "hi", "--max-tokens", "2"), ("chat", "MODEL", "--plain", "--no-save"),
    ("eval", "MODEL", "--text", "TEXT", "--window", "16", "--max-windows", "1", "--device", "cpu"),
    ("bench", "MODEL", "-p", "4", "-n", "2", "-r", "1", "--against", "none", "--no-baseline", "--device", "cpu"),
    ("quantize", "MODEL", "--format", "nf4", "--out", "OUT", "--force", "--yes"),
)  # fmt: skip
WORKS = {"rm": 4, "pull": 6, "tui": 2}  # exit codes on a sound machine, besides 0


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = write_sound(tmp_path_factory.mktemp("model") / "sound")
    (folder.parent / "text.txt").write_text("a red boat and a blue boat " * 30)
    return folder


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOCALQ_", "HF_", "XDG_"))}
    places = {f"LOCALQ_{name}": str(tmp_path / name) for name in ("CONFIG", "DATA", "CACHE", "MODELS")}
    hub = {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1", "XDG_STATE_HOME": str(tmp_path / "state")}
    return {**kept, **places, **hub, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOCALQ_DEVICE": "cpu"}


def words(verb: tuple[str, ...], model: Path, out: Path) -> list[str]:
    meant = {"MODEL": str(model), "TEXT": str(model.parent / "text.txt"), "OUT": str(out)}
    return [meant.get(word, word) for word in verb]


def limit(kind: int, most: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (most, most))


def run(command: list[str], environment: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
    given = {"stderr": subprocess.PIPE, "cwd": ROOT, **options}
    return subprocess.run(
        command, env=environment, input="hi\n", stdout=subprocess.PIPE, text=True, timeout=240, check=False, **given
    )


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "verbs"), [("full", (*QUICK, *ENGINE)), ("closed", ENGINE[:2]), ("broken", ENGINE[:2])]
)
def test_stderr_that_cannot_be_written_costs_nothing(model, environment, tmp_path, kind, verbs):
    for verb in verbs:
        command = [*LOCALQ, *words(verb, model, tmp_path / "out")]
        sound = run(command, environment)
        if kind == "closed":
            done = run(["sh", "-c", 'exec "$0" "$@" 2>&-', *command], environment, stderr=None)
        else:
            reader, stream = os.pipe() if kind == "broken" else (None, os.open("/dev/full", os.O_WRONLY))
            if reader is not None:
                os.close(reader)
            done = run(command, environment, stderr=stream)
            os.close(stream)
        assert done.returncode == sound.returncode == WORKS.get(verb[0], 0), (verb, sound.stderr)
        if verb[0] not in ("bench", "eval", "doctor"):  # which print times and free memory
            assert done.stdout == sound.stdout, verb
        assert bool(done.stdout) == bool(sound.stdout)


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
