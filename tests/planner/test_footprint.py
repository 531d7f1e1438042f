"""What is planned against what is allocated, where neither needs a GPU; prefill: engine/test_prefill_memory.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from localq.engine.sampler import SamplerState
from localq.engine.step.state import StepState
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts, format_sizes
from localq.files.architecture import Architecture
from localq.formats import linear as formats_linear
from localq.formats import nf4
from localq.formats.codebooks import linear as codebook_linear
from localq.formats.codebooks import tiles as codebook_tiles
from localq.formats.codebooks import vq2
from localq.kernels import workspace
from localq.kernels.sampling import workspace_elements
from localq.planner import footprint
from localq.planner import plan as memory_plan
from localq.planner.placement import Placement, Wishes
from tests.support.formats.vq2_checkpoints import packed_of

MIB = 2**20


def shape_of(name: str) -> Architecture:
    return catalog.find(name).arch


def test_a_table_that_leaves_the_device_needs_a_head_that_can_be_made():
    shape = replace(shape_of("llama-3.2-1b"), hidden=2048 + 8)
    assert all(placement.embed == "device" for placement in Wishes().placements(shape))
    with pytest.raises(
        LocalqError, match=r"8-bit heads require a column count divisible by 16.*--embed device"
    ) as raised:
        memory_plan.plan(shape, "bf16", 80 * 2**30, wishes=Wishes(embed="host"))
    assert raised.value.exit_code == ExitCode.USAGE
    eight = replace(shape_of("llama-3.2-1b"), hidden=2048 + 16)  # a multiple of 16 and not of 64
    assert {placement.head for placement in Wishes().placements(eight)} == {"16", "8"}
    with pytest.raises(LocalqError, match="NF4 heads require a column count divisible by 64; this head has 2064"):
        memory_plan.plan(eight, "bf16", 80 * 2**30, wishes=Wishes(head="nf4"))


@pytest.mark.parametrize(("name", "multiprocessors", "clusters"), [
    ("llama-3.1-8b", 132, True), ("llama-3.1-8b", 128, False), ("gemma-3-1b", 188, True), ("qwen2.5-0.5b", 82, False),
    ("phi-3.5-mini", 132, True), ("smollm2-135m", 170, True), ("llama-2-7b", 192, True),
])  # fmt: skip
def test_the_workspace_of_attention_is_enough_for_every_card(name, multiprocessors, clusters):
    """`attention_splits` and `attention_partials` of csrc/attention/decode.cu, once more."""
    shape = shape_of(name)
    ranks = 8 if clusters else 1
    splits = min(max(3 * multiprocessors // shape.kv_heads // ranks * ranks, ranks), 64)
    columns = 64 if shape.head_dim <= 64 else 128 if shape.head_dim <= 128 else 256
    rows = shape.kv_heads * (16 if shape.heads // shape.kv_heads > 8 else 8) * splits
    needed = 4 * rows * (columns + columns // 16) + 4 * 16 * shape.kv_heads
    planned = memory_plan.plan(shape, "nf4", 80 * 2**30).ledger.components["attention_workspace"]
    assert needed <= planned <= 3 * MIB + needed


def test_vq2_in_16_bit_has_tables_and_no_temporaries():
    shape = shape_of("llama-3.3-70b")
    plain, half, full = (
        footprint.fixed_bytes(shape, format, "", None, Placement(), itemsize)
        for format, itemsize in (("nf4", 2), ("vq2", 2), ("vq2", 4))
    )
    assert half["tables"] == format_sizes.WORKSPACE_BYTES + 560 * 4 * 8192
    assert half["scratch"] - plain["scratch"] == 2 * 1024 * 28_672  # inputs of down, rotated
    rotated = 4 * 1024 * 28_672
    plain = footprint.fixed_bytes(shape, "nf4", "", None, Placement(), 4)
    assert full["scratch"] - plain["scratch"] == format_facts.FORMATS["vq2"].unpack_bytes + rotated


@pytest.mark.parametrize(("length", "fragments"), [(4, 1), (16, 1), (32, 2)])
def test_what_vq_gemv_has_besides_the_weights(length, fragments):
    book = torch.randn(256, length, generator=torch.Generator().manual_seed(0))
    assert codebook_tiles.fragments(book, 4096.0).nbytes == fragments * format_sizes.FRAGMENT_BYTES
    assert 2 * fragments <= format_sizes.MOST_FRAGMENTS
    assert 4 * workspace.WORDS == format_sizes.WORKSPACE_BYTES


def test_tables_that_matrices_share_are_counted_once():
    book = torch.randn(256, 16, generator=torch.Generator().manual_seed(1)).half()
    others = [vq2.Packed(((packed.books[0][0], book),), packed.scales, None, (64, 128))
              for packed in (packed_of((64, 128), seed=seed, signs=False) for seed in (0, 1))]  # fmt: skip
    model = torch.nn.ModuleList([vq2.Linear(each) for each in (*others, packed_of((64, 128), "s4l16+s8l16", seed=2))])
    assert codebook_linear.table_bytes(model) == 0  # nothing is in tiles yet
    for linear in model:
        linear.put_into_tiles()
    assert codebook_linear.table_bytes(model) == 3 * format_sizes.FRAGMENT_BYTES  # one for both, two of the last


@pytest.mark.parametrize(
    ("format", "scheme", "head", "expected"),
    [
        ("bf16", "", "16", 0), ("bf16", "", "nf4", 1), ("nf4", "", "16", 1), ("nf4", "", "nf4", 1),
        ("aqlm", "1x16g8", "16", 0), ("aqlm", "1x16g8", "nf4", 1),
    ],
)  # fmt: skip
def test_matrices_and_head_share_one_workspace(format, scheme, head, expected):
    fixed = footprint.fixed_bytes(shape_of("llama-3.3-70b"), format, scheme, None, Placement(head=head), 2)
    assert fixed["tables"] == expected * format_sizes.WORKSPACE_BYTES


def test_a_model_has_a_workspace_once_matrices_are_in_tiles(monkeypatch):
    monkeypatch.setattr(
        formats_linear, "workspace_of", lambda device: workspace.Workspace(torch.zeros(7, dtype=torch.int32))
    )
    packed = nf4.quantize(torch.randn(32, 64))
    for part in (nf4.Linear(packed), vq2.Linear(packed_of((64, 128), signs=False))):
        model = torch.nn.ModuleList([torch.nn.Linear(2, 2), part])
        assert formats_linear.workspace_bytes(model) == 0
        part.put_into_tiles()
        assert formats_linear.workspace_bytes(model) == 28


@pytest.mark.parametrize(("vocab", "context"), [(49152, 2048), (128_256, 8192), (262_145, 512)])
def test_the_sampler_is_counted_to_the_byte(vocab, context):
    shape, place, cpu = replace(shape_of("llama-3.2-1b"), vocab=vocab), Placement(), torch.device("cpu")
    state = StepState(SamplerState(vocab, context, cpu), cpu)
    on_a_gpu = 8 * workspace_elements(vocab)
    planned = footprint.fixed_bytes(shape, "bf16", "", None, place, 2)["sampler"]
    planned += context * footprint.per_token_bytes(shape, place, 2)["sampler"]
    assert planned == state.bytes() + on_a_gpu
