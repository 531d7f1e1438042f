"""Tiny hybrids with a block for multi-token prediction (MTP), and engines that draft with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from localq.engine.generate import Engine
from localq.engine.load.draft_head import load_head
from localq.engine.load.load import LoadedModel, load
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.models.tiny_checkpoints import TINY, make_checkpoint

KINDS = ("right", "random")
MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text")
OPTIONS = LoadOptions(device="cpu", dtype="float32", draft_tokens=7, mtp="mtp")
_OUTPUTS = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


def save_mtp(folder: Path, model_type: str, kind: str = "right", **overrides: Any) -> Path:
    """A checkpoint of this type with an MTP block in one file, all in float32.

    right    what layers add to the embedding is small, and the block passes on that of the token it is given: so it is
             right often
    random   a block of random weights
    """
    fields = {"dtype": torch.float32, "initializer_range": 0.15, "mtp_num_hidden_layers": 1, **overrides}
    made = make_checkpoint(folder, model_type, **fields)
    tensors: dict[str, Tensor] = {}
    for shard in sorted(made.glob("*.safetensors")):
        tensors |= load_file(shard)
        shard.unlink()
    (made / "model.safetensors.index.json").unlink(missing_ok=True)
    if kind == "right":
        tensors = {name: each * _scale(name) for name, each in tensors.items()}
    tensors |= block_tensors(tensors, kind)
    save_file({name: each.contiguous() for name, each in tensors.items()}, made / "model.safetensors")
    config = json.loads((made / "config.json").read_text())
    (made / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    return made


def _scale(name: str) -> float:
    """Embeddings rule over what layers add to them; few tokens are likely, so that few are near ties."""
    if name == "model.embed_tokens.weight":
        return 8.0
    return 0.06 if name.endswith(_OUTPUTS) else 4.0 if name == "lm_head.weight" else 1.0


def block_tensors(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    """The tensors of a block, as files name them, for a model whose layer 1 has attention."""
    generator = torch.Generator().manual_seed(17)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    prefix, hidden = "model.layers.1.", TINY["hidden_size"]
    found = {
        f"mtp.layers.0.{name.removeprefix(prefix)}": each + 0.05 * each.std() * noise(*each.shape)
        for name, each in tensors.items()
        if name.startswith(prefix)
    }
    passed = torch.cat((torch.eye(hidden), 0.02 * noise(hidden, hidden)), 1)
    norm = tensors["model.norm.weight"]
    return {
        **found,
        "mtp.fc.weight": passed if kind == "right" else noise(hidden, 2 * hidden) * hidden**-0.5,
        "mtp.norm.weight": norm.clone() if kind == "right" else 0.1 * noise(hidden),
        "mtp.pre_fc_norm_embedding.weight": 0.02 * noise(hidden),
        "mtp.pre_fc_norm_hidden.weight": 0.1 * noise(hidden),
    }


def loads(folder: Path, options: LoadOptions = OPTIONS) -> tuple[LoadedModel, LoadedModel | None]:
    """The model and its block."""
    files = open_model(folder)
    model = load(files, options)
    return model, load_head(files, model, options, lambda *report: None)


def engine_of(folder: Path, options: LoadOptions = OPTIONS) -> Engine:
    """An engine whose replies are drafted by the block, too."""
    model, head = loads(folder, options)
    return Engine(model, draft_tokens=7, draft=head)


def without_block(folder: Path, source: Path) -> Path:
    """The same model without the block."""
    shutil.copytree(source, folder)
    tensors = {name: each for name, each in load_file(source / "model.safetensors").items() if "mtp." not in name}
    save_file(tensors, folder / "model.safetensors")
    return folder
