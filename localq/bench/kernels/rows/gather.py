"""Rows of the formats whose codewords are gathered: products beside their packages, weights dequantized, and the roof.

Bytes of the products and of `gather_roof` are those that pass through L2, a sector of 32 bytes for each codeword, and
so is their rate; what the rate of a product is to be compared with is that of `gather_roof`, not of memory. Matrices
take turns whole, codebooks too, as the matrices of a model do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localq.bench.kernels import products
from localq.bench.kernels.shapes import Product, Workload
from localq.bench.kernels.table import NOT_INSTALLED, Rival, Row
from localq.bench.kernels.timing import SEED, Bench, check, guarded, installed, type_name, wrong
from localq.formats.codebooks import aqlm, gather_kernel, unpack_kernel
from localq.formats.codebooks.gather_kernel import GatherOperand
from localq.formats.codebooks.unpack_kernel import CodeSet
from localq.formats.vptq import codec as vptq_codec
from localq.formats.vptq import kernel as vptq_kernel
from localq.formats.vptq.kernel import VptqOperand

HALF = torch.float16
ENTRIES = 65_536
VPTQ_SCHEMES = ((8, ENTRIES, 0), (8, ENTRIES, 256), (16, ENTRIES, 0), (16, ENTRIES, ENTRIES))  # length, main, residual
ROWS = (1, 8)
ADDITIVE = (1, ENTRIES, 8)  # books, entries, columns of a codeword; the small codebooks' rows are of `vq_rows`
ROOF_BYTES = (2**20, 2**21)  # tables that are read at random: a codebook of 65,536 entries of 16 and of 32 bytes
ROOF_LOADS, ROOF_THREADS = 512, 1024  # of a thread; of a multiprocessor
AQLM, VPTQ = "aqlm", "vptq"
# How far a package may be from fp64, as a share of the result: it rounds to 16 bits at most 13 times on the way of a
# weight (vptq: two codewords' sum, x times scale and bias, 8 sums of a thread, a block's sum, the result).
PACKAGE_ERROR = 13 * 2.0**-11


def cases(work: Workload) -> list[Callable[[Bench], Row]]:
    """What is to be measured: the roof, then each matrix in each layout."""
    found: list[Callable[[Bench], Row]] = [
        partial(roof_row, size=size, step=step) for size, step in zip(ROOF_BYTES, gather_kernel.ROOF_STEPS, strict=True)
    ]
    for product in work.batches:
        found += [
            partial(aqlm_row, product=product, group=group, rows=n) for group in gather_kernel.GROUPS for n in ROWS
        ]
        found += [partial(vptq_row, product=product, scheme=scheme, rows=n) for scheme in VPTQ_SCHEMES for n in ROWS]
    for product in work.dequantized:
        found += [partial(additive_row, product=product)]
        found += [partial(unpacked_row, product=product, scheme=scheme) for scheme in VPTQ_SCHEMES]
    return found


def roof_row(bench: Bench, size: int, step: int) -> Row:
    """How fast L2 gives random sectors: half of each is asked for at steps of 16 bytes."""
    table = torch.full((size,), 0x5A, dtype=torch.uint8, device=bench.device)
    threads = ROOF_THREADS * _multiprocessors(bench.device)
    sums = torch.ones(threads, dtype=torch.int32, device=bench.device)
    run = partial(gather_kernel.gather_roof, table, step, ROOF_LOADS, sums)
    what = f"{size // 2**20} MiB by {step} bytes (L2)"
    run()
    if bool(sums.any()):  # equal words, an even number of them
        raise wrong("gather_roof", what, "did not read what is there")
    return Row(
        "gather",
        "gather_roof",
        what,
        0,
        "uint8",
        gather_kernel.gather_roof_bytes(ROOF_LOADS, threads),
        bench.time([run, run]),
    )


def aqlm_row(bench: Bench, product: Product, group: int, rows: int) -> Row:
    """One `gather_gemv` of a single matrix in 1x16, checked and timed."""
    packed = _aqlm(bench, product, (1, ENTRIES, group))
    matrix = GatherOperand(packed.codes, packed.codebooks, packed.scales)
    weight = aqlm.dequantize(replace(packed, scales=torch.ones_like(packed.scales)), torch.float32)
    weight *= packed.scales.view(-1, 1).float()
    moved = gather_kernel.gather_gemv_bytes(rows, matrix) + gather_kernel.gather_gemv_sectors(matrix)
    run = partial(_run, gather_kernel.gather_gemv)
    rival = partial(_aqlm_package, bench)
    return _row(bench, "gather_gemv", f"{product.name}, 1x16g{group} (L2)", product, rows, matrix, weight, run, rival,
                moved)  # fmt: skip


def vptq_row(bench: Bench, product: Product, scheme: tuple[int, int, int], rows: int) -> Row:
    """One `vptq_gemv` of a single matrix, checked and timed."""
    packed = _vptq(bench, product, scheme)
    weight = vptq_codec.dequantize(packed, torch.float32)
    matrix = VptqOperand.of(packed)
    moved = vptq_kernel.vptq_gemv_bytes(rows, matrix) + vptq_kernel.vptq_gemv_sectors(matrix)
    run = partial(_run, vptq_kernel.vptq_gemv)
    rival = partial(_vptq_package, bench)
    return _row(bench, "vptq_gemv", f"{product.name}, {_named(scheme)} (L2)", product, rows, matrix, weight, run, rival,
                moved)  # fmt: skip


def additive_row(bench: Bench, product: Product) -> Row:
    """One `additive_dequantize` of a whole matrix in AQLM to f16, checked bit by bit and timed."""
    packed = _aqlm(bench, product, ADDITIVE)
    reference, sets = aqlm.dequantize(packed, HALF), [CodeSet(packed.codes, packed.codebooks[:, :, 0], ADDITIVE[2])]
    what = f"{product.name}, aqlm 1x16g8"
    moved = unpack_kernel.additive_dequantize_bytes(sets, product.outs[0], product.columns, HALF)
    out = torch.empty_like(reference)
    unpack_kernel.additive_dequantize(sets, packed.scales, 0, out, rounded=True)
    if not torch.equal(out, reference):
        raise wrong("additive_dequantize", what, "differs from the reference")
    launches = []
    for _ in range(bench.copies(moved)):
        copies = [replace(each, codes=each.codes.clone(), codebooks=each.codebooks.clone()) for each in sets]
        to = torch.empty_like(out)
        launches.append(partial(unpack_kernel.additive_dequantize, copies, packed.scales, 0, to, rounded=True))
    return Row("gather", "additive_dequantize", what, 0, type_name(HALF), moved, bench.time(launches))


def unpacked_row(bench: Bench, product: Product, scheme: tuple[int, int, int]) -> Row:
    """One `vptq_dequantize` of a whole matrix to f16, checked bit by bit and timed."""
    packed = _vptq(bench, product, scheme)
    reference = vptq_codec.dequantize(packed, HALF)
    matrix = VptqOperand.of(packed)
    what, moved = f"{product.name}, {_named(scheme)}", vptq_kernel.vptq_dequantize_bytes(matrix, HALF)
    if not torch.equal(vptq_kernel.vptq_dequantize(matrix, 0, torch.empty_like(reference)), reference):
        raise wrong("vptq_dequantize", what, "differs from the reference")
    outs = [torch.empty_like(reference) for _ in range(bench.copies(moved))]
    launches = [partial(vptq_kernel.vptq_dequantize, _cloned(matrix), 0, out) for out in outs]
    return Row("gather", "vptq_dequantize", what, 0, type_name(HALF), moved, bench.time(launches))


# ---- parts of rows


def _run(product: Callable[..., Tensor], x: Tensor, matrix: Any, out: Tensor) -> Tensor:
    return product(x, [matrix], out=out)


def _row(
    bench: Bench,
    op: str,
    what: str,
    product: Product,
    rows: int,
    matrix: Any,
    weight: Tensor,
    run: Callable[[Tensor, Any, Tensor], Tensor],
    rival: Callable[[Tensor, Sequence[Any], Tensor], Rival],
    moved: int,
) -> Row:
    """A product with one matrix, whose weights are `weight` f32 [out, in]: checked, timed, beside its package."""
    given = products.inputs(bench, product, rows, HALF)
    out = torch.empty(rows, product.width, dtype=HALF, device=bench.device)
    dense = weight.to(HALF)
    exact = products.exact(given, [weight])
    check(op, what, run(given.x, matrix, out), exact, products.naive(given, [dense]))
    del weight
    copies = [_cloned(matrix) for _ in range(bench.copies(sum(each.nbytes for each in matrix.tensors())))]
    timing = bench.time([partial(run, given.x, each, out) for each in copies])
    rivals = (products.cublas(bench, given.x, [dense]), rival(given.x, copies, exact))
    return Row("gather", op, what, rows, type_name(HALF), moved, timing, rivals)


def _cloned(matrix: Any) -> Any:
    """The same with tensors of its own."""
    held = {each.name: getattr(matrix, each.name) for each in fields(matrix)}
    return replace(matrix, **{name: each.clone() for name, each in held.items() if isinstance(each, Tensor)})


def _package(bench: Bench, name: str, launches: Sequence[Callable[[], Tensor]], exact: Tensor) -> Rival:
    """A package's time, unless its result is not the product."""
    off = ((launches[0]().double().view_as(exact) - exact).norm() / exact.norm()).item()
    if not off <= PACKAGE_ERROR:
        return Rival(name, None, f"not measured, its result is {off:.2%} off, allowed are {PACKAGE_ERROR:.2%}")
    return bench.rival(name, launches)


