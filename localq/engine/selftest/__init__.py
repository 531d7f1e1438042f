"""The self-test of the kernels at first use on a GPU, driver and build: every kernel against the CPU reference.

A new driver, bad memory or a broken build gives wrong words, not an error; the test costs about a second, once. What
passed is remembered (`kernels.selftest_results`); what failed is tested again at every load, so that a cure shows.

`checks.py` lists the checks, `formats.py` has those of matrices, `experts.py`, `codebook_experts.py`,
`gguf_experts.py`, `search.py` and `replies.py` the others, `compare.py` the bounds. Called by `engine.load` and
`engine.patch_transformers`. Open `checks.py` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from localq import driver, gpus
from localq.engine.selftest.checks import CHECKS
from localq.engine.selftest.compare import Mismatch
from localq.errors import ExitCode, LocalqError
from localq.kernels import selftest_results
from localq.kernels.selftest_results import Place, SelftestResult

Checks = Mapping[str, Callable[[torch.device], None]]  # kernel -> what raises `Mismatch` where it is wrong


def ensure(
    device: torch.device, checks: Checks | None = None, place: Callable[[torch.device], Place] | None = None
) -> tuple[str, ...]:
    """Run the self-test unless it has passed here. Returns lines to show the user.

    Raises LocalqError (exit 7) naming the first kernel that gives wrong results. Does nothing on a CPU.
    """
    if device.type != "cuda":
        return ()
    here = (place or place_of)(device)
    known = selftest_results.recall(here)
    if known is not None and not known.failed:
        return ()
    with torch.inference_mode():
        failed, why = first_failure(device, checks)
    note = selftest_results.remember(here, SelftestResult(here.gpu, here.driver, failed))
    if failed:
        raise LocalqError(
            "GPU",
            f"the kernel {failed} produces wrong results on {here.gpu} with driver {here.driver or 'unknown'} ({why})",
            "Update the driver, or use --device cpu. If that does not help, report this as a bug.",
            ExitCode.NO_DEVICE,
        )
    return (note,) if note else ()


def first_failure(device: torch.device, checks: Checks | None = None) -> tuple[str, str]:
    """(kernel, what was wrong) of the first check that fails, ("", "") when all pass."""
    for name, check in (CHECKS if checks is None else checks).items():
        try:
            check(device)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except (Mismatch, RuntimeError, ValueError) as error:  # the launch itself failed, or was refused
            return name, str(error).splitlines()[0]
    return "", ""


def place_of(device: torch.device) -> Place:
    """Return the GPU and driver that kernels would run on."""
    properties = torch.cuda.get_device_properties(device)
    version = gpus.probe().driver_version or ".".join(map(str, driver.probe_driver().cuda_version))
    return Place(properties.name, f"GPU-{properties.uuid}", (properties.major, properties.minor), version)
