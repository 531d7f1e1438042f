"""What was measured, with where and how: what `localq fit` predicts speed from, and what tests hold predictions to.

All times are of one NVIDIA H200 (driver 580.159.04, torch 2.11.0+cu130, kernels built by CUDA 13.0), one row of x, cold
L2, CUDA graphs, medians; commits stand beside the figures. README.md (Results) and csrc/README.md (Measured) say the
same. No consumer card was measured. Data only, torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU = "H200"
READ_BYTES_PER_S = 4.42e12  # reductions of torch, in the same runs
GATHER_BYTES_PER_S = 5.17e12  # `gather_roof`: sectors of L2 at random
MULTIPROCESSOR_GHZ = 132 * 1.83  # multiprocessors times their clock: what a gather from L2 is scaled by

Rows = tuple[tuple[int, int, float], ...]  # out, in, us of one launch

# Matrix-vector products, by `localq bench --kernels`: `vq2` and `2x8` at 2a3f8cb, what gathers at 5a25bd4.
PRODUCTS: dict[str, Rows] = {
    "nf4": (
        (4096, 4096, 6.8), (6144, 4096, 8.7), (8192, 8192, 13.8), (10_240, 8192, 16.3), (4096, 14_336, 13.6),
        (28_672, 4096, 20.2), (28_672, 8192, 35.5), (8192, 28_672, 36.8), (57_344, 8192, 66.0),
        (128_256, 8192, 138.0),
    ),
    "16 bit": (
        (4096, 4096, 11.4), (6144, 4096, 15.4), (28_672, 4096, 57.6), (4096, 14_336, 31.9), (8192, 8192, 36.2),
        (28_672, 8192, 109.6), (8192, 28_672, 115.0), (128_256, 4096, 235.0),
    ),
    "8 bit": ((8192, 8192, 21.7), (28_672, 8192, 70.0), (8192, 28_672, 73.0)),
    "vq2": (
        (4096, 4096, 5.5), (8192, 8192, 8.9), (10_240, 8192, 10.2), (28_672, 8192, 19.7), (57_344, 8192, 34.2),
        (8192, 28_672, 21.9),
    ),
    "2x8": ((4096, 4096, 6.4), (8192, 8192, 10.2), (28_672, 8192, 20.6), (8192, 28_672, 24.4)),
    "1x16": ((8192, 8192, 63.0), (28_672, 8192, 193.0), (8192, 28_672, 204.0)),
    # With one table, from its rates of sectors (75 and 55 % of `gather_roof`): the times themselves were not kept.
    "vptq": ((28_672, 8192, 242.0), (8192, 28_672, 330.0)),
    "vptq + 256": ((8192, 8192, 112.0), (28_672, 8192, 312.0), (8192, 28_672, 418.0)),
}  # fmt: skip

# Decode attention, 8 kv heads of 128: bits of the cache, query heads, slots, us. Of 64 heads: the profiled step of
# llama-3.3-70b@vq2 at 1d73e67; the others by a script that is not in the tree.
ATTENTION: tuple[tuple[int, int, int, float], ...] = (
    (16, 32, 128, 4.9), (16, 32, 1000, 6.7), (16, 32, 4096, 10.5), (16, 32, 32_768, 41.4), (16, 64, 1, 6.8),
    (8, 32, 128, 5.4), (8, 32, 1000, 7.4), (8, 32, 4096, 10.9), (8, 32, 32_768, 33.8),
    (4, 32, 128, 5.7), (4, 32, 1000, 8.5), (4, 32, 4096, 11.1), (4, 32, 32_768, 35.6),
)  # fmt: skip

ROTATION_US = 1.7  # of an input of vq2, inside a step (1d73e67)
NORM_US = ROTATION_US  # not measured: bound by latency as the rotation is
EMBED_AND_CHOICE_US = 6.0  # a row of the table, and the greedy choice among 128k tokens (ad55577)


@dataclass(frozen=True)
class WholeModel:
    """Decoding of 128 tokens at depth 0, random weights, 16-bit cache, by `localq bench --synthetic`."""

    name: str
    head: str
    embed: str
    tok_s: float
    commit: str


WHOLE_MODELS = (
    WholeModel("llama-3.1-8b@nf4", "16", "device", 498.0, "ad55577"),
    WholeModel("llama-3.1-8b@fp16", "16", "device", 248.6, "1d73e67"),
    WholeModel("llama-3.3-70b@nf4", "16", "device", 81.4, "1d73e67"),  # held down by power; its first steps 85.4
    WholeModel("llama-3.3-70b@vq2", "nf4", "host", 147.7, "2a3f8cb"),
)

# Perplexity over that of the reference, by `localq eval` on the validation slice: (model, format). NF4 on a CPU, vq2 at
# 2.098 bits, made with --best, on the H200 (2a3f8cb).
PERPLEXITY_RATIO = {("smollm2-135m", "nf4"): 20.80 / 16.88, ("smollm2-135m", "vq2"): 24.09 / 16.88}

# What is known of the quality of 2-bit formats besides. VPTQ: its README, as read; the reference of Llama 2 70B: AQLM's
# README, both on WikiText-2 at 4,096 tokens.
QUALITY_NOTES = {
    "vptq": "of Llama 2 70B at 2.07 bits its authors tell a perplexity of 3.93, where the full weights have 3.12",
    "vq2": "smollm2-135m at 2.1 bits has 1.43 times the perplexity of its full weights; not measured at other sizes",
}
