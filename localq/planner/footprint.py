"""Memory of a loaded model by component: the sizes that the engine allocates, from its shape.

Torch-free.

Exact for weights, cache, tables and buffers. Memory of prefill is counted at its peak, and the engine reserves that
amount. Memory of CUDA itself is an assumption until a load measures it (`engine.load.vram`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace

from localq.drafts import ROWS
from localq.files import format_facts, layer_caches
from localq.files.architecture import Architecture
from localq.files.attention_shapes import AttentionShape
from localq.files.layer_caches import LayerCache, PerPosition
from localq.files.linears import Linears
from localq.planner import gemma4_memory, recurrent_memory, slabs
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
INPUT_ROWS = 128  # tokens whose inputs of layers are computed at a time (`models.gemma4`)
SPARE_BYTES = 32 * MIB  # unused parts of the allocator's blocks of 20 and 2 MiB
# Without fused attention (soft cap): scores of a block of queries, and copies, in 16 bit.
SCORES_BYTES = 80 * MIB
MULTIPROCESSORS = 192  # of the largest supported card
MOST_SPLITS, CLUSTER = 64, 8  # attention: splits of the slots of a KV head (csrc/attention/decode.cu)
# Bytes per entry of the vocabulary (seen, breakers, matches, index; the mask of one bit is separate), and fixed bytes.
SAMPLER_BYTES, SAMPLER_FIXED = 14, 13_092
LOGITS_BYTES = 6  # per entry of the vocabulary: one row in 16 bit and in f32


def weights_bytes(arch: Architecture, format: str, scheme: str = "") -> dict[str, int]:
    """Bytes of the weights: {"weights": of the blocks, "embedding": of tables, "head": 0 if tied}.

    "weights" includes norms, biases and routers, which take 16 bit or stay in f32; embedding and head take 16 bit.
    `scheme` as in `catalog.Source`.
    """
    return {
        "weights": _stored_bytes(arch, format, scheme) + 2 * (arch.other_parameters + arch.wide_parameters),
        "embedding": 2 * (arch.embedding_parameters + arch.input_table_parameters),
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
    unplaced = _unplaced_bytes(arch, format, scheme, itemsize, placement.rows)
    users = [format_facts.of(format)] + [format_facts.of("nf4")] * (placement.head == "nf4")
    return {
        "weights": weights,
        "embedding": itemsize * _placed_tables(arch, placement),
        "head": head_bytes(arch, placement.head, itemsize),
        **unplaced,
        "tables": unplaced["tables"] + max(each.workspace(scheme) for each in users),
    }


def host_tables(arch: Architecture, placement: Placement) -> int:
    """Weights of the tables that are in host memory."""
    return arch.embedding_parameters + arch.input_table_parameters - _placed_tables(arch, placement)


def _placed_tables(arch: Architecture, placement: Placement) -> int:
    """Weights of the tables that are on the device."""
    tables = ((placement.embed, arch.embedding_parameters), (placement.input_table, arch.input_table_parameters))
    return sum(count for place, count in tables if place == "device")


@functools.lru_cache(maxsize=64)
def _unplaced_bytes(arch: Architecture, format: str, scheme: str, itemsize: int, rows: int) -> dict[str, int]:
    """Return the part of `fixed_bytes` that is the same in every placement."""
    return {
        "kv_cache": sum(count * _recurrent_bytes(kind, itemsize, rows) for kind, count in arch.cache_kinds.items()),
        "tables": _fixed_tables(arch, format, scheme),
        "scratch": _scratch(arch, format, itemsize),
        "step_buffers": _step_buffers(arch, format, itemsize, rows),
        "attention_workspace": _attention_workspace(arch, rows),
        "sampler": SAMPLER_BYTES * arch.vocab + ROWS[-1] * 4 * -(-arch.vocab // 32) + SAMPLER_FIXED,
        "cublas_workspace": CUBLAS_BYTES,
        "graphs": _graph_launches(arch, format, rows) * LAUNCH_BYTES,
    }


def _recurrent_bytes(kind: LayerCache, itemsize: int, rows: int) -> int:
    """Bytes of a state, and of the inputs of drafted tokens behind it."""
    return layer_caches.state_bytes([kind], itemsize) + layer_caches.drafted_bytes([kind], itemsize, rows)


def prefill_chunk(on_gpu: bool) -> int:
    """Return the tokens of a pass over a prompt, which is the longest pass that a sliding window makes room for."""
    return PREFILL_CHUNK if on_gpu else CPU_CHUNK


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
        growing = [each for each in layers if each not in sliding]
        found["scratch"] -= PREFILL_CHUNK if sliding else 0
        found["kv_cache"] -= min(_copy_bytes(placement, itemsize, each) for each in (sliding, growing))
    return found


def _kept_bytes(placement: Placement, itemsize: int, layers: Mapping[PerPosition, int]) -> dict[str, int]:
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


def _copy_bytes(placement: Placement, itemsize: int, layers: Iterable[PerPosition]) -> int:
    """Bytes per position of the dequantized copy of one layer for prefill."""
    if placement.kv_bits == 16:
        return 0
    return 2 * itemsize * max((each.width for each in layer_caches.keys_and_values(layers)), default=0)


def _attention(arch: Architecture) -> dict[PerPosition, int]:
    """Each kind of layer with keys and values, or latents, and how many there are."""
    return {kind: count for kind, count in arch.cache_kinds.items() if isinstance(kind, PerPosition)}


def _slides(layer: PerPosition, chunk: int | None) -> bool:
    return chunk is not None and layer.window > 0


def _launches(arch: Architecture) -> int:
    """Most launches of a layer in a decode step."""
    launches = 6 if arch.experts else 5  # experts: a router
    launches += arch.traits.growing_queries + arch.traits.attention_gate  # a product of its own
    launches += 2 * arch.traits.wide_norms  # of queries and of keys
    launches += 8 * arch.traits.sigmoid_router  # torch's, of the choice
    launches += 7 + arch.conv_kernel if arch.conv_kernel else 0  # torch's, between two products
    return launches + 2 * arch.traits.norms_behind


def _graph_launches(arch: Architecture, format: str, rows: int) -> int:
    """Launches of all graphs: three of a step of one row, and one of each of several rows, up to `rows`; with
    recurrent layers also one of a step of one row that replays drafted tokens.

    Of several rows the norms, the write of keys and values and the rotations are launches of their own, and experts
    are computed row by row.
    """
    gemma4 = arch.traits.two_head_sizes
    of_one = (_launches(arch) + gemma4_memory.layer_launches(arch) * gemma4) * arch.layers + 3
    more = 3 + (4 if format == "vq2" else 0) + gemma4
    several = [each for each in ROWS[1:] if each <= rows]
    by_row = sum(3 * (each - 1) * arch.layers for each in several) if arch.experts else 0
    by_row += sum(2 * (each - 1) * arch.layers for each in several) if arch.traits.wide_norms else 0
    by_row += sum(gemma4_memory.row_launches(arch) * (each - 1) * arch.layers for each in several) if gemma4 else 0
    replaying = 1 if several and arch.recurrent_layers else 0
    return (3 + replaying + len(several)) * of_one + len(several) * more * arch.layers + by_row


def _fixed_tables(arch: Architecture, format: str, scheme: str) -> int:
    """Bytes of tables that do not depend on the context."""
    norms = 4 * arch.other_parameters if arch.traits.four_norms else 0  # 1 + weight in f32
    if arch.traits.two_head_sizes:
        norms = _two_sizes_of_norms(arch)
    if arch.traits.scaled_logits:
        norms += 4 * arch.hidden
    if arch.traits.constant_norms:
        norms += 4 * (arch.hidden + 2 * arch.layers * arch.head_dim)
    if arch.traits.multipliers:  # the last one holds a factor
        norms = 4 * arch.hidden
    if arch.traits.norms_in_f32:
        heads = sum(arch.qk_norm_weights(each) * layers for each, layers in arch.attention_shapes.items())
        norms = 4 * (arch.hidden * (arch.layer_norms * arch.layers + 1) + heads)
    if arch.traits.offset_norms:
        attention = arch.layers - arch.recurrent_layers
        norms = 4 * (arch.hidden * (2 * arch.layers + 1) + 2 * arch.head_dim * attention)
    return norms + format_facts.of(format).tables(arch.linears, scheme)


def _two_sizes_of_norms(arch: Architecture) -> int:
    """Bytes of norms in f32 where layers differ in their heads: of the stream, queries, keys and values."""
    heads = sum((1 + 2 * each.keys) * each.head_dim * layers for each, layers in arch.attention_shapes.items())
    inputs = arch.layers * arch.hidden + arch.input_width if arch.input_width else 0
    inputs += 4 * arch.hidden * arch.expert_layers  # around both MLPs, and of the router
    return 4 * (arch.hidden * (4 * arch.layers + 1) + heads + inputs)


def _scratch(arch: Architecture, format: str, itemsize: int) -> int:
    """Bytes of prefill without the masks: dequantized weights, and activations of a chunk."""
    own = format_facts.of(format)
    chunk = _chunk(arch, itemsize) * 9 // 8  # an eighth for gaps of the allocator
    if own.copies_inputs:
        chunk += itemsize * PREFILL_CHUNK * max(each.columns for each in arch.linears)
    unpacking = own.unpack_bytes if own.unpacks_16_bit or itemsize != 2 else 0
    return slabs.slab_of(arch, format, itemsize) + unpacking + chunk + SPARE_BYTES


def _chunk(arch: Architecture, itemsize: int) -> int:
    """Peak bytes of the activations of a prefill chunk in a block, without the masks."""
    q, kv = (max(width, default=0) for width in _widths(arch))
    turning = 2 * arch.hidden + (q + 2 * kv) + 3 * (q + kv)  # x, its norm; q, k, v; temporaries of the rotation
    turning += q if arch.traits.attention_gate else 0
    turning = _latent_columns(arch) if arch.kv_latent else turning
    turning -= 5 * kv if arch.traits.head_gates else 0  # there keys are made and turned after queries
    fused = arch.traits.fused or arch.traits.fused_mlp
    gated = 3 * arch.hidden + (3 if fused else 2) * _mlp_width(arch)  # the residual, x, its norm; gate and up
    if arch.experts:  # the residual, its norm, the sum in f32; x of the tokens of one expert (at worst all), its MLP
        turning += 2 * arch.hidden  # the sum is in another place than the residual, which leaves a gap
        gated = max(gated, 5 * arch.hidden + (5 if arch.traits.sinks else 3) * arch.expert_intermediate)
        entries = arch.experts_active * (arch.hidden + arch.expert_intermediate)  # of all experts at once
        gated = max(gated, 3 * arch.hidden + entries)
        gated += 2 * arch.hidden if arch.traits.two_head_sizes else 0  # of the dense MLP beside them
    if arch.traits.parallel:  # the norm is held throughout, which leaves a gap; what shared experts give is, too
        shared = arch.hidden if arch.shared_intermediate else 0
        gated = max(gated + shared, 3 * arch.hidden + 2 * arch.shared_intermediate) + arch.hidden
        turning += arch.hidden
    gated += 2 * arch.hidden if arch.conv_kernel else 0  # a gap that the convolution of the block before leaves
    normed = 8 * arch.hidden  # gemma's norms compute in f32
    rows = itemsize * PREFILL_CHUNK
    widest = rows * max(turning, gated, normed)
    widest = max(widest, recurrent_memory.pass_bytes(arch, itemsize, PREFILL_CHUNK))
    if arch.traits.soft_cap:
        widest = max(widest, rows * (2 * arch.hidden + 2 * kv + 3 * q) + SCORES_BYTES * itemsize // 2)
    return max(*_with_inputs(arch, widest, itemsize)) + rows * _rotary(arch) + LOGITS_BYTES * arch.vocab


def _latent_columns(arch: Architecture) -> int:
    """Columns per token at the peak of latent attention: x and its norm, and the largest of queries of latents with q
    and its rotated part, these queries with the gathered latents, and the gathered latents with the heads' values."""
    cached, values = arch.kv_latent + arch.rotary, arch.heads * arch.value_dim
    made = arch.query_columns + cached + 3 * (arch.heads + 1) * arch.rotary
    around = (2 if arch.experts else 4) * arch.hidden  # with a gap, which those with experts have anyway
    return around + max(arch.heads * cached + max(made, arch.heads * cached + cached, values), 2 * values)


