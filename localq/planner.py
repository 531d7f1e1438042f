"""What a model needs in memory, component by component, and how much context a budget leaves. Torch-free.

The engine allocates by the plan it gets here at load, with the exact bytes of the weights; `localq fit` asks the same
functions about models that are not on this machine. Windowed layers are counted like the others, because the engine's
cache keeps every position of every layer.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from localq import catalog
from localq.architecture import Architecture, Linears
from localq.errors import ExitCode, LocalqError, usage_error

MIB = 2**20

# CUDA context, loaded kernels and captured graphs. An assumption of the 24 GB arithmetic that users of such cards go
# by (a context of 300 to 400 MiB plus graphs); to be replaced by a measurement per card.
CUDA_CONTEXT_BYTES = 500 * MIB
PREFILL_CHUNK = 1024  # tokens; prefill goes through the prompt in pieces of this size
MASK_BYTES = 3  # of one chunk row and one context position: a bool mask and its 16-bit form inside attention
LOGIT_COPIES = 4  # f32 rows over the vocabulary: logits, sorted logits, probabilities, cumulated probabilities
CPU_CONTEXT = 8192  # tokens, where no budget limits the context and none was asked for
MIN_CONTEXT = 512  # tokens; a model that leaves less does not fit
CONTEXT_STEP = 64  # contexts that the planner chooses are multiples of it
USABLE_CONTEXT = 4096  # tokens; what a suggested model must leave


# What the drivers of cards of so many GiB report in MiB: RTX 4060, 4070, 4080, 4090 and 5090.
CARD_TOTALS_MIB = {8: 8188, 12: 12_282, 16: 16_376, 24: 24_564, 32: 32_607}
CARD_RESERVE = 1 / 2048  # of any other card: the share that the driver of most of the cards above keeps back
_UNITS = {"": 2**30, "g": 2**30, "gib": 2**30, "gb": 10**9, "m": MIB, "mib": MIB, "mb": 10**6}


@dataclass(frozen=True)
class Ledger:
    """Component -> bytes on the device: weights, embedding, head, kv_cache, scratch, cuda_context."""

    components: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum(self.components.values())


@dataclass(frozen=True)
class Plan:
    """How a model would be loaded. `fits` is false only in plans of `assess`; `reason` then says why in a few words."""

    name: str
    format: str
    ctx: int
    kv_bits: int
    ledger: Ledger
    fits: bool
    reason: str = ""


def parse_bytes(text: str) -> int:
    """Bytes of "1.2", "1.2GiB" (a bare number is GiB), "900MiB", "24GB"; LocalqError (exit 2) for anything else."""
    match = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise usage_error(text, "this is not an amount of memory", "Use something like 24, 24GiB, 24GB or 900MiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_card(text: str) -> int:
    """Bytes of a whole card: as `parse_bytes`, but a bare number of GiB is what the driver of such a card reports."""
    size = parse_bytes(text)
    if not text.strip().replace(".", "").isdecimal():
        return size
    total = CARD_TOTALS_MIB.get(size // 2**30) if size % 2**30 == 0 else None
    return total * MIB if total else size - int(size * CARD_RESERVE)


def weights_bytes(arch: Architecture, format: str, scheme: str = "") -> dict[str, int]:
    """Bytes of the weights in memory: {"weights": the blocks', "embedding": the table's, "head": 0 where tied}.

    Norms, biases and routers count to "weights" and, like embedding and head, take 16 bit. `scheme` as in
    `catalog.Source`; GGUF weights are 16-bit once imported.
    """
    blocks = sum(each.count * linear_bytes(each, format, scheme) for each in arch.linears)
    return {
        "weights": blocks + 2 * arch.other_parameters,
        "embedding": 2 * arch.embedding_parameters,
        "head": 2 * arch.head_parameters,
    }


def linear_bytes(linear: Linears, format: str, scheme: str = "") -> int:
    """Bytes of one [rows, columns] matrix in `format`; the format's own tensors, without padding."""
    rows, columns = linear.rows, linear.columns
    n = rows * columns
    if format in ("bf16", "fp16", "gguf") or (format == "mxfp4" and not linear.expert):
        return 2 * n
    if format == "nf4":  # codes, 8-bit absmax of 64, f32 absmax of 256 of these, two f32 maps of 16 and 256
        blocks = -(-n // 64)
        return -(-n // 2) + blocks + 4 * -(-blocks // 256) + 4 * (16 + 256)
    if format == "mxfp4":  # codes, one e8m0 scale for 32
        return n // 2 + n // 32
    if format in ("awq", "gptq"):  # codes; for 128 of them an fp16 scale and a 4-bit zero point
        return n // 2 + -(-n // 128) * 5 // 2
    if format == "aqlm" and (match := re.fullmatch(r"(\d+)x(\d+)g(\d+)", scheme or "1x16g8")):
        books, bits, group = map(int, match.groups())
        return rows * -(-columns // group) * books * bits // 8 + 2 * rows + 2 * books * (1 << bits) * group
    if format == "vptq" and (match := re.fullmatch(r"v(\d+)-k(\d+)-(\d+)", scheme or "v8-k65536-0")):
        length, main, residual = map(int, match.groups())
        bits = math.ceil(math.log2(main)) + (math.ceil(math.log2(residual)) if residual else 0)
        # per input column: int16 permutation, 16-bit scale and bias
        return -(-rows // length) * columns * bits // 8 + 2 * length * (main + residual) + 6 * columns
    raise usage_error(f"{format} {scheme}".strip(), "the size of this format is not known")


def bits_per_weight(arch: Architecture, format: str, scheme: str = "") -> float:
    """Stored bits per weight over the block matrices."""
    return 8 * sum(each.count * linear_bytes(each, format, scheme) for each in arch.linears) / arch.linear_parameters


def scratch_bytes(arch: Architecture, format: str) -> int:
    """Working memory of a prefill chunk, without what grows with the context (`_bytes_per_token`)."""
    quantized = format not in ("bf16", "fp16", "gguf")
    tile = 2 * max(each.rows * each.columns for each in arch.linears) if quantized else 0  # one matrix, dequantized
    width = arch.intermediate or arch.expert_intermediate * arch.experts_active
    row = 4 * arch.hidden + (arch.heads + 2 * arch.kv_heads) * arch.head_dim + 3 * width
    return tile + 2 * PREFILL_CHUNK * row + 4 * LOGIT_COPIES * arch.vocab


def largest_context(free_bytes: int, bytes_per_token: int) -> int:
    """Tokens whose keys and values fit into what the rest leaves free; 0 when nothing is left."""
    return max(free_bytes, 0) // bytes_per_token


def assess(
    arch: Architecture,
    format: str,
    budget_bytes: int | None,
    *,
    ctx: int | None = None,
    kv_bits: int = 16,
    weights: int | None = None,
    scheme: str = "",
    name: str = "",
) -> Plan:
    """`plan` that never refuses: a model that does not fit gets fits=False, a reason, and its least useful context."""
    if ctx is not None and not 0 < ctx <= arch.max_context:
        why = f"a context of {ctx} tokens is not possible"
        raise usage_error(name or "context", why, f"The model was made for at most {arch.max_context}.")
    fixed = {"weights": weights} if weights is not None else weights_bytes(arch, format, scheme)
    fixed["scratch"] = scratch_bytes(arch, format)
    fixed["cuda_context"] = 0 if budget_bytes is None else CUDA_CONTEXT_BYTES
    per_token = _bytes_per_token(arch, kv_bits)
    least = ctx or min(MIN_CONTEXT, arch.max_context)
    if budget_bytes is None:
        chosen, fits = ctx or min(arch.max_context, CPU_CONTEXT), True
    else:
        largest = largest_context(budget_bytes - sum(fixed.values()), per_token)
        fits = largest >= least
        rounded = largest if largest < CONTEXT_STEP else largest - largest % CONTEXT_STEP
        chosen = ctx or (min(arch.max_context, rounded) if fits else least)
    ledger = Ledger(_with_context(fixed, arch, chosen, kv_bits))
    reason = ""
    if budget_bytes is not None and not fits:
        reason = f"needs {_mib(ledger.total)} with {chosen} tokens of context, {_mib(budget_bytes)} available"
    return Plan(name, format, chosen, kv_bits, ledger, fits, reason)


def plan(
    arch: Architecture,
    format: str,
    budget_bytes: int | None,
    *,
    ctx: int | None = None,
    kv_bits: int = 16,
    weights: int | None = None,
    scheme: str = "",
    name: str = "",
) -> Plan:
    """The plan to load by: the largest context that fits, or `ctx` exactly.

    budget_bytes  all that the process may take on the device, its CUDA context included; None = no limit (CPU)
    weights       exact bytes of all weights where they are known (then the ledger has one line for them)

    Raises LocalqError: exit 3 when it does not fit, naming the bytes and three ways out; exit 2 for a context that
    the model was not made for.
    """
    made = assess(arch, format, budget_bytes, ctx=ctx, kv_bits=kv_bits, weights=weights, scheme=scheme, name=name)
    if made.fits or budget_bytes is None:
        return made
    why = f"{made.reason} ({made.ledger.total} and {budget_bytes} bytes)"
    ways = "; ".join(f"({number}) {way}" for number, way in enumerate(_ways_out(made, arch, budget_bytes, ctx), 1))
    raise LocalqError(name or "model", why, f"Three ways out: {ways}.", ExitCode.DOES_NOT_FIT)


def _ways_out(made: Plan, arch: Architecture, budget_bytes: int, ctx: int | None) -> tuple[str, str, str]:
    """Three things to do about `made`: another model, a shorter context (or the CPU), more free memory."""
    other = _that_fits(made, arch, budget_bytes, ctx)
    smaller = f"use {other}, which fits" if other else "use a GPU with more memory"
    per_token = _bytes_per_token(arch, made.kv_bits)
    largest = largest_context(budget_bytes - made.ledger.total + made.ctx * per_token, per_token)
    shorter = f"a shorter context: --ctx-size {largest}" if MIN_CONTEXT <= largest < made.ctx else "--device cpu"
    missing = _mib(made.ledger.total - budget_bytes)
    return smaller, shorter, f"free {missing} more by closing other programs that use the GPU"


def _that_fits(made: Plan, arch: Architecture, budget_bytes: int, ctx: int | None) -> str | None:
    """What to use instead: the same model in another format if one fits, else the largest that runs.

    "Fits" means with the context asked for, or else a usable one. Among models of one size the catalogue's first
    counts, in its default format.
    """
    candidates = []
    for order, entry in enumerate(catalog.load_catalogue()):
        for format in dict.fromkeys((*(each.format for each in entry.sources), *catalog.MADE_FORMATS)):
            if catalog.not_yet(entry.arch, format) or (entry.arch == arch and format == made.format):
                continue
            source = entry.source(format)
            other = assess(entry.arch, format, budget_bytes, scheme=source.scheme if source else "")
            if other.fits and other.ctx >= (ctx or min(USABLE_CONTEXT, entry.arch.max_context)):
                default = format == entry.default_format
                same = (entry.name == made.name.partition("@")[0], entry.arch == arch)
                rank = (*same, size_class(entry.arch), -order, default, other.ledger.total)
                candidates.append((rank, entry.name if default else f"{entry.name}@{format}"))
    return max(candidates)[1] if candidates else None


def size_class(arch: Architecture) -> float:
    """Parameters to two digits: what differs by less is the same size to a person who chooses."""
    return float(f"{arch.parameters:.2g}")


def _bytes_per_token(arch: Architecture, kv_bits: int) -> int:
    return arch.kv_bytes_per_token(kv_bits) + MASK_BYTES * PREFILL_CHUNK


def _with_context(fixed: dict[str, int], arch: Architecture, ctx: int, kv_bits: int) -> dict[str, int]:
    kv_cache = ctx * arch.kv_bytes_per_token(kv_bits)
    scratch = fixed["scratch"] + ctx * MASK_BYTES * PREFILL_CHUNK
    weights = {part: count for part, count in fixed.items() if part not in ("scratch", "cuda_context")}
    return {**weights, "kv_cache": kv_cache, "scratch": scratch, "cuda_context": fixed["cuda_context"]}


def _mib(count: int) -> str:
    return f"{-(-count // MIB):,} MiB"
