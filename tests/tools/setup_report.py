"""How long `make chat` takes from a fresh clone with pip's cache empty to the answer, stage by stage.

    python -m tests.tools.setup_report OUT [--only cpu|cards] [--capability 8.9] [--nvcc pip] [--most SECONDS]

Two choices, one after the other: "cpu", a machine without an NVIDIA driver, and "cards", one with a pretended driver
and a pretended nvidia-smi that names cards of --capability (comma-separated), with nvcc from pip (--nvcc "": the one
that is installed) and torch for the CPU. Each clones the commit that is checked out here into OUT, with folders for
settings, data and caches of its own. Packages come from where pip is configured to look. Prints seconds of each stage,
processor seconds, and the load of the machine; writes OUT/setup_report.json. Stages run side by side: their sum is more
than the whole. Exit code 1 where there is no right answer, or "cpu" takes longer than --most (120).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHOICES = ("cpu", "cards")
TORCH = "torch==2.13.0"
ANSWER = "Paris"
LIMIT_S = 3600.0


@dataclass
class SetupTimes:
    """One installation: seconds of each stage, of the whole, and of all processors; the load before and after."""

    choice: str
    whole_s: float
    processor_s: float
    load: tuple[float, float]
    answered: bool
    built_for: str
    stages_s: dict[str, float] = field(default_factory=dict)


def main() -> int:
    """Run what the command line asks for; returns the exit code."""
    given = _parser().parse_args()
    out = Path(given.out).resolve()
    found: list[SetupTimes] = []
    for choice in [given.only] if given.only else CHOICES:
        found.append(measure(choice, out, given))
        print("\n".join(lines(found[-1])), flush=True)
        out.joinpath("setup_report.json").write_text(json.dumps([asdict(each) for each in found], indent=1))
    late = any(each.choice == "cpu" and each.whole_s > given.most for each in found)
    return int(late or not all(each.answered for each in found))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.setup_report")
    parser.add_argument("out")
    parser.add_argument("--only", choices=CHOICES)
    parser.add_argument("--capability", default="8.9")
    parser.add_argument("--nvcc", default="pip")
    parser.add_argument("--most", type=float, default=120.0)
    return parser


def measure(choice: str, out: Path, given: argparse.Namespace) -> SetupTimes:
    """Clone, `make chat`, and read what it wrote."""
    folder = out / choice
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    clone = folder / "clone"
    before, used, load = time.monotonic(), _processor_seconds(), os.getloadavg()[0]
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    cloned = time.monotonic() - before
    with (folder / "make.log").open("w") as log:
        subprocess.run(
            ["make", "chat", *variables(choice, folder, given)], cwd=clone, env=environment(folder), stdout=log,
            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, check=False, timeout=LIMIT_S,
        )  # fmt: skip
    whole = time.monotonic() - before
    stages = {"clone": round(cloned, 2), **_stages(clone)}
    installed = stages.pop("total", 0.0)
    stages["question and answer"] = round(whole - cloned - installed, 2)
    return SetupTimes(
        choice, round(whole, 1), round(_processor_seconds() - used, 1), (load, os.getloadavg()[0]),
        ANSWER in (folder / "make.log").read_text(), _built_for(clone), stages,
    )  # fmt: skip


def variables(choice: str, folder: Path, given: argparse.Namespace) -> list[str]:
    """Variables of make that pretend the machine."""
    if choice == "cpu":
        return [f"DRIVER_FILES={folder / 'no-driver'}"]
    driver, smi = folder / "driver-version", folder / "nvidia-smi"
    driver.touch()
    smi.write_text("#!/bin/sh\n" + "".join(f"echo {each}\n" for each in given.capability.split(",")))
    smi.chmod(0o755)
    return [f"DRIVER_FILES={driver}", f"NVIDIA_SMI={smi}", f"NVCC={given.nvcc}", f"TORCH={TORCH}"]


def environment(folder: Path) -> dict[str, str]:
    """That of a new user: pip's cache empty, nothing of localq set, no setting of make inherited."""
    mine = ("LOCALQ_", "HF_", "CUDA", "MAKE", "MFLAGS", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if not key.startswith(mine)}
    homes = {f"XDG_{name}_HOME": str(folder / name.lower()) for name in ("CACHE", "CONFIG", "DATA", "STATE")}
    return {**kept, **homes, "PIP_CACHE_DIR": str(folder / "pip"), "XDG_CONFIG_DIRS": "/etc/xdg"}


def _stages(clone: Path) -> dict[str, float]:
    times = clone / ".venv/setup/times.json"
    return {str(key): float(value) for key, value in json.loads(times.read_text()).items()} if times.exists() else {}


def _built_for(clone: Path) -> str:
    """Architectures of the compiled module, or "host part"; "nothing" where `make chat` failed."""
    asks = (
        "from localq import kernels; print(' '.join(kernels.host_module().build_architectures.split()) or 'host part')"
    )
    try:
        run = subprocess.run([clone / ".venv/bin/python", "-c", asks], capture_output=True, text=True, check=False)
    except OSError:
        return "nothing"
    return run.stdout.strip() or "nothing"


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines(found: SetupTimes) -> list[str]:
    """The report of one installation."""
    load = " to ".join(f"{each:.1f}" for each in found.load)
    processors = f"{found.processor_s:.0f} s of processors ({os.cpu_count()} here, load {load})"
    head = f"{found.choice}: {found.whole_s:.0f} s, {processors}"
    stages = [f"  {name:<22} {seconds:7.1f} s" for name, seconds in found.stages_s.items()]
    return [head, f"  built for {found.built_for}; {'answered' if found.answered else 'NO RIGHT ANSWER'}", *stages]


if __name__ == "__main__":
    sys.exit(main())
