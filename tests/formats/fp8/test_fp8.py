"""FP8 kept as it is: what `formats.fp8_source` makes of it, bit for bit; tiles, damaged files, and whole models."""

from __future__ import annotations

import time

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional as F

from localq.engine.load import weights
from localq.errors import ExitCode, LocalqError
from localq.files.hub import remote
from localq.files.model_folder import open_model
from localq.formats import fp8, fp8_source, owner
from localq.formats.checkpoint import Checkpoint
from localq.formats.fp8 import TILE_BLOCK
from localq.formats.open_checkpoint import open_checkpoint
from localq.models import architecture
from tests.support.formats import fp8_checkpoints
from tests.support.formats.memory_checkpoint import Held
from tests.support.kernels import reference_kernels
from tests.support.models.tiny_checkpoints import make_checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E4M3 = torch.float8_e4m3fn
BLOCK = {"weight_block_size": [128, 128]}


def made_of(shape: tuple[int, int], scales: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors of a matrix with scales of that kind."""
    torch.manual_seed(seed)
    codes = (100 * torch.randn(shape)).clamp(-448, 448).to(E4M3)
    grid = {"blocks": (-(-shape[0] // 128), -(-shape[1] // 128)), "rows": (shape[0], 1), "matrix": ()}[scales]
    name = ".weight_scale" if scales == "rows" else ".weight_scale_inv"
    return {".weight": codes, name: 1e-3 * (1 + torch.rand(grid))}


def checkpoint_of(made: dict[str, torch.Tensor], config: dict[str, object] | None = None) -> Checkpoint:
    return Held({f"P{suffix}": each for suffix, each in made.items()}).checkpoint(config or BLOCK)


def exact(made: dict[str, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """By the source of 16-bit weights."""
    codes, scales = made.values()
    block = {0: tuple(codes.shape), 1: (1, codes.shape[1])}.get(scales.numel() if scales.dim() == 0 else -1)
    rows = tuple(scales.shape) == (len(codes), 1) and ".weight_scale" in made
    sides = (1, codes.shape[1]) if rows else tuple(codes.shape) if scales.dim() == 0 else (128, 128)
    assert block is None or len(block) == 2
    return fp8_source.dequantize(codes, scales, sides, dtype)


def test_bytes_by_hand():
    codes = torch.tensor([[0x38, 0xB8, 0x7E, 0x01]], dtype=torch.uint8).repeat(1, 4).view(E4M3)  # 1, -1, 448, 2^-9
    made = {".weight": codes, ".weight_scale_inv": torch.tensor(0.5)}
    weight = fp8.dequantize(fp8.from_checkpoint(checkpoint_of(made), "P"), torch.float32)
    assert weight[0, :4].tolist() == [0.5, -0.5, 224.0, 2.0**-10]


@pytest.mark.parametrize("scales", ["blocks", "rows", "matrix"])
@pytest.mark.parametrize("shape", [(256, 384), (144, 320), (130, 200), (48, 64), (16, 576)], ids=str)
def test_weights_are_those_of_the_source_in_every_type(shape, scales):
    made = made_of(shape, scales)
    checkpoint = checkpoint_of(made)
    assert owner(checkpoint.tensors, "P.weight") == ("fp8", "P")
    packed = fp8.from_checkpoint(checkpoint, "P")
    for dtype in DTYPES:
        assert torch.equal(fp8.dequantize(packed, dtype), exact(made, dtype))
    assert packed.nbytes == sum(fp8.placed_bytes(checkpoint.tensors, "P"))
    assert fp8.stored_shape(checkpoint, "P") == packed.shape == shape


@pytest.mark.parametrize("scales", ["blocks", "rows", "matrix"])
@pytest.mark.parametrize("shape", [(256, 384), (144, 320), (130, 200)], ids=str)
def test_slabs_of_any_size_give_the_product(shape, scales):
    packed, bias, x = fp8.from_checkpoint(checkpoint_of(made_of(shape, scales)), "P"), torch.randn(shape[0]), None
    x = torch.randn(11, shape[1])
    expected = F.linear(x, fp8.dequantize(packed, torch.float32), bias)
    linear, codes = fp8.Linear(packed, bias), packed.codes.clone()
    for _ in ("as in the file", "in tiles, where they are whole"):
        assert torch.equal(linear(x), expected)
        assert torch.equal(linear.packed.codes, codes)
        for rows in (16, 48):
            linear.scratch = torch.zeros(4 * shape[1] * rows, dtype=torch.uint8)
            torch.testing.assert_close(linear._by_slabs(x), expected, rtol=1e-5, atol=1e-5)
        linear.tile_()
    assert linear.tiled == (shape != (130, 200))


@pytest.mark.parametrize("variant", fp8.VARIANTS)
def test_unpacking_is_done_by_the_kernel(monkeypatch, variant):
    reference_kernels.install(monkeypatch)
    packed = fp8.sample((96, 320), 3, scheme=variant)
    expected = fp8.dequantize(packed, torch.float32)
    assert 0.3 < float(expected.square().mean()) * 320 < 3
    assert torch.equal(fp8.Linear(packed).tile_().unpack(32, torch.empty(32, 320)), expected[32:64])


@pytest.mark.parametrize("variant", fp8.VARIANTS)
def test_what_is_stored_comes_back(variant):
    packed = fp8.sample((256, 384), 1, scheme=variant)
    config = {"weight_block_size": list(TILE_BLOCK)}
    found = fp8.from_checkpoint(checkpoint_of(fp8.stored(packed), config), "P")
    assert torch.equal(packed.codes, found.codes)
    assert torch.equal(packed.scales, found.scales)
    assert fp8.bytes(256, 384, variant) == packed.nbytes


DAMAGED = {
    "no scales": (lambda made: made.pop(".weight_scale_inv"), "FP8 values but no scales"),
    "scales of integers": (
        lambda made: made.update({".weight_scale_inv": made[".weight_scale_inv"].int()}), "FP8 values but no scales"
    ),
    "scales cut": (
        lambda made: made.update({".weight_scale_inv": made[".weight_scale_inv"][:1]}), "which does not match"
    ),
    "a scale of NaN": (lambda made: made[".weight_scale_inv"].view(-1)[1].fill_(torch.nan), "NaN or infinity"),
    "a scale of infinity": (lambda made: made[".weight_scale_inv"].view(-1)[1].fill_(torch.inf), "NaN or infinity"),
    "NaN": (lambda made: made[".weight"].view(torch.uint8)[3].fill_(0x7F), "values contain NaN"),
    "negative NaN": (lambda made: made[".weight"].view(torch.uint8)[3].fill_(0xFF), "values contain NaN"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_layers_are_refused(case):
    damage, why = DAMAGED[case]
    made = made_of((256, 384), "blocks")
    damage(made)
    began = time.monotonic()
    with pytest.raises(LocalqError, match=why) as caught:
        fp8.from_checkpoint(checkpoint_of(made), "P")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert time.monotonic() - began < 1


def test_blocks_that_are_no_whole_tiles_are_named():
    made = made_of((256, 384), "matrix")
    made[".weight_scale_inv"] = torch.rand(7, 3)
    with pytest.raises(LocalqError, match=r"FP8 in blocks of \[40, 128\] is not supported"):
        fp8.from_checkpoint(checkpoint_of(made, {"weight_block_size": [40, 128]}), "P")


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "qwen3_5_moe_text"])
@pytest.mark.parametrize("options", [{"block": (128, 128)}, {"block": None, "activations": True}], ids=str)
def test_a_gpu_keeps_matrices_and_reads_stacks_of_experts_in_16_bit(tmp_path, model_type, options):
    """Every weight of the model has one source, and they are those of a load on the CPU."""
    folder = make_checkpoint(tmp_path / "m", model_type, shard_bytes=10**9)
    fp8_checkpoints.rewrite(folder, **options)
    files = open_model(folder)
    plain = load_file(folder.with_name("m-plain") / "model.safetensors")
    family = architecture(files.config, "m")
    with torch.device("meta"):
        model = family.Model(family.Config.from_dict(files.config))
    with open_checkpoint(files, packed=True) as checkpoint:
        assignment = weights.assign(checkpoint, model, family.rename, "m")
        assert assignment.format == "fp8"
        kept = {entry.prefix: entry for entry in assignment.quantized.values()}
        assert "model.layers.0.mlp.up_proj" in kept or model_type != "llama"
        for prefix, entry in kept.items():
            packed = entry.module.from_checkpoint(checkpoint, prefix)
            assert torch.equal(fp8.dequantize(packed, torch.bfloat16), plain[f"{prefix}.weight"])
        for key in assignment.dense.values():
            assert torch.equal(checkpoint.read(key).bfloat16(), plain[key].bfloat16())
        sizes = weights.block_sizes(assignment, checkpoint, model, torch.bfloat16, packed=True)
        rates = 24 if "qwen3_5" in model_type else 0  # of gated delta nets: f32 in memory
        assert remote.block_bytes(folder) + rates == sum(sizes)
    with open_checkpoint(files) as checkpoint:
        assert not any(fp8.is_quantized(checkpoint.tensors, name.removesuffix(".weight")) for name in plain)
        assignment = weights.assign(checkpoint, model, family.rename, "m")
        assert sum(sizes) < sum(weights.block_sizes(assignment, checkpoint, model, torch.bfloat16, packed=True))
