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

from localq.engine import selftest
from localq.engine.cache import KVCache
from localq.engine.load import device as devices
from localq.engine.load import plan as load_plan
from localq.engine.load import shared_experts, vram, weights
from localq.engine.load.placing import Destinations
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import stored_format
from localq.files.extra_tensors import note
from localq.files.model_folder import ModelFiles
from localq.formats import FORMATS, expert_linears, fp8_source, nf4
from localq.formats.checkpoint import Checkpoint, open_checkpoint
from localq.formats.codebooks import linear as codebook_linear
from localq.formats.linear import SlabLinear, workspace_bytes
from localq.kv_bits import KvBits
from localq.models import architecture
from localq.models.decoder import Decoder
from localq.planner import footprint
from localq.planner import plan as memory_plan
from localq.planner.load_options import LoadOptions
from localq.planner.ram import cpu_dtype
from localq.wording import OnProgress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model, ready to run.

    format   of the weights in the files: a key of `formats.FORMATS`, "bf16", "fp16", "fp32", "fp8" or "gguf"
    plan     the prediction; ledger: component -> bytes allocated
    notes    for the user
    kv_bits, embed, head_bits  as in `placement.Placement`: kv_bits 16 is the dtype of the model
    vram     memory budget of this load on a GPU, None on the CPU
    checkpoint_bytes  host memory for checkpoints of the conversation (`engine.checkpoints`)
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


def load(
    files: ModelFiles,
    options: LoadOptions,
    on_progress: OnProgress = lambda stage, done, total: None,
    pick: Callable[[str], devices.DeviceChoice] = devices.pick,
    opened: Callable[[ModelFiles], Checkpoint] | None = None,
    *,
    may_map: bool = False,
) -> LoadedModel:
    """Load `files`. Raises LocalqError: exit 7 no usable GPU, 3 does not fit, 8 damaged files, 2 bad options.

    opened: returns the weights; benchmarks substitute others. may_map: a file that is cut may end the process
    (`tensor_files`). After an error all memory is freed.
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
            return _load(files, options, checkpoint, choice, dtype, before, on_progress)
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
) -> LoadedModel:
    name, device = options.name or files.name, choice.device
    family = _architecture(files, name)
    config = family.Config.from_dict(files.config)
    held = _begin(device, options, before) if device.type == "cuda" else None
    on_progress("planning", 0, 0)
    with torch.device("meta"):
        model = family.Model(config)
    assignment = weights.assign(checkpoint, model, family.rename, name)
    if held is not None:
        assignment = shared_experts.append(model, assignment, checkpoint)
    sizes = weights.block_sizes(assignment, checkpoint, model, dtype, packed=held is not None)
    scheme = stored_format.scheme_in(files, {name: each.shape for name, each in checkpoint.tensors.items()})
    plan, held = load_plan.plan_load(files, options, assignment, sum(sizes), dtype, held, scheme)
    non_finite = weights.fill(
        model,
        assignment,
        checkpoint,
        Destinations(device, dtype, plan.placement, sizes),
        lambda done, total: on_progress("loading weights", done, total),
    )
    on_progress("allocating the KV cache", 0, 0)
    free_memory()  # temporaries of reading
    model.make_tables(plan.ctx, device)
    model.eval()
    chunk = footprint.window_chunk(device.type == "cuda")
    cache = KVCache(model.cache_layout(), plan.ctx, dtype, device, plan.kv_bits, chunk)
    tables = model.table_bytes(plan.ctx, dtype) + codebook_linear.table_bytes(model)
    tables += expert_linears.table_bytes(model) + weights.padding_bytes(model) + workspace_bytes(model)
    ledger = {**weights.weight_bytes(model), "kv_cache": cache.bytes(), "tables": tables}
    if held is not None:
        ledger["scratch"] = share_scratch(model, dtype)
        ledger["cublas_workspace"] = vram.cublas_workspace(device, dtype)
    kept = load_plan.checkpoint_bytes(plan, dtype, options, held is not None)
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
        notes=(*choice.notes, *files.notes, *filter(None, [note(checkpoint.extra)]), *_notes(plan, non_finite)),
        kv_bits=plan.kv_bits,
        embed=plan.embed,
        head_bits=plan.head,
        vram=held,
        checkpoint_bytes=kept,
    )


def _notes(plan: memory_plan.Plan, non_finite: list[str]) -> list[str]:
    notes = [plan.choice] if plan.choice else []
    if not plan.fits:
        notes.append(f"loaded with --force even though it does not fit: {plan.reason}")
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
    count = footprint.slab_bytes(max(linear.slab_weights for linear in blocks), dtype.itemsize)
    scratch = torch.empty(count, dtype=torch.uint8, device=next(blocks[0].buffers()).device)
    for linear in linears:
        linear.scratch = scratch
    return count


def _architecture(files: ModelFiles, name: str) -> ModuleType:
    found = architecture(files.config, name)
    quantization = files.config.get("quantization_config") or files.text_config.get("quantization_config") or {}
    method = quantization.get("quant_method", nf4.quant_method) if isinstance(quantization, dict) else quantization
    in_8_bit = method == nf4.quant_method and quantization and not quantization.get("load_in_4bit")
    readable = (fp8_source.METHOD, *(module.quant_method for module in FORMATS.values()))
    if in_8_bit or method not in readable:
        what = "bitsandbytes (8-bit)" if in_8_bit else f"{method!r}"
        if isinstance(quantization, dict) and isinstance(algorithm := quantization.get("quant_algo"), str):
            what += f" ({algorithm})"
        step = f"Use {', '.join(FORMATS)}, fp8 or bf16."
        raise LocalqError(name, f"the weights are quantized with {what[:80]}, which is not supported", step)
    if isinstance(quantization, dict) and (variant := stored_format.unreadable(quantization)):
        raise LocalqError(name, f"the weights are {variant}", "Use a different repository for this model.")
    return found


def pick_dtype(wanted: str, files: ModelFiles, device: torch.device) -> torch.dtype:
    """Return the compute dtype: "auto" is `cpu_dtype` on the CPU, on a GPU the checkpoint's (GGUF: bfloat16)."""
    if wanted != "auto":
        if wanted not in DTYPES:
            raise usage_error("--dtype", f"{wanted!r} is not a supported dtype", f"Use auto, {', '.join(DTYPES)}.")
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
    if files.quantization.get("quant_method") == fp8_source.METHOD:
        return fp8_source.METHOD
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
