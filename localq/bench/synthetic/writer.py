"""Random weights as a model folder on the disk, for measuring what needs files: reading, planning, start-up.

The folder is a model like any other: safetensors shards, config.json, and the tokenizer and chat template of a .gguf
model. Replies are random tokens.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from localq.bench.synthetic import checkpoint as synthetic_checkpoint
from localq.errors import usage_error
from localq.files.model_folder import ModelFiles
from localq.formats.checkpoint import Checkpoint, TensorInfo
from localq.quantize.output.folder import claim_folder, write_gguf_text_files
from localq.quantize.output.shards import Shard, ShardWriter, plan_shards, write_file
from localq.text.tokenizer import Tokenizer
from localq.wording import OnProgress


def write(
    files: ModelFiles,
    format: str,
    out: Path,
    text: ModelFiles,
    device: torch.device,
    seed: int = 0,
    on_progress: OnProgress = lambda stage, done, total: None,
) -> int:
    """Write random weights for `files` (of `checkpoint.files_of`) in `format` to the folder `out`; returns their bytes.

    text  a .gguf model whose tokenizer and chat template are written; its vocabulary must not be larger
    The same arguments give the same bytes; an interrupted write continues. Raises LocalqError: exit 2 for a folder that
    is not empty or a larger vocabulary, 9 for a full disk.
    """
    tokens, vocab = Tokenizer.load(text).backend.get_vocab_size(), int(files.config["vocab_size"])
    if tokens > vocab:
        why = (
            f"the tokenizer of {text.name} has {tokens:,} tokens, but the vocabulary of {files.name} has only {vocab:,}"
        )
        raise usage_error("--write", why, "Choose a model with a larger vocabulary.")
    job = {"source": files.name, "format": format, "seed": seed}
    with synthetic_checkpoint.checkpoint(files, format, device, seed) as source, claim_folder(files, out, job, False):
        shards = plan_shards(_matrices(source))
        writer, done = ShardWriter(out, shards, job), 0
        total = sum(shard.nbytes for shard in shards)
        writer.check_space()
        for shard in shards:
            if shard in writer.pending():
                writer.write(shard, _tensors(source, shard))
            done += shard.nbytes
            on_progress("writing random weights", done, total)
        write_gguf_text_files(text, out)
        ids = {key: text.config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in text.config}
        write_file(out / "config.json", json.dumps({**files.config, **ids}, indent=2).encode() + b"\n")
        writer.finish()
    return total


def _matrices(source: Checkpoint) -> Iterator[dict[str, TensorInfo]]:
    """The tensors of each matrix together: they are made at once."""
    for _, group in itertools.groupby(source.tensors.items(), key=lambda item: item[0].rpartition(".")[0]):
        yield dict(group)


def _tensors(source: Checkpoint, shard: Shard) -> Iterator[tuple[str, Tensor]]:
    """In the order of the source."""
    for name in source.tensors:
        if name in shard.tensors:
            yield name, source.read(name).cpu().contiguous()
