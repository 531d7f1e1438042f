"""Long tables at a terminal go through PAGER; what is short, piped or unwanted does not."""

from __future__ import annotations

import os
import sys

import pytest

from localq.cli import execute, pager


@pytest.fixture
def screen(tmp_path, monkeypatch):
    """A terminal of so many lines, and a pager that keeps what it was given; returns what it kept."""
    kept = tmp_path / "kept"
    script = tmp_path / "pager.sh"
    script.write_text(f'#!/bin/sh\necho "$LESS" > {kept}\ncat >> {kept}\n')
    script.chmod(0o755)
    monkeypatch.setenv("PAGER", f"{script} --option")
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    monkeypatch.delenv("LESS", raising=False)
    monkeypatch.setattr(pager, "has_screen", lambda: True)

    def of_lines(lines: int) -> str:
        monkeypatch.setattr(pager.shutil, "get_terminal_size", lambda: os.terminal_size((100, lines)))
        kept.unlink(missing_ok=True)
        assert execute(["help", "environment"]) == 0
        return kept.read_text() if kept.exists() else ""

    return of_lines


def test_a_table_that_is_longer_than_the_screen_goes_through_it(screen, capfd):
    kept = screen(10)
    assert kept.startswith("FRX\nvariable ")
    assert kept.endswith("sends no telemetry\n")
    assert capfd.readouterr().out == ""
    assert screen(200) == ""
    assert "LOCALQ_NOPROJECT" in capfd.readouterr().out


def test_less_is_told_nothing_where_the_user_has_told_it(screen, monkeypatch):
    monkeypatch.setenv("LESS", "-S")
    assert screen(10).startswith("-S\n")


@pytest.mark.parametrize("command", ["cat", "", "  "])
def test_pager_cat_prints(screen, monkeypatch, capfd, command):
    monkeypatch.setenv("PAGER", command)
    screen(10)
    assert "LOCALQ_NOPROJECT" in capfd.readouterr().out


@pytest.mark.parametrize("command", ["no-such-program-at-all", "less 'open"])
def test_a_pager_that_cannot_run_is_named_and_the_table_printed(screen, monkeypatch, capfd, command):
    monkeypatch.setenv("PAGER", command)
    screen(10)
    captured = capfd.readouterr()
    assert "LOCALQ_NOPROJECT" in captured.out
    assert captured.err.startswith(f"PAGER: cannot run {command}")


def test_one_that_is_left_before_the_end_is_no_error(screen, monkeypatch, capfd):
    monkeypatch.setenv("PAGER", "true")
    screen(10)
    assert capfd.readouterr().out == ""


def test_what_was_printed_before_an_error_is_shown(screen, monkeypatch, tmp_path):
    screen(2)

    def fails() -> None:
        with pager.page_output():
            print("one\ntwo\nthree")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fails()
    assert (tmp_path / "kept").read_text() == "FRX\none\ntwo\nthree\n"


def test_ctrl_c_is_the_pagers(screen, monkeypatch, tmp_path):
    """It reaches every process of the terminal; localq waits for the pager, which ends when it likes."""
    script = tmp_path / "pager.sh"
    script.write_text(f'#!/bin/sh\ntrap "" INT\nkill -INT $PPID\ncat > {tmp_path / "kept"}\n')
    assert screen(10).startswith("variable ")


@pytest.mark.parametrize("arguments", [["config", "show"], ["fit", "--vram", "24", "--all"], ["help", "keys"]])
def test_nothing_is_paged_into_a_pipe(monkeypatch, capfd, tmp_path, arguments):
    monkeypatch.setenv("PAGER", "false")
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    assert not sys.stdout.isatty()
    assert execute(arguments) == 0
    assert len(capfd.readouterr().out.splitlines()) > 20
