"""What each part of a loaded model takes in memory: the sizes that the engine allocates, from its shape. Torch-free.

Exact for weights, cache, tables and buffers. What a prefill pass holds at once is counted from its widest moment, and
the engine reserves just that; what CUDA takes for itself is an assumption until a load measures it (`engine.vram`).
"""

from __future__ import annotations

from localq.files.architecture import MODEL_TYPES, Architecture, Linears
from localq.files.format_facts import UNPACK_BYTES, linear_bytes
from localq.files.format_sizes import (
    FRAGMENT_BYTES,
    MEETING_BYTES,
    MOST_FRAGMENTS,
    expert_tables,
    sign_padding,
    small_books,
)
from localq.planner.placement import Placement

MIB = 2**20
# CUDA context, streams and loaded kernels before they are measured. An assumption of the 24 GB arithmetic that users of
# such cards go by (300 to 400 MiB, and graphs). A load replaces it by what was really taken when it began.
CUDA_CONTEXT_BYTES = 500 * MIB
KERNELS_BYTES = 64 * MIB  # of these, machine code that is loaded after that, when it first runs; assumed
MORE_KERNELS_BYTES = 16 * MIB  # the same of a later model in the same process
CUBLAS_BYTES = 32 * MIB  # torch's workspace for cuBLAS on Hopper; elsewhere less
LAUNCH_BYTES = 8192  # of one kernel launch in a captured graph; assumed
PREFILL_CHUNK = 1024  # tokens; prefill goes through the prompt in pieces of this size
PREFILL_SCRATCH = 256 * MIB  # the most that weights take which are dequantized for prefill
SPARE_BYTES = 32 * MIB  # what the allocator's blocks of 20 and 2 MiB hold unused
# Where a soft cap rules out fused attention: scores of a block of queries, and copies, in 16 bit.
SCORES_BYTES = 80 * MIB
MULTIPROCESSORS = 192  # of the largest card that is planned for
MOST_SPLITS, CLUSTER = 64, 8  # attention: parts of a kv head's slots (csrc/attention_decode.cu)
# Per entry of the vocabulary, a bit of a mask apart: seen, breakers, matches, its place in a list; and besides.
SAMPLER_BYTES, SAMPLER_FIXED = 14, 12_848
LOGITS_BYTES = 6  # per entry of the vocabulary: a row in 16 bit and in f32
_PLAIN = ("bf16", "fp16", "gguf")


def weights_bytes(arch: Architecture, format: str, scheme: str = "") -> dict[str, int]:
    """Bytes of the weights in memory: {"weights": the blocks', "embedding": the table's, "head": 0 where tied}.

    Norms, biases and routers count to "weights" and, like embedding and head, take 16 bit. `scheme` as in
    `catalog.Source`; GGUF weights are 16-bit once imported.
    """
    blocks = sum(each.count * linear_bytes(each, _format_of(arch, each, format), scheme) for each in arch.linears)
    return {
        "weights": blocks + 2 * arch.other_parameters,
        "embedding": 2 * arch.embedding_parameters,
        "head": 2 * arch.head_parameters,
    }


def format_outside_experts(arch: Architecture, format: str) -> str:
    """The format of all other matrices of a model in `format`: of mixtures in MXFP4 only the experts are in it."""
    return "bf16" if format == "mxfp4" and arch.experts else format


def format_of_experts(arch: Architecture, format: str) -> str:
    """The format of the experts of a model in `format`: in NF4 those of gpt-oss stay as they are published."""
    return "mxfp4" if format == "nf4" and arch.model_type == "gpt_oss" else format


def _format_of(arch: Architecture, linear: Linears, format: str) -> str:
    return format_of_experts(arch, format) if linear.expert else format_outside_experts(arch, format)


def idle_bytes(arch: Architecture, format: str, scheme: str = "") -> int:
    """Bytes of the weights that one token does not go through: of all experts but the active ones."""
    if not arch.experts:
        return 0
    of = format_of_experts(arch, format)
    experts = sum(each.count * placed_bytes(each, of, scheme) for each in arch.linears if each.expert)
    if arch.mlp_bias:
        experts += 2 * arch.expert_layers * arch.experts * (2 * arch.expert_intermediate + arch.hidden)
    return experts - experts * arch.experts_active // arch.experts


