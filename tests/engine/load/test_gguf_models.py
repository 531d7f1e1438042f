"""GGUF models as a GPU holds them, on the CPU: matrices in the blocks of the file, logits, planned bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import gguf
import pytest
import torch

from localq.engine.load import weights
from localq.engine.load.load import load
from localq.files import catalog, format_facts
from localq.files.architecture import Architecture
from localq.files.gguf import packing, reader
from localq.files.gguf.block_types import KERNEL_TYPES
from localq.files.model_folder import open_model
from localq.formats import expert_linears
from localq.formats import gguf as gguf_format
from localq.formats.expert_linears import stack_of
from localq.formats.experts.stacks import Mxfp4Stack
from localq.formats.linear import SlabStack
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner import footprint, uncatalogued
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
    "lfm2moe": Case("lfm2moe", "lfm2_moe", {**families.CASES["lfm2moe"].config, **WIDE, "moe_intermediate_size": 32}),
    "olmo3": Case("olmo2", "olmo3", {**families.CASES["olmo3"].config, **WIDE}),
    "qwen3moe, wide": Case("qwen3moe", "qwen3_moe", {
        **families.CASES["qwen3moe"].config, **WIDE, "moe_intermediate_size": 64, "intermediate_size": 128}),
}  # fmt: skip
NEW = ("lfm2moe", "olmo3")
PARAMETERS = [
    (name, kind)
    for name in CASES
    for kind in ("Q8_0", "Q4_0")
    if name != "qwen3moe, wide" and (name not in NEW or kind == "Q8_0")
]
PARAMETERS += [
    ("llama", "MXFP4"),
    ("qwen3moe", "MXFP4"),
    ("llama", "NVFP4"),
    ("qwen35", "NVFP4"),
    ("qwen3moe, wide", "NVFP4"),
]  # columns of `down_proj` are no multiple of 64: as in the file
IDS = prompt_of(40, vocab=131)
IN_BLOCKS = (".blocks", ".places", ".codes", ".scales")


@pytest.fixture(scope="module", params=PARAMETERS, ids=str)
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
    assert sum(sizes) == weights.weight_bytes(model)["weights"]


def test_the_plan_knows_the_bytes_from_the_header(path):
    """But for tensors that stay in f32 beside 16-bit weights; here all weights outside blocks are f32."""
    header, files = reader.read_header(path), open_model(path)
    model, sizes, _ = packed_model(files)
    blocks = sum(
        each.nbytes for name, each in model.named_buffers() if name.endswith(IN_BLOCKS) and "lm_head" not in name
    )
    assert packing.device_bytes(header) == blocks + (sum(sizes) - blocks) // 2
    arch = uncatalogued.offer(catalog.resolve(str(path)), offline=True).arch
    tables = format_facts.of("gguf").tables(arch.linears, packing.scheme(header))
    assert expert_linears.table_bytes(model) == tables
    has_tiles = packing.scheme(header) in KERNEL_TYPES
    assert (tables > 0) == (bool(arch.experts) and has_tiles)
    head = getattr(model.lm_head, "blocks", None)
    assert packing.head_bytes(header) == (0 if head is None else head.nbytes)
    assert (head is None) == (model.config.vocab_size % 16 != 0 or not has_tiles)  # no kernel would read it


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path):
    """In the order of OpenAI's files, which the kernels read; biases and logits are those of the dequantized model."""
    case = families.CASES["gpt-oss"]
    case = replace(case, config={**case.config, "hidden_size": 128})
    weights_of = families.read_folder(families.make_folder(case, tmp_path / "folder"))
    path = families.write(tmp_path / "m.gguf", case, weights_of, "Q8_0", experts="MXFP4")
    header, files = reader.read_header(path), open_model(path)
    model, sizes, _ = packed_model(files)
    plain = load(files, CPU)
    expected = logits_of(plain.model, plain, IDS)
    assert expected.std() > 0.1, "the comparison needs logits that differ"
    torch.testing.assert_close(logits_of(model, replace(plain, model=model), IDS), expected, rtol=0, atol=1e-4)
    stacks = [stack_of(each) for each in model.modules() if isinstance(each, SlabStack)]
    assert [type(each) for each in stacks] == [Mxfp4Stack] * 2 * model.config.layers
    of_stacks = sum(each.nbytes for each in stacks)
    assert of_stacks == sum(17 * math.prod(each.shape) // 32 for each in packing.mxfp4_tensors(header).values())
    blocks = of_stacks + sum(
        each.nbytes for name, each in model.named_buffers() if name.endswith(".blocks") and "lm_head" not in name
    )
    assert packing.device_bytes(header) == blocks + (sum(sizes) - blocks) // 2
    assert packing.scheme(header).startswith("mix")
    assert format_facts.without_kernels(packing.scheme(header)) == ""


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
    assert Wishes().choice(first, arch) == ""


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
