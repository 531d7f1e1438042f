"""Memory of a loaded model by component: the sizes that the engine allocates, from its shape.

Torch-free.

Exact for weights, cache, tables and buffers. Memory of prefill is counted at its peak, and the engine reserves that
amount. Memory of CUDA itself is an assumption until a load measures it (`engine.load.vram`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from localq.files import delta_memory, format_facts, layer_caches
from localq.files.architecture import Architecture, Linears
from localq.files.format_facts import Format
from localq.files.layer_caches import KeysAndValues
from localq.planner.placement import STORED, Placement

MIB = 2**20
# Assumption for CUDA context, streams, loaded kernels and graphs (a context takes 300 to 400 MiB). A load replaces
# it by the measured value.
CUDA_CONTEXT_BYTES = 500 * MIB
KERNELS_BYTES = 64 * MIB  # part of these: machine code that is loaded at its first launch; assumed
MORE_KERNELS_BYTES = 16 * MIB  # the same for a later model in the same process
CUBLAS_BYTES = 32 * MIB  # torch's workspace for cuBLAS on Hopper; elsewhere less
LAUNCH_BYTES = 8192  # per kernel launch in a captured graph; assumed
PREFILL_CHUNK = 1024  # tokens; prefill processes the prompt in chunks of this size
CPU_CHUNK = 128  # the same on the CPU: 0.16 s for SmolLM2-135M on two cores, so that Cancel reacts; 256 is 10 % faster
SLIDES_ON_GPU = True  # whether windows slide there: where not, their layers keep every position
PREFILL_SCRATCH = 256 * MIB  # limit of weights dequantized for prefill
SPARE_BYTES = 32 * MIB  # unused parts of the allocator's blocks of 20 and 2 MiB
# Without fused attention (soft cap): scores of a block of queries, and copies, in 16 bit.
SCORES_BYTES = 80 * MIB
MULTIPROCESSORS = 192  # of the largest supported card
MOST_SPLITS, CLUSTER = 64, 8  # attention: splits of the slots of a KV head (csrc/attention/decode.cu)
# Bytes per entry of the vocabulary (seen, breakers, matches, index; the mask of one bit is separate), and fixed bytes.
SAMPLER_BYTES, SAMPLER_FIXED = 14, 12_848
LOGITS_BYTES = 6  # per entry of the vocabulary: one row in 16 bit and in f32


def weights_bytes(arch: Architecture, format: str, scheme: str = "") -> dict[str, int]:
    """Bytes of the weights: {"weights": of the blocks, "embedding": of the table, "head": 0 if tied}.

    "weights" includes norms, biases and routers, which take 16 bit, as do embedding and head. `scheme` as in
    `catalog.Source`.
    """
    return {
        "weights": _stored_bytes(arch, format, scheme) + 2 * arch.other_parameters,
        "embedding": 2 * arch.embedding_parameters,
        "head": 2 * arch.head_parameters,
    }


def _stored_bytes(arch: Architecture, format: str, scheme: str) -> int:
    """Bytes of the block matrices in files."""
    formats = ((each, format_facts.of_linear(arch, each, format)) for each in arch.linears)
    return sum(each.count * of.matrix_bytes(each, scheme) for each, of in formats)


def idle_bytes(arch: Architecture, format: str, scheme: str = "") -> int:
    """Bytes of the weights that one token does not use: experts that are not active."""
    if not arch.experts:
        return 0
    of = format_facts.of_experts(arch, format)
    experts = sum(each.count * of.placed_bytes(each, scheme) for each in arch.linears if each.expert)
    if arch.mlp_bias:
        experts += 2 * arch.expert_layers * arch.experts * (2 * arch.expert_intermediate + arch.hidden)
    return experts - experts * arch.experts_active // arch.experts


def bits_per_weight(arch: Architecture, format: str, scheme: str = "") -> float:
    """Stored bits per weight of the block matrices."""
    return 8 * _stored_bytes(arch, format, scheme) / arch.linear_parameters


def placed_weights(arch: Architecture, format: str, scheme: str = "") -> int:
    """Bytes of the blocks' weights in memory."""
    formats = ((each, format_facts.of_linear(arch, each, format)) for each in arch.linears)
    more = sum(each.count * (of.placed_bytes(each, scheme) - of.matrix_bytes(each, scheme)) for each, of in formats)
    if format_facts.stacks_shared(arch, format):
        own = format_facts.of_experts(arch, format)
        for each in arch.shared_experts:
            stacked = own.placed_bytes(replace(each, expert=True), scheme)
            more += each.count * (stacked - own.placed_bytes(each, scheme))
    return weights_bytes(arch, format, scheme)["weights"] + more


