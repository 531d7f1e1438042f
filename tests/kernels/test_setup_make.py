"""The Makefile's choices, and what it says at the end, without installing anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VARIABLES = ("LOCALQ_NO_CUDA", "TORCH", "NVCC", "NVIDIA_SMI", "DRIVER_FILES", "MAKEFLAGS", "MFLAGS", "MAKELEVEL")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(*arguments: str) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    run = subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    return run.stdout


def test_the_driver_decides_about_torch(tmp_path):
    without = make("-n", "chat", f"DRIVER_FILES={tmp_path}/none")
    assert "--torch 'torch==2.13.0'" in without
    assert "--driver ''" in without
    driver = tmp_path / "version"
    driver.touch()
    found = make("-n", "chat", f"DRIVER_FILES={driver}")
    assert "--torch 'torch>=2.8'" in found
    assert "--torch-index ''" in found
    assert f"--driver '{driver}'" in found
    assert "--torch 'torch==2.9'" in make("-n", "chat", f"DRIVER_FILES={driver}", "TORCH=torch==2.9")


@pytest.mark.parametrize("goal", ["chat", "install", "uninstall", "test"])
def test_no_goal_begins_with_a_python_that_is_too_old(goal):
    assert "localq needs Python 3.11 or newer" in make("-n", goal)


def test_it_ends_with_where_localq_is_and_three_commands(tmp_path, monkeypatch):
    program, folder = tmp_path / ".venv/bin/localq", tmp_path / "bin"
    command = ["-m", "localq.kernels.setup", "next", "--venv", str(tmp_path / ".venv"), "--bin-dir", str(folder)]

    def last(*more: str) -> list[str]:
        run = subprocess.run(
            [sys.executable, *command, *more], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        )
        return run.stdout.strip().splitlines()

    lines = last()
    assert lines[0] == f"localq is installed at {program}."
    assert "make install" in lines[1]
    assert [line.split()[:2] for line in lines[3:]] == [[str(program), each] for each in ("fit", "chat", "doctor")]
    folder.mkdir()
    (folder / "localq").symlink_to(program)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    lines = last("--driver", "/proc/driver/nvidia/version")
    assert [line.split()[:2] for line in lines[2:]] == [["localq", each] for each in ("fit", "chat", "doctor")]


def test_clean_follows_an_uninstall_that_fails(tmp_path):
    (tmp_path / "localq").write_text("another program")
    (tmp_path / "venv").mkdir()
    run = subprocess.run(
        ["make", "uninstall", "clean", f"VENV={tmp_path}/venv", f"BIN_DIR={tmp_path}", f"PYTHON={sys.executable}"],
        cwd=clone_of_the_makefile(tmp_path), capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert run.returncode
    assert (tmp_path / "localq").exists()
    assert not (tmp_path / "venv").exists()


def clone_of_the_makefile(tmp_path: Path) -> Path:
    """A folder in which `make clean` may remove build/."""
    clone = tmp_path / "clone"
    clone.mkdir()
    shutil.copy(ROOT / "Makefile", clone)
    (clone / "localq").symlink_to(ROOT / "localq")
    return clone
