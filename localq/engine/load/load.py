"""Load a model from files on disk: first the plan, then weights, KV cache and tables.

Everything the model needs is allocated here, by the plan, so that a shortage of memory is reported at load time. Knows
no text.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch

from localq.drafts import MTP
from localq.drafts import no_mtp as no_mtp_error
from localq.engine import selftest
from localq.engine.cache import KVCache
from localq.engine.load import device as devices
from localq.engine.load import grouped_experts, shared_experts, vram, weights
from localq.engine.load import plan as load_plan
from localq.engine.load.placing import Destinations
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import format_facts, stored_format
from localq.files.architecture import Architecture
from localq.files.extra_tensors import MORE_TOKENS, note
from localq.files.model_folder import ModelFiles
from localq.formats import FORMATS, expert_linears, fp8_source, nf4
from localq.formats.checkpoint import Checkpoint
from localq.formats.codebooks import linear as codebook_linear
from localq.formats.linear import SlabLinear, workspace_bytes
from localq.formats.open_checkpoint import open_checkpoint
from localq.kv_bits import KvBits
from localq.models import architecture, qwen3_5_mtp
from localq.models.decoder import Decoder
from localq.planner import footprint, slabs
from localq.planner import plan as memory_plan
from localq.planner.draft_shape import DraftShape
from localq.planner.load_options import LoadOptions
from localq.planner.ram import cpu_dtype
from localq.wording import OnProgress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, ready to run.

    format   of the weights in the files: a key of `formats.FORMATS`, "bf16", "fp16" or "fp32"
    plan     the prediction; ledger: component -> bytes allocated
    notes    for the user
    kv_bits, embed, head_bits  as in `placement.Placement`: kv_bits 16 is the dtype of the model
    vram     memory budget of this load on a GPU, None on the CPU
    checkpoint_bytes  host memory for checkpoints of the conversation (`engine.checkpoints`)
    no_mtp   why no MTP block drafts, where one would be taken
    """

    model: Decoder
    cache: KVCache
    vocab: int
    device: torch.device
    dtype: torch.dtype
    format: str
    ctx: int
    plan: memory_plan.Plan
    ledger: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    kv_bits: KvBits = 16
    embed: str = "device"
    head_bits: str = "16"
    vram: vram.VramBudget | None = None
    checkpoint_bytes: int = 0
    no_mtp: str = ""


def load(
    files: ModelFiles,
    options: LoadOptions,
    on_progress: OnProgress = lambda stage, done, total: None,
    pick: Callable[[str], devices.DeviceChoice] = devices.pick,
    opened: Callable[[ModelFiles], Checkpoint] | None = None,
    *,
    may_map: bool = False,
    draft: ModelFiles | None = None,
) -> LoadedModel:
    """Load `files`. Raises LocalqError: exit 7 no usable GPU, 3 does not fit, 8 damaged files, 2 bad options.

    opened: returns the weights; benchmarks substitute others. may_map: a file that is cut may end the process
    (`tensor_files`). draft: a model that the plan leaves room for (`load.draft`). After an error all memory is freed.
    """
    before = vram.free_before_context() if options.device != "cpu" else {}
    on_progress("starting the device", 0, 0)
    choice = pick(options.device)
    idle = ("--vram is ignored when running on the CPU",) if options.vram_bytes and choice.device.type == "cpu" else ()
    if choice.device.type == "cuda":
        on_progress("testing the kernels", 0, 0)
    choice = replace(choice, notes=(*choice.notes, *idle, *selftest.ensure(choice.device)))
    dtype = pick_dtype(options.dtype, files, choice.device)
    failure: LocalqError
    try:
        on_gpu = choice.device.type == "cuda"
        is_mapped = may_map and on_gpu  # to the CPU tensors are copied anyway
        with open_checkpoint(files, mapped=is_mapped, packed=on_gpu) if opened is None else opened(files) as checkpoint:
            return _load(files, options, checkpoint, choice, dtype, before, on_progress, draft)
    except LocalqError as error:
        failure = error.with_traceback(None)  # its frames hold the half-loaded model
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        failure = out_of_memory(options.name or files.name, "while loading", error)
    free_memory()
    raise failure


