"""VPTQ against a case worked by hand and against the `vptq` package, and through the Linear."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from localq.errors import LocalqError
from localq.files import format_facts
from localq.files.linears import Linears
from localq.formats import vptq
from localq.formats.checkpoint import Checkpoint
from localq.formats.vptq import codec as vptq_codec
from tests.support.engine.live_memory import LiveMemory
from tests.support.formats import vptq_layers
from tests.support.formats.memory_checkpoint import Held
from tests.support.formats.vptq_layers import (
    BF16,
    F16,
    F32,
    LAYOUTS,
    Layer,
    Layout,
    by_package,
    checkpoint_of,
    make,
    shorts,
)

DTYPES = (F32, BF16, F16)


@pytest.fixture(scope="module")
def dequant() -> Callable[..., Tensor]:
    return vptq_layers.package_dequant()


def read(layer: Layer) -> vptq.Packed:
    return vptq.from_checkpoint(checkpoint_of(layer), "a.q_proj")


# ---- by hand


def hand_made() -> Layer:
    """W [3, 3]: one outlier column, two others; 2 + 1 bits an index, vectors of 2 rows (the outlier's of 4).

    In the order of quantization the columns are 2 (the outlier), 0, 1.
    main      column 0: codewords 3, 1    column 1: 0, 2            codewords (1, 2) (3, 4) (5, 6) (7, 8)
    residual  column 0: 1, 0              column 1: 1, 1            codewords (0.5, 0.25) (-1, -2)
    words     3 + 4*1 | (0 + 4*1) << 3 = 39,  1 + 4*0 | (2 + 4*1) << 3 = 49
    """
    layout = Layout((2, 4, 2), 3, 3, outlier=(4, 2, 1))
    tensors = {
        ".centroids.weight": torch.arange(1.0, 9.0).reshape(1, 8).half(),
        ".res_centroids.weight": torch.tensor([[0.5, 0.25, -1, -2]]).half(),
        ".indices": torch.tensor([[[39], [49]]], dtype=torch.int32),
        ".outlier_centroids.weight": torch.tensor([[0.0, 0, 0, 0, 10, 20, 30, 40]]).half(),
        ".outlier_indices": torch.tensor([[[1]]], dtype=torch.int16),
        ".perm": torch.tensor([2, 0, 1], dtype=torch.int16),
        ".weight_scale": torch.tensor([1.0, 2.0, 0.5]).half(),
        ".weight_bias": torch.tensor([0.0, 0.25, -1.0]).half(),
    }
    return Layer(layout, tensors, vptq_layers._config(layout), (torch.tensor([3, 1]), torch.tensor([0, 2])))


def test_by_hand() -> None:
    weight = vptq.dequantize(read(hand_made()), F32)
    # column 0: (7, 8) + (-1, -2), then (3, .) + (0.5, .); column 1: 2 * ((1, 2) + (-1, -2)) + 0.25, 2 * (5 - 1) + 0.25;
    # column 2: half of 10, 20, 30, less 1
    assert weight.tolist() == [[6.0, 0.25, 4.0], [6.0, 0.25, 9.0], [3.5, 8.25, 14.0]]


def test_the_hand_made_case_is_the_package_s(dequant: Callable[..., Tensor]) -> None:
    """Unpacked: packed rows of 16 bits and less are too short for the package."""
    made = hand_made()
    indices = {".indices": torch.tensor([[[3, 0], [1, 2]]]), ".res_indices": torch.tensor([[[1, 1], [0, 1]]])}
    tensors = {**made.tensors, **{suffix: shorts(numbers) for suffix, numbers in indices.items()}}
    config = {**made.config, "is_indice_packed": False}
    plain = Layer(dataclasses.replace(made.layout, packed=False), tensors, config, made.numbers)
    expected = vptq.dequantize(read(made), F32)
    assert torch.equal(by_package(dequant, plain).float(), expected)
    assert torch.equal(vptq.dequantize(read(plain), F32), expected)


def test_an_index_across_two_words() -> None:
    # six indices of 7 bits, the fifth of them in bits 28 to 34: four in the first word, three in the second
    words = torch.tensor([[1 | 2 << 7 | 3 << 14 | 4 << 21 | 0b0101 << 28, 0b101 | 127 << 3]], dtype=torch.int32)
    assert vptq.unpack(words, 6, 7).tolist() == [[1, 2, 3, 4, 0b1010101, 127]]


@pytest.mark.parametrize("bits", range(1, 33))
def test_every_width_is_unpacked(bits: int) -> None:
    numbers = torch.randint(2**bits, (3, 37), generator=torch.Generator().manual_seed(bits))
    numbers[0, 0], numbers[-1, -1] = 2**bits - 1, 2**bits - 1
    assert torch.equal(vptq.unpack(vptq_layers.packed(numbers, bits), 37, bits), numbers)


# ---- against the package


@pytest.mark.parametrize("name", LAYOUTS)
def test_dequantize_agrees_bit_for_bit(dequant: Callable[..., Tensor], name: str) -> None:
    layer = make(LAYOUTS[name], seed=len(name))
    expected = by_package(dequant, layer)
    packed = read(layer)
    assert packed.shape == expected.shape == (layer.layout.out, layer.layout.columns)
    assert packed.dtype == expected.dtype
    for dtype in DTYPES:
        assert torch.equal(vptq.dequantize(packed, dtype), expected.to(dtype))


@pytest.mark.parametrize("name", ["all at once", "outliers, longer vectors", "unpacked groups", "v16-k65536-65536"])
def test_slabs_and_parts_change_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = read(make(LAYOUTS[name]))
    out, columns = packed.shape
    whole = vptq.dequantize(packed, BF16)
    monkeypatch.setattr(vptq_codec, "CHUNK_WEIGHTS", {"cpu": 2 * packed.vector_len * columns + 1})
    assert torch.equal(vptq.dequantize(packed, BF16), whole)
    first = packed.vector_len
    into = torch.full((out - first - 1, columns), 7.0, dtype=BF16)
    assert vptq.dequantize_rows(packed, first, out - first - 1, BF16, into) is into
    assert torch.equal(into, whole[first:-1])


@pytest.mark.parametrize(("first", "count"), [(3, 1), (-16, 3), (0, 0), (48, 40), (0, 76)])
def test_rows_that_are_not_there_or_split_a_vector(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="vectors of 16"):
        vptq.dequantize_rows(read(make(LAYOUTS["all at once"])), first, count, F32)


def test_a_residual_of_more_bits_than_the_main_index_is_read_whole(dequant: Callable[..., Tensor]) -> None:
    """The package's `dequant` keeps only main_bits of it; unpacked, where that cannot happen, it is the reference."""
    layout = Layout((8, 16, 1024), 34, 29)
    layer, plain = make(layout), make(dataclasses.replace(layout, packed=False))
    assert layer.numbers[1].max() > 15
    assert torch.equal(vptq.dequantize(read(layer), F16), by_package(dequant, plain))


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float16], ids=str)
def test_unpacked_indices_of_another_16_bit_type(dtype: torch.dtype) -> None:
    layer = make(LAYOUTS["unpacked"])
    other = {**layer.tensors, ".indices": layer.tensors[".indices"].view(dtype)}
    again = dataclasses.replace(layer, tensors=other)
    assert torch.equal(vptq.dequantize(read(again), F32), vptq.dequantize(read(layer), F32))


