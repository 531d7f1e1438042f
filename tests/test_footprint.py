"""What is planned against what is allocated, where neither needs a GPU; prefill: engine/test_prefill_memory.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localq import catalog, planner
from localq.architecture import Architecture
from localq.errors import ExitCode, LocalqError
from localq.placement import Wishes

MIB = 2**20


def shape_of(name: str) -> Architecture:
    return catalog.find(name).arch


def test_a_table_that_leaves_the_device_needs_a_head_that_can_be_made():
    shape = replace(shape_of("llama-3.2-1b"), hidden=2048 + 8)
    assert all(placement.embed == "device" for placement in Wishes().placements(shape))
    with pytest.raises(LocalqError, match=r"8 bit takes a multiple of 16 columns.*--embed device") as raised:
        planner.plan(shape, "bf16", 80 * 2**30, wishes=Wishes(embed="host"))
    assert raised.value.exit_code == ExitCode.USAGE
    eight = replace(shape_of("llama-3.2-1b"), hidden=2048 + 16)  # a multiple of 16 and not of 64
    assert {placement.head for placement in Wishes().placements(eight)} == {"16", "8"}
    with pytest.raises(LocalqError, match="NF4 takes a multiple of 64 columns, the head has 2064"):
        planner.plan(eight, "bf16", 80 * 2**30, wishes=Wishes(head="nf4"))


@pytest.mark.parametrize(("name", "multiprocessors", "clusters"), [
    ("llama-3.1-8b", 132, True), ("llama-3.1-8b", 128, False), ("gemma-3-1b", 188, True), ("qwen2.5-0.5b", 82, False),
    ("phi-3.5-mini", 132, True), ("smollm2-135m", 170, True), ("llama-2-7b", 192, True),
])  # fmt: skip
def test_the_workspace_of_attention_is_enough_for_every_card(name, multiprocessors, clusters):
    """`attention_splits` and `attention_partials` of csrc/attention_decode.cu, once more."""
    shape = shape_of(name)
    ranks = 8 if clusters else 1
    splits = min(max(3 * multiprocessors // shape.kv_heads // ranks * ranks, ranks), 64)
    columns = 64 if shape.head_dim <= 64 else 128 if shape.head_dim <= 128 else 256
    rows = shape.kv_heads * (16 if shape.heads // shape.kv_heads > 8 else 8) * splits
    needed = 4 * rows * (columns + columns // 16) + 4 * 16 * shape.kv_heads
    planned = planner.plan(shape, "nf4", 80 * 2**30).ledger.components["attention_workspace"]
    assert needed <= planned <= 3 * MIB + needed