def bits_per_weight(arch: Architecture, format: str, scheme: str = "") -> float:
    """Stored bits per weight over the block matrices."""
    stored = sum(each.count * linear_bytes(each, _format_of(arch, each, format), scheme) for each in arch.linears)
    return 8 * stored / arch.linear_parameters


def placed_weights(arch: Architecture, format: str, scheme: str = "") -> int:
    """Bytes of the blocks' weights in memory."""
    of = format_of_experts(arch, format)
    more = (each.count * (placed_bytes(each, of, scheme) - linear_bytes(each, of, scheme))
            for each in arch.linears if each.expert)  # fmt: skip
    return weights_bytes(arch, format, scheme)["weights"] + sum(more)


def placed_bytes(linear: Linears, format: str, scheme: str = "") -> int:
    """Bytes of one matrix in memory. NF4 experts lie there as rows of one matrix, and were quantized each around a mean
    of its own: their scales are f32. All else takes what it takes in files."""
    if format == "nf4" and linear.expert:
        return linear.rows * linear.columns // 2 * 9 // 8
    return linear_bytes(linear, format, scheme)


def head_bytes(arch: Architecture, head: str, itemsize: int = 2) -> int:
    """Bytes of the head alone: 0 where it is the embedding table. `itemsize` of the model's type."""
    if head == "nf4":
        return linear_bytes(Linears("head", arch.vocab, arch.hidden, 1), "nf4")
    if head == "8":
        return arch.embedding_parameters + 4 * arch.vocab  # codes, and one f32 scale for each row
    return itemsize * arch.head_parameters


