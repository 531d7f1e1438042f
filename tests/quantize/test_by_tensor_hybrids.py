"""Hybrids and their mixtures in NF4: which tensors are quantized, which stay in 16 bit, and that users are told."""

from __future__ import annotations

import json

import pytest
import torch

from localq.engine.load.load import load
from localq.files.model_folder import open_model
from localq.formats import nf4
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.model.input_moments import CalibrationText
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.formats import expert_checkpoints, hybrid_checkpoints
from tests.support.formats.expert_checkpoints import read
from tests.support.formats.hybrid_checkpoints import LINEAR, PREFIXES
from tests.support.models.tiny_checkpoints import make_checkpoint

DEVICE = torch.device("cpu")
CPU = LoadOptions(device="cpu", dtype="float32")
KEPT = ("in_proj_a.weight", "in_proj_b.weight", "mlp.gate.weight", "mlp.shared_expert_gate.weight")


def test_short_convolutions_and_their_mixtures(tmp_path):
    folder = make_checkpoint(tmp_path / "bf16", "lfm2_moe", shard_bytes=2**30)
    notes: list[str] = []
    out = by_tensor.convert(TensorwiseRequest(open_model(folder), "nf4", tmp_path / "nf4"), say=notes.append)
    made, source = open_checkpoint(open_model(out)), open_checkpoint(open_model(folder))
    packed = {name for name in source.tensors if nf4.is_quantized(made.tensors, name.removesuffix(".weight"))}
    matrices = {name for name, each in source.tensors.items() if len(each.shape) == 2 and "embed" not in name}
    assert matrices - packed == {
        "lm_head.weight",
        *(f"model.layers.{each}.feed_forward.gate.weight" for each in (1, 2)),
    }
    ends = {name.split(".", 3)[3] for name in packed if "experts" not in name}
    assert {"conv.in_proj.weight", "conv.out_proj.weight", "self_attn.out_proj.weight"} <= ends
    assert any("convolutions (conv), routers (gate)" in line for line in notes)
    loaded = load(open_model(out), CPU)
    assert loaded.format == "nf4"
    exact = load(open_model(folder), CPU)
    found, wanted = (logits_of(each.model, each, prompt_of(30)) for each in (loaded, exact))
    assert (found - wanted).norm() < 0.5 * wanted.norm()


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe", "qwen3_5_moe, experts in one tensor"])
def test_matrices_are_quantized_and_rates_and_gates_are_not(kind, tmp_path):
    kind, _, is_fused = kind.partition(", ")
    text = hybrid_checkpoints.source(tmp_path / "text", kind)
    plain = expert_checkpoints.fused(tmp_path / "fused", text) if is_fused else text
    folder = hybrid_checkpoints.wrapped(tmp_path / "wrapped", plain, PREFIXES[0])
    notes: list[str] = []
    out = by_tensor.convert(TensorwiseRequest(open_model(folder), "nf4", tmp_path / "nf4"), say=notes.append)

    made, source = open_checkpoint(open_model(out)), open_checkpoint(open_model(folder))
    names = [name.replace("model.", PREFIXES[0], 1) for name in read(text) if LINEAR.fullmatch(name)]
    packed = [name for name in names if not name.endswith(KEPT)]
    assert packed
    block = [name for name in read(folder) if name.startswith("mtp.")]
    assert all(nf4.is_quantized(made.tensors, name.removesuffix(".weight")) for name in packed)
    others = [name for name in source.tensors if name not in packed and ".experts." not in name]
    assert any(name.endswith(KEPT) for name in others)
    assert all(made.read(name).equal(source.read(name)) for name in others)
    assert not any("visual" in name for name in made.tensors)
    with open_checkpoint(open_model(out), part="mtp") as kept:
        matrices = [name for name in block if name.endswith(("proj.weight", "fc.weight"))]
        assert all(nf4.is_quantized(kept.tensors, name.removesuffix(".weight")) for name in matrices)
        assert {name for name in kept.tensors if not name.startswith(tuple(matrices))} >= {"mtp.norm.weight"}
        assert any(name.endswith("q_proj.weight") for name in matrices)

    skipped = json.loads((out / "config.json").read_text())["quantization_config"]["llm_int8_skip_modules"]
    assert {"lm_head", "layers.0.linear_attn.in_proj_a", "layers.2.linear_attn.in_proj_b"} <= {*skipped}
    (told,) = [line for line in notes if line.startswith("Small tensors left at 16 bits")]
    assert "DeltaNet decay and update rates (in_proj_a, in_proj_b), convolutions (conv1d)" in told
    assert ("routers (gate), shared-expert gates (shared_expert_gate)" in told) == (kind == "qwen3_5_moe")

    loaded, exact = load(open_model(out), CPU), load(open_model(folder), CPU)
    assert loaded.format == "nf4"
    wanted = dict(exact.model.named_parameters())
    for path, parameter in loaded.model.named_parameters():
        error = (parameter - wanted[path]).norm() / wanted[path].norm()
        is_packed = f"{PREFIXES[0]}{path}" in packed or ".experts." in path
        assert (0.05 < error < 0.12) if is_packed else error == 0, path


@pytest.mark.parametrize(
    ("kind", "format", "scheme"),
    [
        ("qwen3_5", "mxfp4", ""),
        ("qwen3_5_moe", "mxfp4", ""),
        ("qwen3_5", "bcq", "q4g32"),
        ("qwen3_5", "squeezellm", ""),
    ],
)
def test_other_formats_with_a_text_keep_the_same_tensors(kind, format, scheme, tmp_path):
    text = hybrid_checkpoints.source(tmp_path / "text", kind)
    folder = hybrid_checkpoints.wrapped(tmp_path / "wrapped", text, PREFIXES[0])
    calibration = None if format == "mxfp4" else CalibrationText([prompt_of(64, seed) for seed in range(3)], DEVICE)
    request = TensorwiseRequest(open_model(folder), format, tmp_path / "out", scheme=scheme, text=calibration)
    out = by_tensor.convert(request)
    made, source = open_checkpoint(open_model(out)), open_checkpoint(open_model(folder))
    for name in (name for name in source.tensors if name.endswith((*KEPT, "A_log", "dt_bias", "conv1d.weight"))):
        assert made.read(name).equal(source.read(name)), name
    loaded, exact = load(open_model(out), CPU), load(open_model(folder), CPU)
    assert loaded.format == format
    ids = prompt_of(70, seed=9)
    found, expected = (logits_of(each.model, each, ids) for each in (loaded, exact))
    assert 0 < float((found - expected).norm() / expected.norm()) < 1


def test_other_families_are_told_nothing_of_it(tmp_path):
    notes: list[str] = []
    source = expert_checkpoints.source(tmp_path / "moe", "qwen3_moe")
    by_tensor.convert(TensorwiseRequest(open_model(source), "nf4", tmp_path / "nf4"), say=notes.append)
    assert not notes