def _load(
    files: ModelFiles,
    options: LoadOptions,
    checkpoint: Checkpoint,
    choice: devices.DeviceChoice,
    dtype: torch.dtype,
    before: dict[str, int],
    on_progress: OnProgress,
    draft: ModelFiles | None,
) -> LoadedModel:
    device, name = choice.device, options.name or files.name
    _architecture(files, name)  # raises before the device is begun
    held = _begin(device, options, before) if device.type == "cuda" else None
    on_progress("planning", 0, 0)
    assigned = assign(files, checkpoint, name, dtype, packed=held is not None)
    shape, no_mtp = None if draft is None else _draft_shape(draft, options, device), ""
    if draft is None and options.mtp and options.draft_tokens:
        shape, no_mtp = _block_shape(files, options, device, dtype)
    plan, held = load_plan.plan_load(
        files, options, assigned.assignment, sum(assigned.sizes), dtype, held, assigned.scheme, shape
    )
    model = build(files, checkpoint, assigned, plan, device, dtype, on_progress)
    if held is not None:
        model.ledger["cublas_workspace"] = vram.cublas_workspace(device, dtype)
    kept = load_plan.checkpoint_bytes(plan, dtype, options, held is not None)
    idle = (f"--draft mtp has no effect: {no_mtp}",) if no_mtp and options.mtp == MTP else ()
    notes = (*choice.notes, *model.notes, *idle)
    return replace(model, notes=notes, vram=held, checkpoint_bytes=kept, no_mtp=no_mtp)


def _draft_shape(files: ModelFiles, options: LoadOptions, device: torch.device) -> DraftShape:
    on_gpu = device.type == "cuda"
    arch, name = Architecture.from_config(files.config), options.draft_name or files.name
    with open_checkpoint(files, packed=on_gpu) as checkpoint:
        assigned = assign(files, checkpoint, name, pick_dtype(options.dtype, files, device), packed=on_gpu)
    assignment = assigned.assignment
    if not on_gpu:
        return DraftShape(name, arch, "bf16", weights=sum(assigned.sizes), on_gpu=False)
    arch = replace(arch, stored_head=assignment.head_bytes)
    return DraftShape(name, arch, assignment.format or "bf16", assigned.scheme, sum(assigned.sizes))


def _block_shape(
    files: ModelFiles, options: LoadOptions, device: torch.device, dtype: torch.dtype
) -> tuple[DraftShape | None, str]:
    """The MTP block of `files` to plan for; or None, and why. Raises LocalqError (exit 2) where it must draft."""
    on_gpu, name = device.type == "cuda", options.name or files.name
    with open_checkpoint(files, packed=on_gpu, part="mtp") as checkpoint:
        try:
            assigned = assign_block(files, checkpoint, name, dtype, packed=on_gpu)
        except LocalqError as error:  # a block of another make
            assigned, why = None, error.why
        else:
            why = "" if assigned is not None else "the files contain no MTP block"
    if assigned is None:
        if options.mtp == MTP:
            raise no_mtp_error(name, why)
        return None, why
    shape = DraftShape.of_block(Architecture.from_config(files.config), assigned.assignment.format or "bf16")
    shape = replace(shape, scheme=assigned.scheme, weights=sum(assigned.sizes))
    return (shape if on_gpu else replace(shape, format="bf16", scheme="", on_gpu=False)), ""


@dataclass(frozen=True)
class Assigned:
    """A model without weights, and those that it will have.

    sizes    of the blocks' tensors in memory; scheme as of `stored_format.scheme_in`
    """

    model: Decoder
    assignment: weights.Assignment
    sizes: list[int]
    scheme: str


def assign(files: ModelFiles, checkpoint: Checkpoint, name: str, dtype: torch.dtype, *, packed: bool) -> Assigned:
    """Assign the weights of `checkpoint`; packed: they stay in their format. Raises LocalqError (exit 8) for others."""
    family = _architecture(files, name)
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(files.config))
    return _assign(files, checkpoint, model, family.rename, name, dtype, packed=packed)


