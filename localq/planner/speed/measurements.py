"""What was measured, with where and how: what `localq fit` predicts speed from, and what tests hold predictions to.

All times are of one NVIDIA H200 (driver 580.159.04, torch 2.11.0+cu130, kernels built by CUDA 13.0), one row of x, cold
L2, CUDA graphs, medians; commits stand beside the figures. README.md (Results) and csrc/README.md (Measured) have those
that people look for. No consumer card was measured. Data only, torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass

GPU = "H200"
READ_BYTES_PER_S = 4.42e12  # reductions of torch, in the same runs
GATHER_BYTES_PER_S = 5.17e12  # `gather_roof`: sectors of L2 at random
CLOCK_GHZ = 1.83
MULTIPROCESSOR_GHZ = 132 * CLOCK_GHZ  # multiprocessors times their clock: what a gather from L2 is scaled by

Rows = tuple[tuple[int, int, float], ...]  # out, in, us of one launch

# Matrix-vector products, by `localq bench --kernels`. `vq2` and int4 (groups of 128) at ea30483; `2x8` and `1x16` at
# f45e95d; VPTQ at 5dba389; of 3,840, 5,120 and 17,408 columns, and of 201088 rows, at 468d13f; bcq (q3g128) and
# squeezellm at d2a1339, by a script that calls the rows of that command one by one; `vq2` of 10240 and 57344 rows and
# both at 4096 x 4096 at 2a3f8cb. NF4 of 2,880, 5,120, 12,288 and 17,408 columns at 468d13f, before that the rest; all
# of 2,048 columns, and 2048 and 2880 x 4096, at d6abc1b. Those of gemma-3-12b in NF4 by `localq bench --profile`,
# inside a step, at ea30483, of experts and of the head of 151936 x 2048 in 16 bit at 2a7008b. Left out, since the two
# ways differ: 16 bit at 5120 x 2880 (11.5 us alone, 10.9 in a step) and 2880 x 4096 (9.7, 8.0); and squeezellm at 28672
# x 2048 (18.1 us), where its tables take as long as look-ups. All but VPTQ's are older than 53fe8d7, so those of that
# command have their share of a graph's start in them, some 2 to 4 us where two to four launches of a large matrix stood
# in one (README.md, Results).
PRODUCTS: dict[str, Rows] = {
    "nf4": (
        (4096, 4096, 6.8), (6144, 4096, 8.7), (8192, 8192, 13.8), (10_240, 8192, 16.3), (4096, 14_336, 13.6),
        (28_672, 4096, 20.2), (28_672, 8192, 35.5), (8192, 28_672, 36.8), (57_344, 8192, 66.0),
        (7168, 5120, 11.0), (5120, 5120, 9.3), (34_816, 5120, 29.0), (5120, 17_408, 20.3), (8192, 3840, 10.5),
        (3840, 4096, 7.0), (30_720, 3840, 23.3), (3840, 15_360, 14.0), (12_288, 12_288, 25.5), (5120, 2048, 7.1),
        (2048, 4096, 5.4), (151_936, 2048, 45.8), (5120, 2880, 8.8), (2880, 4096, 6.9), (201_088, 2880, 91.1),
        (128_256, 8192, 138.0),
    ),
    # In the order of the launches of a layer: gate and up of the chosen experts, and down.
    "nf4 experts": ((12_288, 2048, 11.2), (16_384, 768, 7.2)),
    "mxfp4 experts": ((23_040, 2880, 18.6), (11_520, 2880, 12.7)),
    # Not timed by themselves: what a step of qwen3-30b-a3b@vq2 (2,777 us, ea30483) takes over its other launches, each
    # of the two as much over the product of all their rows (7.1 and 6.3 us by the fit).
    "vq2 experts": ((12_288, 2048, 13.0), (16_384, 768, 12.1)),
    "mxfp4": ((2880, 2880, 5.0),),
    "16 bit": (
        (4096, 4096, 11.4), (6144, 4096, 15.4), (28_672, 4096, 57.6), (4096, 14_336, 31.9), (8192, 8192, 36.2),
        (28_672, 8192, 109.6), (8192, 28_672, 115.0), (128_256, 4096, 235.0),
        (201_088, 2880, 260.7), (151_936, 5120, 348.3), (262_144, 3840, 448.8), (151_936, 2048, 142.6),
        (12_288, 12_288, 73.8),
    ),
    "8 bit": ((8192, 8192, 21.7), (28_672, 8192, 68.1), (8192, 28_672, 73.0), (12_288, 12_288, 45.7),
              (201_088, 2880, 163.1)),
    "vq2": (
        (4096, 4096, 5.5), (8192, 8192, 9.2), (10_240, 8192, 10.2), (28_672, 8192, 19.8), (57_344, 8192, 34.2),
        (8192, 28_672, 22.5), (7168, 5120, 8.0), (5120, 5120, 6.9), (34_816, 5120, 17.7), (5120, 17_408, 12.9),
        (12_288, 12_288, 16.1), (5120, 2048, 8.5), (2048, 4096, 5.4), (151_936, 2048, 26.9), (30_720, 3840, 14.2),
        (8192, 3840, 7.0), (5120, 2880, 5.7), (201_088, 2880, 47.2),
    ),
    "int4": ((28_672, 8192, 34.9), (8192, 28_672, 36.4), (12_288, 12_288, 25.1), (8192, 8192, 14.1),
             (30_720, 3840, 21.2), (8192, 3840, 8.6), (34_816, 5120, 28.8), (7168, 5120, 10.2), (5120, 5120, 8.1),
             (5120, 17_408, 20.3)),
    "squeezellm": ((28_672, 8192, 42.0), (8192, 28_672, 39.8), (12_288, 12_288, 27.2), (8192, 8192, 14.5),
                   (4096, 4096, 5.9), (6144, 4096, 9.4), (28_672, 4096, 27.0), (4096, 14_336, 12.4),
                   (51_200, 5120, 52.6), (10_240, 5120, 14.9), (5120, 25_600, 29.1)),
    "bcq": ((28_672, 8192, 30.2), (8192, 28_672, 33.8), (12_288, 12_288, 20.6), (8192, 8192, 10.8), (5120, 2880, 5.7),
            (30_720, 3840, 16.9), (8192, 3840, 7.4), (201_088, 2880, 67.1), (34_816, 5120, 23.6), (7168, 5120, 8.2),
            (5120, 5120, 7.4), (5120, 17_408, 17.0), (6144, 4096, 6.9), (28_672, 4096, 16.7), (4096, 14_336, 11.1),
            (51_200, 5120, 32.2), (5120, 25_600, 22.1), (10_240, 5120, 10.1), (4096, 4096, 5.6)),
    "2x8": ((4096, 4096, 6.0), (8192, 8192, 9.6), (28_672, 8192, 20.0), (8192, 28_672, 22.4), (12_288, 12_288, 16.0)),
    "1x16": ((4096, 4096, 18.3), (8192, 8192, 56.5), (28_672, 8192, 181.9), (8192, 28_672, 191.4),
             (12_288, 12_288, 119.5)),
    "vptq": ((4096, 4096, 17.7), (8192, 8192, 59.4), (28_672, 8192, 191.8), (8192, 28_672, 205.1),
             (12_288, 12_288, 126.9)),
    "vptq + 256": ((4096, 4096, 19.0), (8192, 8192, 60.7), (28_672, 8192, 200.8), (8192, 28_672, 209.3),
                   (12_288, 12_288, 131.3)),
}  # fmt: skip

# Decode attention, 8 kv heads of 128: bits of the cache, query heads, slots, us. Of 64 heads: the profiled step of
# llama-3.3-70b@vq2 at 1d73e67; the others by a script that is not in the tree.
ATTENTION: tuple[tuple[int, int, int, float], ...] = (
    (16, 32, 128, 4.9), (16, 32, 1000, 6.7), (16, 32, 4096, 10.5), (16, 32, 32_768, 41.4), (16, 64, 1, 6.8),
    (8, 32, 128, 5.4), (8, 32, 1000, 7.4), (8, 32, 4096, 10.9), (8, 32, 32_768, 33.8),
    (4, 32, 128, 5.7), (4, 32, 1000, 8.5), (4, 32, 4096, 11.1), (4, 32, 32_768, 35.6),
)  # fmt: skip

# Inside a step (2a7008b): of a row behind a product; of router and choice of experts; and what attention takes more
# where q and k have norms: 1 to 4 us at four shapes. And what a product of vq2 takes more that rotates its input:
# 0.8 to 2.0 us by columns, in launches of a layer without attention (csrc/README.md).
ROTATION_US, NORM_US, ROUTER_US, QK_NORM_US = 1.7, 2.4, 6.3, 2.0
EMBED_AND_CHOICE_US = 6.0  # a row of the table, and the greedy choice among 128k tokens (ad55577)
# Matrices of AQLM have codebooks of their own, so a launch makes tables for each: what llama-3.1-8b in 2x8 takes more
# in a step (f45e95d) than its launches with one set of codebooks, for each matrix of q, k, v, gate and up behind the
# first.
OWN_BOOKS_US = 1.5


@dataclass(frozen=True)
class WholeModel:
    """Decoding of 128 tokens, random weights. By `localq bench --synthetic` (of qwen3-32b with --formats) at
    depth 0 and with a 16-bit cache; with a depth by `python -m tests.tools.planner_report table`, behind a
    prompt of so many tokens."""

    name: str
    head: str
    embed: str
    tok_s: float
    commit: str
    kv_bits: int = 16
    depth: int = 0
    scheme: str = ""  # what the format leaves open


WHOLE_MODELS = (
    WholeModel("llama-3.1-8b@nf4", "16", "device", 498.0, "ad55577"),
    WholeModel("llama-3.1-8b@fp16", "16", "device", 248.6, "1d73e67"),
    WholeModel("llama-3.1-8b@vq2", "16", "device", 621.9, "8272b55"),
    WholeModel("llama-3.1-8b@aqlm", "16", "device", 602.8, "f45e95d", scheme="2x8g8"),
    WholeModel("llama-3.1-8b@vptq", "16", "device", 139.6, "61779be", scheme="v8-k65536-256"),
    WholeModel("llama-3.1-8b@mxfp4", "16", "device", 453.1, "d2a1339"),
    WholeModel("llama-3.1-8b@bcq", "16", "device", 558.7, "d2a1339", scheme="q3g128"),
    WholeModel("llama-3.1-8b@squeezellm", "16", "device", 467.7, "d2a1339"),
    WholeModel("llama-3.1-8b@awq", "16", "device", 476.7, "d2a1339", scheme="g128"),
    WholeModel("llama-3.1-8b@gptq", "16", "device", 476.9, "d2a1339", scheme="g128"),
    WholeModel("qwen3-32b@fp16", "16", "device", 61.3, "d2a1339"),
    WholeModel("qwen3-32b@nf4", "16", "device", 149.2, "d2a1339"),
    WholeModel("qwen3-32b@vq2", "16", "device", 220.9, "8272b55"),
    WholeModel("qwen3-32b@vptq", "16", "device", 34.1, "8272b55", scheme="v8-k65536-256"),
    WholeModel("gemma-3-12b@vq2", "16", "device", 325.9, "8272b55"),
    WholeModel("qwen3-32b@aqlm", "16", "device", 217.8, "f45e95d", scheme="2x8g8"),
    WholeModel("qwen3-32b@mxfp4", "16", "device", 130.8, "d2a1339"),
    WholeModel("qwen3-32b@bcq", "16", "device", 174.0, "d2a1339", scheme="q3g128"),
    WholeModel("qwen3-32b@squeezellm", "16", "device", 133.1, "d2a1339"),
    WholeModel("qwen3-32b@awq", "16", "device", 142.5, "d2a1339", scheme="g128"),
    WholeModel("qwen3-32b@gptq", "16", "device", 142.7, "d2a1339", scheme="g128"),
    WholeModel("llama-3.3-70b@nf4", "16", "device", 81.4, "1d73e67"),  # held down by power; its first steps 85.4
    WholeModel("llama-3.3-70b@vq2", "nf4", "host", 147.1, "8272b55"),
    WholeModel("gpt-oss-20b@mxfp4", "16", "device", 572.5, "ea30483"),
    WholeModel("qwen3-30b-a3b@nf4", "16", "device", 430.3, "ea30483"),
    WholeModel("qwen3-30b-a3b@vq2", "16", "device", 369.6, "8272b55"),
    WholeModel("llama-3.1-8b@nf4", "16", "device", 469.7, "2056184", 16, 1500),
    WholeModel("llama-3.1-8b@nf4", "16", "device", 454.8, "2056184", 4, 1500),
    WholeModel("qwen3-14b@nf4", "16", "device", 276.8, "2056184", 8, 1500),
    WholeModel("gemma-3-12b@nf4", "16", "device", 252.4, "ea30483", 16, 1500),
    WholeModel("mistral-nemo-12b@nf4", "16", "device", 317.9, "2056184", 4, 1500),
    WholeModel("qwen3-8b@fp16", "16", "device", 230.4, "2056184", 16, 1500),
    WholeModel("qwen3-32b@nf4", "16", "device", 144.3, "2056184", 16, 1500),
    WholeModel("qwen3-32b@nf4", "8", "device", 146.1, "2a7008b", 8, 1500),
    WholeModel("llama-3.3-70b@vq2", "nf4", "host", 138.6, "2056184", 16, 1500),
    WholeModel("llama-3.1-8b@fp16", "16", "device", 240.1, "2056184", 16, 1500),
    WholeModel("llama-3.3-70b@nf4", "16", "device", 80.6, "2056184", 16, 1500),
)

# Perplexity over that of the reference, by `localq eval` on the validation slice: (model, format). Both on a CPU; vq2
# at 2.098 bits: the layers in the tree (a9b6631).
PERPLEXITY_RATIO = {("smollm2-135m", "nf4"): 20.80 / 16.88, ("smollm2-135m", "vq2"): 22.53 / 16.88}

# What is known of the quality of 2-bit formats besides. VPTQ: its README, as read; the reference of Llama 2 70B: AQLM's
# README, both on WikiText-2 at 4,096 tokens.
QUALITY_NOTES = {
    "vptq": "of Llama 2 70B at 2.07 bits its authors tell a perplexity of 3.93, where the full weights have 3.12",
    "vq2": "smollm2-135m at 2.1 bits has 1.35 times the perplexity of its full weights; not measured at other sizes",
}
