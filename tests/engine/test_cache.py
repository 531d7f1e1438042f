"""The static KV cache: what goes where, what comes back in which precision, and how many bytes it is."""

from __future__ import annotations

import pytest
import torch

from localq import kv_bits
from localq.engine import kv_codec
from localq.engine.cache import KVCache
from localq.errors import LocalqError
from localq.files.layer_caches import KeysAndValues, Latents, RecurrentState, SharedCache
from localq.kv_bits import K8V4, KV_BITS

LAYOUT = [KeysAndValues(3, 5), KeysAndValues(2, 7)]
WIDE = [KeysAndValues(3, 40), KeysAndValues(2, 96)]  # what can be quantized
STATE = RecurrentState(heads=3, key_dim=4, value_dim=6, channels=11, columns=2)


def _tokens(count: int, layer: int, layout: list[KeysAndValues] = LAYOUT) -> tuple[torch.Tensor, torch.Tensor]:
    heads, width = layout[layer].kv_heads, layout[layer].head_dim
    k, v = torch.randn(count, heads, width), torch.randn(count, heads, width)
    k[:, :, 3] *= 20  # a channel that stands out, as in real keys
    return k, v


def test_what_was_stored_comes_back_in_slot_order():
    cache = KVCache(LAYOUT, 11, torch.float32, "cpu")
    k, v = _tokens(6, 1)
    cache.update(1, k[:4], v[:4], torch.arange(4), 4)
    keys, values = cache.update(1, k[4:], v[4:], torch.tensor([4, 5]), 6)
    assert keys.shape == (2, 6, 7)
    assert torch.equal(keys, k.transpose(0, 1))
    assert torch.equal(values, v.transpose(0, 1))
    assert not cache.keys[0].any(), "another layer was written"


def test_results_are_views_and_a_longer_live_shows_the_zeros_behind():
    cache = KVCache(LAYOUT, 11, torch.float32, "cpu")
    k, v = _tokens(2, 0)
    keys, values = cache.update(0, k, v, torch.arange(2), 9)
    assert keys.shape == values.shape == (3, 9, 5)
    assert keys.data_ptr() == cache.keys[0].data_ptr()
    assert not keys[:, 2:].any()


@pytest.mark.parametrize("bits", KV_BITS)
def test_a_shorter_conversation_overwrites_in_place(bits):
    cache = KVCache(WIDE, 11, torch.float32, "cpu", bits)
    cache.update(0, *_tokens(8, 0, WIDE), torch.arange(8), 8)
    k, v = _tokens(2, 0, WIDE)
    before, _ = cache.update(0, k, v, torch.tensor([3, 4]), 5)
    fresh = KVCache(WIDE, 11, torch.float32, "cpu", bits)
    alone, _ = fresh.update(0, k, v, torch.tensor([3, 4]), 5)
    assert torch.equal(before[:, 3:5], alone[:, 3:5])


@pytest.mark.parametrize("bits", KV_BITS)
def test_clear_removes_values_that_are_not_finite(bits):
    cache = KVCache(WIDE, 11, torch.bfloat16, "cpu", bits)
    k, v = _tokens(1, 0, WIDE)
    keys, values = cache.update(0, k.bfloat16() * torch.nan, v.bfloat16() * torch.inf, torch.tensor([10]), 11)
    assert not keys[:, 10].isfinite().any()
    assert not values[:, 10].isfinite().any()
    cache.clear()
    assert not any(buffer.any() for buffer in (*cache.keys, *cache.values))
    keys, values = cache.update(0, k.bfloat16(), v.bfloat16(), torch.tensor([2]), 11)
    assert keys.isfinite().all()
    assert values.isfinite().all()


def test_bytes_are_those_of_the_buffers():
    cache = KVCache(LAYOUT, 11, torch.bfloat16, "cpu")
    assert cache.bytes() == KVCache.bytes_for(LAYOUT, 11, torch.bfloat16) == 2 * (3 * 5 + 2 * 7) * 11 * 2


@pytest.mark.parametrize("bits", KV_BITS[1:])
def test_bytes_of_a_quantized_cache(bits):
    cache = KVCache(WIDE, 13, torch.bfloat16, "cpu", bits)
    keys, values = (8, 4) if bits == K8V4 else (bits, bits)
    each = [kv_bits.vector_bytes(of.head_dim, keys) + kv_bits.vector_bytes(of.head_dim, values) for of in WIDE]
    stored = 13 * sum(of.kv_heads * pair for of, pair in zip(WIDE, each, strict=True))
    scratch = 13 * 2 * 2 * 96 * 2  # k and v of the wider layer in 16 bit
    assert cache.bytes() == KVCache.bytes_for(WIDE, 13, torch.bfloat16, bits) == stored + scratch
    assert cache.layer(1).bytes_per_slot() == 2 * each[1]


