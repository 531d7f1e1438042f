"""A package that is not the one that localq asks for is named in one line; another fault is named with its log."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from localq import cli
from localq.cli import command_line, requirements

STATED = [
    "typer>=0.29",
    "textual<9,>=8.2",
    "rich>=14",
    'pytest>=999; extra == "test"',
    'colorama; sys_platform == "win32"',
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Name -> version, to be changed by a test."""
    there = {"typer": "0.29.2", "textual": "8.2.8", "rich": "15.0.0rc1"}

    def version(name: str) -> str:
        if name not in there:
            raise importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(requirements, "requires", lambda name: STATED)
    monkeypatch.setattr(requirements, "version", version)
    return there


def test_what_this_environment_has_is_enough() -> None:
    assert requirements.find_unmet() is None


@pytest.mark.parametrize(
    ("name", "version", "said"),
    [
        ("typer", "0.24.1", "typer 0.24.1 is installed: localq needs typer>=0.29."),
        ("textual", "9.0", "textual 9.0 is installed: localq needs textual<9,>=8.2."),
        ("rich", None, "rich is not installed: localq needs rich>=14."),
    ],
)
def test_the_first_that_is_missed_is_named(
    installed: dict[str, str], name: str, version: str | None, said: str
) -> None:
    assert requirements.find_unmet() is None
    installed.pop(name)
    if version is not None:
        installed[name] = version
    assert str(requirements.find_unmet()).startswith(said)


def test_out_of_a_folder_that_was_not_installed_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "PACKAGE", "no-such-package-anywhere")
    assert requirements.find_unmet() is None


def test_a_failing_verb_names_it_in_one_line(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fails(*given: object, **named: object) -> None:
        raise AttributeError("'TyperOption' object has no attribute 'type_descriptor'")

    monkeypatch.setattr(command_line, "app", fails)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert cli.execute(["ls"]) == 1  # all is as it should be: the fault is localq's own
    assert "unexpected error (AttributeError)" in capsys.readouterr().err
    installed["typer"] = "0.24.1"
    assert cli.execute(["ls"]) == 1
    shown = capsys.readouterr().err
    assert shown.count("\n") == 1
    assert "typer 0.24.1 is installed" in shown
    assert "pip install 'typer>=0.29'" in shown
    assert "type_descriptor" in shown
