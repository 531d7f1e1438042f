"""gather_gemv and vptq_gemv, compiled for the CPU (tests/support/kernels/gather_machine_on_cpu.cuh), against fp64.

How much shared memory there is says whether codewords are kept there: all, some or none.
"""

from __future__ import annotations

import ctypes
from dataclasses import fields, replace

import pytest
import torch

from localq.formats.codebooks.gather_kernel import GatherOperand
from localq.formats.vptq import codec as vptq_codec
from localq.formats.vptq.kernel import vptq_arguments
from localq.kernels import gemv
from localq.kernels.checks import TYPES
from tests.support.kernels.cuda_headers import compile_on_cpu
from tests.support.kernels.gather_operands import aqlm_packed, gather_matrix, unrounded, vptq_matrix, vptq_packed
from tests.support.kernels.gemv_structs import Extras
from tests.support.kernels.guarded_memory import guarded
from tests.support.kernels.nf4_operands import inputs
from tests.support.kernels.row_operands import biased, normed

KERNELS = ("gather/aqlm_gemv.cu", "gather/vptq_gemv.cu")
HALF, BF16 = torch.float16, torch.bfloat16
POINTER, LONG = ctypes.c_void_p, ctypes.c_int64
LARGE = 232_448  # shared memory of a block, of an H200


class Aqlm(ctypes.Structure):
    """csrc/gather/gemv.h, GatherMatrix."""

    _fields_ = (
        *((name, POINTER) for name in ("codes", "codebook", "scales")),
        *((name, LONG) for name in ("out", "columns", "entries", "group")),
    )


class Vptq(ctypes.Structure):
    """csrc/gather/vptq.h: addresses, then sizes, as `vptq_arguments` has them."""

    _fields_ = (*((f"held{i}", POINTER) for i in range(9)), *((f"size{i}", LONG) for i in range(11)))


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    return compile_on_cpu(
        tmp_path_factory.mktemp("library"), "gather_on_cpu.cpp", KERNELS, faults=("gather_gemv", "vptq_gemv")
    )


def in_guarded_memory(matrix):
    held = {each.name: getattr(matrix, each.name) for each in fields(matrix)}
    return replace(matrix, **{name: guarded(it) for name, it in held.items() if isinstance(it, torch.Tensor)})


def structure_of(matrix):
    if isinstance(matrix, GatherOperand):
        held = (each.data_ptr() for each in matrix.tensors())
        return Aqlm(*held, matrix.out_features, matrix.in_features, matrix.entries, matrix.group)
    return Vptq(*vptq_arguments(matrix).values())


def multiply(library, x, matrices, *, multiprocessors=2, shared=LARGE, norm=None, activation=None):
    """f32 [rows, results]; all that is read and written ends where memory ends."""
    matrices, x = [in_guarded_memory(each) for each in matrices], guarded(x)
    outs = [each.out_features for each in matrices]
    out = guarded(torch.full((len(x), outs[0] if activation else sum(outs)), torch.nan))
    name = "gather_gemv" if isinstance(matrices[0], GatherOperand) else "vptq_gemv"
    _, told = gemv.prepare(name, x, matrices, norm, None, activation, out)
    extras = Extras(*(told[each] for each in ("norm", "norm_weight", "eps", "residual", "activation")),
                    (POINTER * gemv.SEGMENTS)(*told["biases"]), told["y_is_f32"])  # fmt: skip
    given = [structure_of(each) for each in matrices]
    getattr(library, f"{name}_on_cpu")(
        (type(given[0]) * len(given))(*given), len(given), ctypes.byref(extras), POINTER(x.data_ptr()),
        POINTER(out.data_ptr()), TYPES[x.dtype], len(x), multiprocessors, shared,
    )  # fmt: skip
    return out.clone()


def assert_near(got, x, dense):
    """As near as sums in f32 are."""
    exact, size = x.double() @ dense.double().T, x.double().abs() @ dense.double().abs().T
    assert ((got - exact).abs() <= 2e-6 * size).all()


