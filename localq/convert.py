"""A full-precision checkpoint becomes a quantized one, tensor by tensor, restartable after a kill.

The Linear weights of the decoder blocks are quantized; embeddings, head, norms, biases, router gates and everything
outside the decoder are copied. What comes out is a Hugging Face model folder that localq loads and, in NF4,
transformers with bitsandbytes. Memory: the largest source tensor and its quantized form.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from localq import __version__
from localq.checkpoint import Checkpoint, open_checkpoint
from localq.conversion_folder import claim, locked, source_facts, stated_dtype, write_small_files
from localq.conversion_plan import Job, notes, plan_jobs, skipped_modules
from localq.errors import LocalqError, bad_file, usage_error
from localq.modelfiles import ModelFiles
from localq.quant import FORMATS
from localq.shard_writer import SHARD_BYTES, ShardWriter, plan_shards, start_state

MADE = ("nf4", "mxfp4")  # formats that are made tensor by tensor; `vq_convert` makes others
OnProgress = Callable[[str, int, int], None]  # what is done, source bytes done, source bytes in total
Say = Callable[[str], None]  # one-line notes for the user


def convert(
    source: ModelFiles,
    format: str,
    out: Path,
    on_progress: OnProgress | None = None,
    say: Say | None = None,
    *,
    force: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Quantize `source` into the folder `out` and return it. The same call goes on where a killed one stopped.

    Raises LocalqError: exit 2 for an unknown format, a source that is quantized already, or an `out` that holds
    something else (`force` replaces an earlier model there), 8 for damaged weights, 9 for the disk.
    """
    module = _format_module(source, format)
    with open_checkpoint(source) as checkpoint:
        jobs = plan_jobs(checkpoint.tensors, module, source.kind)
        if not any(job.quantized for job in jobs):
            raise bad_file(str(source.path), "none of its tensors is a decoder Linear that localq knows")
        shards = plan_shards([job.outputs for job in jobs], shard_bytes)
        task = _task(source, format, jobs, shard_bytes)
        stale = claim(source, out, task, force)
        with locked(out, stale):
            writer = ShardWriter(out, shards, task)
            writer.check_space()
            start_state(out, task)
            _write_shards(writer, checkpoint, jobs, module, source, on_progress)
            write_small_files(source, module.quantization_config(stated_dtype(source), skipped_modules(jobs)), out)
            writer.finish()
    for note in notes(jobs, module.BLOCK):
        if say:
            say(note)
    return out


def _format_module(source: ModelFiles, format: str) -> ModuleType:
    if format not in MADE:
        raise usage_error(format, "localq does not write this format tensor by tensor", f"Formats: {', '.join(MADE)}.")
    if "quantization_config" in source.config:
        method = source.config["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
        why = f"its weights are quantized already ({name})"
        raise usage_error(source.name, why, "Quantize the full-precision weights instead.")
    return FORMATS[format]


def _task(source: ModelFiles, format: str, jobs: list[Job], shard_bytes: int) -> dict[str, Any]:
    """What identifies a conversion: its input files, its output layout and the code that makes it."""
    layout = [[name, part.dtype, list(part.shape)] for job in jobs for name, part in job.outputs.items()]
    described = json.dumps([source_facts(source), layout, shard_bytes, source.config], default=str)
    return {
        "source": source.name,
        "format": format,
        "localq": __version__,
        "fingerprint": hashlib.sha256(described.encode()).hexdigest(),
    }


def _write_shards(
    writer: ShardWriter,
    checkpoint: Checkpoint,
    jobs: list[Job],
    module: ModuleType,
    source: ModelFiles,
    on_progress: OnProgress | None,
) -> None:
    total = sum(job.source.nbytes for job in jobs)
    pending = writer.pending()
    wanted = {name for shard in pending for name in shard.tensors}
    done = sum(job.source.nbytes for job in jobs if not wanted.intersection(job.outputs))

    def tensors(shard_jobs: list[Job]) -> Iterator[tuple[str, Tensor]]:
        nonlocal done
        for job in shard_jobs:
            yield from _outputs(job, checkpoint.read(job.name), module, source.kind).items()
            done += job.source.nbytes
            if on_progress:
                on_progress("quantizing", done, total)

    if on_progress:
        on_progress("quantizing", done, total)
    for shard in pending:
        writer.write(shard, tensors([job for job in jobs if not shard.tensors.keys().isdisjoint(job.outputs)]))


def _outputs(job: Job, tensor: Tensor, module: ModuleType, kind: str) -> dict[str, Tensor]:
    """The tensors that are written for one source tensor, by name."""
    if not job.quantized:
        return {job.name: tensor.to(getattr(torch, job.outputs[job.name].dtype))}
    try:
        packed = module.quantize(tensor)
    except LocalqError as error:
        raise bad_file(job.name, error.why, error.next_step) from error
    if kind == "gguf" and hasattr(packed, "dtype"):  # MXFP4 does not say what it was made of
        packed = dataclasses.replace(packed, dtype=torch.bfloat16)
    written: dict[str, Tensor] = module.to_tensors(packed, job.name.removesuffix(".weight"))
    return written
