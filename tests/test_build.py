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
SEARCH = """
from localq.formats.codebooks.search_kernel import Codebook, vq_search
words = torch.arange(512.0).reshape(256, 2)
targets = words[torch.tensor([3, 250])].reshape(1, 4)
codes, _ = vq_search(
    targets, torch.zeros(4, 4), torch.eye(2).repeat(2, 1, 1), [Codebook(2, words)], torch.zeros(1, 2), beam=4
)
print(codes[0].tolist())
""".strip()


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


def build(hook: str, source: Path, out: Path, settings: str = "", **environment: str) -> Path:
    """Run a hook of the build backend, as pip does, without the isolation that would need a network.

    settings   of pip's option -C, such as "wheel.cmake=false"
    """
    given = dict([settings.split("=")]) if settings else {}
    code = f"import sys; from scikit_build_core.build import {hook}; print({hook}(sys.argv[1], {given}))"
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


def test_the_wheel_without_the_compiled_part_works_anywhere(source, tmp_path):
    wheel = build("build_wheel", source, tmp_path / "dist", "wheel.cmake=false", LOCALQ_NO_CUDA="1")
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
    reason = python_with(unpacked, "from localq import kernels; print(kernels.host_why_not())")
    assert "without its compiled module" in reason


def test_without_cuda_the_host_part_is_compiled_by_the_cpp_compiler_alone(source, tmp_path):
    """A PATH without nvcc, and a CUDACXX that fails, show that nothing looks for it."""
    wheel = build("build_wheel", source, tmp_path / "dist", LOCALQ_NO_CUDA="1", CUDACXX="/nowhere/nvcc")
    assert not wheel.name.endswith("-any.whl")
    unpacked = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    asks = "print(kernels.host_available(), kernels.available(), kernels.build_info(), kernels.why_not())"
    said = python_with(unpacked, f"from localq import kernels; {asks}")
    assert said.startswith("True False None ")
    assert "LOCALQ_NO_CUDA=1" in said
    found = python_with(unpacked, f"import torch; {SEARCH}")
    assert found == "[[3, 250]]"


def test_without_a_cpp_compiler_both_ways_out_are_named(source, tmp_path):
    run = configure(source, tmp_path, "-DLOCALQ_CUDA=OFF", CXX="/nowhere/c++")
    assert run.returncode != 0
    said = " ".join(run.stderr.split())
    assert "no C++ compiler was found" in said
    assert "apt install g++" in said
    assert "-C wheel.cmake=false" in said


def test_a_source_archive_builds_the_same(source, tmp_path):
    archive = build("build_sdist", source, tmp_path / "dist")
    with tarfile.open(archive) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")
    (again,) = (tmp_path / "unpacked").iterdir()
    listed = [{str(path.relative_to(each)) for path in (each / "csrc").rglob("*.*")} for each in (source, again)]
    assert listed[0] == listed[1]
    wheels = [build("build_wheel", each, tmp_path / each.name, "wheel.cmake=false") for each in (source, again)]
    contents = []
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as opened:
            contents.append({name: opened.read(name) for name in opened.namelist() if "RECORD" not in name})
    assert contents[0] == contents[1]


def test_a_missing_nvcc_names_both_ways_out(source, tmp_path):
    hidden = [folder for folder in os.environ["PATH"].split(os.pathsep) if (Path(folder) / "nvcc").exists()]
    hidden += ["/usr/local/cuda/bin", f"{SITE}/nvidia/cu13/bin"]
    run = configure(source, tmp_path, f"-DCMAKE_IGNORE_PATH={';'.join(hidden)}")
    assert run.returncode != 0
    said = " ".join(run.stderr.split())
    assert "nvcc, the CUDA compiler, was not found" in said
    assert "nvidia-cuda-nvcc" in said
    assert "nvidia-cuda-cccl" in said  # nvcc alone compiles no kernel
    assert "LOCALQ_NO_CUDA=1" in said


def configure(source: Path, folder: Path, *definitions: str, **more: str) -> subprocess.CompletedProcess[str]:
    """CMake's answer to a build that names no nvcc."""
    environment = {key: value for key, value in os.environ.items() if key not in ("CUDACXX", "CUDA_HOME", "CUDA_PATH")}
    environment |= more
    scripts = sysconfig.get_path("scripts")  # an environment that is used without being activated
    environment["PATH"] = os.pathsep.join((scripts, os.environ["PATH"]))
    command = [
        f"{scripts}/cmake", "-S", str(source / "csrc"), "-B", str(folder / "build"), "-G", "Ninja",
        f"-DPython_EXECUTABLE={sys.executable}", *definitions,
    ]  # fmt: skip
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


def test_the_compiled_module_brings_its_runtime_and_needs_no_torch():
    if not kernels.available():
        pytest.skip(kernels.why_not())
    content = Path(str(kernels.module().__file__)).read_bytes()
    assert [name for name in (b"libcudart.so", b"libtorch", b"libc10") if name in content] == []
