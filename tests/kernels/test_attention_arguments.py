"""What decode attention and the quantized cache's kernels refuse, by name, before anything touches a device."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from localq.engine.cache import KVCache
from localq.files.layer_caches import KeysAndValues
from localq.kernels import attention
from localq.kernels.gemv import Norm
from localq.kv_bits import KV_BITS, KvBits

HEADS, KV_HEADS, WIDTH, CAPACITY = 6, 2, 64, 9
F16 = torch.float16


def layer(bits: KvBits = 16, width: int = WIDTH) -> attention.KVLayer:
    return KVCache([KeysAndValues(KV_HEADS, width)], CAPACITY, F16, "cpu", bits).layer(0)


def workspace(shape=(HEADS, KV_HEADS, WIDTH)):
    tensors = {"partials": torch.empty(8), "arrived": torch.zeros(4, dtype=torch.int32)}
    return SimpleNamespace(shape=shape, rows=2, splits_of=lambda rows: 4, **tensors)


def decode(**changes):
    arguments = {
        "qkv": torch.zeros(1, (HEADS + 2 * KV_HEADS) * WIDTH, dtype=F16),
        "layer": layer(),
        "position": torch.zeros(1, dtype=torch.int64),
        "heads": HEADS,
        "rotary": None,
        "q_norm": None,
        "k_norm": None,
        "scale": 0.1,
        "softcap": 0.0,
        "window": 0,
        "workspace": workspace(),
        **changes,
    }
    return attention.attention_decode(**arguments)


REFUSED = {
    "on the CPU": ({}, "qkv are on cpu"),
    "heads of no group": ({"heads": 7}, "7 heads and 2 KV heads"),
    "too many heads": ({"heads": 34}, "34 heads and 2 KV heads"),
    "qkv of floats": ({"qkv": torch.zeros(1, 640)}, "qkv is torch.float32"),
    "qkv too short": ({"qkv": torch.zeros(1, 639, dtype=F16)}, "qkv has shape"),
    "cache of another type": ({"qkv": torch.zeros(1, 640, dtype=torch.bfloat16)}, "k of the layer is torch.float16"),
    "position of 32 bit": ({"position": torch.zeros(1, dtype=torch.int32)}, "position is torch.int32"),
    "two positions": ({"position": torch.zeros(2, dtype=torch.int64)}, "position has shape"),
    "rotary flat": ({"rotary": torch.zeros(9, 64, dtype=F16)}, "rotary has shape"),
    "rotary of floats": ({"rotary": torch.zeros(9, 2, 64)}, "rotary is torch.float32"),
    "sinks of other heads": ({"sinks": torch.zeros(2, dtype=F16)}, "sinks has shape"),
    "sinks of floats": ({"sinks": torch.zeros(6)}, "sinks is torch.float32"),
    "base of 32 bit": ({"base": torch.zeros(1, dtype=torch.int32)}, "base is torch.int32"),
    "two bases": ({"base": torch.zeros(2, dtype=torch.int64)}, "base has shape"),
    "another workspace": ({"workspace": workspace((8, 2, 64))}, "workspace is for"),
    "q closer than a head is wide": (
        {"q_stride": 56},
        r"q_stride = 56, must be a multiple of 8, at least head_dim \(64\)",
    ),
    "q at an odd place": ({"q_stride": 68}, "q_stride = 68, must be a multiple of 8"),
    "qkv without gaps": ({"q_stride": 128}, r"qkv has shape \(1, 640\), must have 1024 elements"),
    "gate of other heads": ({"gate": torch.zeros(2, 64, dtype=F16)}, r"gate has shape \(2, 64\), must be \(6, 64\)"),
    "gate without heads": ({"gate": torch.zeros(1, 384, dtype=F16)}, r"gate has shape \(1, 384\), must be \(6, 64\)"),
    "gate of floats": ({"gate": torch.zeros(6, 64)}, "gate is torch.float32 on cpu, must be torch.float16 on cpu"),
    "gate of another type": ({"gate": torch.zeros(6, 64).bfloat16()}, "gate is torch.bfloat16"),
    "gate by columns": ({"gate": torch.zeros(64, 6, dtype=F16).T}, r"gate has strides \(1, 6\)"),
    "gates that overlap": ({"gate": torch.zeros(1, 64, dtype=F16).expand(6, 64)}, r"gate has strides \(0, 1\)"),
    "gates at odd places": ({"gate": torch.zeros(6, 66, dtype=F16)[:, :64]}, r"gate has strides \(66, 1\)"),
    "more rows than the workspace has": ({"qkv": torch.zeros(3, 640, dtype=F16)}, "must have 1 to 2 rows"),
    "a gate of one row for two": (
        {"qkv": torch.zeros(2, 640, dtype=F16), "gate": torch.zeros(6, 64, dtype=F16)},
        r"gate has shape \(6, 64\), must be \(2, 6, 64\)",
    ),
    "out too short": ({"out": torch.zeros(1, 64, dtype=F16)}, "out has shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_decode_refuses(case):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=f"attention_decode: .*{message}"):
        decode(**changes)


@pytest.mark.parametrize("bits", KV_BITS[1:])
def test_write_refuses_rows_with_gaps_and_16_bit(bits):
    k = torch.zeros(3, KV_HEADS, WIDTH, dtype=F16)
    positions = torch.arange(3)
    with pytest.raises(ValueError, match="kv_write: v has shape"):
        attention.kv_write(layer(bits), k, torch.stack([k, k], -1)[..., 0], positions)
    with pytest.raises(ValueError, match="kv_write: k and v are on cpu"):
        attention.kv_write(layer(bits), k, k, positions)


def test_shapes_that_kernels_serve():
    assert attention.why_not(9, 3, 64) == ""
    assert "supports head_dim 100 " in attention.why_not(8, 8, 100)
    assert "supports head_dim 264 " in attention.why_not(8, 8, 264)


@pytest.mark.parametrize(("bits", "slot"), [(16, 512), (8, 272), ("k8v4", 208), (4, 144)])
def test_bytes(bits, slot):
    wide = layer(bits, 128)
    assert attention.attention_decode_bytes(wide, 8, 100) == 100 * 2 * slot + 2 * 128 * (8 + 4 + 8)
    assert attention.attention_decode_bytes(wide, 8, 100, gated=True) == 100 * 2 * slot + 2 * 128 * (8 + 4 + 8 + 8)
    assert attention.kv_write_bytes(wide, 3) == 3 * (2 * slot + 2 * 2 * 128 * 2)


def test_what_the_kernels_are_told_of_keys_and_values_in_different_bits():
    mixed = layer("k8v4")
    assert attention._arguments(mixed)[4:] == (8, 4, KV_HEADS, WIDTH, CAPACITY)
    turned = replace(mixed, k=mixed.v, v=mixed.k)
    with pytest.raises(ValueError, match="attention_decode: k of the layer has shape"):
        decode(layer=turned)
    with pytest.raises(ValueError, match="bits = k4v8, must be one of"):
        decode(layer=replace(mixed, bits="k4v8"))


def test_norm_weights_are_checked():
    with pytest.raises(ValueError, match="q_norm weight has shape"):
        attention._norm("op", "q_norm weight", Norm(torch.ones(3).half(), 1e-5), torch.zeros(1, dtype=F16), WIDTH)
