"""For tests of the full screen: a cache of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured of this machine is not known."""
    monkeypatch.setenv("LOCALQ_CACHE", str(tmp_path))
