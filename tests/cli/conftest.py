"""For tests of the command line: a folder of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the test is, with its settings and its conversations."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path
