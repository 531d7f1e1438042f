"""Whether the kernels are there, why not, and which GPUs they cover."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from localq import kernels
from localq.kernels import BuildInfo

ROOT = Path(__file__).parents[2]


@pytest.fixture
def reload_module(monkeypatch):
    """Let the next question load the module anew, by `load`; the real one is back afterwards."""
    kernels._loaded.cache_clear()

    def use(load):
        monkeypatch.setattr(importlib, "import_module", load)

    yield use
    monkeypatch.undo()
    kernels._loaded.cache_clear()


def test_importing_loads_neither_torch_nor_the_compiled_module():
    code = "import sys, localq.kernels; print([m for m in ('torch', 'localq._C') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert run.stdout.strip() == "[]"


def test_available_or_a_reason():
    assert kernels.available() == (kernels.why_not() == "")
    assert kernels.available() == (kernels.build_info() is not None)
    assert kernels.host_available() == (kernels.host_why_not() == "")
    assert kernels.host_available() or not kernels.available()  # a module with kernels has the host part as well


def test_built_for_what_the_build_lists():
    info = kernels.build_info()
    if info is None:
        pytest.skip(kernels.why_not())
    listed = re.search(r"set\(LOCALQ_ARCHITECTURES ([\d ]+) CACHE", (ROOT / "csrc/CMakeLists.txt").read_text())
    assert listed
    assert info.architectures == tuple(listed.group(1).split())
    assert {"80", "86", "89", "90", "100", "120"} <= set(info.architectures)
    assert re.fullmatch(r"\d+\.\d+\.\d+", info.cuda_version)


def test_not_built(reload_module):
    def load(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    reload_module(load)
    assert not kernels.available()
    assert not kernels.host_available()
    assert "without its compiled module" in kernels.why_not()
    assert kernels.host_why_not() == kernels.why_not()
    assert kernels.build_info() is None
    assert not kernels.covers((9, 0))
    for each in (kernels.module, kernels.host_module):
        with pytest.raises(ImportError, match="without its compiled module"):
            each()


def test_built_for_the_host_alone(reload_module):
    module = ModuleType("localq._C")
    module.build_architectures, module.build_cuda_version = "", ""
    reload_module(lambda name: module)
    assert kernels.host_available()
    assert kernels.host_module() is module
    assert kernels.host_why_not() == ""
    assert not kernels.available()
    assert "LOCALQ_NO_CUDA=1" in kernels.why_not()
    assert kernels.build_info() is None
    assert not kernels.covers((9, 0))
    assert kernels.why_not_on((9, 0)) == kernels.why_not()
    with pytest.raises(ImportError, match="LOCALQ_NO_CUDA=1"):
        kernels.module()


def test_built_and_broken(reload_module):
    def load(name):
        raise ImportError("libstdc++.so.6: version `GLIBCXX_3.4.99' not found")

    reload_module(load)
    assert not kernels.available()
    assert "GLIBCXX_3.4.99" in kernels.why_not()


@pytest.mark.parametrize(
    ("capability", "covered"),
    [
        ((7, 5), False),  # older than all
        ((8, 0), True),
        ((8, 7), True),  # machine code of 8.6 runs there
        ((8, 9), True),
        ((9, 0), True),
        ((10, 0), False),  # not built here, and not newer than the PTX
        ((12, 1), True),  # machine code of 12.0
        ((13, 0), True),  # PTX of 12.0
    ],
    ids=str,
)
def test_covered_gpus(monkeypatch, capability, covered):
    monkeypatch.setattr(kernels, "build_info", lambda: BuildInfo(("80", "86", "90", "120"), "13.0.88"))
    assert kernels.covers(capability) == covered
    assert (kernels.why_not_on(capability) == "") == covered or not kernels.available()
