"""The package as it is built: what a wheel holds with and without kernels, and what is said where nvcc is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from localq import kernels

ROOT = Path(__file__).parents[1]
SITE = sysconfig.get_path("platlib")


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of everything that a build reads, links kept, as a clone has it."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "models.toml"):
        shutil.copy(ROOT / name, copy)
    for folder in ("localq", "csrc"):
        shutil.copytree(
            ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so")
        )
    return copy


def build(hook: str, source: Path, out: Path, **environment: str) -> Path:
    """Run a hook of the build backend, as pip does, without the isolation that would need a network."""
    code = f"import sys; from scikit_build_core.build import {hook}; print({hook}(sys.argv[1]))"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    run = subprocess.run(
        [sys.executable, "-c", code, str(out)],
        cwd=source, env=environment, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return out / run.stdout.splitlines()[-1]


def python_with(folder: Path, code: str) -> str:
    """Output of `code` where `folder` is what is installed: without site, so that no editable install answers."""
    paths = [str(folder), SITE]
    command = [sys.executable, "-S", "-c", f"import sys; sys.path[:0] = {paths!r}; {code}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def test_the_wheel_without_kernels_works_anywhere(source, tmp_path):
    wheel = build("build_wheel", source, tmp_path / "dist", LOCALQ_NO_CUDA="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    unpacked = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(unpacked)
    tops = {name.split("/")[0] for name in names}
    assert tops == {"localq", next(top for top in tops if top.endswith(".dist-info"))}
    assert not [name for name in names if name.endswith((".so", ".cu"))]
    assert (unpacked / "localq/data/models.toml").read_bytes() == (ROOT / "models.toml").read_bytes()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "localq").rglob("*.py")}
    assert modules <= set(names)
    assert {"localq/data/wikitext-2-valid-slice.txt", "localq/data/README.md"} <= set(names)  # text and its licence

    count = python_with(
        unpacked, "from localq.files import catalog; print(len(catalog.load_catalogue()), catalog.__file__)"
    )
    assert count.split()[1].startswith(str(unpacked))
    assert int(count.split()[0]) >= 30
    assert "LOCALQ_NO_CUDA=1" in python_with(unpacked, "from localq import kernels; print(kernels.why_not())")


def test_a_source_archive_builds_the_same(source, tmp_path):
    archive = build("build_sdist", source, tmp_path / "dist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (again,) = (tmp_path / "unpacked").iterdir()
    listed = [{str(path.relative_to(each)) for path in (each / "csrc").rglob("*.*")} for each in (source, again)]
    assert listed[0] == listed[1]
    wheels = [build("build_wheel", each, tmp_path / each.name, LOCALQ_NO_CUDA="1") for each in (source, again)]
    contents = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            contents.append({name: opened.read(name) for name in opened.namelist() if "RECORD" not in name})
    assert contents[0] == contents[1]


def test_a_missing_nvcc_names_both_ways_out(source, tmp_path):
    hidden = [folder for folder in os.environ["PATH"].split(os.pathsep) if (Path(folder) / "nvcc").exists()]
    hidden += ["/usr/local/cuda/bin", f"{SITE}/nvidia/cu13/bin"]
    environment = {key: value for key, value in os.environ.items() if key not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH")}
    scripts = sysconfig.get_path("scripts")  # an environment that is used without being activated
    environment["PATH"] = os.pathsep.join((scripts, os.environ["PATH"]))
    command = [
        f"{scripts}/cmake", "-S", str(source / "csrc"), "-B", str(tmp_path / "build"), "-G", "Ninja",
        f"-DPython_EXECUTABLE={sys.executable}", f"-DCMAKE_IGNORE_PATH={';'.join(hidden)}",
    ]  # fmt: skip
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode != 0
    said = " ".join(run.stderr.split())
    assert "nvcc, the CUDA compiler, was not found" in said
    assert "nvidia-cuda-nvcc" in said
    assert "nvidia-cuda-cccl" in said  # nvcc alone compiles no kernel
    assert "LOCALQ_NO_CUDA=1" in said


def test_the_compiled_module_brings_its_runtime_and_needs_no_torch():
    if not kernels.available():
        pytest.skip(kernels.why_not())
    content = Path(str(kernels.module().__file__)).read_bytes()
    assert [name for name in (b"libcudart.so", b"libtorch", b"libc10") if name in content] == []