def _with_inputs(arch: Architecture, block: int, itemsize: int) -> tuple[int, int]:
    """Bytes of a pass in a block, `block` without what layers add per token; and of making that."""
    width = arch.layers * arch.input_width
    kept = itemsize * PREFILL_CHUNK * width
    made = 7 * itemsize * INPUT_ROWS * width if width else 0
    return block + kept, itemsize * PREFILL_CHUNK * arch.hidden + kept + made


def _widths(arch: Architecture) -> tuple[list[int], list[int]]:
    """Columns of queries, and of keys, in each kind of attention."""
    shapes = arch.attention_shapes
    return [each.query_width for each in shapes], [each.kv_width for each in shapes]


def _mlp_width(arch: Architecture) -> int:
    """Width of the widest dense MLP."""
    return arch.intermediate * (2 if arch.wide_layers else 1)


def _rotary(arch: Architecture) -> int:
    """Elements per position in the rotary tables: cos and sin for each column of a head."""
    if arch.unrotated:
        return 0
    if arch.traits.two_rotary_tables:
        shapes = arch.attention_shapes
        return 2 * sum({each.window: (not each.window and arch.rotary) or each.head_dim for each in shapes}.values())
    return 2 * (arch.rotary or arch.head_dim)


def _attention_workspace(arch: Architecture, rows: int) -> int:
    """Bytes of the partial results of decode attention on the largest card, and of its counters."""
    counters = max((64 * rows * each.kv_heads for each in arch.attention_shapes), default=0)
    return max((_partials_of(each, rows) for each in arch.attention_shapes), default=0) + counters


