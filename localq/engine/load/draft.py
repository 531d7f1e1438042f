"""Load a draft model beside a loaded model, whose plan has counted it (`load`'s argument `draft`)."""

from __future__ import annotations

from localq.engine.load import plan as load_plan
from localq.engine.load.load import LoadedModel, assign, build, free_memory, is_out_of_memory, out_of_memory, pick_dtype
from localq.errors import LocalqError
from localq.files.model_folder import ModelFiles
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.draft_shape import DraftShape
from localq.planner.load_options import LoadOptions
from localq.planner.placement import draft_placement
from localq.planner.plan import Ledger, Plan
from localq.wording import OnProgress


def load_draft(
    files: ModelFiles, target: LoadedModel, options: LoadOptions, on_progress: OnProgress, *, may_map: bool = False
) -> LoadedModel | None:
    """Load `files` on the device of `target`, with its context; None where the plan has no room for it: no drafts.

    options: of `target`. Raises as `load.load`; after an error its memory is freed.
    """
    if target.plan.draft is None:
        return None
    failure: LocalqError
    try:
        return _load(files, target, target.plan.draft, options, on_progress, may_map)
    except LocalqError as error:
        failure = error.with_traceback(None)  # its frames hold the half-loaded model
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        failure = out_of_memory(files.name, "while loading the draft model", error)
    free_memory()
    raise failure


def _load(
    files: ModelFiles,
    target: LoadedModel,
    shape: DraftShape,
    options: LoadOptions,
    on_progress: OnProgress,
    may_map: bool,
) -> LoadedModel:
    device, name = target.device, options.draft_name or files.name
    on_gpu = device.type == "cuda"
    dtype = pick_dtype(options.dtype, files, device)
    with open_checkpoint(files, mapped=may_map and on_gpu, packed=on_gpu) as checkpoint:
        assigned = assign(files, checkpoint, name, dtype, packed=on_gpu)
        placement = draft_placement(shape.arch, target.kv_bits)
        head = load_plan.kept_head(assigned.assignment) or placement.head
        context = min(target.ctx, shape.arch.max_context)
        plan = Plan(
            name, shape.format, context, placement.kv_bits, Ledger({}), fits=True, head=head, arch=shape.arch
        )  # fmt: skip
        return build(files, checkpoint, assigned, plan, device, dtype, on_progress)
