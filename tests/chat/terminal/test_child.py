"""A signal that ends localq ends its pager or editor first, and leaves the terminal as it was."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from tests.support.cli.terminal import Terminal


@pytest.mark.skipif(shutil.which("less") is None, reason="no less")
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_both_leaves_the_terminal_as_it_was(number: int) -> None:
    """less ends at a hangup without resetting the terminal."""
    environment = {**os.environ, "PAGER": "less", "TERM": "xterm-256color"}
    with Terminal([sys.executable, "-m", "localq", "help", "environment"], environment, (80, 10)) as terminal:
        terminal.until("variable ")
        terminal.send("h")
        terminal.until("HELP")
        os.killpg(terminal.process.pid, number)
        assert terminal.wait() == 143, terminal.scrolled
        assert terminal.left_behind() == []


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_an_editor_is_told_to_end_before_it_is_killed(number: int, tmp_path: Path) -> None:
    """It saves what it has and gives the terminal back."""
    script, saved = tmp_path / "editor.sh", tmp_path / "saved"
    script.write_text(
        "#!/bin/sh\n"
        f"trap 'stty sane; printf \"\\033[?1049l\"; echo text > {saved}; exit 1' TERM HUP\n"
        'stty raw -echo; printf "\\033[?1049h"; echo ready; while :; do sleep 0.05; done\n'
    )
    script.chmod(0o755)
    environment = {**os.environ, "EDITOR": str(script), "TERM": "xterm", "LOCALQ_CONFIG": str(tmp_path / "config.toml")}
    environment.pop("VISUAL", None)
    with Terminal([sys.executable, "-m", "localq", "config", "edit"], environment) as terminal:
        terminal.until("ready")
        terminal.process.send_signal(number)
        assert terminal.wait() == 143, terminal.scrolled
        assert terminal.left_behind() == []
        assert saved.read_text() == "text\n"
