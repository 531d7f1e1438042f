"""Mixtures, hybrids and their like come back from a .gguf file as they were: configuration, tensors, logits."""

from __future__ import annotations

import dataclasses
import json
import time

import gguf
import numpy as np
import pytest
import torch

from localq.engine.load.load import load
from localq.files.architecture import Architecture
from localq.files.extra_tensors import MORE_TOKENS
from localq.files.gguf.reader import read_header
from localq.files.gguf.tensors import column_order, read_tensor, row_order
from localq.files.model_folder import open_model
from localq.formats import mxfp4
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import ARCHITECTURES
from localq.planner.load_options import LoadOptions
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.files import tiny_gguf
from tests.support.files import tiny_gguf_families as families
from tests.support.files.tiny_gguf import Case, finish
from tests.support.files.tiny_gguf_conversion import predicting_block

CPU = LoadOptions(device="cpu", dtype="float32")
IDS = prompt_of(70, vocab=131)


@pytest.fixture(scope="module", params=families.CASES)
def made(request, tmp_path_factory):
    """The case, its folder, and the weights in it."""
    case = families.CASES[request.param]
    folder = families.make_folder(case, tmp_path_factory.mktemp("families") / request.param)
    return case, folder, families.read_folder(folder)


@pytest.fixture(scope="module")
def path(made, tmp_path_factory):
    case, _, weights = made
    return families.write(tmp_path_factory.mktemp("gguf") / "m.gguf", case, weights)


def facts(config):
    return dataclasses.asdict(ARCHITECTURES[config["model_type"]].Config.from_dict(config))


def test_the_configuration_is_the_model_s(made, path):
    _, folder, _ = made
    stated = json.loads((folder / "config.json").read_text())
    found = open_model(path).config
    assert found["model_type"] == stated["model_type"]
    assert facts(found) == facts(stated)
    assert Architecture.from_config(found) == Architecture.from_config(stated)


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_the_tensors_are_the_model_s_bit_by_bit(made, path, tmp_path, kind):
    case, _, weights = made
    header = read_header(path if kind == "F32" else families.write(tmp_path / "m.gguf", case, weights, kind))
    assert {name: part.shape for name, part in header.tensors.items()} == {
        name: values.shape for name, values in weights.items()
    }
    for name, values in weights.items():
        read = read_tensor(header, name)
        assert read.dtype == np.float32
        if name.endswith(".A_log"):  # the logarithm of an exponential, both rounded
            np.testing.assert_allclose(read, values, rtol=0, atol=2**-22, err_msg=name)
        else:
            np.testing.assert_array_equal(read, values, err_msg=name)
        assert values.ndim == 1 or len(np.unique(values)) > 20  # a mistake in the order would show


def test_the_logits_are_those_of_the_folder(made, path):
    case, folder, _ = made
    found = []
    for source in (folder, path):
        loaded = load(open_model(source), CPU)
        found.append(logits_of(loaded.model, loaded, IDS))
    expected, ours = found
    assert expected.std() > 0.1, "the comparison needs logits that differ"
    through_logarithms = case.architecture.startswith(("qwen35", "granite", "nemotron"))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-4 if through_logarithms else 0)


@pytest.mark.parametrize(("name", "predicting"), [("qwen35", 2), ("nemotron-moe", 1)])
def test_a_block_that_predicts_more_tokens_is_left_out(tmp_path, name, predicting):
    case = families.CASES[name]
    folder = families.make_folder(case, tmp_path / "folder")
    weights, layers = families.read_folder(folder), families.SHAPE["num_hidden_layers"]
    plain = read_header(families.write(tmp_path / "plain.gguf", case, weights))
    path = families.write(tmp_path / "m.gguf", case, weights, predicting=predicting)
    header = read_header(path)
    assert header.config == plain.config
    assert header.tensors.keys() == plain.tensors.keys()
    assert set(plain.extra) == set()
    [(kind, names)] = header.extra.items()
    assert kind == MORE_TOKENS
    assert {name.split(".")[1] for name in names} == {str(layers + block) for block in range(predicting)}
    assert len(names) == predicting * len(list(predicting_block(0, 4)))
    with open_checkpoint(open_model(path)) as checkpoint:
        assert checkpoint.extra == header.extra
    loaded = load(open_model(path), CPU)
    assert any(f"{MORE_TOKENS} ({len(names)} tensors)" in line for line in loaded.notes)
    expected = load(open_model(folder), CPU)
    found, wanted = (logits_of(each.model, each, IDS) for each in (loaded, expected))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_gate_and_up_of_experts_in_one_stack(tmp_path):
    case = families.CASES["qwen35moe"]
    weights = families.read_folder(families.make_folder(case, tmp_path / "folder"))
    header = read_header(families.write(tmp_path / "m.gguf", case, weights, fused=True))
    assert sum(part.gguf_name.endswith("ffn_gate_up_exps.weight") for part in header.tensors.values()) == 5 * 5 * 2
    for name, values in weights.items():
        if ".experts." in name:
            np.testing.assert_array_equal(read_tensor(header, name), values, err_msg=name)


