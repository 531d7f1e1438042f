"""Rows of the kernels of matrices: every operation of `formats.cases` on random weights, at the shapes of a workload.

Products beside cuBLAS with the same weights in 16 bit, and beside the packages of `rivals`; weights for prefill, which
must be those of the definition, bit for bit. Matrices take turns as those of a model do, so that none is in the cache.
Where codewords are gathered bytes are those that pass through L2, a sector of 32 bytes each: that rate is to be
compared with `gather_roof`, not with memory. And `localq bench --bcq`: sizes and times as nuQmm's paper has them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from localq.bench.kernels import products, rivals
from localq.bench.kernels.shapes import PLAIN, RESIDUAL, Product, Workload
from localq.bench.kernels.table import Row
from localq.bench.kernels.timing import SEED, Bench, check, type_name, wrong
from localq.formats import FORMATS, int8
from localq.formats.bcq import kernel as bcq_kernel
from localq.formats.cases import BY_OP, KERNELS, Case, Kernel, Timed
from localq.formats.codebooks import gather_kernel, lookup_kernel, rotation, rotation_kernel
from localq.formats.linear import PackedLinear, SlabLinear
from localq.formats.nf4 import kernel as nf4_kernel
from localq.kernels import gemv
from localq.kernels.dense import DenseOperand
from localq.kernels.operand import Operand, share_tables

HALF = torch.float16
MODULES: dict[str, ModuleType] = {**FORMATS, "int8": int8}
DENSE = Kernel("dense_gemv", "dense", (), (), (), (1, 8), products="dense")  # weights as they are: no format
DENSE_TIMED = (Timed(Case("dense"), fused=True), Timed(Case("dense"), 8), Timed(Case("dense"), 1, torch.bfloat16))
F32_RESULTS = ("int8_gemv",)  # logits
ROW_BY_ROW = "row-major"
ROOF_BYTES = (2**20, 2**21)  # tables that are read at random: a codebook of 65,536 entries of 16 and of 32 bytes
ROOF_LOADS, ROOF_THREADS = 512, 1024  # of a thread; of a multiprocessor
ROTATED = Case("vq2", "s4l16")
ROTATED_ROWS = (1, 8)
SQUARES = "4096x4096,7168x7168,12288x12288"  # of nuQmm's paper
GROUPS = ("g32", "g64", "g128", "g256", "g512", "row")
Measured = Callable[[Bench], Row]
Launch = Callable[..., Tensor]


def cases(work: Workload, family: str) -> list[Measured]:
    """Every row of a family of `formats.cases`."""
    kernels = [kernel for kernel in KERNELS if kernel.family == family]
    found: list[Measured] = list(_roofs()) if family == "gather" else []
    found += [row for kernel in kernels for row in _rows(kernel, kernel.timed, work)]
    return found + (_rotations(work) if family == "vq" else [])


def dense_cases(work: Workload) -> list[Measured]:
    """Rows of plain weights in 16 bit."""
    return _rows(DENSE, DENSE_TIMED, work)


def trade_offs(work: Workload) -> list[Measured]:
    """One row of x in binary codes with every number of planes and every group."""
    kernel = BY_OP["bcq_gemv"]
    schemes = [f"q{planes}{group}" for planes in range(1, bcq_kernel.PLANES + 1) for group in GROUPS]
    timed = [Timed(Case("bcq", scheme), label=kernel.timed[0].label, fused=True) for scheme in schemes]
    return _rows(kernel, timed, work)


def _rows(kernel: Kernel, timed: Sequence[Timed], work: Workload) -> list[Measured]:
    """For every product that has a kernel: some formats take whole tiles and groups alone."""
    found: list[Measured] = []
    for product in getattr(work, kernel.products):
        wanted = [each for each in timed if (each.fused if product.form else each.plain)]
        found += [FormatRow(kernel, each, product) for each in wanted if _is_readable(each.case, product)]
    return found


def _is_readable(case: Case, product: Product) -> bool:
    fits = getattr(MODULES.get(case.format), "fits", None)
    return fits is None or all(fits(out, product.columns, case.scheme) for out in product.outs)


@dataclass(frozen=True)
class FormatRow:
    """One row of the table; calling it measures."""

    kernel: Kernel
    timed: Timed
    product: Product

    @property
    def name(self) -> str:
        """For people."""
        rows = f"x{self.timed.rows}" if self.timed.rows else ""
        parts = (self.kernel.op, self.product.name, self.product.form, self.timed.case.scheme, rows)
        return " ".join([*(each for each in parts if each), type_name(self.timed.dtype)])

    def __call__(self, bench: Bench) -> Row:
        """The operation checked and timed."""
        return product_row(bench, self) if self.timed.rows else weights_row(bench, self)


def product_row(bench: Bench, asked: FormatRow) -> Row:
    """One product: as near to fp64 as it must be, then its time beside others'."""
    kernel, timed, product = asked.kernel, asked.timed, asked.product
    given = products.inputs(bench, product, timed.rows, timed.dtype)
    operands, wide, stored = _operands(bench, asked)
    type = torch.float32 if kernel.op in F32_RESULTS else timed.dtype
    out = torch.empty(timed.rows, product.width, dtype=type, device=bench.device)
    fused = {"norm": given.norm, "residual": given.residual, "activation": given.activation}
    launch: Launch = _gemm if min(kernel.rows) > gemv.ROWS else partial(operands[0].launch, **fused)
    what = _what(products.describe(product), timed, stored)
    halves = [weight.to(timed.dtype) for weight in wide]
    exact = products.exact(given, wide)
    check(kernel.op, what, launch(given.x, operands, out=out), exact, products.naive(given, halves))
    del wide
    copies = [[each.copy() for each in operands] for _ in range(bench.copies(stored))]
    timing = bench.time([partial(launch, given.x, each, out=out) for each in copies])
    others = [products.cublas(bench, given.x, halves)]
    others += [measure(bench, given.x, copies, exact) for measure in rivals.PRODUCTS.get(kernel.op, ())]
    moved = given.nbytes + stored + sum(each.gathered_bytes for each in operands) + out.nbytes
    return Row(kernel.family, kernel.op, what, timed.rows, type_name(timed.dtype), moved, timing, tuple(others))


