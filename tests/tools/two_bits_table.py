"""SmolLM2-135M at 2 bits in every way, and at 4: a line each, with bits as stored and perplexity over the reference's.

    python -m tests.tools.two_bits_table FOLDER [--device cuda] [--windows 12] [--calibration N] [NAME ...]

Judged as `localq eval` does, on the validation slice, in float16 on a GPU and float32 elsewhere. What is done already
stands in FOLDER/results.json and is not made again; without names all ways are tried, in the order of their names where
those are given. A way stands there, and on stderr, as soon as it is done. The same command may run several times at
once: what one has begun, others leave to it. Others' packages (`tests/tools/rival_quantizers.py`) are used where they
can be imported (`pip install hqq glq`, both need more than localq does), else their lines say that they are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import filelock
import torch

from localq.cli.verbs.quantize_calibrated import (
    BEST_BEAM,
    BEST_ROUNDS,
    BEST_SEQUENCES,
    BEST_STEPS,
    QUICK_WINDOWS,
)
from localq.cli.verbs.quantize_calibrated import joint_training as training
from localq.errors import LocalqError
from localq.files.schemes import VQ2_SCHEMES
from localq.quantize import by_layer, by_tensor, calibration
from localq.quantize.model import fold
from localq.quantize.request import LayerwiseRequest, TensorwiseRequest
from localq.quantize.settings import Effort, Tuning
from tests.tools.rival_quantizers import Way, Work, dense, finer_nf4, glq, hqq, nf4, residual_kmeans

TUNED = Tuning(BEST_STEPS, BEST_SEQUENCES)
BEST: dict[str, Any] = {"effort": Effort(beam=BEST_BEAM, rounds=BEST_ROUNDS), "tuning": TUNED}


# ---- ours


def ours(
    all_text: bool = False,
    patches: Callable[[], Any] = contextlib.nullcontext,
    together: bool = False,
    **settings: Any,
) -> Way:
    """A conversion with these fields of `vq_convert.Request`; at its end all layers are trained `together`, or not."""

    def way(work: Work, out: Path) -> dict[str, float]:
        count = work.calibrated
        ids = calibration.token_windows(work.files, work.text, count, None if all_text else QUICK_WINDOWS)
        whole = training(len(ids), best=together)
        request = LayerwiseRequest(work.files, out, ids, work.device, joint_tuning=whole, force=True, **settings)
        with patches():
            by_layer.convert(request, say=lambda line: print(line, file=sys.stderr))
        return work.judged(out)

    return way


def squeezellm(work: Work, out: Path) -> dict[str, float]:
    """16 values a row, columns weighed by their inputs."""
    by_tensor.convert(TensorwiseRequest(work.files, "squeezellm", out, force=True, text=work.weighing))
    return work.judged(out)


def squeezellm_without_text(work: Work, out: Path) -> dict[str, float]:
    """The same, all columns alike."""
    by_tensor.convert(TensorwiseRequest(work.files, "squeezellm", out, force=True))
    return work.judged(out)


@contextlib.contextmanager
def unturned() -> Any:
    """No rotation at all: of the stream, of values, of inputs."""
    with (
        mock.patch.object(fold, "can_rotate_stream", return_value=False),
        mock.patch.object(fold, "_fold_values"),
        mock.patch.object(by_layer, "rotate_mode", return_value="none"),
    ):
        yield


# ---- the table

WAYS: dict[str, Way] = {
    "reference": lambda work, out: work.judged(None),
    "nf4": nf4,
    "nf4, blocks of 32": dense(finer_nf4(32)),
    "nf4, blocks of 16": dense(finer_nf4(16)),
    "squeezellm": squeezellm,
    "squeezellm, no text": squeezellm_without_text,
    "residual k-means 2x8": dense(residual_kmeans),
    "hqq 2 bit, groups of 64": hqq(64),
    "hqq 2 bit, groups of 16": hqq(16),
    "glq 2 bit, lattice": glq("e8_shell"),
    "glq 2 bit, trellis": glq("trellis"),
    "aqlm2x8 --quick": ours(format="aqlm2x8"),
    "aqlm2x8 --best": ours(True, together=True, format="aqlm2x8", **BEST),
    "vq2 --quick": ours(),
    "vq2 --best": ours(True, together=True, **BEST),
    "vq2 --quick --bits 2.3": ours(bits=2.3),
    "vq2 --quick --bits 3": ours(scheme=VQ2_SCHEMES["3"]),
    "vq2 --best --bits 3": ours(True, together=True, scheme=VQ2_SCHEMES["3"], **BEST),
    "best, layer by layer": ours(True, **BEST),
    "best, layer by layer, 3 bits": ours(True, scheme=VQ2_SCHEMES["3"], **BEST),
    "quick, no rotation": ours(patches=unturned),
    "quick, no overlap (2x8)": ours(scheme="s8l8+s8l8"),
    "quick, 1 path": ours(effort=Effort(beam=1)),
    "quick, 8 paths": ours(effort=Effort(beam=8)),
    "quick, 128 paths": ours(effort=Effort(beam=128)),
    "quick, blocks of 64 columns": ours(effort=Effort(columns=64)),
    "quick, blocks of 384 columns": ours(effort=Effort(columns=384)),
    "quick, blocks of 576 columns": ours(effort=Effort(columns=576)),  # whole rows of all but down
    "quick, no refinement": ours(effort=Effort(steps=0)),
    "quick, two rounds": ours(effort=Effort(rounds=2)),
    "quick, drift not made up for": ours(correction=1e9),
    "quick, all of the text": ours(True),
    "quick, fine-tuned": ours(tuning=TUNED),
    "quick, trained together": ours(together=True),
}


def missing(name: str) -> str:
    """The package that a way needs and that is not there; else empty."""
    package = name.split()[0]
    return package if package in ("hqq", "glq") and importlib.util.find_spec(package) is None else ""


def attempt(name: str, work: Work, ways: dict[str, Way]) -> dict[str, Any]:
    """What a way comes to, or why it does not."""
    if package := missing(name):
        return {"why": f"{package} is not installed"}
    out, begun = work.folder / "model", time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    try:
        found = ways[name](work, out)
    except (LocalqError, subprocess.CalledProcessError, RuntimeError, ImportError) as error:
        return {"why": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return {**found, "seconds": round(time.monotonic() - begun, 1)}


def table(results: dict[str, dict[str, Any]], ways: dict[str, Way] = WAYS) -> list[str]:
    """Markdown."""
    lines = [
        "| way | bits per weight | perplexity | over the reference | seconds |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    reference = results.get("reference", {}).get("perplexity")
    for name in (each for each in ways if each in results):
        found = results[name]
        if "why" in found:
            lines.append(f"| {name} | - | {found['why']} | - | - |")
            continue
        ratio = f"{found['perplexity'] / reference:.3f}" if reference else "-"
        cells = name, f"{found['bits']:.3f}", f"{found['perplexity']:.3f}", ratio, f"{found['seconds']:.0f}"
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(ways: dict[str, Way] = WAYS, said: str | None = __doc__) -> None:
    """See the module; `ways` and what is `said` of them."""
    parser = argparse.ArgumentParser(description=said, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of: {'; '.join(ways)}")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--windows", type=int, default=12, help="to judge by")
    parser.add_argument("--calibration", type=int, help="windows to calibrate on, else 64, and all with --best")
    asked = parser.parse_intermixed_args()
    if unknown := set(asked.names) - set(ways):
        parser.error(f"no such way: {', '.join(sorted(unknown))}")
    asked.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=asked.folder) as own:
        work = Work(Path(own), torch.device(asked.device), asked.windows, asked.calibration)
        for name in asked.names or ways:
            take(name, asked.folder, lambda name: attempt(name, work, ways))
    print(*table(results_of(asked.folder), ways), sep="\n")


def take(name: str, folder: Path, made: Callable[[str], dict[str, Any]]) -> None:
    """The result of a way into `folder`, unless it is there, or another process is at it."""
    claim = filelock.FileLock(folder / f"{hashlib.sha256(name.encode()).hexdigest()}.lock")
    with contextlib.suppress(filelock.Timeout), claim.acquire(blocking=False):
        if "perplexity" in results_of(folder).get(name, {}):
            return
        found = made(name)
        with filelock.FileLock(folder / "results.lock"):
            together = {**results_of(folder), name: found}
            part = folder / "results.part"
            part.write_text(json.dumps(together, indent=1))
            part.replace(folder / "results.json")
        print(f"{name}: {found}", file=sys.stderr, flush=True)


def results_of(folder: Path) -> dict[str, dict[str, Any]]:
    """What is done, by way."""
    kept = folder / "results.json"
    found: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    return found


if __name__ == "__main__":
    main()
