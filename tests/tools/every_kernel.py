"""Every kernel once on every edge shape, for `compute-sanitizer`, which takes 10 to 100 times as long as the tests.

What the results are is the tests' business; what the self-test checks is checked here too. Prints what it runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain, product

import torch

from localq import kv_bits
from localq.engine.cache import KVCache
from localq.engine.selftest import replies as selftest_replies
from localq.engine.selftest.checks import CHECKS
from localq.formats import vptq
from localq.formats.bcq import kernel as bcq_kernel
from localq.formats.codebooks import (
    adjoint_kernel,
    aqlm,
    dequantize_kernel,
    gather_kernel,
    lookup_kernel,
    rotation_kernel,
)
from localq.formats.experts import kernel as expert_kernel
from localq.formats.int4 import kernel as int4_kernel
from localq.formats.mxfp4 import kernel as mxfp4_kernel
from localq.formats.nf4 import kernel as nf4_kernel
from localq.formats.squeezellm import kernel as squeezellm_kernel
from localq.kernels import logit_adjust, sampling
from localq.kernels.gemv import Norm
from localq.kv_bits import KV_BITS
from localq.sampling import Sampling
from tests.support.kernels import (
    adjoint_operands,
    attention_operands,
    bcq_operands,
    expert_operands,
    gather_operands,
    int4_operands,
    nf4_operands,
    search_operands,
    vq_operands,
    vq_stacks,
)
from tests.support.kernels.row_operands import DENSE, INT8, ROWLUT, ROWLUT_TILES

HALF = torch.float16
# One result and one block; parts of tiles and chunks; more chunks than warps; several tiles for every block of threads.
NF4_SHAPES = ((1, 64), (15, 320), (577, 576), (33, 1088), (77, 8256), (5003, 192))
HEADS = ((5, 5, 64), (6, 3, 72), (32, 8, 128), (27, 3, 128), (32, 2, 128), (7, 1, 256), (9, 1, 256), (4, 2, 8))
LIVE = (1, 2, 64, 65, 513, 2049)  # around a piece; in one cluster; in several
Case = tuple[str, Callable[[], object]]


def nf4_cases() -> Iterator[Case]:
    """Both orders, scales of both kinds, 1 to 8 rows, 9 and more, slabs."""
    for shape, nested, tiled in product(NF4_SHAPES, (True, False), (True, False)):
        matrix = nf4_operands.in_order(nf4_operands.operands(shape, nested, "cuda").matrix, tiled)
        name = f"{shape}, nested {nested}, tiled {tiled}"
        for rows in (1, 2, 7, 8):
            x = nf4_operands.inputs(rows, shape[1], HALF, "cuda")
            yield f"nf4_gemv {name}, {rows} rows", partial(nf4_kernel.nf4_gemv, x, [matrix])
        for rows in (9, 33, 70):
            x = nf4_operands.inputs(rows, shape[1], torch.bfloat16, "cuda")
            yield f"nf4_gemm {name}, {rows} rows", partial(nf4_kernel.nf4_gemm, x, matrix)
        yield f"nf4_dequantize {name}", partial(nf4_kernel.nf4_dequantize, matrix, HALF)
        first = 16 * (shape[0] // 32)
        slab = partial(nf4_kernel.nf4_dequantize, matrix, HALF, None, (first, shape[0] - first))
        yield f"nf4_dequantize {name}, the second half", slab


def row_cases() -> Iterator[Case]:
    """16 and 8 bit, and what is gathered: all shapes, one and eight rows, and a gated pair with its norm."""
    aqlm_forms, vptq_forms = gather_operands.AQLM.items(), gather_operands.VPTQ.items()
    forms = (
        ("dense_gemv", DENSE),
        ("int8_gemv", INT8),
        ("rowlut_gemv", ROWLUT),
        ("rowlut_gemv in tiles", ROWLUT_TILES),
        *((f"gather_gemv {name}", form) for name, form in aqlm_forms),
        *((f"vptq_gemv {name}", form) for name, form in vptq_forms),
    )
    for name, form in forms:
        for shape in form.shapes():
            operand = form.make(shape, HALF, 0, "cuda")
            for rows in (1, 8):
                x = nf4_operands.inputs(rows, shape[1], HALF, "cuda")
                yield f"{name} {shape}, {rows} rows", partial(form.gemv, x, [operand.matrix])
        shape = form.shape(333, 1024)
        pair = [form.make(shape, HALF, seed, "cuda").matrix for seed in (1, 2)]
        norm = Norm(torch.ones(shape[1], dtype=HALF, device="cuda"), 1e-5)
        x = nf4_operands.inputs(1, shape[1], HALF, "cuda")
        yield f"{name} gate and up", partial(form.gemv, x, pair, norm=norm, activation="silu")


def rowlut_cases() -> Iterator[Case]:
    """Unpacking: part of a chunk of columns, several; whole and from the second row on."""
    rows, tiles = ((1, 8), (9, 1048), (70, 4096)), ((8, 128), (16, 1152), (72, 4096))
    for form, shape in chain(((ROWLUT, each) for each in rows), ((ROWLUT_TILES, each) for each in tiles)):
        matrix = form.make(shape, HALF, 0, "cuda").matrix
        for first in {0, shape[0] // 2}:
            out = torch.empty(shape[0] - first, shape[1], dtype=HALF, device="cuda")
            yield (
                f"rowlut_dequantize {shape}, tiled {matrix.tiled}, from {first}",
                partial(squeezellm_kernel.rowlut_dequantize, matrix, first, out),
            )


def int4_cases() -> Iterator[Case]:
    """Groups of every kind, an order of columns, x in shared memory and outside of it; slabs; a gated pair."""
    for shape, group in product(((16, 64), (48, 320), (576, 576), (48, 1088), (80, 8256), (5008, 192)), (32, 64, 128)):
        orders = group == 32 and shape[1] < 4096  # which every card gathers for 8 rows of x
        operand = int4_operands.make(shape, group, 1, "cuda", act_order=orders)
        name = f"{shape} in groups of {group}"
        for rows in (1, 2, 7, 8):
            x = nf4_operands.inputs(rows, shape[1], HALF if rows != 2 else torch.bfloat16, "cuda")
            yield f"int4_gemv {name}, {rows} rows", partial(int4_kernel.int4_gemv, x, [operand.matrix])
        for first, dtype in product((0, 16 * (shape[0] // 32)), (HALF, torch.float32)):
            out = torch.empty(shape[0] - first, shape[1], dtype=dtype, device="cuda")
            rows_of = partial(int4_kernel.int4_dequantize, operand.matrix, first, out)
            yield f"int4_dequantize {name} from {first} to {dtype}", rows_of
    wide = int4_operands.make((48, 29568), 64, 1, "cuda")
    x = nf4_operands.inputs(8, 29568, HALF, "cuda")
    yield "int4_gemv, x outside of shared memory", partial(int4_kernel.int4_gemv, x, [wide.matrix])
    pair = [int4_operands.make((336, 1024), 128, seed, "cuda").matrix for seed in (1, 2)]
    norm = Norm(torch.ones(1024, dtype=HALF, device="cuda"), 1e-5)
    x = nf4_operands.inputs(1, 1024, HALF, "cuda")
    yield "int4_gemv gate and up", partial(int4_kernel.int4_gemv, x, pair, norm=norm, activation="silu")


def unpack_cases() -> Iterator[Case]:
    """Codebooks in shared memory and out of it, groups of rows, outliers; whole and in slabs; and the roof."""
    for layout, shape in (((1, 65536, 1, 8), (83, 1048)), ((8, 256, 1, 32), (33, 96)), ((3, 16, 2, 6), (90, 102))):
        linear = aqlm.Linear(gather_operands.aqlm_packed(shape, HALF, 1, layout).to("cuda"))
        for first in (0, 16):
            rows = partial(linear.dequantized_rows, first, shape[0] - first, HALF, None)
            yield f"additive_dequantize {layout} from {first}", rows
    for scheme, outliers in (((8, 65536, 256), (0, 0, 0)), ((12, 300, 7), (5, 4, 19)), ((16, 4096, 0), (8, 12, 64))):
        for packs in (True, False) if scheme[1] != 300 else (False,):
            packed = gather_operands.vptq_packed((83, 341), HALF, 1, scheme, outliers=outliers, packed=packs)
            rows = partial(vptq.Linear(packed.to("cuda")).dequantized_rows, 0, 83, HALF, None)
            yield f"vptq_dequantize {scheme}, outliers {outliers}, packed {packs}", rows
    table, sums = (
        torch.zeros(2**20, dtype=torch.uint8, device="cuda"),
        torch.zeros(512, dtype=torch.int32, device="cuda"),
    )
    for step in gather_kernel.ROOF_STEPS:
        yield f"gather_roof by {step}", partial(gather_kernel.gather_roof, table, step, 16, sums)


def search_cases() -> Iterator[Case]:
    """Every step, one warp and many, several books at a position, beams that fill no warp."""
    for shapes, beam in product(([(4, 16)], [(2, 10)], [(8, 16), (4, 12)], [(8, 8), (8, 8)], [(16, 32)]), (1, 13, 64)):
        operands = search_operands.block(5, 48, shapes, beam).to("cuda")
        yield f"vq_search {shapes}, beam {beam}", partial(search_operands.search, operands)
    yield "vq_search, beam 200", partial(search_operands.search, search_operands.block(3, 16, [(4, 8)], 200).to("cuda"))
    for shape in ((577, 576, 4, 16), (33, 1088, 8, 8), (7, 320, 16, 32), (1, 37, 1, 1), (5, 8, 4, 16)):
        matrix, codes, *book = adjoint_operands.operands(*shape)
        yield f"vq_adjoint {shape}", partial(adjoint_kernel.vq_adjoint, matrix.cuda(), codes.cuda(), *book)


def vq_cases() -> Iterator[Case]:
    """Every scheme on edge shapes with each kernel, a gated pair with its norm; rotations of every kind."""
    for (name, books), shape in product(vq_operands.SCHEMES.items(), ((1, 16), (15, 320), (577, 576), (5003, 2128))):
        operand = vq_operands.make(shape, books, 1, "cuda", together=name == "s8l8+s8l8")
        for rows in (1, 2, 3, 8):
            x = nf4_operands.inputs(rows, shape[1], HALF, "cuda")
            yield f"vq_gemv {name} {shape}, {rows} rows", partial(lookup_kernel.vq_gemv, x, [operand.matrix])
        first, books = 16 * (shape[0] // 32), [each.cuda() for each in operand.codebooks]
        for begin, dtype in product((0, first), (HALF, torch.float32)):
            out = torch.empty(shape[0] - begin, shape[1], dtype=dtype, device="cuda")
            rows_of = partial(dequantize_kernel.vq_dequantize, operand.matrix, books, begin, out, rounded=False)
            yield f"vq_dequantize {name} {shape} from {begin} to {dtype}", rows_of
    pair = [vq_operands.make((333, 1024), [(4, 16)], seed, "cuda").matrix for seed in (1, 2)]
    norm = Norm(torch.ones(1024, dtype=HALF, device="cuda"), 1e-5)
    x = nf4_operands.inputs(1, 1024, HALF, "cuda")
    yield "vq_gemv gate and up", partial(lookup_kernel.vq_gemv, x, pair, norm=norm, activation="silu")
    for columns in (16, 48, 576, 768, 8192):
        signs = torch.zeros(columns // 8, dtype=torch.uint8, device="cuda")
        x = nf4_operands.inputs(3, columns, HALF, "cuda")
        yield f"hadamard {columns}", partial(rotation_kernel.hadamard, x, signs)
    for columns in (48, 576, 1536, 8192, 28_672):
        signs = torch.zeros(columns // 8, dtype=torch.uint8, device="cuda")
        x = nf4_operands.inputs(1, columns, HALF, "cuda")
        operand = vq_operands.make((577, columns), [(4, 16)], 1, "cuda")
        yield f"vq_gemv of {columns} rotated", partial(lookup_kernel.vq_gemv, x, [replace(operand.matrix, signs=signs)])


def bcq_cases() -> Iterator[Case]:
    """Groups of every kind on edge shapes with each kernel, weights whole and in part, a gated pair with its norm."""
    kinds = ((1, 0, False), (2, 32, True), (3, 128, False), (5, 64, True), (4, 512, False))
    for kind, shape in product(kinds, ((1, 8), (15, 328), (577, 576), (5003, 2136))):
        operand = bcq_operands.make(shape, *kind, seed=1, device="cuda")
        for rows in (1, 2, 3, 8):
            x = nf4_operands.inputs(rows, shape[1], HALF, "cuda")
            yield f"bcq_gemv {kind} {shape}, {rows} rows", partial(bcq_kernel.bcq_gemv, x, [operand.matrix])
        for begin in (0, 16 * (shape[0] // 32)):
            out = torch.empty(shape[0] - begin, shape[1], dtype=HALF, device="cuda")
            yield (
                f"bcq_dequantize {kind} {shape} from {begin}",
                partial(bcq_kernel.bcq_dequantize, operand.matrix, begin, out),
            )
    pair = [bcq_operands.make((333, 1152), 3, 128, seed=seed, device="cuda").matrix for seed in (1, 2)]
    norm = Norm(torch.ones(1152, dtype=HALF, device="cuda"), 1e-5)
    x = nf4_operands.inputs(1, 1152, HALF, "cuda")
    yield "bcq_gemv gate and up", partial(bcq_kernel.bcq_gemv, x, pair, norm=norm, activation="silu")


def mixture_cases() -> Iterator[Case]:
    """Every format with parts of units, steps and items, each gate; down with what it adds to; every kind of MXFP4."""
    shapes = ((5, 3, 20, 320), (3, 2, 9, 64), (2, 1, 8, 3648), (40, 16, 72, 192), (9, 8, 768, 2048))
    for (name, make), (count, active, width, columns) in product(expert_operands.FORMATS.items(), shapes):
        chosen, weights = expert_operands.chosen_of(count, active, 1, "cuda")
        x, out = (
            nf4_operands.inputs(active, columns, HALF, "cuda"),
            torch.empty(active, width, dtype=HALF, device="cuda"),
        )
        stack, what = (
            make((count, 2 * width, columns), HALF, 1, "cuda").stack,
            f"{name} {(count, active, width, columns)}",
        )
        norm = Norm(torch.ones(columns, dtype=HALF, device="cuda"), 1e-5)
        for gate, interleaved in (("silu", False), ("clamped", True)):
            given = {"norm": norm, "gate": gate, "interleaved": interleaved, "out": out}
            yield (
                f"experts_gate_up {what}, {gate}",
                partial(expert_kernel.experts_gate_up, x[:1], stack, None, chosen, **given),
            )
        given = {"residual": None, "out": torch.empty(1, 2 * width, dtype=HALF, device="cuda")}
        yield f"experts_down {what}", partial(expert_kernel.experts_down, x, stack, None, chosen, weights, **given)
    for shape, rows in product(((1, 64), (15, 320), (577, 576), (5003, 192)), (1, 8)):
        matrix, _ = expert_operands.mxfp4_matrix(*shape, 1, "cuda")
        x = nf4_operands.inputs(rows, shape[1], torch.bfloat16, "cuda")
        yield f"mxfp4_gemv {shape}, {rows} rows", partial(mxfp4_kernel.mxfp4_gemv, x, [matrix])
        yield f"mxfp4_dequantize {shape}", partial(mxfp4_kernel.mxfp4_dequantize, matrix, HALF)


def attention_cases() -> Iterator[Case]:
    """Every width of heads and cache around every border of the live length; windows; the cache's own kernels."""
    for (heads, kv_heads, width), bits in product(HEADS, KV_BITS):
        for live, window, sinks in ((64, 0, None), (513, 0, None), (513, 130, None), (513, 130, 1.0)):
            case = attention_operands.Case(
                heads, kv_heads, width, live - 1, live + 3, HALF, bits, window=window, sinks=sinks
            )
            yield f"attention_decode {case}", attention_operands.Operands(case).run
    for live, bits in product(LIVE, KV_BITS):
        case = attention_operands.Case(12, 4, 128, live - 1, live, HALF, bits, rotary=128, norm="llama", softcap=9.0)
        yield f"attention_decode {case}", attention_operands.Operands(case).run
    for bits in KV_BITS[1:]:
        cache = KVCache([(3, 72)], 50, HALF, "cuda", bits)
        k, v = torch.randn(2, 41, 3, 72, device="cuda").to(HALF)
        positions = torch.arange(41, device="cuda")
        yield f"kv_write, kv_read, {kv_bits.text(bits)}", partial(cache.update, 0, k, v, positions, 41)