def _gemm(x: Tensor, operands: Sequence[Any], out: Tensor) -> Tensor:
    """NF4 alone has a product of more rows."""
    return nf4_kernel.nf4_gemm(x, operands[0], out=out)


def weights_row(bench: Bench, asked: FormatRow) -> Row:
    """A whole matrix to f16: bit for bit the definition, then its time."""
    kernel, timed, product = asked.kernel, asked.timed, asked.product
    module, shape = MODULES[timed.case.format], (product.outs[0], product.columns)
    packed = module.sample(shape, SEED, bench.device, timed.case.scheme)
    reference: Tensor = module.dequantize(packed, HALF)
    linear: SlabLinear = module.Linear(packed)
    if timed.label != ROW_BY_ROW and True in kernel.orders:
        linear.put_into_tiles()
    stored = _stored(linear)
    what = _what(product.name, timed, stored)
    if not torch.equal(linear.unpack(0, torch.empty_like(reference)), reference):
        raise wrong(kernel.op, what, "the output differs from the reference implementation")
    moved = stored + reference.nbytes
    # Each copy has a result of its own: one that stays in the cache would not have to be written.
    pairs = [(copy.deepcopy(linear), torch.empty_like(reference)) for _ in range(bench.copies(moved))]
    timing = bench.time([partial(each.unpack, 0, out) for each, out in pairs])
    others = rivals.WEIGHTS.get((kernel.op, timed.label), ())
    found = tuple(rival for measure in others for rival in measure(bench, pairs, reference))
    return Row(kernel.family, kernel.op, what, 0, type_name(HALF), moved, timing, found)


def _operands(bench: Bench, asked: FormatRow) -> tuple[list[Operand], list[Tensor], int]:
    """The operands of a launch, their weights f32 as it takes them, and the bytes that it reads of them."""
    timed, product = asked.timed, asked.product
    operands, wide = [], []
    for index, out in enumerate(product.outs):
        found, weight = _operand(bench, timed, (out, product.columns), SEED + index)
        operands.append(found)
        wide.append(weight)
    shared = share_tables(operands)
    return shared, wide, sum(each.nbytes for each in shared)


def _operand(bench: Bench, timed: Timed, shape: tuple[int, int], seed: int) -> tuple[Operand, Tensor]:
    if timed.case.format == DENSE.family:
        plain = (bench.normal(*shape, seed=seed) * shape[1] ** -0.5).to(timed.dtype)
        return DenseOperand(plain), plain.float()
    module = MODULES[timed.case.format]
    packed = module.sample(shape, seed, bench.device, timed.case.scheme)
    weight: Tensor = getattr(module, "multiplied", partial(module.dequantize, dtype=torch.float32))(packed)
    linear: PackedLinear = module.Linear(packed)
    if isinstance(linear, SlabLinear):
        linear.put_into_tiles()
    operand = linear.operand()
    if operand is None:
        raise ValueError(f"{timed.case.format} {timed.case.scheme}: no kernel reads {list(shape)}")
    return operand, weight


