"""A fake hub with the source model, and a user whose token may write to `someone`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.files import hub_server, made_models
from tests.support.files.fake_hub import FakeHub


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In one file of weights, by the command."""
    return made_models.make(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_models.make_in_shards(tmp_path_factory.mktemp("sharded"))


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_server.running(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
        monkeypatch.setenv("LOCALQ_STATE", str(tmp_path / "state"))
        server.store.writers = frozenset({hub_server.TOKEN})
        server.add(made_models.BASE, {"LICENSE": b"The licence of the source.\n"}).card["license"] = "apache-2.0"
        yield server
