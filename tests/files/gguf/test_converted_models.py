"""Converted models come back as they were: configuration, names, shapes, values; every type as the package reads it."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import _type_traits

from localq.errors import LocalqError
from localq.files.gguf import tensors
from localq.files.gguf.binary import BLOCKS
from localq.files.gguf.reader import read_header
from localq.files.gguf.tensors import read_tensor
from localq.files.model_folder import open_model
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import ARCHITECTURES
from tests.support.files import tiny_gguf
from tests.support.files.real_model import smollm2
from tests.support.files.tiny_gguf import CASES, SHAPE, Case


@pytest.fixture(scope="module", params=CASES)
def converted(request, tmp_path_factory):
    """The case, its Hugging Face weights, and the header of its .gguf file."""
    case = CASES[request.param]
    model = tiny_gguf.model(case)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    return case, weights, tiny_gguf.write(path, case, weights)


def facts(config: dict) -> dict:
    return dataclasses.asdict(ARCHITECTURES[config["model_type"]].Config.from_dict(config))


def test_the_configuration_is_the_model_s(converted):
    case, _, path = converted
    assert facts(open_model(path).config) == facts(tiny_gguf.hugging_face_config(case))


def test_pieces_of_rows_are_the_tensor(converted, monkeypatch):
    """Every matrix in more than one piece, the last one shorter; converted to 16 bit as a whole tensor is."""
    path = converted[-1]
    header = read_header(path)
    monkeypatch.setattr(tensors, "PIECE_VALUES", 5 * SHAPE["hidden_size"])
    counts = []
    with contextlib.closing(tensors.FileBytes(header)) as file, open_checkpoint(open_model(path)) as checkpoint:
        for name in header.tensors:
            whole = read_tensor(header, name)
            pieces = list(tensors.read_pieces(header, name, file))
            counts.append(len(pieces))
            np.testing.assert_array_equal(np.concatenate(pieces), whole, err_msg=name)
            assert torch.equal(checkpoint.read_as(name, torch.bfloat16), torch.from_numpy(whole).bfloat16()), name
    assert max(counts) > 3


def test_the_tensors_are_the_model_s_bit_by_bit(converted):
    case, weights, path = converted
    header = read_header(path)
    wanted = dict(weights)
    if {**SHAPE, **case.config}["tie_word_embeddings"]:
        del wanted["lm_head.weight"]
    assert {name: part.shape for name, part in header.tensors.items()} == {
        name: values.shape for name, values in wanted.items()
    }
    for name, values in wanted.items():
        read = read_tensor(header, name)
        assert read.dtype == np.float32
        np.testing.assert_array_equal(read, values, err_msg=name)
        assert values.ndim == 1 or len(np.unique(values)) > 20  # a mistake in the order would show


def test_a_file_that_is_removed_while_it_is_read_is_read_to_its_end(converted, tmp_path):
    """As by `localq rm` in another process (reliability D10)."""
    _, weights, path = converted
    own = tmp_path / path.name
    own.write_bytes(path.read_bytes())
    with open_checkpoint(open_model(own)) as checkpoint:
        first, *others = checkpoint.tensors
        checkpoint.read(first)
        own.unlink()
        for name in others:
            np.testing.assert_array_equal(checkpoint.read(name).numpy(), weights[name], err_msg=name)


def test_the_model_takes_the_tensors(converted):
    _, _, path = converted
    header = read_header(path)
    module = ARCHITECTURES[header.config["model_type"]]
    with torch.device("meta"):
        model = module.Model(module.Config.from_dict(header.config))
    parameters = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {module.rename(name): part.shape for name, part in header.tensors.items()} == parameters


def test_stop_tokens_and_template(tmp_path):
    case = CASES["llama"]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    tiny_gguf.write_keys(writer, case)
    writer.add_eot_token_id(7)
    writer.add_eom_token_id(2)
    writer.add_chat_template("{{ messages }}")
    writer.add_tensor("token_embd.weight", np.zeros((131, 72), np.float32))
    tiny_gguf.finish(writer)
    files = open_model(tmp_path / "m.gguf")
    assert (files.eos_ids, files.chat_template) == ((2, 7), "{{ messages }}")
    assert files.generation_config["bos_token_id"] == 1


@pytest.mark.parametrize(
    ("templates", "chosen"),
    [
        ([("default", "A"), ("tool_use", "B")], "A"),
        ([("rag", "C"), ("default", "A"), ("tool_use", "B")], "A"),
        ([("tool_use", "B")], None),
    ],
)
def test_of_several_templates_the_default_one_is_used(tmp_path, templates, chosen):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    tiny_gguf.write_keys(writer, CASES["llama"])
    writer.add_chat_template([{"name": name, "template": template} for name, template in templates])
    writer.add_tensor("token_embd.weight", np.zeros((131, 72), np.float32))
    tiny_gguf.finish(writer)
    assert open_model(tmp_path / "m.gguf").chat_template == chosen


def test_a_template_that_is_named_default(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    tiny_gguf.write_keys(writer, CASES["llama"])
    writer.add_string("tokenizer.chat_template.default", "A")
    writer.add_array("tokenizer.chat_templates", ["default"])
    writer.add_tensor("token_embd.weight", np.zeros((131, 72), np.float32))
    tiny_gguf.finish(writer)
    assert open_model(tmp_path / "m.gguf").chat_template == "A"


# Steps of a block's range that the format can tell apart; "F16" is exact for these values.
STEPS = {"F16": None, "BF16": None, "Q8_0": 127, "Q5_0": 15, "Q5_1": 15, "Q4_0": 7, "Q4_1": 7}


@pytest.mark.parametrize("kind", STEPS)
def test_quantized_matrices_are_close_and_in_place(tmp_path, kind):
    case = Case("llama", "llama", {"hidden_size": 96, "intermediate_size": 160, "head_dim": 16})
    model = tiny_gguf.model(case)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    header = read_header(tiny_gguf.write(tmp_path / "m.gguf", case, weights, kind))
    for name, values in weights.items():
        read = read_tensor(header, name)
        steps = STEPS[kind]
        if values.ndim == 1 or steps is None:
            np.testing.assert_array_equal(read, values)
        else:  # a step is range / steps and the error at most one of them: rounding of value and of scale
            np.testing.assert_allclose(read, values, rtol=0, atol=5 / steps)


def blocks(kind: gguf.GGMLQuantizationType, count: int) -> np.ndarray:
    """`count` random blocks, u8; their fp16 scales are made harmless by dequantizing until all is finite."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    generator = np.random.default_rng(5)
    found: list[np.ndarray] = []
    with np.errstate(all="ignore"):
        while len(found) < count:
            block = generator.integers(0, 256, size, dtype=np.uint8)
            if np.isfinite(gguf.quants.dequantize(block[None], kind)).all():
                found.append(block)
    return np.stack(found)


