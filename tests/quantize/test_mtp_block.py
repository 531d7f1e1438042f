"""What quantizing does with an MTP block: NF4 keeps it, and it drafts; a conversion by layers says that it is out."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from localq.engine.draft.drafter import Drafter
from localq.engine.generate import Engine
from localq.engine.load.draft_head import load_head
from localq.engine.load.load import load
from localq.files.model_folder import open_model
from localq.formats import nf4
from localq.formats.open_checkpoint import open_checkpoint
from localq.quantize import by_layer, by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.engine_runs import ids_of, prompt_of, steps_of
from tests.support.engine.lossless import EagerTimes
from tests.support.engine.mtp_models import MODEL_TYPES, OPTIONS, save_mtp


def stack_experts(path) -> None:
    """The experts of the block as transformers 5 writes them: gate and up, and down, of all in one tensor each."""
    tensors, prefix = load_file(path), "mtp.layers.0.mlp.experts."
    taken = {name: tensors.pop(name) for name in [*tensors] if name.startswith(prefix)}
    numbers = range(len(taken) // 3)
    gate, up, down = (
        [taken[f"{prefix}{number}.{part}_proj.weight"] for number in numbers] for part in ("gate", "up", "down")
    )
    tensors[f"{prefix}gate_up_proj"] = torch.stack([torch.cat(pair) for pair in zip(gate, up, strict=True)])
    tensors[f"{prefix}down_proj"] = torch.stack(down)
    save_file(tensors, path)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_block_in_nf4_drafts(model_type, tmp_path):
    source = save_mtp(tmp_path / "source", model_type)
    if "moe" in model_type:
        stack_experts(source / "model.safetensors")
    out = open_model(by_tensor.convert(TensorwiseRequest(open_model(source), "nf4", tmp_path / "nf4")))
    exact, plain = load_file(source / "model.safetensors"), load(out, OPTIONS)
    head = load_head(out, plain, OPTIONS, lambda *report: None)
    assert head is not None
    parameters = dict(head.model.named_parameters())
    for name in ("fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight"):
        wanted = exact[f"mtp.{name}"]
        assert 0.02 < float((parameters[name] - wanted).norm() / wanted.norm()) < 0.15, name
    for name in ("norm.weight", "pre_fc_norm_hidden.weight"):
        assert parameters[name].equal(exact[f"mtp.{name}"])
    with open_checkpoint(out, part="mtp") as checkpoint:
        prefixes = [name.removesuffix(".weight") for name in checkpoint.tensors if name.endswith("_proj.weight")]
        assert all(nf4.is_quantized(checkpoint.tensors, prefix) for prefix in prefixes)
        assert len(prefixes) >= 7
    engine = Engine(plain, draft_tokens=7, draft=head)
    prompt = prompt_of(20)
    expected = ids_of(engine, prompt, max_tokens=60)
    engine._drafter = Drafter(engine._draft_model)
    engine._drafter.times = EagerTimes()
    steps = steps_of(engine, prompt, max_tokens=60, draft_tokens=3)
    assert [id for step in steps for id in step.ids] == expected
    assert steps[-1].stats.accepted["mtp"] > 5


def test_a_conversion_by_layers_says_that_it_leaves_the_block_out(tmp_path):
    source = open_model(save_mtp(tmp_path / "source", "qwen3_5_text"))
    with open_checkpoint(source) as checkpoint:
        assert by_layer._without_mtp(checkpoint).startswith("The MTP block is dropped")
    with open_checkpoint(source, part="both") as checkpoint:
        assert by_layer._without_mtp(checkpoint) == ""
        assert torch.equal(checkpoint.read("mtp.norm.weight"), checkpoint.read("model.norm.weight"))