def fixed_bytes(
    arch: Architecture, format: str, scheme: str, weights: int | None, placement: Placement, itemsize: int
) -> dict[str, int]:
    """What does not depend on the context. `weights`: exact bytes of all but embedding and head, where known."""
    if weights is None:
        weights = placed_weights(arch, format, scheme)
    return {
        "weights": weights,
        "embedding": 0 if placement.embed == "host" else itemsize * arch.embedding_parameters,
        "head": head_bytes(arch, placement.head, itemsize),
        "tables": _fixed_tables(arch, format, scheme),
        "scratch": _scratch(arch, format, itemsize),
        "step_buffers": _step_buffers(arch, itemsize),
        "attention_workspace": _attention_workspace(arch),
        "sampler": SAMPLER_BYTES * arch.vocab + 4 * -(-arch.vocab // 32) + SAMPLER_FIXED,
        "cublas_workspace": CUBLAS_BYTES,
        "graphs": 3 * (_launches(arch) * arch.layers + 3) * LAUNCH_BYTES,
    }


def per_token_bytes(arch: Architecture, placement: Placement, itemsize: int) -> dict[str, int]:
    """What each position of the context adds to the components."""
    plain = placement.kv_bits == 16
    bits = 8 * itemsize if plain else placement.kv_bits
    layer = 2 * arch.kv_heads * arch.head_dim * itemsize  # the copy of one layer that prefill reads
    return {
        "kv_cache": arch.kv_bytes_per_token(bits) + (0 if plain else layer),
        "tables": _rotary(arch) * itemsize + 8,
        "scratch": (_kinds(arch) * itemsize + 1) * PREFILL_CHUNK,  # masks as attention adds them, and one as bools
        "sampler": 13,
    }


def _launches(arch: Architecture) -> int:
    """Of a layer in a decode step, at most."""
    launches = 6 if arch.experts else 5  # experts: a router
    return launches + (2 if "four_norms" in MODEL_TYPES[arch.model_type] else 0)


def _fixed_tables(arch: Architecture, format: str, scheme: str) -> int:
    """Tables that the context does not lengthen."""
    norms = 4 * arch.other_parameters if "four_norms" in MODEL_TYPES[arch.model_type] else 0  # 1 + weight in f32
    if arch.model_type == "gpt_oss":  # the weight in f32
        norms = 4 * arch.hidden * (2 * arch.layers + 1)
    if format == "bcq":
        return norms + sum(each.count * sign_padding(each, scheme) for each in arch.linears)
    most = MOST_FRAGMENTS if format == "vq2" else small_books(format, scheme)
    if not most:
        return norms
    dense = most * FRAGMENT_BYTES * sum(each.count for each in arch.linears if not each.expert)
    experts = sum(expert_tables(each, format, scheme) for each in arch.linears if each.expert)
    return norms + MEETING_BYTES + dense + experts


def _scratch(arch: Architecture, format: str, itemsize: int) -> int:
    """What prefill holds besides the masks: dequantized weights, and all that a chunk computes."""
    formats = ((each, _format_of(arch, each, format)) for each in arch.linears)
    largest = max(_slab_weights(each, of) if of not in _PLAIN else 0 for each, of in formats)
    chunk = _chunk(arch, itemsize) * 9 // 8  # an eighth lies in between
    if format in ("vq2", "gptq"):  # the inputs of a Linear, rotated, or in the order of its groups
        chunk += itemsize * PREFILL_CHUNK * max(each.columns for each in arch.linears)
    unpacking = 0 if format in ("vq2", "bcq") and itemsize == 2 else UNPACK_BYTES.get(format, 0)
    return slab_bytes(largest, itemsize) + unpacking + chunk + SPARE_BYTES


def _slab_weights(linear: Linears, format: str) -> int:
    """The most weights that a product with such a matrix needs dequantized: of an expert, gate and up are one where
    all are rows of one matrix, else two."""
    together = linear.expert and linear.name == "gate, up" and format in ("nf4", "mxfp4")
    return linear.rows * linear.columns * (2 if together else 1)


def _chunk(arch: Architecture, itemsize: int) -> int:
    """What a prefill chunk holds at the widest moment of a block, besides the masks."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    fused = "fused" in MODEL_TYPES[arch.model_type]
    turning = 2 * arch.hidden + (q + 2 * kv) + 3 * (q + kv)  # x, its norm; q, k, v; what rotates them
    gated = 3 * arch.hidden + (3 if fused else 2) * arch.intermediate  # x before, x, its norm; gate and up
    if arch.experts:  # x before, its norm, the sum in f32; x of tokens that all chose one expert, and its MLP
        clamped = "sinks" in MODEL_TYPES[arch.model_type]
        turning += 2 * arch.hidden  # the sum was elsewhere than x before: that lies in between
        gated = max(gated, 5 * arch.hidden + (5 if clamped else 3) * arch.expert_intermediate)
    normed = 8 * arch.hidden  # gemma's norms compute in f32
    rows = itemsize * PREFILL_CHUNK
    widest = rows * max(turning, gated, normed)
    if arch.model_type == "gemma2":
        widest = max(widest, rows * (2 * arch.hidden + 2 * kv + 3 * q) + SCORES_BYTES * itemsize // 2)
    return widest + rows * _rotary(arch) + LOGITS_BYTES * arch.vocab


def slab_bytes(largest: int, itemsize: int) -> int:
    """Bytes of the buffer for dequantized weights, of which the largest matrix has so many."""
    return min(itemsize * largest, PREFILL_SCRATCH)


def _rotary(arch: Architecture) -> int:
    """Elements that a position has in the rotary tables: cos and sin for each column of a head."""
    kinds = _kinds(arch) if arch.model_type.startswith("gemma3") else 1  # its windowed layers turn otherwise
    return kinds * 2 * arch.head_dim


def _kinds(arch: Architecture) -> int:
    """Kinds of layers, windowed and not."""
    return 2 if 0 < arch.window_layers < arch.layers else 1


def _attention_workspace(arch: Architecture) -> int:
    """What the parts of decode attention exchange, on the largest card: `attention_partials` of csrc, and counters."""
    splits = min(MOST_SPLITS, max(CLUSTER, 3 * MULTIPROCESSORS // arch.kv_heads))
    columns = 64 if arch.head_dim <= 64 else 128 if arch.head_dim <= 128 else 256
    rows = arch.kv_heads * (16 if arch.heads > 8 * arch.kv_heads else 8) * splits
    return 4 * rows * (columns + columns // 16) + 64 * arch.kv_heads


def _step_buffers(arch: Architecture, itemsize: int) -> int:
    """The fixed rows of a decode step: two of the residual stream, q k v, attention, MLP, logits in f32, a route."""
    width = arch.intermediate + arch.expert_intermediate * arch.experts_active
    row = 2 * arch.hidden + (2 * arch.heads + 2 * arch.kv_heads) * arch.head_dim + width
    routing = 8 * arch.experts_active + 4 * (arch.experts + 1) if arch.experts else 0
    return itemsize * row + routing + 4 * arch.vocab