def write_up(path, data, kind):
    """A .gguf with this one matrix of a layer, as packed."""
    writer = gguf.GGUFWriter(path, "qwen2")
    tiny_gguf.write_keys(writer, CASES["qwen2"])
    writer.add_tensor("token_embd.weight", np.zeros((131, 72), np.float32))
    writer.add_tensor("blk.0.ffn_up.weight", data, raw_dtype=kind)
    tiny_gguf.finish(writer)


@pytest.mark.parametrize("kind", list(_type_traits), ids=lambda kind: kind.name)
def test_every_type_of_the_package_is_read_as_it_reads_it(tmp_path, kind):
    rows, per_row = 3, 2
    values_per_block, _ = gguf.GGML_QUANT_SIZES[kind]
    data = blocks(kind, rows * per_row).reshape(rows, -1)
    write_up(tmp_path / "m.gguf", data, kind)
    header, name = read_header(tmp_path / "m.gguf"), "model.layers.0.mlp.up_proj.weight"
    assert header.tensors[name].shape == (rows, per_row * values_per_block)
    read = read_tensor(header, name)
    assert len(np.unique(read)) > 1
    np.testing.assert_array_equal(read, gguf.quants.dequantize(data, kind))


def test_short_rows_are_dequantized_several_at_a_time(tmp_path, monkeypatch):
    rows, per_row, kind = 12, 2, gguf.GGMLQuantizationType.Q4_1
    data = blocks(kind, rows * per_row).reshape(rows, -1)
    write_up(tmp_path / "m.gguf", data, kind)
    expected, handed = gguf.quants.dequantize(data, kind), []

    def dequantize(data, kind, package=gguf.quants.dequantize):
        handed.append(data.shape)
        return package(data, kind)

    monkeypatch.setattr(gguf.quants, "dequantize", dequantize)
    read = read_tensor(read_header(tmp_path / "m.gguf"), "model.layers.0.mlp.up_proj.weight")
    assert handed == [(3, 4 * data.shape[1])]  # four are as many as 12 divides into without a rest
    np.testing.assert_array_equal(read, expected)