def assign_block(
    files: ModelFiles, checkpoint: Checkpoint, name: str, dtype: torch.dtype, *, packed: bool
) -> Assigned | None:
    """The same for the MTP block, whose tensors `checkpoint` has; None for a model without one."""
    family = _architecture(files, name)
    with torch.device("meta"):
        block = qwen3_5_mtp.block_of(family.Config.from_dict(files.config), family.Model)
    if block is None or not checkpoint.tensors:
        return None
    return _assign(files, checkpoint, block, qwen3_5_mtp.rename, name, dtype, packed=packed)


def _assign(
    files: ModelFiles,
    checkpoint: Checkpoint,
    model: Decoder,
    rename: Callable[[str], str | None],
    name: str,
    dtype: torch.dtype,
    *,
    packed: bool,
) -> Assigned:
    assignment = weights.assign(checkpoint, model, rename, name)
    if packed:
        assignment = shared_experts.append(model, assignment, checkpoint)
    sizes = weights.block_sizes(assignment, checkpoint, model, dtype, packed=packed)
    scheme = stored_format.scheme_in(files, {name: each.shape for name, each in checkpoint.tensors.items()})
    return Assigned(model, assignment, sizes, scheme)


def build(
    files: ModelFiles,
    checkpoint: Checkpoint,
    assigned: Assigned,
    plan: memory_plan.Plan,
    device: torch.device,
    dtype: torch.dtype,
    on_progress: OnProgress,
) -> LoadedModel:
    """Allocate and fill a model by its plan."""
    model, assignment, on_gpu = assigned.model, assigned.assignment, device.type == "cuda"
    non_finite = weights.fill(
        model,
        assignment,
        checkpoint,
        Destinations(device, dtype, plan.placement, assigned.sizes),
        lambda done, total: on_progress("loading weights", done, total),
    )
    on_progress("allocating the KV cache", 0, 0)
    free_memory()  # temporaries of reading
    model.make_tables(plan.ctx, device)
    model.eval()
    chunk = footprint.prefill_chunk(on_gpu)
    cache = KVCache(model.cache_layout(), plan.ctx, dtype, device, plan.kv_bits, chunk, plan.rows)
    tables = model.table_bytes(plan.ctx, dtype) + codebook_linear.table_bytes(model)
    tables += expert_linears.table_bytes(model) + weights.padding_bytes(model) + workspace_bytes(model)
    ledger = {**weights.weight_bytes(model), "kv_cache": cache.bytes(), "tables": tables}
    if on_gpu:
        ledger["scratch"] = share_scratch(model, dtype)
        grouped_experts.install(model, dtype)
    return LoadedModel(
        model=model,
        cache=cache,
        vocab=model.config.vocab_size,
        device=device,
        dtype=dtype,
        format=_format(files, assignment),
        ctx=plan.ctx,
        plan=plan,
        ledger=ledger,
        notes=(*files.notes, *filter(None, [_left_out(checkpoint, plan)]), *_notes(plan, non_finite)),
        kv_bits=plan.kv_bits,
        embed=plan.embed,
        head_bits=plan.head,
    )


def _left_out(checkpoint: Checkpoint, plan: memory_plan.Plan) -> str:
    """The tensors of the files that are not loaded; an MTP block that drafts is loaded."""
    drafts = plan.draft is not None and plan.draft.is_block
    return note({kind: names for kind, names in checkpoint.extra.items() if not (drafts and kind == MORE_TOKENS)})


def _notes(plan: memory_plan.Plan, non_finite: list[str]) -> list[str]:
    notes = [plan.choice] if plan.choice else []
    if not plan.fits:
        notes.append(f"loaded because of --force, although it does not fit: {plan.reason}")
    if non_finite:
        notes.append(
            f"{len(non_finite)} weight tensors contain NaN or infinity (first: {non_finite[0]}); replies may be garbage"
        )
    return notes


def _begin(device: torch.device, options: LoadOptions, before: dict[str, int]) -> vram.VramBudget:
    # cuDNN's attention makes a plan for every new length: 40 ms per prefill pass on an H200, 0.6 s the first time.
    # Torch's own kernels take 10 to 25 % longer on known lengths, but a chat rarely repeats one.
    torch.backends.cuda.enable_cudnn_sdp(False)
    free_memory()
    return vram.open_budget(device, options.vram_bytes, before, options.reserve_bytes)


