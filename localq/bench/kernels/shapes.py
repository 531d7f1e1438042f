"""Workloads of `localq bench --kernels`: the launches of real models, the standard set or the requested ones.

A product is one launch of a matrix-vector kernel: one matrix, or several that read the same x, with what the decode
step fuses around them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from localq.errors import usage_error
from localq.files import catalog, format_facts
from localq.files.architecture import Architecture

PLAIN, NORM, GATE_UP, RESIDUAL = "", "norm", "norm, silu(gate) * up", "residual"
_SHAPE = re.compile(r"^(\d+)x(\d+)$")
_LARGEST = 2**31  # elements of a matrix, and of any of its sides


@dataclass(frozen=True)
class Product:
    """Matrices [out_i, columns] of one launch; `form` is what is fused: nothing, or one of the constants above."""

    outs: tuple[int, ...]
    columns: int
    form: str = PLAIN

    @property
    def name(self) -> str:
        """As the table prints it."""
        return f"{'+'.join(map(str, self.outs))} x {self.columns}"

    @property
    def count(self) -> int:
        """Weights of all matrices."""
        return sum(self.outs) * self.columns

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.outs[0] if self.form == GATE_UP else sum(self.outs)


@dataclass(frozen=True)
class Heads:
    """The geometry of an attention layer. gated: a gate lies behind q of every head."""

    heads: int
    kv_heads: int
    head_dim: int
    gated: bool = False

    @property
    def name(self) -> str:
        """As the table prints it."""
        return f"{self.heads}/{self.kv_heads} heads of {self.head_dim}{', gated' if self.gated else ''}"


@dataclass(frozen=True)
class MixtureShape:
    """The experts of a layer; `gate` and `interleaved` as of `experts_gate_up`.

    format   mxfp4, nf4, vq2, or gguf: Q4_K, down in Q6_K
    shared   one more goes with the chosen ones: the last of the stacks, by the gate of the router
    """

    name: str
    hidden: int
    width: int
    experts: int
    active: int
    format: str
    gate: str = "silu"
    interleaved: bool = False
    shared: bool = False

    @property
    def entries(self) -> int:
        """Experts that a token goes through."""
        return self.active + self.shared


@dataclass(frozen=True)
class Workload:
    """Everything to be timed.

    nf4, dense, int8   products in each format
    batches            matrices for 9 and more rows; dequantized: matrices to dequantize
    attention          geometries; each is timed at all depths and cache widths
    widths             of the residual stream (norms)
    tables             (vocab, hidden) of embeddings and logits
    mixtures           of experts
    """

    nf4: tuple[Product, ...] = ()
    dense: tuple[Product, ...] = ()
    int8: tuple[Product, ...] = ()
    batches: tuple[Product, ...] = ()
    dequantized: tuple[Product, ...] = ()
    attention: tuple[Heads, ...] = ()
    widths: tuple[int, ...] = ()
    tables: tuple[tuple[int, int], ...] = ()
    mixtures: tuple[MixtureShape, ...] = ()


def _plain(*shapes: tuple[int, int]) -> tuple[Product, ...]:
    return tuple(Product((out,), columns) for out, columns in shapes)


# SmolLM2's gate, single matrices of llamas of 8B and 70B (the last: gate and up as one), then the launches of a step of
# llama 8B, qwen3 32B, gemma 3 27B and llama 70B.
STANDARD = Workload(
    nf4=(
        *_plain((1536, 576), (4096, 4096), (8192, 8192), (10240, 8192), (28672, 8192), (8192, 28672), (57344, 8192)),
        Product((4096, 1024, 1024), 4096, NORM),
        Product((14336, 14336), 4096, GATE_UP),
        Product((4096,), 14336, RESIDUAL),
        Product((8192, 1024, 1024), 5120, NORM),
        Product((5120,), 8192, RESIDUAL),
        Product((25600, 25600), 5120, GATE_UP),
        Product((5120,), 25600, RESIDUAL),
        Product((4096, 2048, 2048), 5376, NORM),
        Product((21504, 21504), 5376, GATE_UP),
        Product((8192, 1024, 1024), 8192, NORM),
        Product((8192,), 8192, RESIDUAL),
        Product((28672, 28672), 8192, GATE_UP),
        Product((8192,), 28672, RESIDUAL),
    ),
    dense=(
        *_plain((4096, 4096), (8192, 8192), (28672, 8192), (128256, 4096)),
        Product((4096, 1024, 1024), 4096, NORM),
        Product((14336, 14336), 4096, GATE_UP),
        Product((4096,), 14336, RESIDUAL),
    ),
    int8=_plain((8192, 8192), (128256, 4096), (128256, 8192)),
    batches=_plain((4096, 4096), (8192, 8192), (28672, 8192)),
    dequantized=_plain((4096, 4096), (28672, 8192), (57344, 8192)),
    attention=(Heads(32, 8, 128), Heads(64, 8, 128)),
    widths=(4096, 8192),
    tables=((128256, 4096),),
    mixtures=(
        MixtureShape("gpt-oss-20b", 2880, 2880, 32, 4, "mxfp4", "clamped", True),
        MixtureShape("qwen3-30b-a3b", 2048, 768, 128, 8, "nf4"),
        MixtureShape("qwen3.6-35b-a3b", 2048, 512, 256, 8, "nf4", shared=True),
        MixtureShape("mixtral-8x7b", 4096, 14336, 8, 2, "nf4"),
        MixtureShape("qwen3-30b-a3b", 2048, 768, 128, 8, "vq2"),
        MixtureShape("mixtral-8x7b", 4096, 14336, 8, 2, "vq2"),
        MixtureShape("qwen3-30b-a3b", 2048, 768, 128, 8, "gguf"),
        MixtureShape("qwen3.6-35b-a3b", 2048, 512, 256, 8, "gguf"),
    ),
)


def workload(asked: str | None) -> Workload:
    """Parse ASKED of `localq bench --kernels ASKED`: nothing, "28672x8192,4096x4096", or a catalogued model.

    Raises LocalqError: exit 2 for an invalid shape, 4 for an unknown model.
    """
    if asked is None:
        return STANDARD
    parts = [part.strip() for part in asked.lower().replace("×", "x").split(",")]
    if any(_SHAPE.match(part) for part in parts):
        return of_shapes([_shape(part) for part in parts])
    return of_architecture(catalog.find(asked.partition("@")[0]).arch)


def of_shapes(shapes: list[tuple[int, int]]) -> Workload:
    """Matrices [out, in] by themselves, through every kernel that takes their width."""
    products = _plain(*shapes)
    return _by_width(Workload(nf4=products, dense=products, int8=products, batches=products, dequantized=products))


def of_architecture(arch: Architecture) -> Workload:
    """The launches of one decode step of `arch`, each once. Of a model with experts: those of one expert."""
    traits, hidden = arch.traits, arch.hidden
    q, kv = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    middle = arch.intermediate or arch.expert_intermediate
    after = PLAIN if traits.norms_behind else RESIDUAL
    products = (
        Product((q + 2 * kv,) if traits.fused else (arch.query_rows, kv, kv), hidden, NORM),
        *([Product((q,), hidden, NORM)] if traits.attention_gate else []),
        Product((hidden,), q, after),
        *_delta_nets(arch),
        Product((middle, middle), hidden, GATE_UP),
        Product((hidden,), middle, after),
    )
    head = Product((arch.vocab,), hidden)
    return _by_width(
        Workload(
            nf4=(*products, head),
            dense=(*products, head),
            int8=(head,),
            batches=_plain((middle, hidden), (hidden, middle)),
            dequantized=_plain((middle, hidden), (hidden, middle)),
            attention=(Heads(arch.heads, arch.kv_heads, arch.head_dim, traits.hybrid),),
            widths=(hidden,),
            tables=((arch.vocab, hidden),),
            mixtures=_mixtures(arch),
        )
    )


def _delta_nets(arch: Architecture) -> tuple[Product, ...]:
    """The products around the rule of a gated delta net, or around a short convolution."""
    if arch.conv_kernel:
        return Product((3 * arch.hidden,), arch.hidden, NORM), Product((arch.hidden,), arch.hidden, RESIDUAL)
    if not arch.recurrent_layers:
        return ()
    inputs = (arch.delta_channels, arch.delta_columns)
    return Product(inputs, arch.hidden, NORM), Product((arch.hidden,), arch.delta_columns, RESIDUAL)


def _mixtures(arch: Architecture) -> tuple[MixtureShape, ...]:
    if not arch.experts:
        return ()
    ours = (arch.model_type, arch.hidden, arch.expert_intermediate, arch.experts, arch.experts_active)
    published = arch.traits.published_experts
    if published:
        return (MixtureShape(*ours, published, "clamped", True),)
    return (MixtureShape(*ours, "nf4", shared=format_facts.stacks_shared(arch, "nf4")),)


def _by_width(work: Workload) -> Workload:
    """Without what a kernel cannot take: NF4 reads blocks of 64 columns, 16- and 8-bit weights 16 bytes at a time."""

    def fitting(products: tuple[Product, ...], step: int) -> tuple[Product, ...]:
        return tuple(each for each in products if each.columns % step == 0)

    return replace(
        work,
        nf4=fitting(work.nf4, 64),
        batches=fitting(work.batches, 64),
        dequantized=fitting(work.dequantized, 64),
        dense=fitting(work.dense, 8),
        int8=fitting(work.int8, 16),
    )


def _shape(text: str) -> tuple[int, int]:
    found = _SHAPE.match(text)
    step = "Use OUTxIN or a comma-separated list, such as 28672x8192,8192x28672."
    if found is None:
        raise usage_error(repr(text), "not a matrix shape", step)
    out, columns = int(found[1]), int(found[2])
    if columns % 64 or not 0 < out * columns < _LARGEST:
        raise usage_error(repr(text), "IN must be a multiple of 64, and OUT*IN must be less than 2^31", step)
    return out, columns
