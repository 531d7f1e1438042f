"""SystemFacts of `localq doctor` and their verdict, from package metadata, libcuda and NVML; loads no torch.

Separate from the verb, whose file `localq --help` imports.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from localq import __version__, disk, driver, gpus, kernels, places, settings
from localq.chat.terminal import error_log
from localq.driver import CudaStack, Driver
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, packaged_model
from localq.gpus import Gpu, NvmlReport
from localq.kernels import BuildInfo, selftest_results
from localq.kernels.selftest_results import Place, SelftestResult
from localq.wording import human_bytes

MIB = 2**20
_SHOWN_PROCESSES = 5
_TORCH_CUDA = re.compile(r"^cuda\b[^=]*=\s*(?:'([\d.]+)'|None)", re.MULTILINE)  # in torch/version.py


@dataclass(frozen=True)
class Torch:
    """The installed torch: its version, and the CUDA version it was built with (None = a CPU build)."""

    version: str
    cuda: str | None


@dataclass(frozen=True)
class Folder:
    """A folder that localq uses, existing or not, and the free bytes of its disk (None: unknown)."""

    path: Path
    free: int | None


@dataclass(frozen=True)
class SystemFacts:
    """Everything that `localq doctor` prints.

    torch          None: not installed
    kernels        None: not available, for the reason `kernels_why`
    first          the GPU that localq would use
    settings       None: unreadable, for the reason `settings_error`
    embedded       model name -> whether its file is on this machine
    """

    torch: Torch | None
    kernels: BuildInfo | None
    kernels_why: str
    driver: Driver
    nvml: NvmlReport
    first: Gpu | None
    folders: dict[str, Folder]
    embedded: dict[str, bool]
    settings: settings.Settings | None
    settings_error: LocalqError | None
    selftest: SelftestResult | None


def gather() -> SystemFacts:
    """The facts of this machine."""
    found = driver.probe_driver()
    nvml = gpus.probe() if found.present else NvmlReport()
    try:
        in_force, settings_error = settings.load(), None
    except LocalqError as error:
        in_force, settings_error = None, error
    first = gpus.first_visible(nvml.gpus)
    return SystemFacts(
        torch=installed_torch(),
        kernels=kernels.build_info(),
        kernels_why=kernels.why_not(),
        driver=found,
        nvml=nvml,
        first=first,
        folders={
            "models": _folder(places.hub_cache()),
            "data": _folder(places.data_dir()),
            "cache": _folder(places.cache_dir()),
            "config": _folder(places.config_file().parent),
        },
        embedded=_embedded_models(),
        settings=in_force,
        settings_error=settings_error,
        selftest=_selftest(first, nvml, found),
    )


def _selftest(first: Gpu | None, nvml: NvmlReport, found: Driver) -> SelftestResult | None:
    if first is None or first.capability is None:
        return None
    version = nvml.driver_version or ".".join(map(str, found.cuda_version))
    return selftest_results.recall(Place(first.name, first.uuid or "", first.capability, version))


def installed_torch() -> Torch | None:
    """The torch of this environment, read from its files: importing it takes seconds."""
    try:
        distribution = importlib.metadata.distribution("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    version_file = Path(str(distribution.locate_file("torch/version.py")))
    found = _TORCH_CUDA.search(version_file.read_text(encoding="utf-8")) if version_file.is_file() else None
    return Torch(distribution.version, found[1] if found else None)


def _folder(path: Path) -> Folder:
    try:
        return Folder(path, disk.free_bytes(path))
    except LocalqError:  # the folder is still worth naming
        return Folder(path, None)


def _embedded_models() -> dict[str, bool]:
    sources = {
        entry.name: source for entry in catalog.load_catalogue() for source in entry.sources if source.kind == "pypi"
    }
    return {name: packaged_model.local_path(source) is not None for name, source in sources.items()}


# ---- judgement


def problem(facts: SystemFacts) -> LocalqError | None:
    """Return the error that keeps localq from working here; None if it works, even if only on the CPU.

    Exit codes: 1 (torch is missing), 7 (a driver is present but the GPU cannot be used), 8 (config.toml is broken).
    """
    if facts.torch is None:
        return LocalqError("torch", "not installed in this environment", "Run `python -m pip install torch`.")
    if facts.settings_error is not None:
        return facts.settings_error
    if not facts.driver.present:
        return None
    if facts.kernels is not None and facts.first is not None and facts.first.capability is not None:
        kernels_why = kernels.why_not_on(facts.first.capability)
    else:
        kernels_why = facts.kernels_why
    cause = driver.diagnose(CudaStack(facts.driver, facts.torch.cuda, kernels_why=kernels_why))
    if cause is None and facts.selftest is not None and facts.selftest.failed:
        cause = f"the self-test of the {facts.selftest.failed} kernel failed", "Update the driver."
    if cause is None:
        return None
    why, step = cause
    return LocalqError("GPU", why, f"{step} To run on the CPU instead, use --device cpu.", ExitCode.NO_DEVICE)


def verdict(facts: SystemFacts) -> str:
    """The verdict on a machine without a problem."""
    if not facts.driver.present:
        return f"yes, but only on the CPU: no NVIDIA driver found{_other_gpus()}"
    return f"yes, on {facts.first.name}" if facts.first else "yes, on the GPU"


def _other_gpus() -> str:
    """Return a note on the GPU that the PCI bus shows without an NVIDIA driver: it needs one, or is unsupported."""
    found = gpus.vendors()
    if "NVIDIA" in found:
        return "; the NVIDIA GPU in this machine needs one"
    others = " and ".join(found)
    return f"; the {others} GPU in this machine is not supported; localq needs an NVIDIA GPU" if found else ""


# ---- print


def lines(facts: SystemFacts) -> list[tuple[str, str]]:
    """(title, text) of every line."""
    python = f"Python {platform.python_version()} ({sys.executable})"
    rows = [
        ("localq", f"{__version__}, {python}"),
        ("torch", _torch_text(facts.torch)),
        ("kernels", _kernels_text(facts)),
        ("driver", _driver_text(facts)),
    ]
    if facts.first is not None and facts.kernels is not None:
        rows.append(("self-test", _selftest_text(facts.selftest)))
    for gpu in facts.nvml.gpus:
        rows += _gpu_lines(gpu, facts)
    rows += [("unavailable", each) for each in facts.nvml.unavailable]
    for name, folder in facts.folders.items():
        free = "" if folder.free is None else f" ({human_bytes(folder.free)} free)"
        rows.append((name, f"{folder.path}{free}"))
    rows += [
        ("embedded", f"{name} {'is built into localq' if there else packaged_model.BUILT_IN}")
        for name, there in facts.embedded.items()
    ]
    if facts.settings is not None:
        rows.append(("network", "off (the `offline` setting is on)" if facts.settings.offline else "allowed"))
    found = error_log.count()
    count = "no unexpected errors recorded" if not found else f"{found} unexpected error{'s' if found > 1 else ''}"
    return [*rows, ("log", f"{error_log.path()} ({count})")]


def _torch_text(torch: Torch | None) -> str:
    if torch is None:
        return "not installed"
    return f"{torch.version}, {f'built with CUDA {torch.cuda}' if torch.cuda else 'a CPU build'}"


def _kernels_text(facts: SystemFacts) -> str:
    if facts.kernels is None:
        return f"none: {facts.kernels_why}"
    built = " ".join(f"sm_{each}" for each in facts.kernels.architectures)
    return f"built with CUDA {facts.kernels.cuda_version} for {built} and newer"


def _selftest_text(verdict: SelftestResult | None) -> str:
    if verdict is None:
        return "not yet run for this GPU, driver and build; it runs when you first load a model"
    return f"failed: wrong results from {verdict.failed}" if verdict.failed else "passed"


def _driver_text(facts: SystemFacts) -> str:
    if not facts.driver.present:
        return "none found"
    version = facts.nvml.driver_version or "(unknown version)"
    major, minor = facts.driver.cuda_version
    served = f", supports CUDA {major}.{minor}" if major else ""
    return f"NVIDIA {version}{served}{f'; {facts.driver.why_not}' if facts.driver.why_not else ''}"


def _gpu_lines(gpu: Gpu, facts: SystemFacts) -> list[tuple[str, str]]:
    parts = [gpu.name]
    if gpu.capability is not None:
        parts.append("sm_{}{}".format(*gpu.capability))
        if facts.kernels is not None:
            parts.append("kernels " + ("supported" if kernels.covers(gpu.capability) else "not supported"))
    if gpu.total is not None and gpu.free is not None:
        parts.append(f"{gpu.free // MIB:,} MiB of {gpu.total // MIB:,} MiB free")
    rows = [(f"GPU {gpu.index}", ", ".join(parts))]
    held = gpu.processes or ()
    for process in held[:_SHOWN_PROCESSES]:
        size = "unknown memory use" if process.bytes is None else f"{process.bytes // MIB:,} MiB"
        name = f" ({process.name})" if process.name else ""
        rows.append(("", f"process {process.pid}{name}: {size}"))
    if len(held) > _SHOWN_PROCESSES:
        rows.append(("", f"and {len(held) - _SHOWN_PROCESSES} more processes"))
    return rows


def as_json(facts: SystemFacts) -> dict[str, Any]:
    """The facts as `--json` prints them; sizes in bytes."""
    return {
        "version": __version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "torch": asdict(facts.torch) if facts.torch else None,
        "kernels": asdict(facts.kernels) if facts.kernels else None,
        "kernels_why": facts.kernels_why,
        "selftest": asdict(facts.selftest) if facts.selftest else None,
        "driver": {**asdict(facts.driver), "version": facts.nvml.driver_version} if facts.driver.present else None,
        "gpus": [_gpu_json(gpu, facts) for gpu in facts.nvml.gpus],
        "untold": list(facts.nvml.unavailable),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "folders": {name: {"path": str(each.path), "free_bytes": each.free} for name, each in facts.folders.items()},
        "embedded": facts.embedded,
        "offline": facts.settings.offline if facts.settings else None,
        "log": {"path": str(error_log.path()), "errors": error_log.count()},
        "device": "cuda" if facts.driver.present else "cpu",
    }


def _gpu_json(gpu: Gpu, facts: SystemFacts) -> dict[str, Any]:
    covered = kernels.covers(gpu.capability) if gpu.capability is not None else None
    return {**asdict(gpu), "kernels_run": covered, "first": gpu is facts.first}