ERROR = {8: 0.006, 4: 0.1}  # of Gaussian values, relative; measured 0.005, 0.086


@pytest.mark.parametrize("bits", KV_BITS[1:])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_quantized_cache_gives_back_about_what_was_stored(bits, layer):
    torch.manual_seed(layer)
    cache = KVCache(WIDE, 70, torch.float32, "cpu", bits)
    heads, width = WIDE[layer].kv_heads, WIDE[layer].head_dim
    k, v = torch.randn(2, 60, heads, width)
    for part in (slice(0, 40), slice(40, 60)):
        keys, values = cache.update(layer, k[part], v[part], torch.arange(60)[part], 64)
    for got, stored, part in zip((keys, values), (k, v), kv_bits.split(bits), strict=True):
        assert got.shape == (heads, 64, width)
        assert not got[:, 60:].any()
        difference = got[:, :60].transpose(0, 1) - stored
        assert ERROR[part] / 10 * stored.norm() < difference.norm() <= ERROR[part] * stored.norm()
    assert not cache.keys[1 - layer].any(), "another layer was written"


@pytest.mark.parametrize("bits", KV_BITS[1:])
def test_it_works_in_inference_mode(bits):
    with torch.inference_mode():
        cache = KVCache(WIDE, 9, torch.float32, "cpu", bits)
        k, v = _tokens(3, 0, WIDE)
        keys, _ = cache.update(0, k, v, torch.arange(3), 3)
    assert keys.shape == (3, 3, 40)


def test_keys_in_8_and_values_in_4_bit_are_those_of_either_cache():
    """Of one cache in each: the same codes, scales and results."""
    torch.manual_seed(3)
    k, v = _tokens(17, 1, WIDE)
    caches = {bits: KVCache(WIDE, 20, torch.float32, "cpu", bits) for bits in (8, K8V4, 4)}
    read = {bits: cache.update(1, k, v, torch.arange(17), 17) for bits, cache in caches.items()}
    assert torch.equal(read[K8V4][0], read[8][0])
    assert torch.equal(read[K8V4][1], read[4][1])
    mixed, in_8, in_4 = (caches[bits].layer(1) for bits in (K8V4, 8, 4))
    for ours, theirs in (
        (mixed.k, in_8.k), (mixed.k_scales, in_8.k_scales), (mixed.v, in_4.v), (mixed.v_scales, in_4.v_scales),
    ):  # fmt: skip
        assert torch.equal(ours, theirs)


def test_what_cannot_be_quantized_is_refused():
    with pytest.raises(
        LocalqError,
        match="a KV cache below 16 bits requires a head dimension divisible by 8, up to 256; this model's is 5",
    ):
        KVCache(LAYOUT, 11, torch.float32, "cpu", 8)
    with pytest.raises(LocalqError, match="5 is not a supported KV cache precision"):
        KVCache(WIDE, 11, torch.float32, "cpu", 5)
    with pytest.raises(LocalqError, match="k4v8 is not a supported KV cache precision"):
        KVCache(WIDE, 11, torch.float32, "cpu", "k4v8")


# ---- other kinds of layers

MIXED = [*WIDE, STATE, SharedCache(1), STATE]


@pytest.mark.parametrize("bits", KV_BITS)
def test_each_kind_has_its_buffers_and_bytes(bits):
    cache = KVCache(MIXED, 13, torch.bfloat16, "cpu", bits)
    alone = KVCache(WIDE, 13, torch.bfloat16, "cpu", bits)
    assert cache.bytes() - alone.bytes() == 2 * (4 * 3 * 4 * 6 + 2 * 11 * 2) == 2 * STATE.bytes(2)
    assert cache.bytes() == KVCache.bytes_for(MIXED, 13, torch.bfloat16, bits)
    assert cache.layer(3) is cache.layer(1)
    assert [len(cache.keys), len(cache.states)] == [2, 2]


def test_a_state_is_changed_in_place_and_cleared():
    cache = KVCache(MIXED, 13, torch.bfloat16, "cpu")
    for layer in (2, 4):
        state = cache.state(layer)
        assert [state.matrix.shape, state.matrix.dtype] == [(3, 4, 6), torch.float32]
        assert [state.columns.shape, state.columns.dtype] == [(11, 2), torch.bfloat16]
        assert not any(part.any() for part in state)
        state.matrix.add_(torch.nan)
        state.columns.fill_(layer)
    assert cache.state(2).columns.eq(2).all()
    cache.clear(first=5)
    assert not any(part.any() for layer in (2, 4) for part in cache.state(layer))


