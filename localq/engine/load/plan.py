"""The plan of a load: context length and placement from the exact bytes of the weights. Allocates nothing."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from localq import gpus
from localq.engine.load import vram, weights
from localq.engine.load.placing import HEAD
from localq.errors import usage_error
from localq.files.architecture import Architecture
from localq.files.model_folder import ModelFiles
from localq.planner import checkpoints, footprint, placement, ram
from localq.planner import plan as memory_plan
from localq.planner.draft_shape import DraftShape
from localq.planner.load_options import LoadOptions

LESS = "Use a smaller model or a shorter context (--ctx), or close other programs."


def plan_load(
    files: ModelFiles,
    options: LoadOptions,
    assignment: weights.Assignment,
    block_bytes: int,
    dtype: torch.dtype,
    held: vram.VramBudget | None,
    scheme: str = "",
    draft: DraftShape | None = None,
) -> tuple[memory_plan.Plan, vram.VramBudget | None]:
    """Plan context length, placement and ledger; exit 3 when the model does not fit. Limits the allocator on a GPU.

    block_bytes: exact bytes of all weights but embedding and head; scheme: of `stored_format.scheme_in`; draft: a model
    that will be loaded beside it. Where `options.force` has a plan that does not fit, nothing is limited and `held` is
    no hard budget any more.
    """
    packed, name = held is not None, options.name or files.name
    plan = memory_plan.plan(
        replace(
            Architecture.from_config(files.config),
            thinks=options.thinks,
            stored_head=assignment.head_bytes if packed else 0,
        ),
        assignment.format or "bf16",
        _ram(dtype, block_bytes) if held is None else held.budget,
        wishes=replace(_wishes(options, assignment, name), draft=draft),
        weights=block_bytes,
        name=name,
        itemsize=dtype.itemsize,
        scheme=scheme if packed else "",
        context_bytes=footprint.CUDA_CONTEXT_BYTES if held is None else held.context,
        freeing="" if held is None else _freeing(held),
        force=options.force,
    )
    if held is None:
        return plan, None
    if plan.fits:
        held = held.hold(plan.ledger.components["cuda_context"] + plan.ledger.components["graphs"])
    else:
        held = replace(held, hard=False)
    return plan, held


def checkpoint_bytes(plan: memory_plan.Plan, dtype: torch.dtype, options: LoadOptions, on_gpu: bool) -> int:
    """Return the host memory for checkpoints, beside the model, which lies in memory already.

    Raises LocalqError (exit 3) where the RAM is too small for a wish.
    """
    assert plan.arch is not None
    chunk = footprint.prefill_chunk(on_gpu)
    one = checkpoints.bytes_of_one(plan.arch, plan.kv_bits, dtype.itemsize, plan.ctx, chunk)
    if not one:
        return 0
    most = 2 * one if on_gpu else one  # pinned memory is rounded up (`engine.checkpoints.held_bytes`)
    return checkpoints.budget(most, options.checkpoint_bytes, ram.free_ram().bytes)


def _ram(dtype: torch.dtype, block_bytes: int) -> ram.Ram:
    """RAM for the load; this process has its own already."""
    return replace(ram.free_ram(str(dtype).removeprefix("torch.")), weights=block_bytes, process=0)


def _wishes(options: LoadOptions, assignment: weights.Assignment, name: str) -> placement.Wishes:
    """Return the user's wishes, with what the files decide: a quantized head stays as stored."""
    wishes = options.wishes
    kept = kept_head(assignment)
    if kept is not None:
        if wishes.head not in ("auto", kept):
            stored = assignment.quantized[HEAD].format.upper()
            why = f"the output head is stored as {stored}, not as {placement.HEAD_NAMES[wishes.head]}"
            raise usage_error("--head", why, "Remove --head.")
        wishes = replace(wishes, head=kept)
    return wishes


def kept_head(assignment: weights.Assignment) -> str | None:
    """The value of `Placement.head` for a quantized head that stays as it is; None for one that can be made anew."""
    head = assignment.quantized.get(HEAD)
    if head is None or assignment.head is not None:  # (`placement.STORED`)
        return None
    return head.format if head.format in weights.HEAD_FORMATS else "16"


def _freeing(held: vram.VramBudget) -> str:
    """Return how to free GPU memory, for an error message."""
    if held.hard and held.budget + held.others < held.available:
        return "with a larger --vram"
    gpu = gpus.of_uuid(f"GPU-{torch.cuda.get_device_properties(held.device).uuid}")
    return gpus.closing_hint(gpu, os.getpid())
