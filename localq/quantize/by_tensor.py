"""A full-precision checkpoint becomes a quantized one, tensor by tensor, restartable after a kill.

The Linear weights of the decoder blocks are quantized; embeddings, head, norms, biases, router gates and everything
outside the decoder are copied. What comes out is a Hugging Face model folder that localq loads and, in NF4,
transformers with bitsandbytes (experts of mixtures: `conversion_plan`). Memory: the largest source tensor and its
quantized form.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from localq import __version__
from localq.errors import LocalqError, bad_file, usage_error
from localq.files import schemes
from localq.files.model_folder import ModelFiles
from localq.formats import FORMATS, bcq
from localq.formats.checkpoint import Checkpoint, in_memory, open_checkpoint
from localq.quantize.binary.layers import Layers
from localq.quantize.bits import binary_mixture
from localq.quantize.bits import mixture as bit_mixture
from localq.quantize.model import input_moments
from localq.quantize.output.folder import claimed, source_facts, stated_dtype, write_small_files
from localq.quantize.output.shards import SHARD_BYTES, ShardWriter, plan_shards, start_state
from localq.quantize.output.tensor_jobs import Job, maker_of, notes, plan_jobs, skipped_modules

MADE = ("nf4", "mxfp4", "bcq", "squeezellm")  # formats that are made tensor by tensor; `vq_convert` makes others
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
    scheme: str = "",
    text: input_moments.Text | None = None,
    wish: binary_mixture.Wish | None = None,
) -> Path:
    """Quantize `source` into the folder `out` and return it. The same call goes on where a killed one stopped.

    text   of a format of `prepare.WEIGHED`: squeezellm has columns count as much as their inputs there, bcq is made
           layer by layer on it (`quantizer/binary_layers.py`); None: all columns alike, each matrix by itself

    scheme   of bcq: "q3g128" and the like, which is also the default; wish: in its place, a mixture, on its own text

    Raises LocalqError: exit 2 for an unknown format, a source that is quantized already, or an `out` that holds
    something else (`force` replaces an earlier model there), 8 for damaged weights, 9 for the disk.
    """
    module: Any = _format_module(source, format)
    if format == "bcq":
        module = module.of_scheme(scheme)
    with open_checkpoint(source) as checkpoint:
        jobs = plan_jobs(checkpoint.tensors, module, source.kind, str(source.config.get("model_type")))
        if not any(job.quantized for job in jobs):
            raise bad_file(str(source.path), "none of its tensors is a decoder Linear that localq knows")
        facts = wish.facts if wish is not None else [] if text is None else text.facts
        task = _task(source, format, jobs, shard_bytes, facts)
        with claimed(source, out, task, force):
            tell, hear = on_progress or (lambda what, done, total: None), say or (lambda line: None)
            if wish is not None:
                start_state(out, task)
                module = binary_mixture.mixed(out, task, wish, source, checkpoint, tell, hear)
                jobs = plan_jobs(checkpoint.tensors, module, source.kind, str(source.config.get("model_type")))
            writer = ShardWriter(out, plan_shards([job.outputs for job in jobs], shard_bytes), task)
            writer.check_space()
            start_state(out, task)
            moments: dict[str, Tensor] = {}
            layers: Layers | None = None
            if format == "bcq" and (read := text if wish is None else wish.text) is not None:
                layers = _layers(source, checkpoint, read, module, writer)
            elif text is not None:
                moments = input_moments.kept(out, text, source, checkpoint, tell)
            _write_shards(writer, checkpoint, jobs, module, source, on_progress, moments, layers)
            write_small_files(source, module.quantization_config(stated_dtype(source), skipped_modules(jobs)), out)
            writer.finish()
            for kept in (input_moments.FILE, bit_mixture.FILE):
                (out / kept).unlink(missing_ok=True)
    for note in notes(jobs, module.BLOCK):
        if say:
            say(note)
    return out


def _format_module(source: ModelFiles, format: str) -> ModuleType:
    if format not in MADE:
        raise usage_error(format, "localq does not write this format tensor by tensor", f"Formats: {', '.join(MADE)}.")
    if "quantization_config" in source.config and not (format == "nf4" and schemes.only_experts(source)):
        method = source.config["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
        why = f"its weights are quantized already ({name})"
        raise usage_error(source.name, why, "Quantize the full-precision weights instead.")
    return FORMATS[format]


def _task(source: ModelFiles, format: str, jobs: list[Job], shard_bytes: int, text: list[str]) -> dict[str, Any]:
    """What identifies a conversion: its input files, its output layout and the code that makes it."""
    layout = [[name, part.dtype, list(part.shape)] for job in jobs for name, part in job.outputs.items()]
    described = json.dumps([source_facts(source), layout, shard_bytes, source.config, *text], default=str)
    return {
        "source": source.name,
        "format": format,
        "localq": __version__,
        "fingerprint": hashlib.sha256(described.encode()).hexdigest(),
    }


def _layers(
    source: ModelFiles, checkpoint: Checkpoint, text: input_moments.Text, module: Any, writer: ShardWriter
) -> Layers:
    """The layers on `text`; those of shards that are written already as they are there."""
    with torch.inference_mode():
        model, streams = input_moments.begun(text, source, checkpoint)
    files = writer.finished()

    def written(prefix: str) -> bcq.Packed | None:
        names = [prefix + suffix for suffix in bcq.suffixes]
        if not files.keys() >= set(names):
            return None
        stored = in_memory({name: _stored(files[name], name) for name in names}, source.config)
        return bcq.from_checkpoint(stored, prefix)

    return Layers(model, streams, partial(maker_of, module), written)


def _stored(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        found: Tensor = file.get_tensor(name)
    return found


def _write_shards(
    writer: ShardWriter,
    checkpoint: Checkpoint,
    jobs: list[Job],
    module: ModuleType,
    source: ModelFiles,
    on_progress: OnProgress | None,
    moments: Mapping[str, Tensor],
    layers: Layers | None = None,
) -> None:
    total = sum(job.source.nbytes for job in jobs)
    pending = writer.pending()
    wanted = {name for shard in pending for name in shard.tensors}
    done = sum(job.source.nbytes for job in jobs if not wanted.intersection(job.outputs))

    def tensors(shard_jobs: list[Job]) -> Iterator[tuple[str, Tensor]]:
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
    job: Job, tensor: Tensor, module: ModuleType, kind: str, moments: Mapping[str, Tensor], layers: Layers | None
) -> dict[str, Tensor]:
    """The tensors that are written for one source tensor, by name; moments: of inputs, by prefix, where measured."""
    if not job.quantized:
        ((name, described),) = job.outputs.items()
        return {name: tensor.to(getattr(torch, described.dtype))}
    written: dict[str, Tensor] = {}
    for prefix, matrix in job.matrices(tensor):
        try:
            moment = moments.get(prefix)
            packed: Any
            if layers is not None and prefix in layers:
                packed = layers.packed(prefix)
            elif moment is not None:
                packed = maker_of(module, prefix).quantize(matrix.to(moment.device), moment)
            else:
                packed = maker_of(module, prefix).quantize(matrix)
        except LocalqError as error:
            raise bad_file(job.name, error.why, error.next_step) from error
        if kind == "gguf" and hasattr(packed, "dtype"):  # MXFP4 does not say what it was made of
            packed = dataclasses.replace(packed, dtype=torch.bfloat16)
        written |= maker_of(module, prefix).to_tensors(packed, prefix)
    return written
