"""For all tests: those marked `cuda` skip by name where they cannot run, and no test leaves this machine."""

from __future__ import annotations

import gc
import importlib.util
import ipaddress
import os
import signal
import socket
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

_modules = 0  # how many there were when their objects were last frozen


def pytest_configure() -> None:
    _default_signals()
    os.environ["LOCALQ_DTYPE"] = "float32"  # every processor gives the same tokens, also in child processes
    os.environ["OLLAMA_MODELS"] = os.devnull  # this machine's models are no part of a test
    os.environ["LOCALQ_RUNTIME"] = os.devnull  # nor its servers


def pytest_collection_finish() -> None:
    _freeze_modules()


def pytest_runtest_setup(item: pytest.Item) -> None:
    _default_signals()
    _freeze_modules()
    if "torch" in sys.modules:  # random numbers of a test are the same in every run, and its own
        sys.modules["torch"].manual_seed(zlib.crc32(item.nodeid.encode()))


def _freeze_modules() -> None:
    """700,000 objects of modules are there, and stay: to look for garbage among them takes half a second, twice a load
    and after each reply of a line chat. Tests import more modules on their way, transformers and textual most."""
    global _modules
    if len(sys.modules) != _modules:
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)


def _default_signals() -> None:
    """As at a terminal, where children inherit it too: a shell starts background jobs with Ctrl-C ignored, `nohup` with
    SIGHUP, and a program's `main` that a test has called leaves handlers of its own."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if marked and (reason := _why_no_cuda()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_cuda() -> str:
    """Why tests marked `cuda` cannot run. Kernels that are built and do not load are no reason: those tests fail."""
    import torch  # only where such a test is collected: it costs seconds

    if not torch.cuda.is_available():
        return f"no GPU that torch {torch.__version__} can use"
    if importlib.util.find_spec("localq._C") is None:
        return "localq was built without CUDA kernels"
    return ""


@pytest.fixture(autouse=True, scope="session")
def loopback_only() -> Any:
    """Connecting anywhere but to this machine raises, in the test process; tests start no children that would."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "connect_ex"):
            patch.setattr(socket.socket, name, _guarded(getattr(socket.socket, name)))
        yield


@pytest.fixture
def no_own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped catalogue, whatever the machine's user has added to it."""
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))


def _guarded(connect: Any) -> Any:
    def guarded(self: socket.socket, address: Any) -> Any:
        if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
            raise RuntimeError(f"a test tried to connect to {address[0]}: only loopback is allowed")
        return connect(self, address)

    return guarded


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