def test_the_table_of_block_sizes_is_the_package_s():
    assert {int(kind): sizes for kind, sizes in gguf.GGML_QUANT_SIZES.items()} == BLOCKS


@pytest.mark.parametrize(("number", "words"), [(26, "I32"), (28, "F64"), (24, "I8"), (99, "number 99")])
def test_types_that_are_no_weights_are_refused_by_name(tmp_path, number, words):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen2")
    tiny_gguf.write_keys(writer, CASES["qwen2"])
    writer.add_tensor("token_embd.weight", np.zeros((131, 72), np.float32))
    tiny_gguf.finish(writer)
    data = bytearray((tmp_path / "m.gguf").read_bytes())
    at = data.index(b"token_embd.weight") + len("token_embd.weight") + 4 + 2 * 8
    data[at : at + 4] = number.to_bytes(4, "little")
    (tmp_path / "m.gguf").write_bytes(data + bytes(131 * 72 * 4))
    with pytest.raises(LocalqError, match=rf"'token_embd.weight' has type {words}"):
        read_tensor(read_header(tmp_path / "m.gguf"), "model.embed_tokens.weight")


# ---- the real file


def test_the_real_model_s_configuration():
    files = open_model(smollm2())
    wanted = {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
        "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "rope_scaling": None,
        "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "attention_bias": False,
    }  # fmt: skip
    assert {key: files.config[key] for key in wanted} == wanted
    assert files.eos_ids == (2,)
    assert files.chat_template is not None


def test_the_real_model_s_tensors_are_those_of_transformers():
    from transformers import LlamaConfig, LlamaForCausalLM

    header = read_header(smollm2())
    with torch.device("meta"):
        reference = LlamaForCausalLM(LlamaConfig(**header.config)).state_dict()
    del reference["lm_head.weight"]
    assert {name: part.shape for name, part in header.tensors.items()} == {
        name: tuple(tensor.shape) for name, tensor in reference.items()
    }


def test_the_real_model_s_values_are_those_that_transformers_reads():
    """Without building the model: its own loader of the file, for the layers that hold every kind of tensor."""
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    header = read_header(smollm2())
    processor = LlamaTensorProcessor(config=header.config)
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2()).tensors}
    names = [name for name in header.tensors if ".layers." not in name or ".layers.17." in name]
    assert len(names) == 2 + 9
    for name in names:
        raw = stored[header.tensors[name].gguf_name]
        values = gguf.quants.dequantize(raw.data, raw.tensor_type)
        wanted = processor.process(values, raw.name).weights
        np.testing.assert_array_equal(read_tensor(header, name), wanted, err_msg=name)


def test_the_header_needs_no_numpy_and_is_read_in_no_time():
    """The front end opens the file at every start."""
    code = (
        "import sys, time; from pathlib import Path; from localq.files.gguf.reader import read_header\n"
        "start = time.process_time(); model = read_header(Path(sys.argv[1])); spent = time.process_time() - start\n"
        "assert len(model.tensors) == 272 and spent < 0.5, spent\n"
        "assert not {'numpy', 'gguf', 'torch', 'tokenizers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(smollm2())], check=True, timeout=60)
