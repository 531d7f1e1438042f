"""`--install-completion` loses nothing of the files with which a shell starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from localq import disk
from localq.cli import completion
from localq.errors import ExitCode, LocalqError

MINE = b"export A=1\nalias b='c'  # \xff\n"
START_FILES = [(name, shell.start_file) for name, shell in completion.SHELLS.items() if shell.start_file]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "it's my home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_the_script_and_the_lines_are_there_once(home, shell):
    for _ in range(2):
        script = completion.install(shell)
        assert "_LOCALQ_COMPLETE" in script.read_text()
    start_file = home / completion.SHELLS[shell].start_file
    if start_file != home:
        lines = [line for line in start_file.read_text().splitlines() if line]
        assert len(lines) == len(completion.SHELLS[shell].lines)


@pytest.mark.parametrize("program", ["bash", "zsh"])
def test_a_shell_reads_the_start_file(home, program):
    completion.install("bash")
    if program == "zsh":
        completion.install("zsh")
    checked = [program, "-n", str(home / f".{program}rc")]
    try:
        done = subprocess.run(checked, capture_output=True, text=True, timeout=20, check=False)
    except FileNotFoundError:
        pytest.skip(f"no {program}")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("shell", "start_file"), START_FILES)
def test_what_the_start_file_has_stays_at_its_beginning(home, shell, start_file):
    kept = home / "dotfiles"
    kept.write_bytes(MINE)
    kept.chmod(0o640)
    (home / start_file).symlink_to(kept)
    before = kept.stat()
    completion.install(shell)
    assert (home / start_file).is_symlink()
    assert kept.read_bytes().startswith(MINE + b"\n")
    assert (kept.stat().st_ino, kept.stat().st_mode) == (before.st_ino, before.st_mode)


@pytest.mark.parametrize(("shell", "start_file"), START_FILES)
def test_a_full_disk_costs_nothing_that_was_there(home, shell, start_file):
    """The limit of a file's size stands for the disk; in another process, which keeps it."""
    (home / start_file).write_bytes(MINE)
    limited = "import resource as r, sys; r.setrlimit(r.RLIMIT_FSIZE, (0, 0)); from localq.cli import completion;"
    code = f"{limited} completion.install(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", code, shell], capture_output=True, timeout=60, check=False)
    assert b"the disk is full" in done.stderr
    assert (home / start_file).read_bytes() == MINE


@pytest.mark.parametrize(("shell", "start_file"), START_FILES)
@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "huge", "loop"])
def test_a_start_file_that_is_none_is_named(home, shell, start_file, kind):
    path = home / start_file
    make = {
        "pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "device": lambda: path.symlink_to("/dev/zero"),
        "loop": lambda: path.symlink_to(path),
        "huge": lambda: path.touch() or os.truncate(path, 2**40),
    }  # fmt: skip
    make[kind]()
    with pytest.raises(LocalqError) as caught:
        completion.install(shell)
    assert str(path) in caught.value.what
    assert caught.value.exit_code in (ExitCode.USAGE, ExitCode.DISK)


@pytest.mark.parametrize("shell", ["powershell", "", "\x1b]0;x\x07"])
def test_another_shell_is_refused(shell):
    with pytest.raises(LocalqError, match="is not supported") as caught:
        completion.install(shell)
    assert caught.value.exit_code == ExitCode.USAGE


def test_the_option_installs_it_this_way(home):
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    command = [sys.executable, "-m", "localq", "--install-completion", "bash"]
    (home / ".bashrc").mkdir()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (ExitCode.DISK, 1)
    assert "not a regular file" in done.stderr
    (home / ".bashrc").rmdir()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert disk.read_text(home / ".bashrc").count("source") == 1


ASKED = {
    "nothing": {},
    "no place": {"COMP_WORDS": "localq sh"},
    "no words": {"COMP_CWORD": "1"},
    "a place that is no number": {"COMP_WORDS": "localq sh", "COMP_CWORD": "one"},
    "an open quote": {"COMP_WORDS": 'localq "sh', "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "localq 'sh"},
    "a lone backslash": {"COMP_WORDS": "localq \\", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "localq \\"},
    "broken settings": {"COMP_WORDS": "localq chat -", "COMP_CWORD": "2", "_TYPER_COMPLETE_ARGS": "localq chat -"},
}


@pytest.mark.parametrize("shell", completion.SHELLS)
@pytest.mark.parametrize("given", ASKED)
def test_completions_of_a_broken_line_are_none_without_a_word(tmp_path, shell, given):
    """What is printed would stand in the line that the user is typing."""
    config = tmp_path / "config.toml"
    config.write_text("= broken" if "settings" in given else "")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMP_", "_TYPER_"))}
    own = {completion.VARIABLE: f"complete_{shell}", "XDG_STATE_HOME": str(tmp_path), "LOCALQ_CONFIG": str(config)}
    command = [sys.executable, "-m", "localq"]
    environment = {**kept, **own, **ASKED[given]}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    assert done.returncode in (0, 1)
    assert done.stderr == ""
    assert "unexpected" not in done.stdout
    assert not list(tmp_path.rglob("errors.log"))