def test_experts_in_mxfp4_as_the_file_of_openai_has_them(tmp_path):
    case = families.CASES["gpt-oss"]
    weights = families.read_folder(families.make_folder(case, tmp_path / "folder"))
    path = families.write(tmp_path / "m.gguf", case, weights, experts="MXFP4")
    header = read_header(path)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    tensor = header.tensors[name]
    kind = gguf.GGMLQuantizationType.MXFP4
    assert [part.type for part in tensor.parts] == [kind, kind]
    gate, up = (weights[name].transpose(0, 2, 1)[:, start::2] for start in (0, 1))
    rounded = [
        gguf.quants.dequantize(gguf.quants.quantize(np.ascontiguousarray(each), kind), kind) for each in (gate, up)
    ]
    expected = np.empty_like(weights[name].transpose(0, 2, 1))
    expected[:, ::2], expected[:, 1::2] = rounded
    np.testing.assert_array_equal(read_tensor(header, name), expected.transpose(0, 2, 1))
    with open_checkpoint(open_model(path)) as checkpoint:  # expert by expert
        read = checkpoint.read_as(name, torch.float32)
    np.testing.assert_array_equal(read.numpy(), expected.transpose(0, 2, 1))


def test_published_mxfp4_blocks_keep_their_values_in_gguf(tmp_path):
    """A byte has the elements i and i + 16 of a block in GGUF, 2i and 2i + 1 in the files of openai."""
    generator = np.random.default_rng(4)
    codes = generator.integers(0, 16, (5, 2 * 64, 3, 32), dtype=np.uint8)
    scales = generator.integers(110, 135, (5, 2 * 64, 3), dtype=np.uint8)
    published = mxfp4.Packed(
        torch.from_numpy(codes[..., ::2] | codes[..., 1::2] << 4).reshape(-1, 48),
        torch.from_numpy(scales).reshape(-1, 3),
    )
    expected = mxfp4.dequantize(published, torch.float32).numpy().reshape(5, 128, 96).transpose(0, 2, 1)
    blocks = np.concatenate([scales[..., None], codes[..., :16] | codes[..., 16:] << 4], -1).reshape(5, 128, -1)
    writer = families.open_writer(tmp_path / "m.gguf", families.CASES["gpt-oss"])
    writer.add_tensor("token_embd.weight", np.zeros((131, 96), np.float32))
    for part, start in (("gate", 0), ("up", 1)):
        kind = gguf.GGMLQuantizationType.MXFP4
        writer.add_tensor(f"blk.0.ffn_{part}_exps.weight", np.ascontiguousarray(blocks[:, start::2]), raw_dtype=kind)
    finish(writer)
    read = read_tensor(read_header(tmp_path / "m.gguf"), "model.layers.0.mlp.experts.gate_up_proj")
    np.testing.assert_array_equal(read, expected)


@pytest.mark.parametrize("name", ["qwen35", "qwen35moe", "llama"])
def test_orders_are_those_of_the_stored_rows_and_columns(tmp_path, name):
    """As packed blocks need them: without values."""
    if name == "llama":
        case = tiny_gguf.CASES["llama"]
        weights = {key: each.numpy() for key, each in tiny_gguf.model(case).state_dict().items()}
        path = tiny_gguf.write(tmp_path / "m.gguf", case, weights)
    else:
        case = families.CASES[name]
        weights = families.read_folder(families.make_folder(case, tmp_path / "folder"))
        path = families.write(tmp_path / "m.gguf", case, weights)
    header, moved = read_header(path), set()
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    for key, tensor in header.tensors.items():
        rows, columns = row_order(tensor), column_order(tensor)
        if len(tensor.shape) != 2 or (rows is None and columns is None):
            continue
        found = stored[tensor.gguf_name].data
        found = found if rows is None else found[rows]
        found = found if columns is None else found[:, columns]
        np.testing.assert_array_equal(found, weights[key], err_msg=key)
        moved.add(key.rpartition(".layers.")[2].split(".", 1)[1])
    expected = {
        f"linear_attn.{part}.weight" for part in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
    }
    assert moved == ({"self_attn.q_proj.weight", "self_attn.k_proj.weight"} if name == "llama" else expected)


def test_every_matrix_of_a_stack_lies_where_its_tensor_says(tmp_path):
    case = families.CASES["qwen3moe"]
    weights = families.read_folder(families.make_folder(case, tmp_path / "folder"))
    path = families.write(tmp_path / "m.gguf", case, weights, experts="Q8_0")
    header, data = read_header(path), path.read_bytes()
    for name, tensor in header.tensors.items():
        if ".experts." not in name or ".down_proj" in name:
            continue
        kind = gguf.GGMLQuantizationType(tensor.type)
        assert kind == gguf.GGMLQuantizationType.Q8_0
        expected = gguf.quants.quantize(weights[name], kind).tobytes()
        assert data[tensor.offset : tensor.offset + len(expected)] == expected


def test_a_header_with_thousands_of_experts_is_read_in_no_time(tmp_path):
    """48 layers of 128 experts, as Qwen3 30B-A3B has."""
    sizes = {"num_experts": 128, "num_hidden_layers": 48, "hidden_size": 4, "moe_intermediate_size": 2, "head_dim": 2}
    case = Case("qwen3moe", "qwen3_moe", {**families.CASES["qwen3moe"].config, **sizes, "num_attention_heads": 2})
    writer = families.open_writer(tmp_path / "m.gguf", case)
    writer.add_tensor("token_embd.weight", np.zeros((131, 4), np.float32))
    for block in range(48):
        for part, shape in (("gate", (128, 2, 4)), ("up", (128, 2, 4)), ("down", (128, 4, 2))):
            writer.add_tensor(f"blk.{block}.ffn_{part}_exps.weight", np.zeros(shape, np.float32))
    finish(writer)
    start = time.process_time()
    header = read_header(tmp_path / "m.gguf")
    assert time.process_time() - start < 1.0
    assert len(header.tensors) == 1 + 48 * 128 * 3
