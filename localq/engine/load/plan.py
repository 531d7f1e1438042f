"""What is asked of a load, and its plan: from exact bytes of weights to context and placement. Allocates nothing."""

from __future__ import annotations

import os
from dataclasses import replace

import psutil  # type: ignore[import-untyped]  # ships no types
import torch

from localq import gpus
from localq.engine.load import vram, weights
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files.architecture import Architecture
from localq.files.model_folder import ModelFiles
from localq.planner import footprint, placement
from localq.planner import plan as planner
from localq.planner.load_options import LoadOptions

LESS = "Use a smaller model, a shorter context (--ctx), or close other programs."


def planned(
    files: ModelFiles,
    options: LoadOptions,
    assignment: weights.Assignment,
    block_bytes: int,
    dtype: torch.dtype,
    held: vram.Held | None,
    scheme: str = "",
) -> tuple[planner.Plan, vram.Held | None]:
    """The context, what is reduced, and the predicted ledger; exit 3 when it does not fit. Sets the limit on a GPU.

    block_bytes: exact bytes of all weights but embedding and head; scheme: as of `stored_format.scheme_in`. Where
    `options.force` has a plan that does not fit, nothing is limited and `held` is no hard budget any more.
    """
    packed, name = held is not None, options.name or files.name
    plan = planner.plan(
        Architecture.from_config(files.config),
        (assignment.format if packed else None) or "bf16",
        None if held is None else held.budget,
        wishes=_wishes(options, assignment, packed, name),
        weights=block_bytes,
        name=name,
        itemsize=dtype.itemsize,
        scheme=scheme if packed else "",
        context_bytes=footprint.CUDA_CONTEXT_BYTES if held is None else held.context,
        freeing="" if held is None else _freeing(held),
        force=options.force,
    )
    if held is None:
        _check_host_memory(plan, name, options.force, dtype)
    elif plan.fits:
        held = held.hold(plan.ledger.components["cuda_context"] + plan.ledger.components["graphs"])
    else:
        held = replace(held, hard=False)
    return plan, held


def _wishes(options: LoadOptions, assignment: weights.Assignment, packed: bool, name: str) -> placement.Wishes:
    """Those of the user, with what the files decide already. A head in few bits stays as they have it."""
    wishes = options.wishes
    if (head := assignment.quantized.get(weights.HEAD)) is not None:
        kept = head.format if head.format in weights.HEAD_FORMATS else "16"
        if wishes.head not in ("auto", kept):
            why = f"its files hold the head in {head.format.upper()}, not in {wishes.head} bit"
            raise usage_error("--head", why, "Leave --head out.")
        wishes = replace(wishes, head=kept)
    return wishes if packed else replace(wishes, embed="device")  # which is host memory there


def _freeing(held: vram.Held) -> str:
    """How the GPU could have more for this process, for a refusal."""
    if held.hard and held.budget + held.others < held.available:
        return "with a larger --vram"
    gpu = gpus.of_uuid(f"GPU-{torch.cuda.get_device_properties(held.device).uuid}")
    return gpus.closing_hint(gpu, os.getpid())


def _check_host_memory(plan: planner.Plan, name: str, force: bool, dtype: torch.dtype) -> None:
    free = psutil.virtual_memory().available
    if plan.ledger.total > free and not force:
        why = f"needs {plan.ledger.total} bytes of memory with {plan.ctx} tokens of context, {free} are free"
        step = f"--dtype bfloat16 takes half. Or: {LESS}" if dtype == torch.float32 else LESS
        raise LocalqError(name, why, step, ExitCode.DOES_NOT_FIT)
