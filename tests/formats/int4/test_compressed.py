"""compressed-tensors in 4 bits: by hand, against what its package writes, entries of config.json, damaged layers."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.files import compressed_tensors
from localq.files.stored_format import unreadable
from localq.formats.int4 import codec as int4_codec
from localq.formats.int4 import compressed
from tests.support.formats.int4_checkpoints import (
    COMPRESSED,
    Int4,
    checkpoint_of,
    compressed_config,
    compressed_group,
    reference,
    tensors,
    words,
)
from tests.support.formats.int4_damage import Damage, change, drop, set_last, state

SHAPE = (48, 128)
SYMMETRIC, ASYMMETRIC = Int4(COMPRESSED, 64, symmetric=True), Int4(COMPRESSED, 64)
ORDERED = Int4(COMPRESSED, 64, act_order=True)


def weight_of(made: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    return compressed.dequantize(compressed.from_checkpoint(checkpoint_of(made, config), "P"), torch.float32)


def test_by_hand():
    """Two groups of 16 columns, 2 rows, a negative scale. Zero points are 0 and 2 in row 0, -8 and 7 in row 1."""
    packed = torch.tensor([[words([8] * 8)] * 4] * 2, dtype=torch.int32)  # values of 0
    packed[0, 1] = words([8, 8, 8, 15, 8, 8, 8, 8])  # column 11 of row 0 is 7
    packed[1, 3] = words([0, 8, 8, 8, 8, 8, 8, 8])  # column 24 of row 1 is -8
    zeros = torch.tensor([[words([8, 0]), words([10, 15])]], dtype=torch.int32)
    scales = torch.tensor([[0.5, -2.0], [1.0, 0.25]], dtype=torch.bfloat16)
    made = {".weight_packed": packed, ".weight_scale": scales, ".weight_zero_point": zeros,
            ".weight_shape": torch.tensor([2, 32])}  # fmt: skip
    expected = torch.empty(2, 32)
    expected[0, :16], expected[0, 11], expected[0, 16:] = 0.0, 3.5, 4.0
    expected[1, :16], expected[1, 16:], expected[1, 24] = 8.0, -1.75, -3.75
    assert torch.equal(weight_of(made, Int4(COMPRESSED, 16).config), expected)


@pytest.mark.parametrize("of", [SYMMETRIC, ASYMMETRIC, Int4(COMPRESSED, -1), Int4(COMPRESSED, 128, symmetric=True)])
@pytest.mark.parametrize("shape", [SHAPE, (20, 128)], ids=str)  # 20 zero points take two and a half words
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_what_the_package_compresses_is_read_bit_for_bit(of, shape, dtype):
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    torch.manual_seed(1)
    groups = 1 if of.group == -1 else shape[1] // of.group
    signs = torch.randint(0, 2, (shape[0], groups)) * 2 - 1
    scale = (signs * (0.01 + 0.02 * torch.rand(shape[0], groups))).to(dtype)
    zeros = None if of.symmetric else torch.randint(-8, 8, (shape[0], groups), dtype=torch.int8)
    held = {"weight": 0.1 * torch.randn(shape, dtype=dtype), "weight_scale": scale}
    scheme = QuantizationScheme(targets=["Linear"], weights=compressed_group(of)["weights"])
    held |= {} if zeros is None else {"weight_zero_point": zeros}
    stored = PackedQuantizationCompressor.compress(held, scheme)
    made = {f".{name}": each for name, each in stored.items() if each is not None}
    expected = PackedQuantizationCompressor.decompress(dict(stored), scheme)["weight"]
    assert expected.dtype == dtype
    assert torch.equal(weight_of(made, of.config), expected.float())


def test_an_order_of_minus_ones_is_none():
    """Versions that had orders wrote them so for modules without one."""
    made = tensors(SHAPE, ASYMMETRIC)
    expected = reference(made, ASYMMETRIC).float()
    made[".weight_g_idx"] = torch.full((128,), -1, dtype=torch.int32)
    packed = compressed.from_checkpoint(checkpoint_of(made, ASYMMETRIC.config), "P")
    assert packed.in_order
    assert torch.equal(compressed.dequantize(packed, torch.float32), expected)
    assert sum(compressed.placed_bytes(checkpoint_of(made, {}).tensors, "P")) == packed.nbytes


@pytest.mark.parametrize("scheme", ["g32", "g128", "row", "g64, ordered"])
def test_stored_is_the_inverse_of_reading(scheme):
    packed = int4_codec.sample((40, 256), 3, "cpu", scheme)
    made = compressed.stored(packed)
    size = scheme.removesuffix(int4_codec.ORDERED)
    stated = {suffix: (each.dtype, tuple(each.shape)) for suffix, each in made.items() if suffix != ".weight_g_idx"}
    assert compressed.layout(40, 256, size) == stated
    again = compressed.from_checkpoint(
        checkpoint_of(made, compressed.quantization_config("float16", ["lm_head"], size)), "P"
    )
    assert torch.equal(compressed.dequantize(again, torch.float32), compressed.dequantize(packed, torch.float32))


# ---- config.json


MIXED = compressed_config(
    compressed_group(Int4(COMPRESSED, 32), ("re:.*down_proj$", "re:(a+)+$")),
    compressed_group(SYMMETRIC, ("Linear", "model.layers.0.mlp.up_proj")),
    {"targets": ["LlamaAttention"], "weights": None, "input_activations": {"num_bits": 8, "type": "float"}},
    ignore=["lm_head", "re:.*mlp.gate$", "re:((a|a)*)*b"],
)


@pytest.mark.parametrize("of", [Int4(COMPRESSED, 32), SYMMETRIC], ids=str)
def test_tensors_say_which_entry_they_are_of(of):
    made = tensors(SHAPE, of)
    assert torch.equal(weight_of(made, MIXED), reference(made, of).float())
    assert (unreadable(MIXED), compressed_tensors.scheme_of_config(MIXED)) == ("", "g32")


@pytest.mark.parametrize("of", [Int4(COMPRESSED, 32, symmetric=True), ASYMMETRIC, Int4(COMPRESSED, 128)], ids=str)
def test_tensors_of_no_entry_are_refused(of):
    with pytest.raises(LocalqError, match=r"but config\.json specifies 4-bit weights with groups of 32 and zero"):
        weight_of(tensors(SHAPE, of), MIXED)


def test_patterns_of_a_file_never_run():
    """One that takes longer than the universe lasts costs nothing."""
    name = "a" * 60
    checkpoint = checkpoint_of(tensors(SHAPE, SYMMETRIC), MIXED)
    begin = time.monotonic()
    assert compressed.stored_shape(checkpoint, "P") == SHAPE
    assert not compressed.is_quantized(checkpoint.tensors, name)
    assert time.monotonic() - begin < 1


def weights(**fields: Any) -> dict[str, Any]:
    group = compressed_group(SYMMETRIC)
    return {"config_groups": {"group_0": {**group, "weights": {**group["weights"], **fields}}}}


def entry(**fields: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {**compressed_group(SYMMETRIC), **fields}}}


VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "3 bits": (weights(num_bits=3), "with 3 bits (localq supports 4 and 8)"),
    "bits of text": (weights(num_bits="4"), "with '4' bits"),
    "4 bits and 2 bits": (
        compressed_config(compressed_group(SYMMETRIC), weights(num_bits=2)["config_groups"]["group_0"]), "with 2 bits",
    ),
    "fp8": ({"format": "float-quantized"}, "in layout 'float-quantized'"),
    "int4 in bytes": ({"format": "int-quantized"}, "with 4 bits in layout 'int-quantized'"),
    "nvfp4": ({"format": "nvfp4-pack-quantized"}, "in layout 'nvfp4-pack-quantized'"),
    "mxfp4 of one entry": (entry(format="mxfp4-pack-quantized"), "in layout 'mxfp4-pack-quantized'"),
    "marlin-24": ({"format": "marlin-24"}, "in layout 'marlin-24'"),
    "no format": ({"format": None}, "in layout 'None'"),
    "floats": (weights(type="float"), "with float weights"),
    "per tensor": (weights(strategy="tensor", group_size=None), "with one scale per tensor"),
    "per tensor, unnamed": (weights(strategy=None, group_size=None), "with one scale per tensor"),
    "blocks": (weights(strategy="block"), "with one scale per block"),
    "groups of nothing": (weights(group_size=None), "with a group size of None"),
    "groups of 0": (weights(group_size=0), "with a group size of 0"),
    "groups of truth": (weights(group_size=True), "with a group size of True"),
    "vast groups": (weights(group_size=10**30), "with a group size of 10000000000000000000"),
    "symmetric of text": (weights(symmetric="no"), "with symmetric = 'no'"),
    "sparse": ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "with sparse weights"),
    "rotated": ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "with rotated inputs"),
    "no groups": ({"config_groups": {}}, "without any quantized weights"),
    "groups of a list": ({"config_groups": [1]}, "without any quantized weights"),
    "a group of text": ({"config_groups": {"a" * 99: "x"}}, f"with a malformed group, {'a' * 40!r}"),
    "weights of text": (entry(weights="x"), "with a malformed group, 'group_0'"),
    "activations only": (entry(weights=None), "without any quantized weights"),
    "a preset": ({"config_groups": {"W8A8": ["Linear"]}}, "with preset 'W8A8'"),
}  # fmt: skip


@pytest.mark.parametrize("case", VARIANTS)
def test_other_variants_are_refused_by_name(case):
    fields, why = VARIANTS[case]
    found = unreadable({**SYMMETRIC.config, **fields})
    assert found.startswith("compressed-tensors")
    assert why in found
    assert len(found) < 120


READABLE: dict[str, tuple[dict[str, Any], str]] = {
    "as it is": ({}, "g64"),
    "channels": (weights(strategy="channel", group_size=None), "row"),
    "channels by -1": (weights(strategy=None, group_size=-1), "row"),
    "a strategy that is left out": (weights(strategy=None, group_size=32), "g32"),
    "activations in 8 bits": (entry(input_activations={"num_bits": 8, "type": "int", "dynamic": True}), "g64"),
    "a cache in 8 bits": ({"kv_cache_scheme": {"num_bits": 8}}, "g64"),
    "not sparse": ({"sparsity_config": {"format": "dense"}, "transform_config": {}}, "g64"),
    "the format of the entry": ({"format": "mixed-precision", **entry(format="pack-quantized")}, "g64"),
    "a preset": ({"config_groups": {"W4A16": ["Linear"]}}, "g128"),
    "8 bits": (weights(num_bits=8), "g64, 8 bits"),
    "no bits": ({"config_groups": {"g": {"targets": ["Linear"], "weights": {"group_size": 64}}}}, "g64, 8 bits"),
    "int8": ({"format": "int-quantized", **weights(num_bits=8, strategy="channel", group_size=None)}, "row, 8 bits"),
}


@pytest.mark.parametrize("case", READABLE)
def test_what_is_read(case):
    fields, scheme = READABLE[case]
    stated = {**SYMMETRIC.config, **fields}
    assert (unreadable(stated), compressed_tensors.scheme_of_config(stated)) == ("", scheme)


# ---- damaged layers


PACKED, SCALE, ZEROS, G_IDX, STATED = (
    ".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape"
)  # fmt: skip
DAMAGED: dict[str, tuple[Damage, str]] = {
    "no scales": (drop(SCALE), "lacks P.weight_scale"),
    "no shape": (drop(STATED), "lacks P.weight_shape"),
    "codes of bytes": (change(PACKED, lambda t: t.view(torch.uint8)), "weight_packed has dtype uint8; expected int32"),
    "codes of floats": (change(PACKED, lambda t: t.float()), "weight_packed has dtype float32"),
    "codes of one size": (change(PACKED, lambda t: t.flatten()), "weight_packed has shape .* expected two dimensions"),
    "no codes": (change(PACKED, lambda t: t[:0]), "expected two dimensions"),
    "codes cut": (change(PACKED, lambda t: t[:, :-1].contiguous()), "120 columns|do not match|groups of 60 columns"),
    "rows cut": (change(PACKED, lambda t: t[:-2]), r"weight_scale has shape \[48, 2\]; expected \[46, 2\]"),
    "odd rows": (change(PACKED, lambda t: t[:-1]), r"an odd number of rows \(47\)"),
    "scales of integers": (change(SCALE, lambda t: t.int()), "weight_scale has dtype int32; expected float16"),
    "scales of one size": (change(SCALE, lambda t: t.flatten()), "weight_scale has shape .* expected two dimensions"),
    "scales transposed": (change(SCALE, lambda t: t.T.contiguous()), r"weight_scale has shape \[2, 48\]"),
    "scales cut": (
        change(SCALE, lambda t: t[:, :1]), "1 groups of 128 columns with zero points do not match|weight_zero"
    ),
    "three groups": (
        change(SCALE, lambda t: torch.cat([t, t[:, :1]], 1)), "128 columns cannot be split evenly into 3 groups"
    ),
    "groups of 8": (
        lambda made, config: made.update({SCALE: made[SCALE].repeat(1, 8), ZEROS: made[ZEROS].repeat(1, 8)}),
        "groups of 8 columns",
    ),
    "a scale that is NaN": (set_last(SCALE, float("nan")), "weight_scale contain NaN"),
    "a scale that is infinite": (set_last(SCALE, float("-inf")), "weight_scale contain NaN or infinity"),
    "zero points of bytes": (change(ZEROS, lambda t: t.to(torch.int8)), "weight_zero_point has dtype int8"),
    "zero points along in": (
        change(ZEROS, lambda t: torch.zeros(48, 1, dtype=torch.int32)),
        r"weight_zero_point has shape \[48, 1\]; expected \[6, 2\]",
    ),
    "zero points that config.json denies": (
        state(**weights()), "the weights have 2 groups of 64 columns with zero points, but config.json",
    ),
    "no zero points": (drop(ZEROS), "the weights have 2 groups of 64 columns without zero points, but config.json"),
    "other groups": (
        state(**compressed_config(compressed_group(Int4(COMPRESSED, 32)))),
        "the weights have 2 groups of 64 columns with zero points, "
        "but config.json specifies 4-bit weights with groups of 32",
    ),
    "whole rows": (
        state(**compressed_config(compressed_group(Int4(COMPRESSED, -1)))),
        "but config.json specifies 4-bit weights with one group per row and",
    ),
    "no entries": (state(config_groups={}), "but config.json specifies no supported groups"),
    "another shape": (change(STATED, lambda t: t * 2), r"weight_shape is \[96, 256\], but weight_packed has 48 x 128"),
    "a shape of floats": (change(STATED, lambda t: t.float()), r"weight_shape is float32 \[2\]; expected int64 \[2\]"),
    "a shape of three": (change(STATED, lambda t: torch.cat([t, t])), r"weight_shape is int64 \[4\]"),
    "a nameless method": (lambda made, config: config.pop("quant_method"), "quant_method None"),
    "another method": (state(quant_method="gptq"), "quant_method 'gptq', but the tensors are packed for compressed"),
    "no configuration": (lambda made, config: config.clear(), "describes the quantization"),
}  # fmt: skip
OF_ORDERS: dict[str, tuple[Damage, str]] = {
    "no order": (drop(G_IDX), "actorder is 'group', but weight_g_idx is missing"),
    "a group beyond the last": (set_last(G_IDX, 2), "weight_g_idx contains values from 0 to 2, but there are 2 groups"),
    "one of no group": (set_last(G_IDX, -1), "weight_g_idx contains values from -1 to"),
    "groups of other sizes": (change(G_IDX, lambda t: t * 0), "weight_g_idx does not assign 64 columns"),
    "an order cut": (change(G_IDX, lambda t: t[:-1]), r"weight_g_idx has shape \[127\]; expected \[128\]"),
    "an order of floats": (change(G_IDX, lambda t: t.float()), "weight_g_idx has dtype float32"),
}


CASES = [*((ASYMMETRIC, case) for case in DAMAGED), *((ORDERED, case) for case in OF_ORDERS)]


@pytest.mark.parametrize(("of", "case"), CASES, ids=str)
def test_damaged_layers_are_refused(of, case):
    damage, why = (OF_ORDERS if of == ORDERED else DAMAGED)[case]
    made, config = tensors(SHAPE, of), dict(of.config)
    damage(made, config)
    begin = time.monotonic()
    with pytest.raises(LocalqError, match=why) as caught:
        weight_of(made, config)
    assert time.monotonic() - begin < 1
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert caught.value.what == "P"