def sampling_cases() -> Iterator[Case]:
    """Vocabularies around a word of the mask, histories around a block; all that acts on a choice."""
    places = [torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2)]
    for vocab, length in product((31, 32, 1000, 49152), (21, 257, 4097)):
        state = selftest_replies.states_of(vocab, length, torch.device("cuda"))[1]
        logits = torch.randn(vocab, device="cuda")
        yield f"dry_match {vocab}, {length} tokens", partial(logit_adjust.dry_match, state, places[0])
        yield f"adjust {vocab}", partial(logit_adjust.adjust, logits, state, softcap=30.0)
        draw = Sampling(temperature=1.0, top_k=500, top_p=0.95, xtc_probability=1.0, xtc_threshold=0.001)
        state.reset(draw, torch.tensor([0]), 1)
        choose = partial(sampling.sample, logits, state, greedy=False, chosen=places[0], token=places[1])
        yield f"sample {vocab}, XTC", choose


def main(words: list[str]) -> None:
    """Runs the cases whose name holds one of `words`, all without any. -WORD leaves out those that hold it:
    "-self-test" saves a sanitizer the references, which are torch's.

    Operands are made on the way from case to case, so lists of other kernels than those that are named are not begun.
    """
    wanted, unwanted = [word for word in words if word[0] != "-"], [word[1:] for word in words if word[0] == "-"]
    checks = ((f"self-test {name}", partial(check, torch.device("cuda", 0))) for name, check in CHECKS.items())
    count = 0
    lists = (
        (" ".join(CHECKS), checks),
        ("nf4_gemv nf4_gemm nf4_dequantize", nf4_cases()),
        ("dense_gemv int8_gemv rowlut_gemv gather_gemv vptq_gemv", row_cases()),
        ("rowlut_dequantize", rowlut_cases()),
        ("int4_gemv int4_dequantize", int4_cases()),
        ("additive_dequantize vptq_dequantize gather_roof", unpack_cases()),
        ("vq_gemv vq_dequantize hadamard rotated", vq_cases()),
        ("vq_experts_gate_up vq_experts_down rotated", vq_stacks.cases()),
        ("bcq_gemv bcq_dequantize", bcq_cases()),
        ("vq_search vq_adjoint", search_cases()),
        ("experts_gate_up experts_down mxfp4_gemv mxfp4_dequantize", mixture_cases()),
        ("attention_decode kv_write kv_read", attention_cases()),
        ("dry_match adjust sample", sampling_cases()),
    )
    known = " ".join(kernels for kernels, _ in lists)
    anywhere = not wanted or any(word not in known for word in wanted)
    begun = (cases for kernels, cases in lists if anywhere or any(word in kernels for word in wanted))
    for name, run in chain.from_iterable(begun):
        if (wanted and not any(word in name for word in wanted)) or any(word in name for word in unwanted):
            continue
        print(name, flush=True)  # before: the last line tells what did not end
        run()
        torch.cuda.synchronize()
        count += 1
    print(f"{count} cases ran")


if __name__ == "__main__":
    with torch.inference_mode():
        main(sys.argv[1:])
