"""Shared experts as a GPU holds them, on the CPU: in the stacks of the routed ones, or MLPs of their own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localq.engine.load import weights
from localq.engine.load.load import load
from localq.engine.load.stacks import idle_bytes
from localq.engine.step import fused_experts
from localq.files.hub import remote as hub_remote
from localq.files.model_folder import open_model
from localq.formats import expert_linears, mxfp4, nf4
from localq.formats.codebooks import experts_kernel
from localq.formats.codebooks.experts_kernel import vq_stack
from localq.formats.codebooks.linear import VqLinear
from localq.formats.expert_linears import LinearStack
from localq.formats.experts import kernel as expert_kernel
from localq.formats.experts import stacks
from localq.models.experts import StackedExpert
from localq.models.layers import GatedMLP
from localq.planner.load_options import LoadOptions
from localq.quantize import by_tensor
from localq.quantize.request import TensorwiseRequest
from tests.support.engine import step_stand_ins
from tests.support.engine.fused_steps import logits_of_launches, operations
from tests.support.engine.packed_models import packed_model
from tests.support.formats import expert_checkpoints, hybrid_checkpoints
from tests.support.formats.hybrid_checkpoints import in_nf4
from tests.support.kernels import reference_kernels
from tests.support.models.tiny_models import PREFILL, logits_in_steps
from tests.support.quantize.vq2_conversions import converted

STACKED = ("16 bit, a matrix each", "16 bit, in one tensor", "nf4", "nf4 by localq", "mxfp4")
APART = ("nf4, shared in 16 bit", "nf4, another width", "vq2")
every_case = pytest.mark.parametrize("name", [*STACKED, *APART])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("shared")
    like = hybrid_checkpoints.source(place / "like", "qwen3_5_moe", shared_expert_intermediate_size=64)
    wide = hybrid_checkpoints.source(place / "wide", "qwen3_5_moe", shared_expert_intermediate_size=192)
    kept = ("in_proj_a.weight", "in_proj_b.weight", "gate.weight")
    in_16_bit = lambda name: name.endswith(kept) or ".shared_expert." in name  # noqa: E731
    made = {
        format: by_tensor.convert(TensorwiseRequest(open_model(like), format, place / format))
        for format in ("nf4", "mxfp4")
    }
    return {
        "16 bit, a matrix each": like,
        "16 bit, in one tensor": expert_checkpoints.fused(place / "fused", like),
        "nf4": in_nf4(place / "bnb", like, lambda name: name.endswith(kept))[0],
        "nf4 by localq": made["nf4"],
        "nf4, shared in 16 bit": in_nf4(place / "half", like, in_16_bit)[0],
        "nf4, another width": in_nf4(place / "other", wide, lambda name: name.endswith(kept))[0],
        "mxfp4": made["mxfp4"],
        "vq2": converted(like, place / "vq2", format="vq2"),
    }


def mixtures(model):
    return [block.mlp for block in model.layers]


@every_case
def test_it_lies_behind_the_routed_ones_where_it_is_like_them(name, folders):
    files = open_model(folders[name])
    model, _, places = packed_model(files)
    with pytest.raises(ValueError, match="0 bytes are left"):
        places.block(torch.ones(1))
    exact = load(files, LoadOptions(device="cpu", dtype="float32")).model
    for ours, theirs in zip(mixtures(model), mixtures(exact), strict=True):
        shared, count = ours.shared_expert, ours.experts.count
        assert isinstance(shared, StackedExpert if name in STACKED else GatedMLP)
        assert ours.experts.stacked == count + (name in STACKED)
        assert isinstance(theirs.shared_expert, GatedMLP)
        assert theirs.experts.stacked == count
        if name not in STACKED:
            continue
        assert not list(shared.parameters())
        for leaf, found in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            stack = expert_linears.stack_of(getattr(ours.experts, leaf))
            assert stacks.shape_of(stack)[0] == count + 1
            dense = dense_of(stack)
            assert torch.equal(dense[:-1], getattr(theirs.experts, leaf))
            assert torch.equal(dense[-1], torch.cat([getattr(theirs.shared_expert, each).weight for each in found]))


def put_into_tiles(model):
    """What a GPU's kernels read."""
    for module in model.modules():
        if isinstance(module, VqLinear):
            module.put_into_tiles()
    for stack in (module for module in model.modules() if isinstance(module, LinearStack)):
        stack.stack = vq_stack([[each.tiles for each in some] for some in stack.parts])


def dense_of(stack):
    """f32 [E, out, in]"""
    if isinstance(stack, torch.Tensor):
        return stack
    if isinstance(stack, stacks.Mxfp4Stack):
        packed = mxfp4.Packed(stack.blocks.flatten(0, 1).flatten(1), stack.scales.flatten(0, 1))
        return mxfp4.dequantize(packed, torch.float32).view(stack.experts, -1, stack.in_features)
    of = stack.matrix
    packed = nf4.Packed(of.codes, of.absmax, None, None, None, (of.out_features, of.in_features), torch.float16)
    return nf4.dequantize(packed, torch.float32).view(stack.experts, -1, of.in_features)


