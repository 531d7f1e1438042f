"""A server for the tests of a module, and what it is allowed anew for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from localq.chat.tools.toolbox import Toolbox
from tests.support.chat.tool_chats import forget, serve


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home folder of the server."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def served(home: Path) -> Iterator[Toolbox]:
    """The server, which runs for all tests of the module."""
    with serve(home) as box:
        yield box


@pytest.fixture
def box(served: Toolbox) -> Toolbox:
    """The server; nothing is allowed yet."""
    forget(served)
    return served
