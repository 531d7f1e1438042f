"""GGUF models as a GPU holds them, on the CPU: matrices in the blocks of the file, logits, planned bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import gguf
import pytest
import torch

from localq.engine.load import weights
from localq.engine.load.load import load
from localq.files.architecture import Architecture
from localq.files.gguf import packing, reader
from localq.files.model_folder import open_model
from localq.formats import expert_linears
from localq.formats import gguf as gguf_format
from localq.formats.checkpoint import open_checkpoint
from localq.planner import footprint
from localq.planner.load_options import LoadOptions
from localq.planner.placement import STORED, Placement, Wishes
from tests.support.engine.engine_runs import logits_of, prompt_of
from tests.support.engine.packed_models import packed_model
from tests.support.files import tiny_gguf_families as families
from tests.support.files.tiny_gguf import Case

CPU = LoadOptions(device="cpu", dtype="float32")
WIDE = {"vocab_size": 144, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
CASES = {
    "llama": Case("llama", "llama", {**WIDE, "rope_theta": 1e4}),
    "llama, odd vocabulary": Case("llama", "llama", {**WIDE, "rope_theta": 1e4, "vocab_size": 131}),
    "qwen35, tied": Case("qwen35", "qwen3_5_text", {**families.HYBRID, **WIDE, **DELTA, "tie_word_embeddings": True}),
    "qwen35": Case("qwen35", "qwen3_5_text", {**families.HYBRID, **WIDE, **DELTA, "tie_word_embeddings": False}),
    "qwen3moe": Case("qwen3moe", "qwen3_moe", {
        **families.CASES["qwen3moe"].config, **WIDE, "moe_intermediate_size": 32, "intermediate_size": 96}),
}  # fmt: skip
IDS = prompt_of(40, vocab=131)


@pytest.fixture(scope="module", params=[(name, kind) for name in CASES for kind in ("Q8_0", "Q4_0")], ids=str)
def path(request, tmp_path_factory):
    name, kind = request.param
    folder = tmp_path_factory.mktemp("model")
    case = CASES[name]
    weights_of = families.read_folder(families.make_folder(case, folder / "folder"))
    return families.write(folder / "m.gguf", case, weights_of, kind)


def test_blocks_stay_packed_and_give_the_logits_of_the_dequantized_model(path):
    files = open_model(path)
    model, sizes, _ = packed_model(files)
    plain = load(files, CPU)
    expected = logits_of(plain.model, plain, IDS)
    assert expected.std() > 0.1, "the comparison needs logits that differ"
    torch.testing.assert_close(logits_of(model, replace(plain, model=model), IDS), expected, rtol=0, atol=1e-4)
    linears = [each for each in model.modules() if isinstance(each, gguf_format.Linear)]
    packed = packing.packed_matrices(reader.read_header(path))
    assert len(linears) == len(packed)
    assert sum(each.blocks.nbytes for each in linears) == sum(
        math.prod(packing.blocks_shape(each)) for each in packed.values()
    )
    assert sum(sizes) == weights.weight_bytes(model)["weights"] + expert_linears.table_bytes(model)


def test_the_plan_knows_the_bytes_from_the_header(path):
    """But for tensors that stay in f32 beside 16-bit weights; here all weights outside blocks are f32."""
    header, files = reader.read_header(path), open_model(path)
    model, sizes, _ = packed_model(files)
    blocks = sum(
        each.nbytes
        for name, each in model.named_buffers()
        if name.endswith((".blocks", ".places")) and "lm_head" not in name
    )
    assert packing.device_bytes(header) == blocks + (sum(sizes) - blocks) // 2
    head = getattr(model.lm_head, "blocks", None)
    assert packing.head_bytes(header) == (0 if head is None else head.nbytes)
    assert (head is None) == (model.config.vocab_size % 16 != 0)  # no kernel would read it


def test_the_head_stays_as_stored(path):
    header, files = reader.read_header(path), open_model(path)
    arch = replace(Architecture.from_config(files.config), stored_head=packing.head_bytes(header))
    if not arch.stored_head:
        assert Wishes().placements(arch)[0].head == "16"
        return
    first = Wishes().placements(arch)[0]
    assert first == Placement(16, "device", STORED)
    assert footprint.head_bytes(arch, STORED) == packing.head_bytes(header)
    assert all(each.head == STORED for each in Wishes().placements(arch))
    assert Wishes().choice(first) == ""


def test_tensors_of_the_checkpoint(path):
    header, files = reader.read_header(path), open_model(path)
    with open_checkpoint(files) as dense, open_checkpoint(files, packed=True) as packed:
        for name, tensor in packing.packed_matrices(header).items():
            prefix = name.removesuffix(".weight")
            matrix = gguf_format.from_checkpoint(packed, prefix)
            assert matrix.type == gguf.GGMLQuantizationType(tensor.type).name
            assert gguf_format.stored_shape(packed, prefix) == tensor.shape
            source = name if name in dense.tensors else packing.TABLE
            assert torch.equal(gguf_format.dequantize(matrix, torch.float32), dense.read(source))


@pytest.mark.parametrize("head", ["8", "nf4", "16"])
def test_another_head_is_made_of_the_stored_one(path, head):
    files = open_model(path)
    model, _, _ = packed_model(files, head)  # a head in fewer bits is dequantized again on the CPU
    assert not isinstance(model.lm_head, gguf_format.Linear)
    plain = load(files, CPU)
    expected = logits_of(plain.model, plain, IDS)
    found = logits_of(model, replace(plain, model=model), IDS)
    assert (found - expected).norm() < {"8": 0.02, "nf4": 0.2, "16": 1e-5}[head] * expected.norm()