@every_case
def test_nothing_lies_there_twice(name, folders):
    """The model has the bytes that were planned, and those of idle experts are of the routed ones alone."""
    files = open_model(folders[name])
    model, sizes, _ = packed_model(files)
    maps = nf4.CODE_MAP.nbytes + nf4.dynamic_map().nbytes
    assert sum(sizes) <= weights.weight_bytes(model)["weights"] + model.embed_tokens.weight.nbytes
    held = {each.data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
    table = model.embed_tokens.weight.nbytes + (0 if model.lm_head is None else model.lm_head.weight.nbytes)
    assert 0 <= sum(held.values()) - table - sum(sizes) <= maps + weights.padding_bytes(model)
    active, experts = model.config.experts_active, model.config.experts
    routed = sum(
        each.nbytes * experts // mixture.experts.stacked
        for mixture in mixtures(model)
        for each in (*mixture.experts.parameters(), *mixture.experts.buffers())
    )
    assert idle_bytes(model) == pytest.approx(routed * (experts - active) / experts, abs=len(model.layers))


@pytest.mark.parametrize(
    ("limit", "value"), [("MOST_CHOSEN", 3), ("WIDEST", 4 * 384 - 1)], ids=["a choice of 3", "x of three"]
)
def test_it_stays_apart_where_one_more_has_no_room(limit, value, folders, monkeypatch):
    monkeypatch.setattr(expert_kernel, limit, value)
    model, _, _ = packed_model(open_model(folders["mxfp4"]))
    assert all(isinstance(mixture.shared_expert, GatedMLP) for mixture in mixtures(model))


@pytest.mark.parametrize("name", ["nf4", "nf4 by localq", "nf4, shared in 16 bit"])
def test_headers_tell_what_it_takes_in_memory(name, folders):
    """Its scales are f32 in the stacks, as those of the routed experts."""
    tensors = expert_checkpoints.read(folders[name])
    scales = [
        each.nbytes
        for key, each in tensors.items()
        if ".mlp." in key and key.endswith(".weight.absmax") and each.dtype == torch.uint8
    ]
    stored = sum(each.nbytes for key, each in tensors.items() if "embed_tokens" not in key and "lm_head" not in key)
    assert hub_remote.block_bytes(folders[name]) == stored + 3 * sum(scales)
    model, _, _ = packed_model(open_model(folders[name]))
    held = [each for mixture in mixtures(model) for each in mixture.buffers() if each.dtype == torch.float32]
    in_f32 = sum(each.nbytes for each in {each.data_ptr(): each for each in held}.values())
    assert in_f32 == 4 * sum(scales) + nf4.CODE_MAP.nbytes


@every_case
def test_a_pass_of_the_modules_is_that_of_the_mixture_before(name, folders, monkeypatch):
    reference_kernels.install(monkeypatch)
    files = open_model(folders[name])
    model, _, _ = packed_model(files)
    exact = load(files, LoadOptions(device="cpu", dtype="float32")).model
    x = torch.randn(9, model.config.hidden)
    with torch.inference_mode():
        for ours, theirs in zip(mixtures(model), mixtures(exact), strict=True):
            expected = theirs(x)
            torch.testing.assert_close(ours(x), expected, rtol=0, atol=2e-4 * float(expected.abs().max()))


LAUNCHES = {  # of a mixture
    **{name: ["router", "gate_up", "down"] for name in STACKED},
    "nf4, shared in 16 bit": ["router", "gate_up", "gate_up", "down", "down"],
    "vq2": ["router", "gate_up", "gate_up", "down", "down"],
    "nf4, another width": ["router", "gate_up", "gate_up", "down", "down", "down", "down"],  # tiled: no stack of one
}


@every_case
def test_a_step_of_launches_is_that_of_the_modules(name, folders, monkeypatch):
    reference_kernels.install(monkeypatch)
    step_stand_ins.install(monkeypatch)
    monkeypatch.setattr(experts_kernel, "HALF_TYPES", (torch.float32, torch.float16))  # stand-ins compute in f32
    files = open_model(folders[name])
    model, _, _ = packed_model(files)
    put_into_tiles(model)
    for mixture in mixtures(model):
        assert fused_experts.why_not(mixture, torch.float16) == "" or name.startswith("16 bit")  # of f32, here
    own = [each for each in operations(model) if each in ("router", "gate_up", "down")]
    assert own == LAUNCHES[name] * model.config.layers
    exact = load(files, LoadOptions(device="cpu", dtype="float32")).model
    with torch.inference_mode():
        got, expected = logits_of_launches(model), logits_in_steps(exact)[sum(PREFILL) :]
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-3 * float(expected.abs().max()))