@pytest.mark.parametrize("shared", [LARGE, 25_000], ids=["all kept", "some kept"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(("group", "shape"), [(8, (70, 1056)), (16, (40, 2080))], ids=str)
def test_aqlm(library, group, shape, rows, shared):
    packed = aqlm_packed(shape, HALF, 3, (1, 1024, 1, group))
    x = inputs(rows, shape[1], HALF)
    assert_near(multiply(library, x, [gather_matrix(packed)], shared=shared), x, unrounded(packed))


@pytest.mark.parametrize(("shape", "multiprocessors"), [((5, 576), 9), ((19, 8960), 2), ((23, 4160), 3)], ids=str)
def test_aqlm_on_few_and_on_wide_rows(library, shape, multiprocessors):
    """Fewer results than blocks; x of more than 8,192 columns, so staged in two rounds; a norm of several words."""
    packed = aqlm_packed(shape, HALF, 4, (1, 512, 1, 8))
    x = inputs(1, shape[1], HALF)
    norm = gemv.Norm(torch.ones(shape[1], dtype=HALF), 1e-5) if shape[1] == 4160 else None
    got = multiply(library, x, [gather_matrix(packed)], multiprocessors=multiprocessors, norm=norm)
    assert_near(got, x if norm is None else normed(x, norm), unrounded(packed))


def test_a_row_of_aqlm_is_the_same_wherever_it_lies(library):
    """Bit by bit: sums are added in the order of the columns, which the tile of a row and its block do not change."""
    packed = aqlm_packed((40, 2080), HALF, 6, (1, 512, 1, 16))
    packed = replace(packed, codes=packed.codes[:1].expand_as(packed.codes).contiguous())
    packed = replace(packed, scales=torch.ones_like(packed.scales))
    got = multiply(library, inputs(8, 2080, HALF), [gather_matrix(packed)])
    assert (got == got[:, :1]).all()
    assert got.unique().numel() == 8


def test_two_matrices_of_aqlm(library):
    outs, columns = (22, 38), 544
    packed = [aqlm_packed((out, columns), HALF, out, (1, 512, 1, 8)) for out in outs]
    x = inputs(2, columns, HALF)
    got = multiply(library, x, [gather_matrix(each) for each in packed], multiprocessors=4)
    assert_near(got, x, torch.cat([unrounded(each) for each in packed]))


SCHEMES = {
    "v8": (8, 4096, 0), "v8 + 256": (8, 2048, 256), "v16": (16, 512, 0), "v16 + as many": (16, 512, 512),
    "v8, odd bits": (8, 128, 64), "v16, odd bits": (16, 256, 32), "v8, 32 bits": (8, 65536, 65536),
    "v8 of 2": (8, 2, 0),
}  # fmt: skip


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("packs", [True, False], ids=["packed", "unpacked"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_vptq(library, scheme, packs, rows):
    """Items whole and short, vectors with padding; in one window and in several."""
    shape = (75, 1096)
    packed = vptq_packed(shape, HALF, 2, SCHEMES[scheme], packed=packs)
    x = inputs(rows, shape[1], HALF)
    results = [
        multiply(library, x, [vptq_matrix(packed)], shared=shared) for shared in (LARGE, 8_000 if rows == 1 else 44_000)
    ]
    for got in results:
        assert_near(got, x, vptq_codec.dequantize(packed, torch.float32))


@pytest.mark.parametrize("scheme", ["v8 + 256", "v16"])
@pytest.mark.parametrize("norm", [True, False])
def test_every_place_of_vptq_is_its_column(library, scheme, norm):
    """x = unit vectors: a wrong index, lane or place cannot hide in a sum."""
    shape = (33, 552)
    packed = vptq_packed(shape, BF16, 5, SCHEMES[scheme], norm=norm)
    dense = vptq_codec.dequantize(packed, torch.float32)
    for first in range(0, shape[1], 104):
        x = torch.eye(shape[1], dtype=BF16)[first : first + 8]
        assert torch.equal(multiply(library, x, [vptq_matrix(packed)]), dense[:, first : first + 8].T)
        assert torch.equal(multiply(library, x[5:6], [vptq_matrix(packed)])[0], dense[:, first + 5])


def moved_by_one(values):
    """The same, two bytes behind the begin of a line."""
    room = torch.empty(len(values) + 1, dtype=values.dtype)
    room[1:] = values
    return room[1:]


@pytest.mark.parametrize("shared", [LARGE, 44_000], ids=["one window", "several"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("arrays", ["begin between lines", "begin between lines, no places", "no places", "no norm"])
def test_arrays_by_column_of_vptq(library, arrays, rows, shared):
    """Whole lines of places, scale and bias are read where they begin with one, else value by value."""
    shape = (27, 2328 if rows == 5 else 9224)
    packed = vptq_packed(shape, HALF, 4, (8, 512, 0), places="no places" not in arrays, norm=arrays != "no norm")
    if "between" in arrays:
        names = ("places", "weight_scale", "weight_bias")
        there = {name: getattr(packed, name) for name in names if getattr(packed, name) is not None}
        packed = replace(packed, **{name: moved_by_one(values) for name, values in there.items()})
        assert packed.weight_scale.data_ptr() % 16 == 2
    x = inputs(rows, shape[1], HALF)
    got = multiply(library, x, [vptq_matrix(packed)], shared=shared)
    assert_near(got, x, vptq_codec.dequantize(packed, torch.float32))


@pytest.mark.parametrize("make", ["aqlm", "vptq"])
def test_three_matrices_biases_and_norm(library, make):
    outs, columns = (40, 8, 22), 352
    if make == "aqlm":
        packed = [aqlm_packed((out, columns), BF16, out, (1, 512, 1, 8)) for out in outs]
        matrices, dense = [gather_matrix(each) for each in packed], torch.cat([unrounded(each) for each in packed])
    else:
        packed = [vptq_packed((out, columns), BF16, out, (8, 512, 16)) for out in outs]
        matrices = [vptq_matrix(each) for each in packed]
        dense = torch.cat([vptq_codec.dequantize(each, torch.float32) for each in packed])
    generator = torch.Generator().manual_seed(3)
    norm = gemv.Norm((torch.rand(columns, generator=generator) + 0.5).to(BF16), 1e-5)
    bias, x = torch.randn(sum(outs), generator=generator).to(BF16), inputs(1, columns, BF16)
    got = multiply(library, x, biased(matrices, bias.split(outs)), multiprocessors=3, norm=norm)
    exact = normed(x, norm).double() @ dense.double().T
    assert ((got - exact - bias.double()).abs() <= 0.02 * exact.abs().mean()).all()  # a norm of 1 ulp more


@pytest.mark.parametrize("make", ["aqlm", "vptq"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("shape", [(50, 672), (18, 2336)], ids=str)  # fewer items than warps, and more
def test_gate_and_up(library, make, shape, rows):
    packed = [
        aqlm_packed(shape, HALF, seed, (1, 512, 1, 8))
        if make == "aqlm"
        else vptq_packed(shape, HALF, seed, (16, 64, 0))
        for seed in (1, 2)
    ]
    unpack = unrounded if make == "aqlm" else lambda each: vptq_codec.dequantize(each, torch.float32)
    matrices = [(gather_matrix if make == "aqlm" else vptq_matrix)(each) for each in packed]
    x = inputs(rows, shape[1], HALF)
    got = multiply(library, x, matrices, activation="silu")
    gate, up = (x.double() @ unpack(each).double().T for each in packed)
    torch.testing.assert_close(got.double(), torch.nn.functional.silu(gate) * up, rtol=1e-4, atol=1e-4)
