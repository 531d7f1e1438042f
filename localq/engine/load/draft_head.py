"""Load the MTP block of a model beside it, whose plan has counted it (`LoadOptions.mtp`)."""

from __future__ import annotations

from localq.engine.cache import KVCache
from localq.engine.load import grouped_experts, weights
from localq.engine.load.load import (
    LoadedModel,
    assign_block,
    free_memory,
    is_out_of_memory,
    out_of_memory,
    share_scratch,
)
from localq.engine.load.placing import Destinations
from localq.errors import LocalqError
from localq.files.model_folder import ModelFiles
from localq.formats import expert_linears
from localq.formats.codebooks import linear as codebook_linear
from localq.formats.linear import workspace_bytes
from localq.formats.open_checkpoint import open_checkpoint
from localq.models.qwen3_5_mtp import MultiTokenPrediction
from localq.planner.draft_cost import ring_slots
from localq.planner.draft_shape import DraftShape
from localq.planner.load_options import LoadOptions
from localq.planner.placement import draft_placement
from localq.planner.plan import Ledger, Plan
from localq.wording import OnProgress


def load_head(
    files: ModelFiles, target: LoadedModel, options: LoadOptions, on_progress: OnProgress, *, may_map: bool = False
) -> LoadedModel | None:
    """Load the MTP block of `files`, of which `target` is loaded, and let it share parts of that; None where the plan
    has none.

    options: of `target`. Raises as `load.load`; after an error its memory is freed.
    """
    shape = target.plan.draft
    if shape is None or not shape.is_block:
        return None
    failure: LocalqError
    try:
        return _load(files, target, shape, options.name or files.name, on_progress, may_map)
    except LocalqError as error:
        failure = error.with_traceback(None)  # its frames hold the half-loaded block
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        failure = out_of_memory(files.name, "while loading the MTP block", error)
    free_memory()
    raise failure


def _load(
    files: ModelFiles, target: LoadedModel, shape: DraftShape, name: str, on_progress: OnProgress, may_map: bool
) -> LoadedModel:
    device, dtype = target.device, target.dtype
    on_gpu = device.type == "cuda"
    placement = draft_placement(shape.arch, target.kv_bits)
    with open_checkpoint(files, mapped=may_map and on_gpu, packed=on_gpu, part="mtp") as checkpoint:
        assigned = assign_block(files, checkpoint, name, dtype, packed=on_gpu)
        assert assigned is not None
        block, sizes = assigned.model, assigned.sizes
        assert isinstance(block, MultiTokenPrediction)
        weights.fill(
            block,
            assigned.assignment,
            checkpoint,
            Destinations(device, dtype, placement, sizes),
            lambda done, total: on_progress("loading the MTP block", done, total),
        )
    free_memory()  # temporaries of reading
    block.eval()
    ledger = {"weights": weights.weight_bytes(block)["weights"]}
    tables = codebook_linear.table_bytes(block) + expert_linears.table_bytes(block) + workspace_bytes(block)
    tables += weights.padding_bytes(block)
    if on_gpu:
        ledger["scratch"] = share_scratch(block, dtype)
        grouped_experts.install(block, dtype)
    tables += block.share(target.model, ring_slots(on_gpu))
    cache = KVCache(block.cache_layout(), target.ctx, dtype, device, placement.kv_bits)
    plan = Plan(
        shape.name, shape.format, target.ctx, placement.kv_bits, Ledger({}), fits=True, arch=shape.arch
    )  # fmt: skip
    return LoadedModel(
        model=block,
        cache=cache,
        vocab=target.vocab,
        device=device,
        dtype=dtype,
        format=shape.format,
        ctx=target.ctx,
        plan=plan,
        ledger={**ledger, "kv_cache": cache.bytes(), "tables": tables},
        kv_bits=placement.kv_bits,
    )
