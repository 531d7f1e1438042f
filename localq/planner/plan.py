"""The plan of a load: memory by component, and the context that a budget leaves. Torch-free.

The engine allocates by this plan, made at load with the exact bytes of the weights. `localq fit` calls the same
functions for models that are not on this machine. Windowed layers count like others, because the engine's cache keeps
every position of every layer.

Choices that the user leaves open are made here: nothing is reduced if a usable context (or the requested one) fits,
else as many of `placement.STEPS` as needed, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localq import kv_bits
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog, format_facts
from localq.files.architecture import Architecture
from localq.kv_bits import KvBits
from localq.planner import footprint
from localq.planner.footprint import CUDA_CONTEXT_BYTES, MIB
from localq.planner.placement import HEAD_COLUMNS, HEAD_NAMES, Placement, Wishes, kv_storable
from localq.wording import parse_bytes

CPU_CONTEXT = 8192  # tokens: the default without a budget
MIN_CONTEXT = 512  # tokens; a model with less does not fit
CONTEXT_STEP = 64  # tokens; chosen contexts are multiples of this
USABLE_CONTEXT = 4096  # tokens; the least context of a suggested model

# Nominal GiB -> MiB that the driver reports: RTX 4060, 4070, 4080, 4090 and 5090.
CARD_TOTALS_MIB = {8: 8188, 12: 12_282, 16: 16_376, 24: 24_564, 32: 32_607}
CARD_RESERVE = 1 / 2048  # other cards: the share that the driver keeps back on most of the cards above


# Weights of the blocks with norms; embedding and head; the KV cache, with the dequantized copy for prefill if it is
# quantized; tables of positions; memory of prefill; memory of a decode step; memory of CUDA and its libraries.
COMPONENTS = (
    *("weights", "embedding", "head", "kv_cache", "tables", "scratch", "step_buffers", "attention_workspace"),
    *("sampler", "cublas_workspace", "graphs", "cuda_context"),
)
_ON_GPU_ONLY = ("step_buffers", "attention_workspace", "cublas_workspace", "graphs")


@dataclass(frozen=True)
class Ledger:
    """Component -> bytes on the device, in the order of `COMPONENTS`."""

    components: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum(self.components.values())


@dataclass(frozen=True)
class Plan:
    """How a model would be loaded. If `fits` is false, `reason` says why in a few words.

    kv_bits, embed, head  as in `placement.Placement`
    choice                what the planner reduced, in one line; empty if nothing
    arch                  the planned shape
    """

    name: str
    format: str
    ctx: int
    kv_bits: KvBits
    ledger: Ledger
    fits: bool
    reason: str = ""
    embed: str = "device"
    head: str = "16"
    choice: str = ""
    arch: Architecture | None = None

    @property
    def placement(self) -> Placement:
        """Placement of embedding, head and KV cache."""
        return Placement(self.kv_bits, self.embed, self.head)


def parse_card(text: str) -> int:
    """Bytes of a card, as `parse_bytes`; a plain number of GiB means the total that its driver reports."""
    size = parse_bytes(text)
    if not text.strip().replace(".", "").isdecimal():
        return size
    total = CARD_TOTALS_MIB.get(size // 2**30) if size % 2**30 == 0 else None
    return total * MIB if total else size - int(size * CARD_RESERVE)


def largest_context(free_bytes: int, bytes_per_token: int) -> int:
    """Tokens whose keys and values fit in `free_bytes`."""
    return max(free_bytes, 0) // bytes_per_token


def assess(
    arch: Architecture,
    format: str,
    budget_bytes: int | None,
    *,
    wishes: Wishes | None = None,
    weights: int | None = None,
    scheme: str = "",
    name: str = "",
    itemsize: int = 2,
    context_bytes: int = CUDA_CONTEXT_BYTES,
) -> Plan:
    """As `plan`; a model that does not fit gets fits=False, a reason and the least context.

    Raises LocalqError (exit 2) for wishes that this shape does not support.
    """
    wishes = wishes or Wishes()
    ctx = wishes.ctx
    if ctx is not None and not 0 < ctx <= arch.max_context:
        why = f"a context of {ctx} tokens is not possible"
        raise usage_error(name or "context", why, f"The model supports at most {arch.max_context}.")
    _check(arch, wishes)
    target = ctx or min(USABLE_CONTEXT, arch.max_context)
    tried: list[Plan] = []
    for placement in wishes.placements(arch):
        fixed = footprint.fixed_bytes(arch, format, scheme, weights, placement, itemsize)
        fixed["cuda_context"] = context_bytes
        tried.append(_plan_placement(arch, placement, budget_bytes, fixed, ctx, itemsize))
        if tried[-1].fits and tried[-1].ctx >= target:
            break
    return replace(tried[-1], name=name, format=format, choice=_choice(wishes, tried[-1], target), arch=arch)


def plan(
    arch: Architecture,
    format: str,
    budget_bytes: int | None,
    *,
    wishes: Wishes | None = None,
    weights: int | None = None,
    scheme: str = "",
    name: str = "",
    itemsize: int = 2,
    context_bytes: int = CUDA_CONTEXT_BYTES,
    freeing: str = "",
    force: bool = False,
) -> Plan:
    """The plan of a load: with the largest context that fits, or exactly the requested one.

    budget_bytes   device memory for the process, CUDA context included; None = no limit (CPU)
    weights        exact bytes of all weights without embedding and head, if known
    itemsize       bytes of an element of the compute type
    context_bytes  memory of CUDA itself
    freeing        for the error: how to free memory, such as `gpus.closing_hint`
    force          return a plan that does not fit instead of raising

    Raises LocalqError: exit 3 if it does not fit, with the bytes and three ways out; exit 2 for wishes that this shape
    does not support.
    """
    made = assess(
        arch, format, budget_bytes, wishes=wishes, weights=weights, scheme=scheme, name=name, itemsize=itemsize,
        context_bytes=context_bytes,
    )  # fmt: skip
    if made.fits or budget_bytes is None or force:
        return made
    why = f"{made.reason} ({made.ledger.total} and {budget_bytes} bytes)"
    instead = _that_fits(made, arch, budget_bytes, wishes or Wishes(), itemsize, context_bytes)
    found = (*_ways_out(made, arch, budget_bytes, instead, itemsize), _more(made, budget_bytes, freeing))
    ways = "; ".join(f"({number}) {way}" for number, way in enumerate(found, 1))
    raise LocalqError(name or "model", why, f"Three ways out: {ways}.", ExitCode.DOES_NOT_FIT)


def _check(arch: Architecture, wishes: Wishes) -> None:
    """Raises LocalqError (exit 2) for wishes that this shape does not support."""
    if wishes.kv_bits not in (None, 16) and not kv_storable(arch):
        why = f"heads of {arch.head_dim} columns cannot be stored in {kv_bits.text(wishes.kv_bits)}"
        raise usage_error("--kv", why, "Use 16.")
    head = wishes.placements(arch)[0].head
    columns = HEAD_COLUMNS[head]
    if arch.hidden % columns:
        why = f"{HEAD_NAMES[head]} needs a multiple of {columns} columns, the head has {arch.hidden}"
        step = "Use 16." if wishes.embed != "host" or not arch.tied else "Use 16, with --embed device."
        raise usage_error("--head", why, step)
    if wishes.embed == "host" and arch.tied and wishes.head == "16":
        why = "this model's embedding is also its output head, which the GPU reads in full for every token"
        raise usage_error("--embed", why, "Add --head 8 or --head nf4, or use --embed device.")


def _plan_placement(
    arch: Architecture,
    placement: Placement,
    budget_bytes: int | None,
    fixed: dict[str, int],
    ctx: int | None,
    itemsize: int,
) -> Plan:
    """The plan of one placement, without name and format."""
    growth = footprint.per_token_bytes(arch, placement, itemsize)
    least = ctx or min(MIN_CONTEXT, arch.max_context)
    if budget_bytes is None:
        fixed.update(dict.fromkeys((*_ON_GPU_ONLY, "cuda_context"), 0))
        chosen, fits = ctx or min(arch.max_context, CPU_CONTEXT), True
    else:
        largest = largest_context(budget_bytes - sum(fixed.values()), sum(growth.values()))
        fits = largest >= least
        rounded = largest if largest < CONTEXT_STEP else largest - largest % CONTEXT_STEP
        chosen = ctx or (min(arch.max_context, rounded) if fits else least)
    ledger = Ledger({part: fixed.get(part, 0) + chosen * growth.get(part, 0) for part in COMPONENTS})
    reason = ""
    if budget_bytes is not None and not fits:
        reason = f"needs {_mib(ledger.total)} with {chosen} tokens of context, {_mib(budget_bytes)} available"
    return Plan("", "", chosen, placement.kv_bits, ledger, fits, reason, placement.embed, placement.head)


def _choice(wishes: Wishes, chosen: Plan, target: int) -> str:
    """What the planner reduced, for people."""
    changes = (
        (wishes.embed == "auto" and chosen.embed != "device", "embedding in RAM (--embed)"),
        (wishes.head == "auto" and chosen.head != "16", f"head {HEAD_NAMES[chosen.head]} (--head)"),
        (wishes.kv_bits is None and chosen.kv_bits != 16, f"KV cache {kv_bits.text(chosen.kv_bits)} (--kv)"),
    )
    made = [text for is_made, text in changes if is_made]
    return f"saves memory: {', '.join(made)}" if made else ""


def _ways_out(made: Plan, arch: Architecture, budget_bytes: int, other: str | None, itemsize: int) -> tuple[str, str]:
    """The first two ways out: another format or model; a shorter context, else the CPU."""
    first = " (it is quantized here first)" if other and catalog.resolve(other).source is None else ""
    smaller = f"use {other}, which fits{first}" if other else "use a GPU with more memory"
    per_token = sum(footprint.per_token_bytes(arch, made.placement, itemsize).values())
    largest = largest_context(budget_bytes - made.ledger.total + made.ctx * per_token, per_token)
    shorter = f"a shorter context: --ctx {largest}" if MIN_CONTEXT <= largest < made.ctx else "--device cpu"
    return smaller, shorter


def _more(made: Plan, budget_bytes: int, freeing: str) -> str:
    """The third way out: more memory."""
    missing = _mib(made.ledger.total - budget_bytes)
    return f"free {missing} more {freeing or 'by closing other programs that use the GPU'}"


def _that_fits(
    made: Plan, arch: Architecture, budget_bytes: int, wishes: Wishes, itemsize: int, context_bytes: int
) -> str | None:
    """The name to use instead: the same model in another format, else the largest that runs well.

    It must fit with all wishes, and with a usable context if none was requested. Among models of one size the
    catalogue's first is taken, in its default format.
    """
    candidates = []
    for order, entry in enumerate(catalog.load_catalogue()):
        for format in dict.fromkeys((*(each.format for each in entry.sources), *catalog.quantizable_formats(entry))):
            if format_facts.why_unsupported(entry.arch, format) or format_facts.of(format).offered_last:
                continue
            if format_facts.one_by_one(entry.arch, format):
                continue
            if entry.arch == arch and format == made.format:
                continue
            source = entry.source(format)
            asked = replace(wishes, ctx=wishes.ctx or min(USABLE_CONTEXT, entry.arch.max_context))
            try:
                other = assess(
                    entry.arch, format, budget_bytes, wishes=asked, scheme=source.scheme if source else "",
                    itemsize=itemsize, context_bytes=context_bytes,
                )  # fmt: skip
            except LocalqError:  # this shape does not support the wishes
                continue
            if other.fits:
                default = format == entry.default_format
                same = (entry.name == made.name.partition("@")[0], entry.arch == arch)
                rank = (*same, size_class(entry.arch), -order, default, other.ledger.total)
                candidates.append((rank, entry.name if default else f"{entry.name}@{format}"))
    return max(candidates)[1] if candidates else None


def size_class(arch: Architecture) -> float:
    """Parameters rounded to two digits: models that differ by less count as the same size."""
    return float(f"{arch.parameters:.2g}")


def _mib(count: int) -> str:
    return f"{-(-count // MIB):,} MiB"