@pytest.mark.parametrize(("out", "columns"), [(1100, 8192), (500, 28672)])  # the columns of a 70B
@pytest.mark.parametrize("scheme", [(8, 65536, 0), (8, 65536, 65536), (16, 65536, 65536), (6, 4096, 4096)])
def test_temporaries_are_as_planned(
    out: int, columns: int, scheme: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vptq_codec.CHUNK_WEIGHTS, "meta", vptq_codec.CHUNK_WEIGHTS["cuda"])
    length, count, residuals = scheme
    words = -(-columns * (16 + 16 if residuals == 65536 else 24 if residuals else 16) // 32)

    def held(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    packed = vptq.Packed(
        indices=held(torch.int32, 1, -(-out // length), words),
        centroids=held(F16, 1, count, length),
        res_indices=None,
        res_centroids=held(F16, 1, residuals, length) if residuals else None,
        outlier_indices=None,
        outlier_centroids=None,
        places=held(torch.int16, columns),
        weight_scale=held(F16, columns),
        weight_bias=held(F16, columns),
        shape=(out, columns),
    )
    with LiveMemory() as memory:
        weight = vptq.dequantize(packed, F16)
    assert memory.now == weight.nbytes
    assert 0 < memory.peak - weight.nbytes <= format_facts.FORMATS["vptq"].unpack_bytes


# ---- the contract, and the module


def test_what_a_layer_takes() -> None:
    layer = make(Layout((8, 65536, 256), 120, 64))
    held, packed = checkpoint_of(layer), read(layer)
    assert vptq.placed_bytes(held.tensors, "a.q_proj") == [
        tensor.nbytes for name in vptq_codec.FIELDS if (tensor := getattr(packed, name)) is not None
    ]
    assert vptq.stored_bytes(held.tensors, "a.q_proj") == packed.nbytes == vptq.bytes(120, 64, "v8-k65536-256")
    assert vptq.bytes(120, 64, "v8-k65536-256") == format_facts.matrix_bytes(
        Linears("", 120, 64, 1), "vptq", "v8-k65536-256"
    )
    wide = make(Layout((8, 256, 0), 120, 64, perm=torch.int64))
    assert vptq.stored_bytes(checkpoint_of(wide).tensors, "a.q_proj") == read(wide).nbytes + 6 * 64
    assert sum(vptq.placed_bytes(checkpoint_of(wide).tensors, "a.q_proj")) == read(wide).nbytes
    assert 8 * vptq.bytes(28672, 8192) / (28672 * 8192) == pytest.approx(
        2 + 0.0357 + 0.0017, abs=1e-4
    )  # codebook; columns
    with pytest.raises(LocalqError):
        vptq.bytes(8, 8, "2x8")


def test_placed_asks_for_every_tensor_once_in_order() -> None:
    layer = make(LAYOUTS["all at once"])
    sizes: list[int] = []

    def place(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor.clone()

    placed = read(layer).placed(place, torch.device("cpu"))
    assert sizes == vptq.placed_bytes(checkpoint_of(layer).tensors, "a.q_proj")
    assert torch.equal(vptq.dequantize(placed, F32), vptq.dequantize(read(layer).to("cpu"), F32))


@pytest.mark.parametrize("name", ["all at once", "indices alone", "unpacked"])
def test_linear(name: str) -> None:
    packed = read(make(LAYOUTS[name]))
    out, columns = packed.shape
    x, bias = torch.randn(5, columns), torch.randn(out)
    dense = vptq.dequantize(packed, F32)
    linear = vptq.Linear(packed, bias)
    assert torch.equal(linear(x), F.linear(x, dense, bias))
    assert not list(linear.parameters())  # frozen: buffers only
    assert linear.tile_() is linear
    for given in (bias, None):  # what a GPU does, here: slabs of two vectors
        linear = vptq.Linear(packed, given)
        linear.scratch = torch.empty(4 * columns * 2 * packed.vector_len + 8, dtype=torch.uint8)
        torch.testing.assert_close(linear._by_slabs(x), F.linear(x, dense, given))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", LAYOUTS)
def test_on_the_gpu(name: str) -> None:
    packed = read(make(LAYOUTS[name]))
    there = packed.to("cuda")
    for dtype in DTYPES:
        dense = vptq.dequantize(packed, dtype)
        assert torch.equal(vptq.dequantize(there, dtype).cpu(), dense)
    x = torch.randn(9, packed.shape[1], device="cuda", dtype=BF16)
    linear = vptq.Linear(there)
    linear.scratch = torch.empty(2 * packed.shape[1] * 2 * packed.vector_len, dtype=torch.uint8, device="cuda")
    dense = vptq.dequantize(there, BF16)
    exact = x.double() @ dense.double().T
    naive_error = (F.linear(x, dense).double() - exact).abs().max()
    assert (linear(x).double() - exact).abs().max() <= 2 * naive_error + 1e-6 * exact.abs().max()


# ---- what config.json may leave out


def test_what_is_left_unsaid_the_tensors_say() -> None:
    layer = make(Layout((8, 256, 16), 48, 36))  # 48 = 6 vectors: no padding that only config.json knows of
    kept = ("group_num", "group_size", "num_centroids", "num_res_centroids", "outlier_size", "vector_lens")
    short = {key: value for key, value in layer.config.items() if key in kept}
    expected = vptq.dequantize(read(layer), F32)
    for config in (short, {**short, "in_features": -1, "out_features": -1, "norm_dim": 0, "vector_quant_dim": "out"}):
        packed = read(dataclasses.replace(layer, config=config))
        assert torch.equal(vptq.dequantize(packed, F32), expected)


def test_shared_layer_config_goes_by_the_last_part_of_the_name() -> None:
    layer = make(LAYOUTS["v6-k4096-0"])
    held = checkpoint_of(layer)
    shared = Checkpoint(held.tensors, Held({f"a.q_proj{key}": each for key, each in layer.tensors.items()}), {
        "config_for_layers": {"b.q_proj": {}}, "shared_layer_config": {"q_proj": layer.config},
    })  # fmt: skip
    assert vptq.from_checkpoint(shared, "a.q_proj").shape == (41, 53)


def test_centroids_alone_mark_a_layer() -> None:
    held = checkpoint_of(make(LAYOUTS["outliers"])).tensors
    assert vptq.is_quantized(held, "a.q_proj")
    assert not vptq.is_quantized(held, "a.q_proj.centroids")
    assert not vptq.is_quantized(held, "a.q_proj.outlier_centroids")
    assert not vptq.is_quantized({"a.q_proj.weight": 1, "b.indices": 1}, "a.q_proj")


def test_an_order_of_more_than_15_bits() -> None:
    order = torch.arange(40_000).flip(0)
    layer = make(Layout((8, 2, 0), 3, 40_000, norm=False))
    rest = {key: each for key, each in layer.tensors.items() if key != ".perm"}
    plain = Layer(layer.layout, rest, {**layer.config, "enable_perm": False}, layer.numbers)
    expected = vptq.dequantize(read(plain), F16).flip(1)
    for perm in (order, shorts(order), shorts(order).view(torch.uint16)):
        turned = dataclasses.replace(layer, tensors={**rest, ".perm": perm})
        assert torch.equal(vptq.dequantize(read(turned), F16), expected)
