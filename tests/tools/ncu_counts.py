"""Instructions, shared-memory wavefronts and bytes per weight of every hot kernel, for `tests/tools/ncu_counts.sh`.

`launch` runs each case once, a marker kernel before it; `table FILE` reads what ncu counted. Figures are per weight
(attention: per element of the cache) and thread: a warp's instruction or wavefront counts as 32.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from localq import kv_bits
from localq.kv_bits import KV_BITS, KvBits

METRICS = {
    "smsp__inst_executed.sum": "instructions",
    "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum": "shared",
    "l1tex__data_pipe_lsu_wavefronts.sum": "lsu",
    "dram__bytes_read.sum": "read",
    "dram__bytes_write.sum": "written",
    "gpu__time_duration.sum": "ns",
}
MARKER = "spin_kernel"  # torch.cuda._sleep
WARP = 32
# Bytes that memory brings per clock and multiprocessor at the bandwidth that can be reached.
CARDS = {"RTX 3090": 6.2, "RTX 4090": 2.9, "H200": 17.8}
ISSUE, LANES = 128, 32  # thread instructions, and load/store lanes, per clock and multiprocessor


@dataclass(frozen=True)
class Counted:
    """The sums over all kernels of one case, by the values of `METRICS`."""

    name: str
    elements: int
    sums: dict[str, float]

    def per_element(self, what: str) -> float:
        """Thread instructions, thread look-ups, bytes or nanoseconds an element."""
        each = self.sums[what] / self.elements
        return each * WARP if what in ("instructions", "shared", "lsu") else each

    def margins(self, bytes_per_clock: float) -> tuple[float, float]:
        """What a multiprocessor can issue and look up while memory brings the bytes, over what the kernel does."""
        clocks = (self.per_element("read") + self.per_element("written")) / bytes_per_clock
        lanes = self.per_element("lsu")
        return ISSUE * clocks / self.per_element("instructions"), LANES * clocks / lanes if lanes else float("inf")


# ---- launch

SHAPE = (28672, 8192)
TURNED = "8192 x 28672"  # at the end of a name: of that shape
DEPTH = 16384
CASES: list[tuple[str, int]] = [
    ("nf4_gemv, 1 row", SHAPE[0] * SHAPE[1]),
    ("nf4_gemv, 8 rows", SHAPE[0] * SHAPE[1]),
    ("nf4_gemv, 1 row, bf16", SHAPE[0] * SHAPE[1]),
    ("nf4_gemm, 16 rows", SHAPE[0] * SHAPE[1]),
    ("nf4_dequantize", SHAPE[0] * SHAPE[1]),
    ("nf4_dequantize, tiled", SHAPE[0] * SHAPE[1]),
    (f"nf4_dequantize, tiled, {TURNED}", SHAPE[0] * SHAPE[1]),
    ("dense_gemv, 1 row", SHAPE[0] * SHAPE[1]),
    ("int8_gemv, 1 row", SHAPE[0] * SHAPE[1]),
    ("int4_gemv, 1 row", SHAPE[0] * SHAPE[1]),
    ("int4_gemv, 8 rows", SHAPE[0] * SHAPE[1]),
    ("int4_dequantize", SHAPE[0] * SHAPE[1]),
    *((f"vq_gemv, {rows} row{'s' * (rows > 1)}", SHAPE[0] * SHAPE[1]) for rows in (1, 2, 4, 8)),
    (f"vq_gemv, 1 row, {TURNED}", SHAPE[0] * SHAPE[1]),
    ("bcq_gemv, 1 row, 2 planes", SHAPE[0] * SHAPE[1]),
    ("rowlut_gemv, 1 row", SHAPE[0] * SHAPE[1]),
    ("rowlut_gemv, 8 rows", SHAPE[0] * SHAPE[1]),
    *((f"attention_decode, {kv_bits.text(bits)}", 2 * 8 * 128 * DEPTH) for bits in KV_BITS),
]


def launch(wanted: Iterable[str]) -> None:
    """Every case whose name holds one of `wanted` (all without any), in the order of `CASES`, inside the profiler."""
    import torch

    chosen = _chosen(list(wanted))
    device = torch.device("cuda", 0)
    runs = {name: _case(name, device) for name, _ in chosen}
    for run in runs.values():
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    for run in runs.values():
        torch.cuda._sleep(1)
        run()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _chosen(wanted: list[str]) -> list[tuple[str, int]]:
    return [case for case in CASES if not wanted or any(each in case[0] for each in wanted)]


def _case(name: str, device: Any) -> Callable[[], object]:
    import torch

    from localq.formats import nf4
    from localq.formats.int8 import kernel as int8_kernel
    from localq.formats.int8.kernel import Int8Operand
    from localq.formats.nf4 import kernel as nf4_kernel
    from localq.kernels import dense

    op, shape = name.partition(",")[0], SHAPE[::-1] if name.endswith(TURNED) else SHAPE
    if op == "attention_decode":
        return _attention(next(bits for bits in KV_BITS if name.endswith(f", {kv_bits.text(bits)}")), device)
    if op == "dense_gemv":
        weight = torch.randn(SHAPE, dtype=torch.float16, device=device)
        return partial(dense.dense_gemv, _x(1, device), [dense.DenseOperand(weight)])
    if op == "int8_gemv":
        codes = torch.randint(-127, 128, SHAPE, dtype=torch.int8, device=device)
        scales = torch.rand(SHAPE[0], dtype=torch.float32, device=device)
        return partial(int8_kernel.int8_gemv, _x(1, device), [Int8Operand(codes, scales)])
    if op.startswith("int4"):
        return _int4(0 if op == "int4_dequantize" else int(name.split()[1]), device)
    if op == "vq_gemv":
        return _vq(int(name.split()[1]), shape, device)
    if op == "bcq_gemv":
        return _bcq(device)
    if op == "rowlut_gemv":
        return _rowlut(int(name.split()[1]), device)
    linear = nf4.Linear(nf4.sample(shape, 1, device))
    matrix = linear.operand() if op == "nf4_dequantize" and "tiled" not in name else linear.tile_().operand()
    if op == "nf4_dequantize":
        return partial(nf4_kernel.nf4_dequantize, matrix, torch.float16)
    rows = int(name.split()[1])
    x = _x(rows, device).to(torch.bfloat16 if "bf16" in name else torch.float16)
    if op == "nf4_gemm":
        return partial(nf4_kernel.nf4_gemm, x, matrix)
    return partial(nf4_kernel.nf4_gemv, x, [matrix])


def _int4(rows: int, device: Any) -> Callable[[], object]:
    """Groups of 128; a product with so many rows of x, or with none the weights in f16."""
    import torch

    from localq.formats.int4.kernel import Int4Operand, int4_dequantize, int4_gemv

    (out, columns), groups = SHAPE, SHAPE[1] // 128
    codes = torch.randint(256, (out, columns // 2), dtype=torch.uint8, device=device)
    zeros = torch.randint(256, (groups, out // 2), dtype=torch.uint8, device=device)
    matrix = Int4Operand(codes, torch.ones(groups, out, dtype=torch.float16, device=device), zeros, None, 128)
    if rows == 0:
        return partial(int4_dequantize, matrix, 0, torch.empty(SHAPE, dtype=torch.float16, device=device))
    return partial(int4_gemv, _x(rows, device), [matrix])


def _vq(rows: int, shape: tuple[int, int], device: Any) -> Callable[[], object]:
    """vq2 with stride 4 and length 16."""
    import torch

    from localq.formats.codebooks import tiles as codebook_tiles
    from localq.formats.codebooks.lookup_kernel import VqBook, VqOperand, vq_gemv

    positions = shape[1] // 4
    codes = torch.randint(256, (shape[0] * positions,), dtype=torch.uint8, device=device)
    codebook = torch.randn(256, 16, dtype=torch.float16, device=device)
    factor = codebook_tiles.factor_of([codebook])
    book = VqBook(codes, codebook_tiles.fragments(codebook, factor), 4, 0, positions)
    scales = torch.ones(shape[0], dtype=torch.float16, device=device)
    return partial(vq_gemv, _x(rows, device, shape[1]), [VqOperand((book,), scales, factor, *shape)])


def _bcq(device: Any) -> Callable[[], object]:
    """Two planes, groups of 128."""
    import torch

    from localq.formats import bcq
    from localq.formats.bcq.kernel import BcqOperand, bcq_gemv

    (out, columns), planes = SHAPE, 2
    codes = torch.randint(256, (out, planes, columns // 8), dtype=torch.uint8, device=device)
    scales = torch.ones(out, planes, columns // 128, dtype=torch.float16, device=device)
    matrix = bcq.Linear(bcq.Packed(codes, scales)).put_into_tiles().operand()
    assert isinstance(matrix, BcqOperand)
    return partial(bcq_gemv, _x(1, device), [matrix])


def _rowlut(rows: int, device: Any) -> Callable[[], object]:
    import torch

    from localq.formats import squeezellm
    from localq.formats.squeezellm.kernel import rowlut_gemv

    codes = torch.randint(256, (SHAPE[0], SHAPE[1] // 2), dtype=torch.uint8, device=device)
    packed = squeezellm.Packed(codes, torch.randn(SHAPE[0], 16).half().to(device))
    return partial(rowlut_gemv, _x(rows, device), [squeezellm.Linear(packed).tile_().operand()])


def _x(rows: int, device: Any, columns: int = SHAPE[1]) -> Any:
    import torch

    return torch.randn(rows, columns, dtype=torch.float16, device=device)


def _attention(bits: KvBits, device: Any) -> Callable[[], object]:
    import torch

    from localq.engine.cache import KVCache
    from localq.files.layer_caches import KeysAndValues
    from localq.kernels import attention

    cache = KVCache([KeysAndValues(8, 128)], DEPTH, torch.float16, device, bits)
    qkv = torch.randn(1, (32 + 16) * 128, dtype=torch.float16, device=device)
    workspace = attention.AttentionWorkspace(32, 8, 128, device)
    position = torch.tensor([DEPTH - 1], device=device)
    return partial(
        attention.attention_decode, qkv, cache.layer(0), position, heads=32, rotary=None, q_norm=None, k_norm=None,
        scale=0.1, softcap=0.0, window=0, workspace=workspace,
    )  # fmt: skip


# ---- table


def counted(lines: Iterable[str], cases: list[tuple[str, int]]) -> Iterator[Counted]:
    """What ncu's CSV (base units) says of each case; raises ValueError unless it holds as many markers as cases."""
    rows = csv.DictReader(line for line in lines if line.startswith('"'))
    groups: list[dict[str, float]] = []
    marker = ""
    for row in rows:
        if MARKER in row["Kernel Name"]:
            if row["ID"] != marker:
                groups.append(dict.fromkeys(METRICS.values(), 0.0))
                marker = row["ID"]
        elif groups and row["Metric Name"] in METRICS:
            groups[-1][METRICS[row["Metric Name"]]] += float(row["Metric Value"].replace(",", ""))
    if len(groups) != len(cases):
        raise ValueError(f"{len(groups)} marked launches, {len(cases)} cases")
    for (name, elements), sums in zip(cases, groups, strict=True):
        yield Counted(name, elements, sums)


def table(path: str, wanted: list[str]) -> None:
    """Print the figures of every case, and what is left on the cards."""
    cards = "".join(f"{card:>20}" for card in CARDS)
    print(f"{'per weight':<26}{'instr':>8}{'shared':>8}{'lsu':>8}{'read B':>8}{'write B':>8}{'us':>9}{cards}")
    with open(path, encoding="utf-8") as file:
        for each in counted(file, _chosen(wanted)):
            figures = "".join(
                f"{each.per_element(what):8.3f}" for what in ("instructions", "shared", "lsu", "read", "written")
            )
            margins = "".join("{:>20}".format("{:.1f} / {:.1f}".format(*each.margins(rate))) for rate in CARDS.values())
            print(f"{each.name:<26}{figures}{each.sums['ns'] / 1e3:9.1f}{margins}")
    print(
        "cards: instructions / load-store lanes that fit into the time of memory, over what the kernel needs; above 1"
    )
    print("the kernel is bound by memory. The machine code counted is that of the card that ncu ran on.")


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        launch(sys.argv[2:])
    else:
        table(sys.argv[2], sys.argv[3:])