def share_scratch(model: Decoder, dtype: torch.dtype) -> int:
    """Give all quantized linears of a model on a GPU one buffer for weights dequantized in prefill; returns its bytes.

    Its size is that of the blocks: the head runs for one token at a time, or in slabs.
    """
    linears = [module for module in model.modules() if isinstance(module, SlabLinear)]
    blocks = [module for module in model.layers.modules() if isinstance(module, SlabLinear)]
    if not blocks:
        return 0
    count = slabs.slab_bytes(max(linear.slab_weights for linear in blocks), dtype.itemsize)
    scratch = torch.empty(count, dtype=torch.uint8, device=next(blocks[0].buffers()).device)
    for linear in linears:
        linear.scratch = scratch
    return count


def _architecture(files: ModelFiles, name: str) -> ModuleType:
    found = architecture(files.config, name)
    quantization = files.config.get("quantization_config") or files.text_config.get("quantization_config") or {}
    method = quantization.get("quant_method", nf4.quant_method) if isinstance(quantization, dict) else quantization
    in_8_bit = method == nf4.quant_method and quantization and not quantization.get("load_in_4bit")
    readable = tuple(module.quant_method for module in FORMATS.values())
    if in_8_bit or method not in readable:
        what = "bitsandbytes (8-bit)" if in_8_bit else f"{method!r}"
        if isinstance(quantization, dict) and isinstance(algorithm := quantization.get("quant_algo"), str):
            what += f" ({algorithm})"
        step = stored_format.INSTEAD.get(str(method)) or f"Use {', '.join(FORMATS)} or bf16."
        raise LocalqError(name, f"the weights are quantized with {what[:80]}, which is not supported", step)
    if isinstance(quantization, dict) and (variant := stored_format.unreadable(quantization)):
        raise LocalqError(
            name, f"the weights use an unsupported format: {variant}", "Use a different repository for this model."
        )
    return found


def pick_dtype(wanted: str, files: ModelFiles, device: torch.device) -> torch.dtype:
    """Return the compute dtype: "auto" is `cpu_dtype` on the CPU, on a GPU the checkpoint's (GGUF: bfloat16)."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise usage_error(
                "--dtype", f"{wanted!r} is not a supported dtype", f"Use one of auto, {', '.join(DTYPES)}."
            )
        return DTYPES[wanted]
    if device.type == "cpu":
        return DTYPES[cpu_dtype()]
    return DTYPES.get(_stored_dtype(files), torch.bfloat16) if files.kind != "gguf" else torch.bfloat16


def _stored_dtype(files: ModelFiles) -> str:
    """Return the dtype in config.json ("dtype" in transformers 5), bfloat16 where it is absent."""
    for config in (files.config, files.text_config):
        if stated := config.get("dtype") or config.get("torch_dtype"):
            return str(stated)
    return "bfloat16"


def _format(files: ModelFiles, assignment: weights.Assignment) -> str:
    """Return `LoadedModel.format`."""
    if files.kind == "gguf":
        return "gguf"
    method = files.quantization.get("quant_method")
    if method == fp8_source.METHOD:
        return fp8_source.METHOD
    stated = format_facts.of_method(method)
    if stated is not None and stated.name in assignment.formats:  # others may be beside it
        return stated.name
    return assignment.format or {"bfloat16": "bf16", "float16": "fp16"}.get(_stored_dtype(files), "fp32")


def is_out_of_memory(error: BaseException) -> bool:
    """True for torch's two errors for exhausted memory, on a GPU and on the CPU."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def out_of_memory(name: str, when: str, error: BaseException) -> LocalqError:
    """Return the error for memory that ran out although the plan fits, because of another program (exit 3)."""
    why = f"ran out of memory {when} ({str(error).splitlines()[0]})"
    return LocalqError(name, why, load_plan.LESS, ExitCode.DOES_NOT_FIT)


def free_memory() -> None:
    """Release unreferenced memory to the system."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
