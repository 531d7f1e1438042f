"""Factors of matrices in tensors of their own ("X.scale"), as files in NVFP4 have them."""

from __future__ import annotations

from dataclasses import replace

import gguf
import numpy as np
import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.gguf import packing
from localq.files.gguf.reader import read_header
from localq.files.gguf.tensors import read_tensor
from localq.files.model_folder import open_model
from localq.formats import gguf as gguf_format
from localq.formats.open_checkpoint import open_checkpoint
from tests.support.files import tiny_gguf_families as families
from tests.support.files import tiny_gguf_nvfp4 as nvfp4

CASE = families.CASES["qwen3moe"]
CASE = replace(CASE, config={**CASE.config, "hidden_size": 64, "moe_intermediate_size": 64})
QUERY, GATE = "blk.0.attn_q", "blk.1.ffn_gate_exps"


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return families.read_folder(families.make_folder(CASE, tmp_path_factory.mktemp("factors") / "folder"))


def test_they_multiply_the_values(weights, tmp_path):
    """Of a matrix, and of each expert of a stack; as a checkpoint has them, packed and not."""
    path = families.write(tmp_path / "m.gguf", CASE, weights, "NVFP4")
    header, experts = read_header(path), [f"model.layers.1.mlp.experts.{expert}.gate_proj" for expert in (0, 3)]
    with open_checkpoint(open_model(path), packed=True) as checkpoint:
        for prefix in ("model.layers.0.self_attn.q_proj", *experts):
            name = f"{prefix}.weight"
            factor = nvfp4.factors_of(weights[name])
            blocks = nvfp4.quantize(weights[name] / factor)
            expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.NVFP4) * factor
            assert np.array_equal(read_tensor(header, name), expected)
            assert np.abs(expected - weights[name]).max() < 0.2 * np.abs(weights[name]).max()
            assert np.array_equal(checkpoint.read(f"{prefix}.blocks").numpy(), blocks)
            assert np.array_equal(checkpoint.read(f"{prefix}.factor").numpy(), factor)
    assert not [name for name in header.tensors if "scale" in name]
    assert packing.scheme(header) == "NVFP4"


def test_beside_another_type_the_matrix_becomes_16_bit(weights, tmp_path):
    """Kernels of other types have no factor."""

    def change(tensors):
        tensors[f"{QUERY}.scale"] = np.full(1, 0.5, np.float32)
        tensors[f"{QUERY}.input_scale"] = np.full(1, 9.0, np.float32)

    name = "model.layers.0.self_attn.q_proj.weight"
    plain = read_tensor(read_header(families.write(tmp_path / "plain.gguf", CASE, weights, "Q8_0")), name)
    header = read_header(families.write(tmp_path / "m.gguf", CASE, weights, "Q8_0", change=change))
    assert np.array_equal(read_tensor(header, name), plain / 2)
    packed = packing.packed_matrices(header)
    assert name not in packed
    assert name.replace("q_proj", "k_proj") in packed


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        ({f"{QUERY}.scale": np.ones(2, np.float32)}, r"'blk.0.attn_q.scale' has shape \(2,\) and type 0"),
        ({f"{GATE}.scale": np.ones(1, np.float32)}, r"'blk.1.ffn_gate_exps.scale' has shape \(1,\) and type 0"),
    ],
)
def test_of_another_shape_they_are_damage(weights, tmp_path, tensor, why):
    path = families.write(tmp_path / "m.gguf", CASE, weights, "Q8_0", change=lambda tensors: tensors.update(tensor))
    with pytest.raises(LocalqError, match=why) as caught:
        read_header(path)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_without_a_matrix_they_are_unknown(weights, tmp_path):
    def change(tensors):
        tensors["blk.0.other.scale"] = np.ones(1, np.float32)

    path = families.write(tmp_path / "m.gguf", CASE, weights, "Q8_0", change=change)
    with pytest.raises(LocalqError, match=r"tensor 'blk.0.other.scale' is not part of the qwen3moe architecture"):
        read_header(path)


def test_a_factor_that_is_no_number_is_damage(weights, tmp_path, monkeypatch):
    def factors_of(values):
        return np.full_like(factors(values), np.nan)

    factors = nvfp4.factors_of
    monkeypatch.setattr(nvfp4, "factors_of", factors_of)
    path = families.write(tmp_path / "nan.gguf", CASE, weights, "NVFP4")
    checkpoint = open_checkpoint(open_model(path), packed=True)
    with checkpoint, pytest.raises(LocalqError, match=r"its factor is \[nan\]; expected one number"):
        gguf_format.from_checkpoint(checkpoint, "model.layers.0.self_attn.q_proj")