def _aqlm_package(bench: Bench, x: Tensor, matrices: Sequence[GatherOperand], exact: Tensor) -> Rival:
    if not installed(AQLM):
        return Rival(AQLM, None, NOT_INSTALLED)

    def made() -> Rival:
        from aqlm.inference_kernels import get_forward_pass_kernel  # type: ignore[import-untyped]  # need not be there

        kernel = get_forward_pass_kernel(matrices[0].codebooks, False)
        return _package(bench, AQLM, [partial(kernel, x, *each.tensors(), None) for each in matrices], exact)

    return guarded(AQLM, made)


def _vptq_package(bench: Bench, x: Tensor, matrices: Sequence[VptqOperand], exact: Tensor) -> Rival:
    if not installed(VPTQ):
        return Rival(VPTQ, None, NOT_INSTALLED)

    def made() -> Rival:
        from vptq import libvptq  # type: ignore[import-untyped]  # need not be there; its products take 1 and 2 rows

        calls = [
            partial(
                libvptq.quant_gemv, x.unsqueeze(0), each.indices, each.centroids, None, each.res_centroids, None, None,
                _order(each.places), each.weight_scale, each.weight_bias, None, each.in_features, each.out_features,
            )
            for each in matrices
        ]  # fmt: skip
        return _package(bench, VPTQ, calls, exact)

    return guarded(VPTQ, made) if x.shape[0] < 3 else Rival(VPTQ, None, "its products take 1 and 2 rows")


