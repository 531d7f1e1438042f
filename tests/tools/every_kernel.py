"""Every kernel once on every edge shape, for `compute-sanitizer`, which takes 10 to 100 times as long as the tests.

Kernels of matrices run on the table `formats.cases`, the others on the lists below.

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
from localq.engine.selftest import delta_nets, delta_rows, formats
from localq.engine.selftest import replies as selftest_replies
from localq.engine.selftest.checks import CHECKS
from localq.files import delta_memory
from localq.files.layer_caches import KeysAndValues
from localq.formats import cases, vptq
from localq.formats.cases import Kernel
from localq.formats.codebooks import (
    adjoint_kernel,
    aqlm,
    gather_kernel,
    lookup_kernel,
    rotation_kernel,
)
from localq.formats.experts import grouped
from localq.formats.experts import kernel as expert_kernel
from localq.formats.gguf import experts_kernel as gguf_experts
from localq.formats.gguf import tiles
from localq.formats.int4 import kernel as int4_kernel
from localq.formats.linear import SlabLinear
from localq.formats.nf4 import kernel as nf4_kernel
from localq.kernels import logit_adjust, sampling
from localq.kernels.gemv import ROWS, Norm
from localq.kernels.operand import share_tables
from localq.kv_bits import KV_BITS
from localq.sampling import Sampling
from tests.support.kernels import (
    adjoint_operands,
    attention_operands,
    expert_operands,
    gather_operands,
    gguf_operands,
    int4_operands,
    nf4_operands,
    search_operands,
    vq_operands,
    vq_stacks,
)
from tests.support.kernels.row_operands import DENSE

HALF = torch.float16
HEADS = ((5, 5, 64), (6, 3, 72), (32, 8, 128), (27, 3, 128), (32, 2, 128), (7, 1, 256), (9, 1, 256), (4, 2, 8))
LIVE = (1, 2, 64, 65, 513, 2049)  # around a piece; in one cluster; in several
Case = tuple[str, Callable[[], object]]


def kernel_cases(kernel: Kernel) -> Iterator[Case]:
    """A kernel of matrices on every variant and shape of its table, in each order of codes: every number of rows, or
    weights whole and from the middle on; and a gated pair with its norm."""
    for variant, shape, tiled in product(kernel.variants, kernel.shapes, kernel.orders):
        fits = getattr(formats.MODULES[variant.format], "fits", None)
        if fits is not None and not fits(*shape, variant.scheme):
            continue
        case = replace(variant, shape=shape)
        linear, _ = formats.linear_of(case, torch.device("cuda"), 1, tiled)
        name = f"{kernel.op} {variant.format} {variant.scheme} {shape}, tiled {tiled}"
        if not kernel.rows:
            yield from weights_cases(name, kernel, linear)
        elif (operand := linear.operand()) is not None:
            for rows in kernel.rows:
                x = nf4_operands.inputs(rows, shape[1], HALF if rows != 2 else torch.bfloat16, "cuda")
                run = partial(nf4_kernel.nf4_gemm, x, operand) if rows > ROWS else partial(operand.launch, x, [operand])
                yield f"{name}, {rows} rows", run
    if kernel.rows and min(kernel.rows) == 1:
        yield f"{kernel.op} gate and up", gated_pair(replace(kernel.variants[0], shape=(336, 1024)))


def weights_cases(name: str, kernel: Kernel, linear: SlabLinear) -> Iterator[Case]:
    """Called by `kernel_cases`."""
    for first, dtype in product((0, 16 * (linear.out_features // 32)), kernel.dtypes):
        out = torch.empty(linear.out_features - first, linear.in_features, dtype=dtype, device="cuda")
        yield f"{name} from {first} to {dtype}", partial(linear.unpack, first, out)


def gated_pair(case: cases.Case) -> Callable[[], object]:
    """gate and up, with their norm."""
    pair = [formats.linear_of(case, torch.device("cuda"), seed, True)[0].operand() for seed in (1, 2)]
    norm = Norm(torch.ones(case.shape[1], dtype=HALF, device="cuda"), 1e-5)
    x = nf4_operands.inputs(1, case.shape[1], HALF, "cuda")
    return partial(pair[0].launch, x, share_tables(pair), norm=norm, activation="silu")


def dense_cases() -> Iterator[Case]:
    """Weights in 16 bit, one and eight rows, and a gated pair with its norm."""
    for shape in DENSE.shapes():
        operand = DENSE.make(shape, HALF, 0, "cuda")
        for rows in (1, 8):
            x = nf4_operands.inputs(rows, shape[1], HALF, "cuda")
            yield f"dense_gemv {shape}, {rows} rows", partial(DENSE.gemv, x, [operand.matrix])
    pair = [DENSE.make((333, 1024), HALF, seed, "cuda").matrix for seed in (1, 2)]
    norm = Norm(torch.ones(1024, dtype=HALF, device="cuda"), 1e-5)
    x = nf4_operands.inputs(1, 1024, HALF, "cuda")
    yield "dense_gemv gate and up", partial(DENSE.gemv, x, pair, norm=norm, activation="silu")


def layout_cases() -> Iterator[Case]:
    """What `sample` does not make: NF4 with scales in f32, groups of rows, outliers, orders of long rows; the roof."""
    for shape, tiled in product(((1, 64), (577, 576), (33, 1088)), (False, True)):
        matrix = nf4_operands.in_order(nf4_operands.operands(shape, False, "cuda").matrix, tiled)
        x = nf4_operands.inputs(8, shape[1], HALF, "cuda")
        yield f"nf4_gemv {shape}, scales in f32, tiled {tiled}", partial(nf4_kernel.nf4_gemv, x, [matrix])
        yield f"nf4_gemm {shape}, scales in f32, tiled {tiled}", partial(nf4_kernel.nf4_gemm, x, matrix)
        yield f"nf4_dequantize {shape}, scales in f32, {tiled}", partial(nf4_kernel.nf4_dequantize, matrix, HALF)
    for shape, parts in product(((5120, 2048), (1024, 8512), (160, 8192)), (1, 2)):  # blocks share units
        pair = [nf4_operands.operands(shape, True, "cuda", seed).matrix for seed in range(parts)]
        tiled = share_tables([nf4_operands.in_order(each, True) for each in pair])
        x = nf4_operands.inputs(1, shape[1], HALF, "cuda")
        run = partial(nf4_kernel.nf4_gemv, x, tiled, activation="silu" if parts == 2 else None)
        yield f"nf4_gemv {shape}, 1 row, {parts} tiles a unit", run
    wide = int4_operands.make((48, 29568), 64, 1, "cuda")
    x = nf4_operands.inputs(8, 29568, HALF, "cuda")
    yield "int4_gemv, x outside of shared memory", partial(int4_kernel.int4_gemv, x, [wide.matrix])
    for layout, shape in (((8, 256, 1, 32), (33, 96)), ((3, 16, 2, 6), (90, 102))):
        linear = aqlm.Linear(gather_operands.aqlm_packed(shape, HALF, 1, layout).to("cuda"))
        for first in (0, 16):
            rows = partial(linear.dequantized_rows, first, shape[0] - first, HALF, None)
            yield f"additive_dequantize {layout} from {first}", rows
    for scheme, outliers in (((8, 65536, 256), (0, 0, 0)), ((12, 300, 7), (5, 4, 19)), ((16, 4096, 0), (8, 12, 64))):
        for packs in (True, False) if scheme[1] != 300 else (False,):
            packed = gather_operands.vptq_packed((83, 341), HALF, 1, scheme, outliers=outliers, packed=packs)
            rows = partial(vptq.Linear(packed.to("cuda")).dequantized_rows, 0, 83, HALF, None)
            yield f"vptq_dequantize {scheme}, outliers {outliers}, packed {packs}", rows
    for name, form in gather_operands.VPTQ.items():
        operand = form.make((33, 1120), HALF, 3, "cuda")
        yield f"vptq_gemv {name}", partial(form.gemv, nf4_operands.inputs(8, 1120, HALF, "cuda"), [operand.matrix])
    table = torch.zeros(2**20, dtype=torch.uint8, device="cuda")
    sums = torch.zeros(512, dtype=torch.int32, device="cuda")
    for step in gather_kernel.ROOF_STEPS:
        yield f"gather_roof by {step}", partial(gather_kernel.gather_roof, table, step, 16, sums)


def rotation_cases() -> Iterator[Case]:
    """Blocks of every size: by themselves, and in front of a product."""
    for columns in (16, 48, 576, 768, 8192):
        signs = torch.zeros(columns // 8, dtype=torch.uint8, device="cuda")
        x = nf4_operands.inputs(3, columns, HALF, "cuda")
        yield f"hadamard {columns}", partial(rotation_kernel.hadamard, x, signs)
    for columns in (48, 576, 1536, 8192, 28_672):
        signs = torch.zeros(columns // 8, dtype=torch.uint8, device="cuda")
        x = nf4_operands.inputs(1, columns, HALF, "cuda")
        operand = replace(vq_operands.make((577, columns), [(4, 16)], 1, "cuda").matrix, signs=signs)
        yield f"vq_gemv of {columns} rotated", partial(lookup_kernel.vq_gemv, x, [operand])


def search_cases() -> Iterator[Case]:
    """Every step, one warp and many, several books at a position, beams that fill no warp."""
    for shapes, beam in product(([(4, 16)], [(2, 10)], [(8, 16), (4, 12)], [(8, 8), (8, 8)], [(16, 32)]), (1, 13, 64)):
        operands = search_operands.block(5, 48, shapes, beam).to("cuda")
        yield f"vq_search {shapes}, beam {beam}", partial(search_operands.search, operands)
    yield "vq_search, beam 200", partial(search_operands.search, search_operands.block(3, 16, [(4, 8)], 200).to("cuda"))
    for shape in ((577, 576, 4, 16), (33, 1088, 8, 8), (7, 320, 16, 32), (1, 37, 1, 1), (5, 8, 4, 16)):
        matrix, codes, *book = adjoint_operands.operands(*shape)
        yield f"vq_adjoint {shape}", partial(adjoint_kernel.vq_adjoint, matrix.cuda(), codes.cuda(), *book)


def mixture_cases() -> Iterator[Case]:
    """Every format with parts of units, steps and items, each gate; down with what it adds to."""
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


def gguf_mixture_cases() -> Iterator[Case]:
    """Every block type; rows of whole items and a rest, one expert and the most."""
    for type, (count, active) in product(tiles.TILED_TYPES, ((3, 1), (9, 8), (16, 16))):
        columns, what = 1536, f"{type} {active} of {count}"
        chosen, weights = expert_operands.chosen_of(count, active, 1, "cuda")
        x = nf4_operands.inputs(active, columns, HALF, "cuda")
        norm = Norm(torch.ones(columns, dtype=HALF, device="cuda"), 1e-5)
        pairs, _ = gguf_operands.experts(count, 2, (48, columns), type, device="cuda")
        given = {"norm": norm, "out": torch.empty(active, 48, dtype=HALF, device="cuda")}
        yield f"gguf_experts_gate_up {what}", partial(gguf_experts.gguf_experts_gate_up, x[:1], pairs, chosen, **given)
        pairs, _ = gguf_operands.experts(count, 2, (48, columns), type, device="cuda", up_type="Q5_1")
        given["gates"] = torch.empty(active, 48, device="cuda")
        run = partial(gguf_experts.gguf_experts_gate_up, x[:1], pairs, chosen, **given)
        yield f"gguf_experts_gate_up {what}, up in Q5_1", run
        downs, _ = gguf_operands.experts(count, 1, (112, columns), type, device="cuda")
        given = {"residual": None, "out": torch.empty(1, 112, dtype=HALF, device="cuda")}
        yield (
            f"gguf_experts_down {what}",
            partial(gguf_experts.gguf_experts_down, x, downs, chosen, weights, **given),
        )


def grouped_cases() -> Iterator[Case]:
    """Experts without entries and with more than a tile, ragged rows and columns; with a gate and without."""
    for (name, make), (count, active, tokens, width, columns) in product(
        expert_operands.FORMATS.items(), ((6, 2, 70, 40, 128), (3, 1, 9, 136, 64), (40, 4, 133, 264, 320))
    ):
        chosen, weights = expert_operands.experts_of_tokens(count, active, tokens, 1, "cuda")
        entries, what = grouped.experts_sort(chosen, count), f"{name} {(count, active, tokens, width, columns)}"
        stack = make((count, 2 * width, columns), HALF, 1, "cuda").stack
        x, by_place = (nf4_operands.inputs(rows, columns, HALF, "cuda") for rows in (tokens, entries.count))
        gated, each = (torch.empty(entries.count, rows, dtype=HALF, device="cuda") for rows in (width, 2 * width))
        y = torch.empty(tokens, 2 * width, dtype=HALF, device="cuda")
        yield f"experts_sort {what}", partial(grouped.experts_sort, chosen, count)
        for gate in (grouped.Gate(), grouped.Gate("clamped", interleaved=True)):
            given = {"gate": gate, "out": gated}
            yield f"experts_gemm {what}, {gate.name}", partial(grouped.experts_gemm, x, stack, None, entries, **given)
        given = {"gate": None, "out": each}
        yield f"experts_gemm {what}", partial(grouped.experts_gemm, by_place, stack, None, entries, **given)
        yield f"experts_sum {what}", partial(grouped.experts_sum, each, entries, weights, y)


def router_cases() -> Iterator[Case]:
    """Rows of a word and of many, the most experts; without and with the gate of a shared one."""
    for count, active, columns in ((1, 1, 8), (33, 3, 4104), (257, 8, 2048), (512, 15, 64)):
        x, weight, gate = (nf4_operands.inputs(rows, columns, HALF, "cuda") for rows in (1, count, 1))
        norm = Norm(torch.ones(columns, dtype=HALF, device="cuda"), 1e-5)
        workspace = expert_kernel.router_workspace(count, "cuda")
        for shared_gate in (None, gate):
            entries = active + (shared_gate is not None)
            given = {
                "norm": norm, "how": "softmax_of_chosen", "workspace": workspace, "shared_gate": shared_gate,
                "weights": torch.empty(entries, device="cuda"),
                "chosen": torch.empty(entries, dtype=torch.int32, device="cuda"),
            }  # fmt: skip
            what = f"{active} of {count}, {columns} columns{'' if shared_gate is None else ', a shared expert'}"
            yield f"router {what}", partial(expert_kernel.router, x, weight, None, active, **given)


def attention_cases() -> Iterator[Case]:
    """Every width of heads and cache around every border of the live length; windows; the cache's own kernels."""
    for (heads, kv_heads, width), bits in product(HEADS, KV_BITS):
        for live, window, sinks in ((64, 0, None), (513, 0, None), (513, 130, None), (513, 130, 1.0)):
            case = attention_operands.Case(
                heads, kv_heads, width, live - 1, live + 3, HALF, bits, window=window, sinks=sinks
            )
            yield f"attention_decode {case}", attention_operands.Operands(case).run
    for (heads, width), live, gate, bits in product(((6, 24), (24, 256)), LIVE, ("in q", "apart"), KV_BITS):
        case = attention_operands.Case(heads, heads // 6, width, live - 1, live, HALF, bits, gate=gate)
        yield f"attention_decode {case}", attention_operands.Operands(case).run
    for live, bits in product(LIVE, KV_BITS):
        case = attention_operands.Case(12, 4, 128, live - 1, live, HALF, bits, rotary=128, norm="llama", softcap=9.0)
        yield f"attention_decode {case}", attention_operands.Operands(case).run
    for bits in KV_BITS[1:]:
        cache = KVCache([KeysAndValues(3, 72)], 50, HALF, "cuda", bits)
        k, v = torch.randn(2, 41, 3, 72, device="cuda").to(HALF)
        positions = torch.arange(41, device="cuda")
        yield f"kv_write, kv_read, {kv_bits.text(bits)}", partial(cache.update, 0, k, v, positions, 41)


def delta_cases() -> Iterator[Case]:
    """Numbers of value heads per key head; one block after the other finishes a head. Groups of chunks, odd ends."""
    for key_heads, shared in ((1, 1), (2, 3), (3, 8), (16, 3)):
        for hidden in (8, 320, 6152):  # less than a block's threads take at once; more than is loaded ahead
            case = delta_nets.draw_step(key_heads, shared, HALF, torch.device("cuda"), hidden=hidden)
            name = f"delta_decode {key_heads} key heads, {shared} shared, {hidden} columns"
            yield name, partial(case.run, case.workspace())
            rows_case = delta_rows.draw_rows(key_heads, shared, HALF, torch.device("cuda"), hidden=hidden)
            for rows in (1, 2, 8, 8):  # each behind the one before, whose tokens it replays
                rows_case.position += rows
                tokens = rows_case.draw(rows, torch.Generator().manual_seed(rows))
                name = f"delta_verify {key_heads} key heads, {shared} shared, {hidden} columns, {rows} rows"
                yield name, partial(rows_case.verify, tokens)
    for key_heads, shared, tokens, chunks in ((1, 1, 2, 1), (2, 3, 63, 1), (1, 8, 130, 1), (16, 3, 193, 3)):
        case = delta_nets.draw(key_heads, shared, HALF, torch.device("cuda"), tokens=tokens)
        size = chunks * delta_memory.chunk_bytes(key_heads, shared)
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        yield f"delta_prefill {key_heads} key heads, {shared} shared, {tokens} tokens", partial(case.prefill, workspace)


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
        *((kernel.op, kernel_cases(kernel)) for kernel in cases.KERNELS),
        ("dense_gemv", dense_cases()),
        (f"{' '.join(cases.BY_OP)} gather_roof", layout_cases()),
        ("vq_gemv hadamard rotated", rotation_cases()),
        ("vq_experts_gate_up vq_experts_down rotated", vq_stacks.cases()),
        ("vq_search vq_adjoint", search_cases()),
        ("experts_gate_up experts_down", mixture_cases()),
        ("gguf_experts_gate_up gguf_experts_down", gguf_mixture_cases()),
        ("experts_sort experts_gemm experts_sum", grouped_cases()),
        ("router", router_cases()),
        ("attention_decode kv_write kv_read", attention_cases()),
        ("delta_decode delta_verify delta_prefill", delta_cases()),
        ("dry_match adjust sample", sampling_cases()),
    )
    known = " ".join(kernels for kernels, _ in lists)
    anywhere = not wanted or any(word not in known for word in wanted)
    begun = (found for kernels, found in lists if anywhere or any(word in kernels for word in wanted))
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