def head_bytes(arch: Architecture, head: str, itemsize: int = 2) -> int:
    """Bytes of the head; 0 if it is the embedding table. `itemsize` of the model's type."""
    if head == STORED:
        return arch.stored_head
    if head == "nf4":
        return format_facts.matrix_bytes(Linears("head", arch.vocab, arch.hidden, 1), "nf4")
    if head == "8":
        return arch.embedding_parameters + 4 * arch.vocab  # codes, and one f32 scale per row
    return itemsize * arch.head_parameters


def fixed_bytes(
    arch: Architecture, format: str, scheme: str, weights: int | None, placement: Placement, itemsize: int
) -> dict[str, int]:
    """Component -> bytes that do not depend on the context.

    `weights`: exact bytes without embedding and head.
    """
    if weights is None:
        weights = placed_weights(arch, format, scheme)
    unplaced = _unplaced_bytes(arch, format, scheme, itemsize)
    users = [format_facts.of(format)] + [format_facts.of("nf4")] * (placement.head == "nf4")
    return {
        "weights": weights,
        "embedding": 0 if placement.embed == "host" else itemsize * arch.embedding_parameters,
        "head": head_bytes(arch, placement.head, itemsize),
        **unplaced,
        "tables": unplaced["tables"] + max(each.workspace(scheme) for each in users),
    }