def _partials_of(shape: AttentionShape, rows: int) -> int:
    """Bytes of the partial results in layers of one kind."""
    heads, kv_heads, head_dim = shape.heads, shape.kv_heads, shape.head_dim
    splits = max(
        each * min(MOST_SPLITS, max(CLUSTER, 3 * MULTIPROCESSORS // (each * kv_heads))) for each in range(1, rows + 1)
    )
    columns = next(each for each in (64, 128, 256, 512) if head_dim <= each or each == 512)
    places = kv_heads * (16 if heads > 8 * kv_heads else 8) * splits
    return 4 * places * (columns + columns // 16)


def _step_buffers(arch: Architecture, format: str, itemsize: int, rows: int) -> int:
    """Bytes of the decode steps: two residual rows, q k v, attention, MLP, logits in f32, routing.

    Steps of several rows share buffers, with a row that is normed, and of vq2 rows of three widths that are rotated.
    What experts need each step has for one row.
    """
    queries, keys = (max(width, default=0) for width in _widths(arch))
    row = 2 * arch.hidden + 2 * queries + 2 * keys + _mlp_width(arch)
    row += arch.traits.growing_queries
    if arch.traits.attention_gate or arch.traits.hybrid:  # its gate
        row += queries
    if gemma4 := arch.traits.two_head_sizes:
        row = gemma4_memory.row_elements(arch, rows, format == "vq2")
    elif rows > 1:
        row += arch.hidden + (arch.hidden + queries + _mlp_width(arch) if format == "vq2" else 0)
    experts = (arch.expert_intermediate + gemma4) * arch.experts_active
    routing = 8 * arch.experts_active + 4 * (arch.experts + 1) if arch.experts else 0
    routing += 4 * arch.experts * arch.traits.sigmoid_router
    if arch.shared_intermediate and arch.experts:  # in the choice, and at most with an MLP and a gate of its own
        row += arch.shared_intermediate
        experts += arch.expert_intermediate + 1
        routing += 12
    gates = 4 * experts if format == "gguf" else 0  # in f32, where gate and up are of two block types
    steps = sum(each <= rows for each in ROWS)
    shared = rows * (itemsize * row + 4 * arch.vocab)
    steps += rows > 1 and arch.recurrent_layers > 0  # of one row, with a replay
    recurrent = recurrent_memory.step_buffers(arch, itemsize, rows)
    return shared + steps * (itemsize * experts + gates + routing) + recurrent