def test_latents_have_one_vector_per_position():
    layout = [Latents(7), STATE, Latents(7)]
    cache = KVCache(layout, 13, torch.bfloat16, "cpu")
    assert cache.bytes() == KVCache.bytes_for(layout, 13, torch.bfloat16) == 2 * 13 * 7 * 2 + STATE.bytes(2)
    stored = torch.randn(5, 7).bfloat16()
    cache.update_latents(2, stored[:3], torch.arange(3), 3)
    found = cache.update_latents(2, stored[3:], torch.tensor([3, 4]), 6)
    assert torch.equal(found[0], torch.cat((stored, stored.new_zeros(1, 7))))
    assert found.data_ptr() == cache.latents[2].data_ptr()
    assert not cache.latents[0].any(), "another layer was written"
    parts = cache.parts(5)
    assert [(tuple(part.shape), part.dtype) for part in parts] == cache.part_shapes(5)
    assert torch.equal(parts[-1][0], stored)
    assert not any(part.data_ptr() == found.data_ptr() for part in cache.passing_parts(5))
    cache.clear(first=2)
    assert torch.equal(cache.latents[2][0, :2], stored[:2])
    assert not cache.latents[2][0, 2:].any()


@pytest.mark.parametrize("bits", [8, "k8v4", 4])
def test_latents_stay_in_16_bit(bits):
    with pytest.raises(LocalqError, match="this model has a latent KV cache, which supports only 16 bits"):
        KVCache([Latents(64)], 11, torch.float32, "cpu", bits)


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_inputs_of_drafted_tokens_have_their_buffers_and_bytes(rows):
    cache = KVCache(MIXED, 13, torch.bfloat16, "cpu", rows=rows)
    one = (rows - 1) * (2 * 11 + 2 * 4 * 3)
    assert one == STATE.drafted_bytes(2, rows)
    assert cache.bytes() - KVCache(MIXED, 13, torch.bfloat16, "cpu").bytes() == 2 * one
    assert cache.bytes() == KVCache.bytes_for(MIXED, 13, torch.bfloat16, rows=rows)
    assert cache.drafted(2) is None
    with cache.with_drafts():
        inputs, decay, beta = cache.drafted(2)
    assert cache.drafted(2) is None
    assert inputs.shape == (rows - 1, 11)
    assert decay.shape == beta.shape == (rows - 1, 3)


@pytest.mark.parametrize("forget", [KVCache.begin, KVCache.clear, lambda cache: cache.place(3)])
def test_another_text_has_no_drafted_tokens_behind_it(forget):
    cache = KVCache(MIXED, 13, torch.bfloat16, "cpu", rows=4)
    cache.replayable = 3
    forget(cache)
    assert cache.replayable == 0


# ---- the codec


def test_an_8_bit_vector_by_hand():
    """Eight times 1: one turned element of 8 / sqrt(8), the others 0."""
    codes, scales = kv_codec.quantize(torch.ones(8), 8)
    assert codes.tolist() == [128 + 127] + [128] * 7
    assert scales[0].item() == torch.tensor(8**0.5 / 127).half().item()
    assert scales[1].item() == 0
    back = kv_codec.dequantize(codes, scales, 8, torch.float32)
    assert torch.allclose(back, torch.full((8,), 127 * scales[0].item() / 8**0.5))


def test_the_order_of_4_bit_codes():
    codes = torch.arange(16, dtype=torch.uint8).repeat(2)
    packed = kv_codec._pack(codes)
    words = packed.view(torch.int32).long() & 0xFFFFFFFF
    for element in range(8):
        shift = 4 * (element // 2) + 16 * (element % 2)
        assert ((words >> shift) & 15).tolist() == codes.view(4, 8)[:, element].tolist()
    assert torch.equal(kv_codec._unpack(packed), codes)


def test_the_order_of_scales():
    x = torch.zeros(96)
    for block in range(3):
        x[32 * block] = 2.0**block  # turned: all 32 elements of the block are 2 ** block / sqrt(32)
    _, scales = kv_codec.quantize(x, 8)
    expected = [2.0**block / 32**0.5 / 127 for block in (0, 2, 1)] + [0.0]  # even blocks, then odd ones
    assert torch.allclose(scales.float(), torch.tensor(expected), rtol=1e-3)


@pytest.mark.parametrize("width", [8, 16, 24, 48, 80, 96, 128, 160, 256])
@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_and_every_width(width, bits):
    codes, scales = kv_codec.quantize(torch.zeros(2, width), bits)
    assert codes.shape == (2, width * bits // 8)
    assert not kv_codec.dequantize(codes, scales, bits, torch.float32).any()
    x = torch.randn(50, width)
    back = kv_codec.dequantize(*kv_codec.quantize(x, bits), bits, torch.float32)
    assert (back - x).norm() <= {8: 0.006, 4: 0.1}[bits] * x.norm()
    assert torch.allclose(kv_codec.rotate(kv_codec.rotate(x)), x, atol=1e-5)


def test_unknown_bits():
    with pytest.raises(ValueError, match="5 bits is not"):
        kv_codec.quantize(torch.ones(8), 5)
