"""What is built for a machine: the driver, nvidia-smi and nvcc are invented programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from localq.kernels.setup import machine

ROOT = Path(__file__).parents[2]
LISTED = ("80", "86", "89", "90", "100", "120")


def program(path: Path, text: str, code: int = 0) -> str:
    """An executable that prints `text`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {code}\n")
    path.chmod(0o755)
    return str(path)


def test_the_list_of_architectures_is_that_of_the_build():
    assert machine.listed_architectures(ROOT) == LISTED


def test_without_a_driver_only_the_host_part_is_built():
    build = machine.build_for_this_machine("", False, LISTED)
    assert (build.kind, build.architectures, build.asked) == (machine.HOST, (), False)
    assert build.name == "host"


def test_without_a_driver_and_a_compiler_nothing_is_built(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    build = machine.build_for_this_machine("", False, LISTED)
    assert build.kind == machine.NOTHING
    assert "g++" in build.why


@pytest.mark.parametrize(
    ("cards", "architectures"),
    [
        ("8.9", ("89",)),
        ("8.9\n8.9", ("89",)),
        ("12.0\n8.6", ("86", "120")),
        ("8.7", ("86",)),  # machine code of 8.6 runs there
        ("10.3", ("100",)),
        ("13.0", ("120",)),  # by its PTX
        ("7.5\n9.0", ("90",)),
    ],
)
def test_with_a_driver_kernels_are_built_for_the_cards_alone(tmp_path, cards, architectures):
    smi = program(tmp_path / "nvidia-smi", cards)
    build = machine.build_for_this_machine("", True, LISTED, smi)
    assert (build.kind, build.architectures) == (machine.KERNELS, architectures)
    assert build.name == "-".join(("kernels", *architectures))


@pytest.mark.parametrize(("text", "code"), [("", 0), ("[N/A]", 0), ("No devices were found", 6)])
def test_where_nvidia_smi_names_no_card_kernels_are_built_for_all(tmp_path, text, code):
    build = machine.build_for_this_machine("", True, LISTED, program(tmp_path / "nvidia-smi", text, code))
    assert (build.kind, build.architectures, build.name) == (machine.KERNELS, (), "kernels")


def test_a_card_that_is_too_old_gets_no_kernels(tmp_path):
    build = machine.build_for_this_machine("", True, LISTED, program(tmp_path / "nvidia-smi", "7.5"))
    assert build.kind == machine.HOST
    assert "7.5 is too low" in build.why


@pytest.mark.parametrize(
    ("word", "kind"), [("1", machine.HOST), ("yes", machine.HOST), ("0", machine.KERNELS), ("OFF", machine.KERNELS)]
)
def test_the_variable_decides_before_the_driver(word, kind):
    for driver in (False, True):
        build = machine.build_for_this_machine(word, driver, LISTED)
        assert (build.kind, build.architectures, build.asked) == (kind, (), True)
    assert machine.build_for_all(word).kind == kind
    assert machine.build_for_all("").kind == machine.KERNELS


def test_nvcc_is_found_where_cmake_looks(tmp_path):
    release = "Cuda compilation tools, release 13.0, V13.0.88"
    named = program(tmp_path / "named/nvcc", release)
    home = program(tmp_path / "home/bin/nvcc", release)
    on_path = program(tmp_path / "path/nvcc", release)
    everywhere = {"CUDACXX": named, "CUDA_HOME": str(tmp_path / "home"), "PATH": str(tmp_path / "path")}
    own = tmp_path / "own/nvcc"
    assert machine.find_nvcc(everywhere, own).path == Path(named)
    assert machine.find_nvcc({**everywhere, "CUDACXX": ""}, own).path == Path(home)
    assert machine.find_nvcc({"PATH": str(tmp_path / "path")}, own).path == Path(on_path)


def test_an_nvcc_that_is_too_old_is_none(tmp_path):
    old = program(tmp_path / "nvcc", "Cuda compilation tools, release 12.4, V12.4.131")
    found = machine.find_nvcc({"CUDACXX": old}, tmp_path / "own")
    assert found.path is None
    assert "CUDA 12.4, but 12.8 or newer is required" in found.why