def _stored(linear: SlabLinear) -> int:
    """Bytes that dequantizing reads."""
    operand = linear.operand()
    return sum(each.nbytes for each in linear.buffers()) if operand is None else operand.nbytes


def _what(name: str, timed: Timed, stored: int) -> str:
    label = timed.label.format(scheme=timed.case.scheme, megabytes=stored / 1e6)
    return f"{name}, {label}" if label else name


# ---- what one format has


def _roofs() -> list[Measured]:
    steps = zip(ROOF_BYTES, gather_kernel.ROOF_STEPS, strict=True)
    return [partial(roof_row, size=size, step=step) for size, step in steps]


def roof_row(bench: Bench, size: int, step: int) -> Row:
    """Time reads of random sectors from L2; at steps of 16 bytes, each requests half a sector."""
    table = torch.full((size,), 0x5A, dtype=torch.uint8, device=bench.device)
    on_gpu = bench.device.type == "cuda"
    count = torch.cuda.get_device_properties(bench.device).multi_processor_count if on_gpu else 1
    sums = torch.ones(ROOF_THREADS * count, dtype=torch.int32, device=bench.device)
    run = partial(gather_kernel.gather_roof, table, step, ROOF_LOADS, sums)
    what = f"{size // 2**20} MiB by {step} bytes (L2)"
    run()
    if bool(sums.any()):  # equal words, an even number of them
        raise wrong("gather_roof", what, "the output does not match the stored data")
    moved = gather_kernel.gather_roof_bytes(ROOF_LOADS, sums.numel())
    return Row("gather", "gather_roof", what, 0, "uint8", moved, bench.time([run, run]))


def _rotations(work: Workload) -> list[Measured]:
    found: list[Measured] = [
        partial(rotated_row, product=product) for product in work.nf4 if product.form in (PLAIN, RESIDUAL)
    ]
    widths = dict.fromkeys(product.columns for product in work.nf4)
    return found + [partial(hadamard_row, columns=columns, rows=rows) for columns in widths for rows in ROTATED_ROWS]


def rotated_row(bench: Bench, product: Product) -> Row:
    """One `vq_gemv` of one row that it rotates itself, checked and timed, beside two launches that do the same."""
    given = products.inputs(bench, product, 1, HALF)
    signs = rotation.packed_signs(bench.normal(product.columns, seed=SEED + 1) < 0)
    plain, weight = _operand(bench, Timed(ROTATED), (product.width, product.columns), SEED)
    assert isinstance(plain, lookup_kernel.VqOperand)
    turned = products.Inputs(rotation.rotate(given.x, signs), given.norm, given.residual, given.activation)
    out, between = torch.empty(1, product.width, dtype=HALF, device=bench.device), torch.empty_like(given.x)

    def multiply(operand: Any) -> Tensor:
        return lookup_kernel.vq_gemv(given.x, [operand], residual=given.residual, out=out)

    def both(operand: Any) -> Tensor:
        rotation_kernel.hadamard(given.x, signs, between)
        return lookup_kernel.vq_gemv(between, [operand], residual=given.residual, out=out)

    what = f"{products.describe(product)}, vq2 {ROTATED.scheme}, rotated"
    exact, naive = products.exact(turned, [weight]), products.naive(turned, [weight.half()])
    check("vq_gemv", what, multiply(replace(plain, signs=signs)), exact, naive)
    stored = plain.nbytes + signs.nbytes
    copies = [plain.copy() for _ in range(bench.copies(stored))]
    timing = bench.time([partial(multiply, replace(each, signs=signs)) for each in copies])
    others = (bench.rival("pre-rotated", [partial(both, each) for each in copies]),)
    return Row("vq", "vq_gemv", what, 1, type_name(HALF), given.nbytes + stored + out.nbytes, timing, others)


def hadamard_row(bench: Bench, columns: int, rows: int) -> Row:
    """One `hadamard`, checked bit by bit and timed."""
    x = bench.normal(rows, columns, dtype=HALF)
    signs = rotation.packed_signs(bench.normal(columns, seed=SEED + 1) < 0)
    out = torch.empty_like(x)
    rotation_kernel.hadamard(x, signs, out)
    if not torch.equal(out, rotation.rotate(x, signs)):
        raise wrong("hadamard", str(columns), "the output differs from the reference implementation")
    run = partial(rotation_kernel.hadamard, x, signs, out)
    moved = rotation_kernel.hadamard_bytes(rows, columns)
    return Row("vq", "hadamard", f"{columns}", rows, type_name(x.dtype), moved, bench.time([run, run]))