def _order(places: Tensor | None) -> Tensor | None:
    """What the package reads: the column of each place, int16 (bits of a u16)."""
    if places is None:
        return None
    order = torch.argsort(places.int() & 0xFFFF)
    return (order - (order >= 2**15) * 2**16).to(torch.int16)


def _named(scheme: tuple[int, int, int]) -> str:
    return "v{}-k{}-{}".format(*scheme)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def _integers(bench: Bench, high: int, *shape: int) -> Tensor:
    generator = torch.Generator(bench.device).manual_seed(SEED)
    return torch.randint(high, shape, device=bench.device, generator=generator)


def _aqlm(bench: Bench, product: Product, layout: tuple[int, int, int]) -> aqlm.Packed:
    (books, entries, group), out = layout, product.outs[0]
    codes = _integers(bench, entries, out, product.columns // group, books)
    codes = codes.to(torch.int16 if entries > 256 else torch.int8)
    scales = 1 + 0.1 * bench.normal(out, 1, 1, 1)
    return aqlm.Packed(codes, bench.normal(books, entries, 1, group, dtype=HALF) / 64, scales.to(HALF))


def _vptq(bench: Bench, product: Product, scheme: tuple[int, int, int]) -> vptq_codec.Packed:
    (length, count, residuals), out, columns = scheme, product.outs[0], product.columns
    bits = vptq_codec.index_bits(count) + (vptq_codec.index_bits(residuals) if residuals else 0)
    words = _integers(bench, 2**32, 1, -(-out // length), vptq_codec.words_of(columns, bits)) - 2**31
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(SEED)).to(bench.device)
    return vptq_codec.Packed(
        words.to(torch.int32), bench.normal(1, count, length, dtype=HALF) / 64, None,
        bench.normal(1, residuals, length, dtype=HALF, seed=SEED + 1) / 256 if residuals else None, None, None,
        (order - (order >= 2**15) * 2**16).to(torch.int16), 1 + 0.1 * bench.normal(columns, dtype=HALF, seed=SEED + 2),
        bench.normal(columns, dtype=HALF, seed=SEED + 3) / 256, (out, columns),
    )  # fmt: skip