@functools.lru_cache(maxsize=64)
def _unplaced_bytes(arch: Architecture, format: str, scheme: str, itemsize: int) -> dict[str, int]:
    """Those of `fixed_bytes` that are the same in every placement."""
    return {
        "kv_cache": sum(count * layer_caches.state_bytes([kind], itemsize) for kind, count in arch.cache_kinds.items()),
        "tables": _fixed_tables(arch, format, scheme),
        "scratch": _scratch(arch, format, itemsize),
        "step_buffers": _step_buffers(arch, itemsize),
        "attention_workspace": _attention_workspace(arch),
        "sampler": SAMPLER_BYTES * arch.vocab + 4 * -(-arch.vocab // 32) + SAMPLER_FIXED,
        "cublas_workspace": CUBLAS_BYTES,
        "graphs": 3 * (_launches(arch) * arch.layers + 3) * LAUNCH_BYTES,
    }


def prefill_chunk(on_gpu: bool) -> int:
    """Tokens of a pass of a prompt."""
    return PREFILL_CHUNK if on_gpu else CPU_CHUNK


def window_chunk(on_gpu: bool) -> int | None:
    """Tokens of the longest pass that a window makes room for; None where windows do not slide."""
    return None if on_gpu and not SLIDES_ON_GPU else prefill_chunk(on_gpu)


def per_token_bytes(
    arch: Architecture, placement: Placement, itemsize: int, chunk: int | None = None
) -> dict[str, int]:
    """Component -> bytes per position of the context. chunk: of windows that slide, which `windowed_bytes` counts."""
    layers = {each: count for each, count in _attention(arch).items() if not _slides(each, chunk)}
    growing = _kept_bytes(placement, itemsize, layers)
    return {**growing, "tables": (_rotary(arch) + arch.traits.growing_queries) * itemsize + 8, "sampler": 13}


def windowed_bytes(arch: Architecture, placement: Placement, itemsize: int, chunk: int | None) -> dict[str, int]:
    """Component -> bytes per position of the first arch.window + chunk, in windows that slide."""
    layers = _attention(arch)
    sliding = {each: count for each, count in layers.items() if _slides(each, chunk)}
    found = _kept_bytes(placement, itemsize, sliding)
    if len(sliding) < len(layers):  # what all layers share has the size of those that grow
        found["scratch"] -= PREFILL_CHUNK if sliding else 0
        found["kv_cache"] -= _copy_bytes(placement, itemsize, sliding)
    return found


def _kept_bytes(placement: Placement, itemsize: int, layers: Mapping[KeysAndValues, int]) -> dict[str, int]:
    """Component -> bytes per position in so many layers of each kind: keys and values, and masks of a pass.

    Masks: those that attention adds, one per kind of layer, and one of bools.
    """
    bits = 8 * itemsize if placement.kv_bits == 16 else placement.kv_bits
    kinds = len({each.window for each in layers})
    return {
        "kv_cache": sum(count * each.slot_bytes(bits) for each, count in layers.items())
        + _copy_bytes(placement, itemsize, layers),
        "scratch": (kinds * itemsize + 1) * PREFILL_CHUNK if layers else 0,
    }


def _copy_bytes(placement: Placement, itemsize: int, layers: Iterable[KeysAndValues]) -> int:
    """Bytes per position of the dequantized copy of one layer for prefill; heads of all layers are alike."""
    return 0 if placement.kv_bits == 16 else 2 * itemsize * max((each.width for each in layers), default=0)


def _attention(arch: Architecture) -> dict[KeysAndValues, int]:
    """Each kind of layer with keys and values, and how many there are."""
    return {kind: count for kind, count in arch.cache_kinds.items() if isinstance(kind, KeysAndValues)}


def _slides(layer: KeysAndValues, chunk: int | None) -> bool:
    return chunk is not None and layer.window > 0


def _launches(arch: Architecture) -> int:
    """Most launches of a layer in a decode step."""
    launches = 6 if arch.experts else 5  # experts: a router
    launches += arch.traits.growing_queries + arch.traits.attention_gate  # a product of its own
    return launches + (2 if arch.traits.four_norms else 0)


def _fixed_tables(arch: Architecture, format: str, scheme: str) -> int:
    """Bytes of tables that do not depend on the context."""
    norms = 4 * arch.other_parameters if arch.traits.four_norms else 0  # 1 + weight in f32
    if arch.traits.constant_norms:
        norms += 4 * (arch.hidden + 2 * arch.layers * arch.head_dim)
    if arch.traits.norms_in_f32:
        norms = 4 * arch.hidden * (2 * arch.layers + 1)
    if arch.traits.offset_norms:
        attention = arch.layers - arch.recurrent_layers
        norms = 4 * (arch.hidden * (2 * arch.layers + 1) + 2 * arch.head_dim * attention)
    return norms + format_facts.of(format).tables(arch.linears, scheme)


def _scratch(arch: Architecture, format: str, itemsize: int) -> int:
    """Bytes of prefill without the masks: dequantized weights, and activations of a chunk."""
    formats = ((each, format_facts.of_linear(arch, each, format)) for each in arch.linears)
    largest, own = max(_slab_weights(each, of) for each, of in formats), format_facts.of(format)
    chunk = _chunk(arch, itemsize) * 9 // 8  # an eighth for gaps of the allocator
    if own.copies_inputs:
        chunk += itemsize * PREFILL_CHUNK * max(each.columns for each in arch.linears)
    unpacking = own.unpack_bytes if own.unpacks_16_bit or itemsize != 2 else 0
    return slab_bytes(largest, itemsize) + unpacking + chunk + SPARE_BYTES


def _slab_weights(linear: Linears, format: Format) -> int:
    """Most weights that a product with such a matrix dequantizes at once.

    Gate and up of an expert are one product if the format stacks experts, else two.
    """
    if not format.is_quantized:
        return 0
    together = linear.expert and linear.name == "gate, up" and format.stacks_experts
    return linear.rows * linear.columns * (2 if together else 1)


def _chunk(arch: Architecture, itemsize: int) -> int:
    """Peak bytes of the activations of a prefill chunk in a block, without the masks."""
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    turning = 2 * arch.hidden + (q + 2 * kv) + 3 * (q + kv)  # x, its norm; q, k, v; temporaries of the rotation
    turning += q if arch.traits.attention_gate else 0
    gated = (
        3 * arch.hidden + (3 if arch.traits.fused else 2) * arch.intermediate
    )  # the residual, x, its norm; gate and up
    if (
        arch.experts
    ):  # the residual, its norm, the sum in f32; x of the tokens of one expert (at worst all), and its MLP
        turning += 2 * arch.hidden  # the sum is in another place than the residual, which leaves a gap
        gated = max(gated, 5 * arch.hidden + (5 if arch.traits.sinks else 3) * arch.expert_intermediate)
    normed = 8 * arch.hidden  # gemma's norms compute in f32
    rows = itemsize * PREFILL_CHUNK
    widest = rows * max(turning, gated, normed)
    if arch.recurrent_layers:
        widest = max(widest, _delta_pass(arch, itemsize))
    if arch.traits.soft_cap:
        widest = max(widest, rows * (2 * arch.hidden + 2 * kv + 3 * q) + SCORES_BYTES * itemsize // 2)
    return widest + rows * _rotary(arch) + LOGITS_BYTES * arch.vocab


def _delta_pass(arch: Architecture, itemsize: int) -> int:
    """Peak bytes of the activations of a prefill chunk in a gated delta net."""
    shared, heads = arch.delta_value_heads // arch.delta_key_heads, arch.delta_key_heads
    rule = delta_memory.rule_bytes(PREFILL_CHUNK, heads, shared, arch.delta_key_dim, arch.delta_value_dim)
    rates = 16 * PREFILL_CHUNK * arch.delta_value_heads  # f32, with temporaries
    gathered, around = arch.delta_columns, 2 * arch.hidden  # the residual and its norm
    # q, k and v, and what they are convolved from; then with what is gathered; then the gate in f32
    mixing = itemsize * PREFILL_CHUNK * (around + arch.delta_channels + gathered) + rule
    if itemsize == 2 and (arch.delta_key_dim, arch.delta_value_dim) == delta_memory.KERNEL_DIMS:
        # by kernels: the same, the gate, what is gathered, and their workspace
        workspace = delta_memory.kernel_bytes(PREFILL_CHUNK, heads, shared)
        mixing = max(mixing, 2 * PREFILL_CHUNK * (around + arch.delta_channels + 2 * gathered) + workspace)
    gating = PREFILL_CHUNK * (itemsize * (around + 3 * gathered) + 2 * 4 * gathered)
    return max(mixing, gating, itemsize * PREFILL_CHUNK * (around + 2 * arch.delta_channels)) + rates


def slab_bytes(largest: int, itemsize: int) -> int:
    """Bytes of the buffer for dequantized weights; `largest`: weights of the largest matrix."""
    return min(itemsize * largest, PREFILL_SCRATCH)


def _rotary(arch: Architecture) -> int:
    """Elements per position in the rotary tables: cos and sin for each column of a head."""
    kinds = _kinds(arch) if arch.traits.two_rotary_tables else 1
    return kinds * 2 * (arch.rotary or arch.head_dim)


def _kinds(arch: Architecture) -> int:
    """Number of kinds of layers: windowed and not."""
    return 2 if 0 < arch.window_layers < arch.layers else 1


def _attention_workspace(arch: Architecture) -> int:
    """Bytes of the partial results of decode attention on the largest card, and of its counters."""
    splits = min(MOST_SPLITS, max(CLUSTER, 3 * MULTIPROCESSORS // arch.kv_heads))
    columns = 64 if arch.head_dim <= 64 else 128 if arch.head_dim <= 128 else 256
    rows = arch.kv_heads * (16 if arch.heads > 8 * arch.kv_heads else 8) * splits
    return 4 * rows * (columns + columns // 16) + 64 * arch.kv_heads


def _step_buffers(arch: Architecture, itemsize: int) -> int:
    """Bytes of a decode step: two residual rows, q k v, attention, MLP, logits in f32, routing."""
    width = arch.intermediate + arch.expert_intermediate * arch.experts_active
    row = 2 * arch.hidden + (2 * arch.heads + 2 * arch.kv_heads) * arch.head_dim + width + arch.traits.growing_queries
    if arch.traits.attention_gate or arch.traits.hybrid:  # its gate
        row += arch.query_columns
    routing = 8 * arch.experts_active + 4 * (arch.experts + 1) if arch.experts else 0
    if arch.shared_intermediate and arch.experts:  # in the choice, and at most with an MLP and a gate of its own
        row += arch.expert_intermediate + arch.shared_intermediate + 1
        routing += 12
    return itemsize * row + routing + _delta_buffers(arch, itemsize) + 4 * arch.vocab


def _delta_buffers(arch: Architecture, itemsize: int) -> int:
    """Bytes of a decode step of gated delta nets: operands, workspace, and rates and offsets of every layer in f32."""
    if not arch.recurrent_layers:
        return 0
    operands = arch.delta_channels + 2 * arch.delta_columns
    workspace = arch.delta_columns + arch.delta_key_heads + 2 * arch.delta_value_heads * arch.recurrent_layers
    return itemsize * operands + 4 * workspace
