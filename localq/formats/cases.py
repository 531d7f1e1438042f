"""Matrices that every matrix kernel runs on: one table for its test, self-test, benchmark and the sanitizers.

A `Case` is a matrix that `sample` of its format makes. Tables of sizes only: what must hold is in `engine.selftest`, in
`bench.kernels.formats`, in the tests of the formats and in tests/tools/every_kernel.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from localq.files.gguf.block_types import by_name
from localq.formats import FORMATS

Shape = tuple[int, int]
HALF, BFLOAT = torch.float16, torch.bfloat16
# How far a product may be from fp64: in units of the last place of 16 bit of the sum of magnitudes (self-test), and
# times as far as the same product computed by torch in 16 bit (tests, benchmark).
ROUNDINGS, TIMES_NAIVE = 3, 2


@dataclass(frozen=True)
class Case:
    """A matrix: a key of FORMATS (or "int8"), a variant for `sample`, and [out, in]; (0, 0) for every shape."""

    format: str
    scheme: str = ""
    shape: Shape = (0, 0)


@dataclass(frozen=True)
class Timed:
    """A row of the benchmark for every product of a workload.

    rows     of x; 0 for what makes weights
    label    behind the shape in the table; {scheme} and {megabytes} are filled in
    plain    also for products with nothing fused around them
    fused    for products with a norm, an activation or a residual
    """

    case: Case
    rows: int = 1
    dtype: torch.dtype = HALF
    label: str = ""
    plain: bool = True
    fused: bool = False


@dataclass(frozen=True)
class Kernel:
    """One operation.

    op        its name in `csrc`
    family    `bench --only` has it under
    quick     matrices of the self-test: tiles and a rest, chunks and a rest
    variants  format and scheme of whatever has code of its own: tests and sanitizers take each at each shape
    shapes    [out, in] at the edges of tiles, chunks, blocks and of shared memory
    rows      of x; () for what makes weights
    orders    of codes that it reads: as stored, in tiles
    dtypes    of x, or of the weights that it makes
    timed     rows of the benchmark; products: which field of a Workload they take
    typed     codebooks and scales have the type of x
    """

    op: str
    family: str
    quick: tuple[Case, ...]
    variants: tuple[Case, ...]
    shapes: tuple[Shape, ...]
    rows: tuple[int, ...] = ()
    orders: tuple[bool, ...] = (True,)
    dtypes: tuple[torch.dtype, ...] = (HALF, BFLOAT)
    timed: tuple[Timed, ...] = ()
    products: str = "nf4"
    typed: bool = False


def _steps(case: Case, label: str = "") -> tuple[Timed, ...]:
    """1, 2, 4 and 8 rows in float16, one in bfloat16; one row with what a decode step fuses."""
    first = Timed(case, 1, label=label, fused=True)
    return first, *(Timed(case, rows, label=label) for rows in (2, 4, 8)), Timed(case, 1, BFLOAT, label)


FLOATS = (HALF, BFLOAT, torch.float32)
ROW_SHAPES = ((1, 64), (15, 320), (48, 512), (577, 576), (33, 1088), (1001, 2112), (5003, 4160), (77, 28672),
              (40009, 192))  # fmt: skip
INT4_SHAPES = ((16, 64), (48, 320), (32, 512), (576, 576), (48, 1088), (1008, 2112), (5008, 4160), (80, 28672),
               (40000, 192))  # fmt: skip
GGUF_SHAPES = ((16, 256), (48, 512), (576, 1536), (48, 5120), (1008, 2304), (5008, 4096), (80, 28672), (40000, 256))
SCALED_SHAPES = ((16, 64), (48, 320), (32, 512), (576, 576), (48, 1088), (1008, 2112), (5008, 4160), (80, 28672),
                 (40000, 192))  # fmt: skip
GATHERED_SHAPES = ((1, 32), (15, 160), (48, 512), (577, 576), (33, 1120), (1001, 2144), (77, 28672))
VARIANTS = {name: tuple(Case(name, scheme) for scheme in module.VARIANTS) for name, module in FORMATS.items()}
(NF4,), (MXFP4,), (ROWLUT,) = VARIANTS["nf4"], VARIANTS["mxfp4"], VARIANTS["squeezellm"]
GPTQ, BCQ, VPTQ, GGUF = (VARIANTS[name] for name in ("gptq", "bcq", "vptq", "gguf"))
INT4 = tuple(case for case in GPTQ if not case.scheme.endswith(" bits"))
INT8 = tuple(case for case in GPTQ if case not in INT4)
G128 = INT4[0]
SCALED = (*VARIANTS["nvfp4"], *VARIANTS["fp8"], *INT8)
# Columns of rows that end within an item, by the columns of a block.
GGUF_REST = {32: 864, 64: 832, 256: 768}
BCQ_KINDS = tuple(Case("bcq", scheme, (83, 1312)) for scheme in ("q1row", "q2g32z", "q3g128", "q5g64z"))
GATHERED = tuple(case for case in VARIANTS["aqlm"] if case.scheme.startswith("1x16"))  # codebooks too large for tables
LOOKUP = (VARIANTS["vq2"][0], *(case for case in VARIANTS["aqlm"] if case not in GATHERED))
VPTQ_QUICK = ("v8-k1024-0", "v8-k256-16", "v16-k512-256")

KERNELS: tuple[Kernel, ...] = (
    Kernel(
        "nf4_gemv", "nf4", (Case("nf4", "", (83, 640)),), (NF4,), (*ROW_SHAPES, (77, 8256), (5003, 192)), (1, 3, 8),
        (False, True),
        timed=tuple(
            Timed(NF4, rows, dtype, fused=(rows, dtype) == (1, HALF)) for dtype in (HALF, BFLOAT) for rows in (1, 8)
        ),
    ),
    Kernel(
        "nf4_gemm", "gemm", (Case("nf4", "", (83, 640)),), (NF4,),
        ((1, 64), (15, 320), (577, 576), (33, 1088), (1001, 2112), (272, 4096), (5003, 4160), (40009, 192)),
        (9, 21, 70),
        (False, True), timed=tuple(Timed(NF4, rows) for rows in (9, 16, 64, 256)), products="batches",
    ),
    Kernel(
        "nf4_dequantize", "dequantize", (Case("nf4", "", (83, 640)),), (NF4,),
        ((1, 64), (3, 320), (16, 512), (47, 1088), (577, 576), (33, 1536), (1001, 2112)), (), (False, True), FLOATS,
        (Timed(NF4, 0, label="row-major"), Timed(NF4, 0, label="tiled")), "dequantized",
    ),
    Kernel(
        "int8_gemv", "int8", (Case("int8", "", (83, 640)),), (Case("int8"),), ROW_SHAPES, (1, 8),
        timed=(Timed(Case("int8")), Timed(Case("int8"), 8), Timed(Case("int8"), 1, BFLOAT)), products="int8",
    ),
    Kernel(
        "int4_gemv", "int4",
        (Case("awq", "g128", (80, 640)), Case("gptq", "g64, ordered", (80, 832)), Case("gptq", "g32", (80, 576))), INT4,
        INT4_SHAPES, (1, 8),
        timed=(
            *_steps(G128, "{scheme}"), *(Timed(case, label="{scheme}") for case in INT4[1:3]),
            Timed(INT4[3], label="{scheme}", fused=True),
        ),
    ),
    Kernel(
        "int4_dequantize", "int4",
        (Case("awq", "g128", (80, 640)), Case("gptq", "g64", (80, 832)), Case("gptq", "g32", (80, 576))), INT4[:3],
        INT4_SHAPES[:6], (), (True,), FLOATS, (Timed(G128, 0, label="{scheme}"),), "dequantized",
    ),
    Kernel(
        "gguf_gemv", "gguf", tuple(Case("gguf", case.scheme, (80, columns))
                                   for case in GGUF for columns in (1280, GGUF_REST[by_name(case.scheme).values])),
        GGUF, GGUF_SHAPES, (1, 8),
        timed=(*_steps(GGUF[0], "{scheme}"), *(Timed(case, label="{scheme}", fused=case.scheme == "Q6_K")
                                               for case in GGUF[1:])),
    ),
    Kernel(
        "gguf_dequantize", "gguf",
        tuple(Case("gguf", case.scheme, (80, GGUF_REST[by_name(case.scheme).values])) for case in GGUF), GGUF,
        GGUF_SHAPES[:5], (), (True,), FLOATS, tuple(Timed(case, 0, label="{scheme}") for case in GGUF), "dequantized",
    ),
    Kernel(
        "scaled_gemv", "scaled",
        tuple(replace(case, shape=(80, columns)) for case in SCALED for columns in (1280, 832)),
        SCALED, SCALED_SHAPES, (1, 8),
        timed=(*_steps(SCALED[0], "nvfp4"), Timed(SCALED[2], label="fp8 in blocks", fused=True),
               Timed(SCALED[3], label="fp8 {scheme}"), Timed(INT8[0], label="{scheme}", fused=True)),
    ),
    Kernel(
        "scaled_dequantize", "scaled", tuple(replace(case, shape=(80, 832)) for case in SCALED), SCALED,
        SCALED_SHAPES[:6], (), (True,), FLOATS,
        (Timed(SCALED[0], 0, label="nvfp4"), Timed(SCALED[2], 0, label="fp8 in blocks")), "dequantized",
    ),
    Kernel(
        "rowlut_gemv", "rowlut", (Case("squeezellm", "", (83, 1632)), Case("squeezellm", "", (88, 1664))), (ROWLUT,),
        ((1, 32), (8, 128), (16, 1152), *ROW_SHAPES[2:]), (1, 2, 3, 8), timed=_steps(ROWLUT),
    ),
    Kernel(
        "rowlut_dequantize", "rowlut", (Case("squeezellm", "", (83, 1632)), Case("squeezellm", "", (88, 1664))),
        (ROWLUT,), ((1, 8), (9, 1048), (70, 4096), (8, 128), (16, 1152), (72, 4096)), (), (True,), FLOATS,
        (Timed(ROWLUT, 0),), "dequantized",
    ),
    Kernel(
        "gather_gemv", "gather", tuple(Case("aqlm", scheme, (83, 640)) for scheme in ("1x12g8", "1x9g16")), GATHERED,
        GATHERED_SHAPES, (1, 8), typed=True,
        timed=tuple(Timed(case, rows, label="{scheme} (L2)") for case in GATHERED for rows in (1, 8)),
        products="batches",
    ),
    Kernel(
        "vptq_gemv", "gather", tuple(Case("vptq", scheme, (83, 640)) for scheme in VPTQ_QUICK), VPTQ, GATHERED_SHAPES,
        (1, 8), typed=True,
        timed=tuple(Timed(case, rows, label="{scheme} (L2)") for case in VPTQ for rows in (1, 8)),
        products="batches",
    ),
    Kernel(
        "additive_dequantize", "gather",
        (*(Case("aqlm", scheme, (83, 144)) for scheme in ("1x12g8", "1x9g16", "2x8g8")),
         Case("vq2", "s4l16+s16l32", (83, 144))),
        GATHERED, ((83, 1048), (21, 2064), (130, 592)), (), (False,), FLOATS,
        (Timed(GATHERED[0], 0, label="aqlm {scheme}"),), "dequantized",
    ),
    Kernel(
        "vptq_dequantize", "gather", tuple(Case("vptq", scheme, (83, 328)) for scheme in VPTQ_QUICK), VPTQ,
        ((83, 344), (21, 2064), (1001, 576)), (), (False,), FLOATS,
        tuple(Timed(case, 0, label="{scheme}") for case in VPTQ), "dequantized",
    ),
    Kernel(
        "vq_gemv", "vq",
        (Case("vq2", "s4l16+s16l32", (83, 640)), *(Case(each.format, each.scheme, (83, 640)) for each in LOOKUP[1:])),
        (*LOOKUP, *VARIANTS["vq2"][1:], Case("vq2", "s8l16"), Case("vq2", "s16l16"), Case("vq2", "s2l8")),
        ((1, 16), (15, 320), (577, 576), (4099, 2128), (5003, 2128)), (1, 2, 3, 8),
        timed=(
            *_steps(LOOKUP[0], "vq2 {scheme}"), *(Timed(case, label="aqlm {scheme}", fused=True) for case in LOOKUP[1:])
        ),
    ),
    Kernel(
        "vq_dequantize", "vq", (*(Case("vq2", scheme, (83, 304)) for scheme in ("s4l16", "s4l16+s16l32")),
                                Case("aqlm", "2x8g8", (83, 304))),
        (*LOOKUP, Case("vq2", "s4l16+s4l16")), ((1, 16), (15, 320), (577, 576), (5003, 2128)), (), (True,), FLOATS,
        (*(Timed(case, 0, label=f"{case.format} {{scheme}}") for case in LOOKUP),
         Timed(Case("vq2", "s4l16+s4l16"), 0, label="vq2 {scheme}")), "dequantized",
    ),
    Kernel(
        "bcq_gemv", "bcq", BCQ_KINDS, (*BCQ, *(Case("bcq", case.scheme) for case in BCQ_KINDS), Case("bcq", "q4g512")),
        ((1, 8), (15, 328), (577, 576), (4099, 2128), (256, 3072), (5003, 2136)), (1, 2, 3, 8),
        timed=(
            *_steps(BCQ[0], "{scheme}, {megabytes:.1f} MB"),
            *(Timed(case, label="{scheme}, {megabytes:.1f} MB", fused=case is BCQ[1]) for case in BCQ[1:]),
        ),
    ),
    Kernel(
        "bcq_dequantize", "bcq", BCQ_KINDS, BCQ, ((1, 8), (15, 328), (577, 576), (5003, 2136)), (), (True,),
        (HALF, BFLOAT), (Timed(BCQ[0], 0, label="{scheme}"),), "dequantized",
    ),
    Kernel(
        "mxfp4_gemv", "experts", (Case("mxfp4", "", (83, 704)),), (MXFP4,),
        ((1, 64), (15, 320), (577, 576), (5003, 192)), (1, 2, 3, 8),
        timed=(Timed(MXFP4), Timed(MXFP4, 8)), products="batches",
    ),
    Kernel(
        "mxfp4_dequantize", "experts", (Case("mxfp4", "", (83, 704)),), (MXFP4,),
        ((1, 64), (15, 320), (577, 576), (5003, 192)), (), (True,), FLOATS, (Timed(MXFP4, 0),), "dequantized",
    ),
)  # fmt: skip
BY_OP = {kernel.op: kernel for kernel in KERNELS}
