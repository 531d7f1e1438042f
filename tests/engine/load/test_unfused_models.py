"""Whole models of families whose steps have no kernels yet, as they are published, in 16 bit and quantized."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from localq.engine.load.load import load
from localq.files.architecture import Architecture
from localq.files.extra_tensors import MORE_TOKENS
from localq.files.layer_caches import EmptyCache, KeysAndValues, Latents, RecurrentState
from localq.files.model_folder import open_model
from localq.formats import mxfp4, nf4
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.engine.packed_models import packed_model
from tests.support.formats.expert_checkpoints import logits
from tests.support.models.tiny_checkpoints import make_checkpoint

CPU = LoadOptions(device="cpu", dtype="float32")
IDS = prompt_of(80, seed=3)
KEPT = (
    "gate.weight",
    "g_proj.weight",
    "kv_b_proj.weight",
    "router.layer.weight",
    "conv1d.weight",
    "norm.weight",
    "A_log",
    "dt_bias",
    ".D",
    "e_score_correction_bias",
)


KINDS = {  # what each layer keeps, and a name of the files
    "nemotron_h": (
        [RecurrentState, EmptyCache, KeysAndValues, EmptyCache, RecurrentState],
        "backbone.layers.1.mixer.experts.4.up_proj.weight",
    ),
    "granitemoehybrid": (
        [RecurrentState, KeysAndValues, RecurrentState],
        "model.layers.0.block_sparse_moe.input_linear.weight",
    ),
    "cohere2_moe": ([KeysAndValues] * 3, "model.layers.1.mlp.experts.4.gate_proj.weight"),
    "glm4_moe_lite": ([Latents] * 3, "model.layers.1.mlp.shared_experts.gate_proj.weight"),
    "laguna": ([KeysAndValues] * 3, "model.layers.1.mlp.shared_expert.gate_proj.weight"),
}
GATES = {
    "nemotron_h": "layers.1.mixer.gate", "granitemoehybrid": "layers.1.block_sparse_moe.router.layer",
    "laguna": "layers.1.mlp.gate", "cohere2_moe": "layers.1.mlp.gate", "glm4_moe_lite": "layers.1.mlp.gate",
}  # fmt: skip


BEHIND = {"nemotron_h": "mtp.layers.0", "glm4_moe_lite": "model.layers.3"}  # the layer that predicts more tokens


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(kind, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp(kind) / "made", kind, shard_bytes=2**30)


def test_the_logits_are_those_of_transformers(kind, folder):
    loaded = load(open_model(folder), CPU)
    expected = logits(folder, tuple(IDS))
    assert expected.std() > 0.3, "the comparison needs logits that differ"
    torch.testing.assert_close(logits_of(loaded.model, loaded, IDS), expected, rtol=0, atol=1e-4)
    assert KINDS[kind][1] in load_file(folder / "model.safetensors"), "as they are published"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_planned_is_what_is_allocated(kind, folder, dtype):
    loaded = load(open_model(folder), LoadOptions(device="cpu", dtype=dtype))
    assert {part: loaded.plan.ledger.components[part] for part in loaded.ledger} == loaded.ledger
    assert [type(kept) for kept in loaded.cache.layout] == KINDS[kind][0]
    arch = Architecture.from_config(open_model(folder).config)
    assert arch.layer_caches == tuple(loaded.cache.layout)
    in_16_bit = arch.parameters - arch.embedding_parameters - arch.head_parameters
    if dtype == "bfloat16":
        assert loaded.ledger["weights"] == 2 * (in_16_bit + arch.wide_parameters)


@pytest.mark.parametrize("format", ["nf4", "mxfp4"])
def test_quantized_at_home(kind, folder, tmp_path, format):
    notes: list[str] = []
    out = by_tensor.convert(TensorwiseRequest(open_model(folder), format, tmp_path / "out"), say=notes.append)
    made, source = open_checkpoint(open_model(out)), open_checkpoint(open_model(folder))
    module = {"nf4": nf4, "mxfp4": mxfp4}[format]
    for name in (name for name in source.tensors if ".layers." in name):
        if len(source.tensors[name].shape) == 3 and "linear" in name:  # a stack of experts becomes one matrix each
            assert name not in made.tensors
            continue
        packed = module.is_quantized(made.tensors, name.removesuffix(".weight"))
        assert packed == (not name.endswith((*KEPT, "bias"))), name
        assert packed or made.read(name).equal(source.read(name))
    assert bool(notes) == (kind not in ("cohere2_moe", "glm4_moe_lite", "laguna"))
    if format == "nf4":
        assert all("convolutions (conv1d)" in told for told in notes)
        skipped = json.loads((out / "config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]
        assert GATES[kind] in skipped
    loaded, exact = load(open_model(out), CPU), load(open_model(folder), CPU)
    assert loaded.format == format
    found, expected = (logits_of(each.model, each, IDS) for each in (loaded, exact))
    assert 0 < float((found - expected).norm() / expected.norm()) < 1


def test_as_on_a_gpu_every_tensor_has_its_place(folder, tmp_path):
    out = by_tensor.convert(TensorwiseRequest(open_model(folder), "nf4", tmp_path / "out"))
    _, sizes, places = packed_model(open_model(out))
    with pytest.raises(ValueError, match="0 bytes are left"):
        places.block(torch.ones(1))
    assert sum(sizes) > 0


def test_layers_that_predict_more_tokens_are_left_out(kind, folder, tmp_path):
    from safetensors.torch import save_file

    if kind not in BEHIND:
        pytest.skip("has none")
    tensors = {name: each.clone() for name, each in load_file(folder / "model.safetensors").items()}
    tensors |= {f"{BEHIND[kind]}.{part}.weight": torch.ones(4) for part in ("enorm", "eh_proj", "mixer.q_proj")}
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load(open_model(tmp_path), CPU)
    assert any(f"{MORE_TOKENS} (3 tensors)" in line for line in loaded.notes)
