"""Quantize a full-precision checkpoint tensor by tensor; an interrupted conversion resumes.

The Linear weights of the decoder blocks, and of an MTP block (`models.qwen3_5_mtp`), are quantized; embeddings, head,
norms, biases, router gates and everything outside the decoder are copied. The result is a Hugging Face model folder
that localq loads and, in NF4, transformers with bitsandbytes (experts of mixtures: `output/tensor_jobs.py`). Memory:
the largest source tensor and its quantized form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from localq.errors import LocalqError, bad_file, usage_error
from localq.files import format_facts, stored_format
from localq.files.model_folder import ModelFiles
from localq.files.model_types import MODEL_TYPES, text_part
from localq.formats import FORMATS, bcq, fp8_source
from localq.formats.checkpoint import Checkpoint, in_memory
from localq.formats.open_checkpoint import open_checkpoint
from localq.formats.tensor_files import read_tensors
from localq.quantize import memory
from localq.quantize.binary.layers import LayerCodes
from localq.quantize.bits import binary_mixture
from localq.quantize.bits import mixture as bit_mixture
from localq.quantize.model import input_moments
from localq.quantize.output.folder import claim_folder, conversion_task, output_dtype, write_small_files
from localq.quantize.output.shards import ShardWriter, plan_shards, start_state
from localq.quantize.output.tensor_jobs import TensorJob, maker_of, notes, plan_jobs, skipped_modules
from localq.quantize.request import TensorwiseRequest
from localq.wording import OnProgress, Say


def convert(request: TensorwiseRequest, on_progress: OnProgress | None = None, say: Say | None = None) -> Path:
    """Quantize into `request.out` and return it. The same call resumes an interrupted conversion.

    Raises LocalqError: exit 2 for an unknown format, a quantized source, or an `out` that holds something else, 8 for
    damaged weights, 9 for the disk, 3 where RAM does not suffice.
    """
    source, format, out, text, budget = request.source, request.format, request.out, request.text, request.budget
    module: Any = _format_module(source, format)
    if format == "bcq":
        module = module.of_scheme(request.scheme)
    with open_checkpoint(source, part="both" if has_mtp(source) else "text") as checkpoint:
        jobs = plan_jobs(checkpoint.tensors, module, source.kind, text_part(source.config)[0])
        if not any(job.quantized for job in jobs):
            raise bad_file(str(source.path), "no decoder weight matrices found")
        task = _task(request, jobs)
        less = _check_memory(request, jobs)
        with memory.guard(out, less), claim_folder(source, out, task, request.force):
            report, note = on_progress or (lambda what, done, total: None), say or (lambda line: None)
            if budget is not None:
                start_state(out, task)
                module = binary_mixture.choose_format(out, task, budget, source, checkpoint, report, note)
                jobs = plan_jobs(checkpoint.tensors, module, source.kind, text_part(source.config)[0])
            writer = ShardWriter(out, plan_shards([job.outputs for job in jobs], request.shard_bytes), task)
            writer.check_space()
            start_state(out, task)
            moments: dict[str, Tensor] = {}
            layers: LayerCodes | None = None
            if format == "bcq" and (read := text if budget is None else budget.text) is not None:
                layers = _layers(source, checkpoint, read, module, writer)
            elif text is not None:
                moments = input_moments.load_or_measure(out, text, source, checkpoint, report)
            _write_shards(writer, checkpoint, jobs, module, source, on_progress, moments, layers)
            quantization = module.quantization_config(output_dtype(source), skipped_modules(jobs))
            write_small_files(source, quantization, out, record=request.record)
            writer.finish()
            for name in (input_moments.FILE, bit_mixture.FILE):
                (out / name).unlink(missing_ok=True)
    for line in notes(jobs, module.BLOCK):
        if say:
            say(line)
    return out


def has_mtp(source: ModelFiles) -> bool:
    """Return whether the files of this model may have an MTP block, which is kept."""
    return MODEL_TYPES[text_part(source.config)[0]].hybrid


def _format_module(source: ModelFiles, format: str) -> ModuleType:
    if format not in (made := format_facts.formats_by_tensor()):
        raise usage_error(
            format, "tensor-by-tensor quantization does not support this format", f"Formats: {', '.join(made)}."
        )
    keeps = format_facts.of(format).keeps_experts and stored_format.only_experts(source)
    if source.quantization and not keeps and source.quantization.get("quant_method") != fp8_source.METHOD:
        method = source.quantization.get("quant_method", "method not specified in config.json")
        why = f"the weights are already quantized ({method})"
        raise usage_error(source.name, why, "Quantize the full-precision weights instead.")
    return FORMATS[format]


def _check_memory(request: TensorwiseRequest, jobs: list[TensorJob]) -> str:
    """Raise LocalqError (exit 3) where RAM cannot hold a tensor and its result, or the text.

    Returns what takes less memory, "" without a text.
    """
    needed, step = memory.tensor_bytes(jobs, request.format), ""
    text = request.text if request.budget is None else request.budget.text
    if text is not None:
        hidden, on_gpu = int(request.source.text_config.get("hidden_size") or 0), text.device.type == "cuda"
        weighing = memory.text_bytes(jobs, text.windows, hidden, on_gpu)
        needed, step = max(needed, weighing), "use a smaller --windows, or use --calibration none"
    memory.check_ram(request.source.name, needed, step)
    return step


def _task(request: TensorwiseRequest, jobs: list[TensorJob]) -> dict[str, Any]:
    budget, text = request.budget, request.text
    facts = budget.facts if budget is not None else [] if text is None else text.facts
    settings = [request.shard_bytes, request.source.config, *facts]
    return conversion_task(request.source, request.format, [job.outputs for job in jobs], settings)


def _layers(
    source: ModelFiles, checkpoint: Checkpoint, text: input_moments.CalibrationText, module: Any, writer: ShardWriter
) -> LayerCodes:
    """Return the layers quantized on `text`; matrices in finished shards are read back."""
    with torch.inference_mode():
        model, streams = input_moments.open_streams(text, source, checkpoint)
    files = writer.finished_files()

    def written(prefix: str) -> bcq.Packed | None:
        names = [prefix + suffix for suffix in bcq.suffixes]
        if not files.keys() >= set(names):
            return None
        stored = in_memory({name: read_tensors(files[name], (name,))[name] for name in names}, source.config)
        return bcq.from_checkpoint(stored, prefix)

    return LayerCodes(model, streams, partial(maker_of, module), written)


def _write_shards(
    writer: ShardWriter,
    checkpoint: Checkpoint,
    jobs: list[TensorJob],
    module: ModuleType,
    source: ModelFiles,
    on_progress: OnProgress | None,
    moments: Mapping[str, Tensor],
    layers: LayerCodes | None = None,
) -> None:
    total = sum(job.source.nbytes for job in jobs)
    pending = writer.pending()
    wanted = {name for shard in pending for name in shard.tensors}
    done = sum(job.source.nbytes for job in jobs if not wanted.intersection(job.outputs))

    def tensors(shard_jobs: list[TensorJob]) -> Iterator[tuple[str, Tensor]]:
        nonlocal done
        for job in shard_jobs:
            yield from _outputs(job, checkpoint.read(job.name), module, source.kind, moments, layers).items()
            done += job.source.nbytes
            if on_progress:
                on_progress("quantizing", done, total)

    if on_progress:
        on_progress("quantizing", done, total)
    for shard in pending:
        writer.write(shard, tensors([job for job in jobs if not shard.tensors.keys().isdisjoint(job.outputs)]))


def _outputs(
    job: TensorJob,
    tensor: Tensor,
    module: ModuleType,
    kind: str,
    moments: Mapping[str, Tensor],
    layers: LayerCodes | None,
) -> dict[str, Tensor]:
    """Return the output tensors of one source tensor, by name; moments: of measured inputs, by prefix."""
    if not job.quantized:
        ((name, described),) = job.outputs.items()
        return {name: tensor.to(getattr(torch, described.dtype))}
    written: dict[str, Tensor] = {}
    for prefix, matrix in job.matrices(tensor):
        try:
            moment = moments.get(prefix)
            packed: Any
            if layers is not None and prefix in layers:
                packed = layers.codes(prefix)
            elif moment is not None:
                packed = maker_of(module, prefix).quantize(matrix.to(moment.device), moment)
            else:
                packed = maker_of(module, prefix).quantize(matrix)
        except LocalqError as error:
            raise bad_file(job.name, error.why, error.next_step) from error
        if kind == "gguf" and hasattr(packed, "dtype"):  # MXFP4 does not record the source dtype
            packed = dataclasses.replace(packed, dtype=torch.bfloat16)
        written |= maker_of(module, prefix).to_tensors(packed, prefix)
    return written
