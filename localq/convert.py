"""A full-precision checkpoint becomes a quantized one, tensor by tensor, restartable after a kill.

The Linear weights of the decoder blocks are quantized; embeddings, head, norms, biases, router gates and everything
outside the decoder are copied. What comes out is a Hugging Face model folder that localq and transformers (with
bitsandbytes, for NF4) load. Memory: the largest source tensor and its quantized form.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from localq import __version__, catalog
from localq.checkpoint import Checkpoint, open_checkpoint
from localq.conversion_plan import Job, notes, plan_jobs, skipped_modules
from localq.disk import disk_errors
from localq.errors import ExitCode, LocalqError, bad_file, usage_error
from localq.jsonfile import inside
from localq.modelfiles import ModelFiles
from localq.quant import FORMATS
from localq.safetensors_header import shard_paths
from localq.shard_writer import (
    SHARD_BYTES,
    STATE_NAME,
    ShardWriter,
    load_state,
    plan_shards,
    start_state,
    write_file,
)

OnProgress = Callable[[str, int, int], None]  # what is done, source bytes done, source bytes in total
Say = Callable[[str], None]  # one-line notes for the user

LOCK_NAME = "conversion.lock"
# Everything that a tokenizer, a chat front end or the licence of the weights needs.
COPIED = re.compile(
    r"(tokenizer.*\.(json|model)|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt)|merges\.txt"
    r"|spiece\.model|chat_template\.(jinja|json)|generation_config\.json|(pre)?processor_config\.json"
    r"|preprocessor_config\.json|(LICENSE|NOTICE|USE_POLICY).*)"
)
OURS = re.compile(r"(model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|conversion\.state\.json)")


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
        _claim(source, out, task, force)
        with _locked(out):
            writer = ShardWriter(out, shards, task)
            writer.check_space()
            start_state(out, task)
            _write_shards(writer, checkpoint, jobs, module, source, on_progress)
            _write_small_files(source, module.quantization_config(_dtype(source), skipped_modules(jobs)), out)
            writer.finish()
    for note in notes(jobs):
        if say:
            say(note)
    return out


def _format_module(source: ModelFiles, format: str) -> ModuleType:
    if format not in catalog.MADE_FORMATS:
        raise usage_error(format, "localq does not write this format", f"Formats: {', '.join(catalog.MADE_FORMATS)}.")
    if "quantization_config" in source.config:
        method = source.config["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
        why = f"its weights are quantized already ({name})"
        raise usage_error(source.name, why, "Quantize the full-precision weights instead.")
    return FORMATS[format]


def _task(source: ModelFiles, format: str, jobs: list[Job], shard_bytes: int) -> dict[str, Any]:
    """What identifies a conversion: its input files, its output layout and the code that makes it."""
    paths = [source.path] if source.kind == "gguf" else list(shard_paths(source.path).values())
    stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    layout = [[name, part.dtype, list(part.shape)] for job in jobs for name, part in job.outputs.items()]
    described = json.dumps([stats, layout, shard_bytes, source.config], default=str)
    return {
        "source": source.name,
        "format": format,
        "localq": __version__,
        "fingerprint": hashlib.sha256(described.encode()).hexdigest(),
    }


# ---- the output folder


def _claim(source: ModelFiles, out: Path, task: dict[str, Any], force: bool) -> None:
    """Make sure that `out` may be written: new, empty, the same conversion interrupted, or `force`."""
    if out.resolve() == (source.path if source.kind == "safetensors" else source.path.parent).resolve():
        raise usage_error(str(out), "this is the folder of the source", "Give another folder.")
    if out.exists() and not out.is_dir():
        raise usage_error(str(out), "this is a file", "Give a folder.")
    unstarted = {LOCK_NAME, f"{STATE_NAME}.part"}  # all that a kill before the first record leaves
    names = [path.name for path in out.iterdir() if path.name not in unstarted] if out.exists() else []
    if not names:
        return
    state = load_state(out)
    if state is not None and state.get("job") == task:
        return
    if not force:
        why = "it holds an unfinished conversion of something else" if state else "the folder is not empty"
        raise usage_error(str(out), why, "Give another folder, or --force to replace the model in it.")
    with disk_errors(out):
        for name in names:
            if OURS.fullmatch(name):
                (out / name).unlink()


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep a second localq from writing into the same folder."""
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        file = (out / LOCK_NAME).open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            why = "another localq is quantizing into it"
            raise LocalqError(str(out), why, "Wait for it to end.", ExitCode.FAILURE) from error
        yield
        (out / LOCK_NAME).unlink(missing_ok=True)


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
    if kind == "gguf":
        packed = dataclasses.replace(packed, dtype=torch.bfloat16)
    written: dict[str, Tensor] = module.to_tensors(packed, job.name.removesuffix(".weight"))
    return written


# ---- configuration and tokenizer


def _write_small_files(source: ModelFiles, quantization: dict[str, Any], out: Path) -> None:
    if source.kind == "gguf":
        _write_gguf_text_files(source, out)
    else:
        for name in sorted(path.name for path in source.path.iterdir()):
            path = inside(source.path, name) if COPIED.fullmatch(name) and not (source.path / name).is_dir() else None
            if path is not None:
                write_file(out / name, path.read_bytes())
    config = {**source.config, "dtype": _dtype(source), "quantization_config": quantization}
    config.pop("torch_dtype", None)  # the older name of "dtype"
    write_file(out / "config.json", _json(config))


def _dtype(source: ModelFiles) -> str:
    """The dtype of the tensors that stay unquantized, and the one to compute in."""
    named = [part.get(key) for part in (source.config, source.text_config) for key in ("dtype", "torch_dtype")]
    known = [name for name in named if name in ("bfloat16", "float16", "float32")]
    return known[0] if known and source.kind != "gguf" else "bfloat16"


def _write_gguf_text_files(source: ModelFiles, out: Path) -> None:
    from localq.gguf_import import vocab  # tokenizers and the gguf package: only for a .gguf source

    tokens = vocab.special_tokens(source.path)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{key: tokens[key] for key in ("bos_token", "eos_token", "unk_token", "pad_token") if tokens.get(key)},
        "add_bos_token": bool(tokens.get("add_bos")),
        "add_eos_token": bool(tokens.get("add_eos")),
        "clean_up_tokenization_spaces": False,
    }
    if source.chat_template:
        config["chat_template"] = source.chat_template
    write_file(out / "tokenizer.json", vocab.build_tokenizer(source.path).to_str().encode())
    write_file(out / "tokenizer_config.json", _json(config))
    write_file(out / "generation_config.json", _json(source.generation_config))


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, indent=2, ensure_ascii=False).encode() + b"\n"
