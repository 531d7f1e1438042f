"""NF4 against a case worked by hand and against bitsandbytes; its files, its contract and its module."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from localq.errors import ExitCode, LocalqError
from localq.files import format_facts
from localq.formats import FORMATS, nf4, owner
from localq.formats.checkpoint import info
from localq.formats.nf4 import codec as nf4_codec
from tests.support.formats.memory_checkpoint import Held
from tests.support.formats.nf4_weights import sample

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def bnb() -> Any:
    logging.disable(logging.WARNING)  # it warns about an optional kernel package when it is imported
    functional = pytest.importorskip("bitsandbytes").functional
    logging.disable(logging.NOTSET)
    return functional


# ---- by hand


def test_codes_and_scales_by_hand() -> None:
    row = torch.zeros(2, 64)
    row[0, :4] = torch.tensor([-2.0, 2.0, 0.0, 0.32])  # absmax 2: scaled -1, 1, 0, 0.16 -> codes 0, 15, 7, 9
    row[1, :3] = torch.tensor([1.0, 0.22, -0.4])  # absmax 1: 0.22 is nearer to 0.2461 (10), -0.4 to -0.3949 (3)
    packed = nf4.quantize(row)
    assert packed.codes.shape == (2, 32)
    assert packed.codes[0, :3].tolist() == [0x0F, 0x79, 0x77]  # the even column is the high nibble
    assert packed.codes[1, :2].tolist() == [0xFA, 0x37]
    assert packed.offset is not None
    assert packed.nested_absmax is not None
    assert packed.offset.item() == 1.5
    assert packed.nested_absmax.tolist() == [0.5]  # |2 - 1.5| and |1 - 1.5|
    assert packed.absmax.tolist() == [255, 0]  # +1 is entry 255, -1 is nearest to entry 0 (-0.99297)
    scales = nf4.absmax_f32(packed)
    assert scales[0, 0].item() == 2.0
    assert scales[1, 0].item() == pytest.approx(1.5 - 0.5 * 0.992968738079071, abs=1e-7)
    weight = nf4.dequantize(packed, torch.float32)
    assert weight[0, :4].tolist() == [-2.0, 2.0, 0.0, 2 * nf4.CODE_MAP[9].item()]


def test_a_tie_takes_the_lower_code() -> None:
    bounds = (nf4.CODE_MAP[:-1] + nf4.CODE_MAP[1:]) / 2
    above = torch.nextafter(bounds, torch.tensor(2.0))
    row = torch.cat([bounds, torch.ones(1), above, torch.zeros(33)]).reshape(1, 64)  # absmax 1: nothing is scaled
    packed = nf4.quantize(row)
    codes = torch.stack((packed.codes >> 4, packed.codes & 15), dim=-1).reshape(-1)
    assert codes[:15].tolist() == list(range(15))
    assert codes[16:31].tolist() == list(range(1, 16))


def test_a_tie_of_the_scales_takes_the_even_entry() -> None:
    entries = nf4.dynamic_map()
    bounds = (entries[:-1] + entries[1:]) / 2
    codes, scales = nf4_codec._quantize_absmax(torch.cat([bounds, torch.ones(1)]))
    assert scales.tolist() == [1.0]
    assert codes[:255].tolist() == [index + index % 2 for index in range(255)]


def test_bits_per_weight_and_bytes() -> None:
    packed = nf4.quantize(sample(192, 448, torch.bfloat16))
    assert packed.nbytes == nf4.bytes(192, 448)
    assert nf4.bytes(28672, 8192) * 8 / (28672 * 8192) == pytest.approx(4.127, abs=5e-4)


# ---- against bitsandbytes


def test_tables_are_those_of_bitsandbytes(bnb: Any) -> None:
    assert torch.equal(nf4.CODE_MAP, bnb.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(nf4.dynamic_map(), bnb.create_dynamic_map())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("out", "columns"), [(1, 64), (7, 64), (33, 192), (130, 576), (3, 24576)])
def test_quantize_agrees_bit_for_bit(bnb: Any, out: int, columns: int, dtype: torch.dtype) -> None:
    weight = sample(out, columns, dtype, seed=out)
    codes, state = bnb.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    packed = nf4.quantize(weight)
    assert packed.nested_absmax is not None
    assert torch.equal(packed.codes, codes.reshape(out, columns // 2))
    assert torch.equal(packed.offset, state.offset)
    assert torch.equal(packed.nested_absmax, state.state2.absmax)
    assert torch.equal(packed.nested_map, state.state2.code)
    # The 8-bit codes: bitsandbytes has an exact kernel in plain torch (and on CUDA), and one for CPUs with a table of
    # 65,536 bins. Ours are those of the exact one; the CPU library's may lie one entry away, and never nearer.
    absmax = bnb.quantize_4bit(weight, compress_statistics=False, quant_type="nf4")[1].absmax
    portable = torch._C.DispatchKeySet(torch._C.DispatchKey.CompositeExplicitAutograd)
    kernel = torch.ops.bitsandbytes.quantize_blockwise.default
    exact, _ = kernel.redispatch(portable, absmax - state.offset, nf4.dynamic_map(), 256)
    assert torch.equal(packed.absmax, exact)
    error, error_of_table = (
        (nf4.absmax_f32(dataclasses.replace(packed, absmax=chosen)).reshape(-1) - absmax).abs()
        for chosen in (packed.absmax, state.absmax)
    )
    assert (error <= error_of_table * (1 + 1e-5) + 1e-7 * absmax).all()
    assert (packed.absmax != state.absmax).float().mean() < 0.02 or packed.absmax.numel() < 100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dequantize_agrees_bit_for_bit(bnb: Any, dtype: torch.dtype) -> None:
    weight = sample(130, 576, torch.float32)
    codes, state = bnb.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    packed = dataclasses.replace(nf4.quantize(weight), absmax=state.absmax)
    state.dtype = dtype
    assert torch.equal(nf4.dequantize(packed, dtype), bnb.dequantize_4bit(codes, state))
    codes, state = bnb.quantize_4bit(weight, compress_statistics=False, quant_type="nf4")
    single = nf4.Packed(packed.codes, state.absmax, None, None, None, (130, 576), torch.float32)
    state.dtype = dtype
    assert torch.equal(nf4.dequantize(single, dtype), bnb.dequantize_4bit(codes, state))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sample(37, 320, torch.float16)
    whole = nf4.quantize(weight)
    dense = nf4.dequantize(whole, torch.bfloat16)
    monkeypatch.setattr(nf4_codec, "CHUNK_ELEMENTS", {"cpu": 5 * 320})  # 7 full chunks and one of two rows
    chunked = nf4.quantize(weight)
    assert torch.equal(whole.codes, chunked.codes)
    assert torch.equal(whole.absmax, chunked.absmax)
    assert torch.equal(dense, nf4.dequantize(chunked, torch.bfloat16))


def test_error_is_within_half_a_step() -> None:
    weight = sample(64, 512, torch.float32)
    packed = nf4.quantize(weight)
    largest_gap = (nf4.CODE_MAP[1:] - nf4.CODE_MAP[:-1]).max()
    scales = nf4.absmax_f32(packed).repeat_interleave(64, dim=1)
    scale_error = (scales - weight.reshape(64, -1, 64).abs().amax(-1).repeat_interleave(64, dim=1)).abs()
    error = (nf4.dequantize(packed, torch.float32) - weight).abs()
    assert (error <= scales * largest_gap / 2 + scale_error * 2 + 1e-6).all()
    assert (nf4.dequantize(packed, torch.float32)[32, :64] == 0).all()  # an all-zero block stays zero


@pytest.mark.parametrize(
    "weight",
    [
        torch.zeros(3, 96),
        torch.zeros(64),
        torch.zeros(2, 2, 64),
        torch.zeros(0, 64),
        torch.zeros(2, 64, dtype=torch.int32),
        torch.full((2, 64), float("nan")),
        torch.tensor([[float("inf")] + [0.0] * 63]),
    ],
    ids=["columns", "vector", "cube", "empty", "integers", "nan", "inf"],
)
def test_refused_weights(weight: Tensor) -> None:
    with pytest.raises(LocalqError) as caught:
        nf4.quantize(weight)
    assert caught.value.exit_code == ExitCode.BAD_FILE


# ---- checkpoints


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_written_is_what_is_read(dtype: torch.dtype) -> None:
    packed = nf4.quantize(sample(33, 192, dtype))
    tensors = nf4.to_tensors(packed, "a.q_proj")
    described = {"a.q_proj" + suffix: value for suffix, value in nf4.layout(33, 192).items()}
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == described
    assert {name.removeprefix("a.q_proj") for name in tensors} == set(nf4.suffixes)
    again = nf4.from_checkpoint(Held(tensors).checkpoint(), "a.q_proj")
    assert again.shape == (33, 192)
    assert again.dtype == dtype
    for field in ("codes", "absmax", "nested_absmax", "nested_map", "offset"):
        assert torch.equal(getattr(again, field), getattr(packed, field)), field


def test_bitsandbytes_reads_ours_and_we_read_theirs(bnb: Any) -> None:
    weight = sample(33, 192, torch.bfloat16)
    packed = nf4.quantize(weight)
    ours = nf4.to_tensors(packed, "p")
    parts = {name.removeprefix("p.weight."): t for name, t in ours.items() if name != "p.weight"}
    state = bnb.QuantState.from_dict(parts, device=torch.device("cpu"))
    assert torch.equal(bnb.dequantize_4bit(ours["p.weight"], state), nf4.dequantize(packed, torch.bfloat16))

    for nested in (True, False):
        codes, state = bnb.quantize_4bit(weight, compress_statistics=nested, quant_type="nf4")
        theirs = {"p.weight." + key: value for key, value in state.as_dict(packed=True).items()}
        for storage in (torch.uint8, torch.bfloat16, torch.float32):
            held = Held({**theirs, "p.weight": codes.reshape(-1).view(storage).reshape(-1, 1)}).checkpoint()
            assert nf4.is_quantized(held.tensors, "p")
            read = nf4.from_checkpoint(held, "p")
            assert (read.nested_absmax is not None) == nested
            assert torch.equal(nf4.dequantize(read, torch.bfloat16), bnb.dequantize_4bit(codes, state))


def test_fp4_is_refused_by_name(bnb: Any) -> None:
    _, state = bnb.quantize_4bit(sample(4, 64, torch.float32), quant_type="fp4")
    tensors = {"p.weight." + key: value for key, value in state.as_dict(packed=True).items()}
    with pytest.raises(LocalqError, match="FP4") as caught:
        nf4.is_quantized(tensors, "p")
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert not nf4.is_quantized({"p.weight": 1}, "p")


# ---- the contract of a format, and the module


@pytest.mark.parametrize("name", format_facts.formats_by_tensor())
def test_format_contract(name: str) -> None:
    module = FORMATS[name]
    weight = sample(33, 192, torch.bfloat16)
    packed = module.quantize(weight)
    dense = module.dequantize(packed, torch.float32)
    assert dense.shape == weight.shape
    assert module.bytes(33, 192) == packed.nbytes
    assert "bits per weight" in (module.__doc__ or "")
    x = torch.randn(5, 192)
    bias = torch.randn(33)
    linear = module.Linear(packed, bias)
    assert torch.equal(linear(x), F.linear(x, dense, bias))
    assert not list(linear.parameters())  # frozen: buffers only
    tensors = module.to_tensors(packed, "p")
    described = {"p" + suffix: info(*each) for suffix, each in module.layout(33, 192).items()}
    checkpoint = Held(tensors).checkpoint()
    assert described == checkpoint.tensors
    assert owner(checkpoint.tensors, "p" + module.suffixes[0]) == (name, "p")
    assert module.stored_shape(checkpoint, "p") == (33, 192)
    assert torch.equal(module.dequantize(module.from_checkpoint(checkpoint, "p"), torch.float32), dense)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("rows", [1, 8, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_linear_on_the_gpu(rows: int, dtype: torch.dtype) -> None:
    packed = nf4.quantize(sample(320, 1088, dtype)).to("cuda")
    bias = torch.randn(320, dtype=dtype, device="cuda")
    x = torch.randn(rows, 1088, dtype=dtype, device="cuda")
    dense = nf4.dequantize(packed, dtype)
    exact = x.double() @ dense.double().T + bias.double()
    naive_error = (F.linear(x, dense, bias).double() - exact).abs().max()
    error = (nf4.Linear(packed, bias)(x).double() - exact).abs().max()
    assert error <= 2 * naive_error + 1e-6 * exact.abs().max()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_quantize_on_the_gpu_gives_the_same_codes() -> None:
    weight = sample(130, 576, torch.bfloat16)
    on_cpu, on_gpu = nf4.quantize(weight), nf4.quantize(weight.cuda()).to("cpu")
    assert torch.equal(on_cpu.codes, on_gpu.codes)  # the scales' mean is summed in another order there
    assert torch.allclose(nf4.absmax_f32(on_cpu), nf4.absmax_f32(on_gpu), rtol=0.02)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_quantize_agrees_bit_for_bit_with_the_cuda_kernel(bnb: Any, dtype: torch.dtype) -> None:
    weight = torch.randn(1030, 2112, device="cuda").to(dtype)  # no all-zero block: there the kernel differs
    codes, state = bnb.quantize_4bit(weight, compress_statistics=True, quant_type="nf4")
    packed = nf4.quantize(weight)
    assert torch.equal(packed.codes, codes.reshape(1030, 1056))
    assert torch.equal(packed.absmax, state.absmax)
    assert torch.equal(packed.nested_absmax, state.state2.absmax)
    assert torch.equal(packed.offset, state.offset)
    assert torch.equal(nf4.dequantize(packed, dtype), bnb.dequantize_4bit(codes, state))
