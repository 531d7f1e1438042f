"""One server for many tests: starting its engine process takes half a second."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cli.terminal_localq import write_model
from tests.support.server.live_server import KEY, LiveServer
from tests.support.server.tool_model import write_tool_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def shared_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    server = LiveServer(model_folder, tmp_path_factory.mktemp("server"), origins=("http://good.example",))
    yield server
    server.close()


@pytest.fixture
def server(shared_server: LiveServer) -> Iterator[LiveServer]:
    """A server without a key; the engine says "Hello."."""
    shared_server.say()
    yield shared_server
    shared_server.hang_up()


@pytest.fixture(scope="session")
def locked_server(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server with a key."""
    server = LiveServer(model_folder, tmp_path_factory.mktemp("locked"), key=KEY)
    yield server
    server.close()


@pytest.fixture(scope="session")
def shared_tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_tool_model(tmp_path_factory.mktemp("models") / "tiny")
    server = LiveServer(folder, tmp_path_factory.mktemp("tools"))
    yield server
    server.close()


@pytest.fixture
def tool_server(shared_tool_server: LiveServer) -> Iterator[LiveServer]:
    """A server of a model that takes tools."""
    shared_tool_server.say()
    yield shared_tool_server
    shared_tool_server.hang_up()
