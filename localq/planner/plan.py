"""The plan of a load: memory by component, and the context that a budget leaves. Torch-free.

The engine allocates by this plan, made at load with the exact bytes of the weights. `localq fit` calls the same
functions for models that are not on this machine, and this is the only check whether a model fits: `chat`, `run`,
`pull`, the screens and the engine all call it, for a GPU and for the CPU. What a layer keeps of the context counts by
its kind (`files.layer_caches`): windows that slide keep a fixed number of positions, states a fixed amount.

Choices that the user leaves open are made here. The embedding moves to host memory where that gives more context, as
this changes neither replies nor speed. The other steps of `placement.STEPS` are taken in their order, each only until
`comfortable_context` fits (or the requested context), and with them the context stops there. So more memory never gives
less context. On the CPU nothing is reduced; the context is `CPU_CONTEXT` or what the RAM leaves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog, format_facts
from localq.files.architecture import Architecture
from localq.kv_bits import KvBits
from localq.planner import costs, footprint, ram
from localq.planner.costs import PlacementCost
from localq.planner.draft_shape import DraftShape
from localq.planner.footprint import CUDA_CONTEXT_BYTES, MIB
from localq.planner.placement import Placement, Wishes
from localq.planner.ram import Ram
from localq.wording import human_bytes, parse_bytes

Budget = int | Ram | None  # bytes of GPU memory; RAM on the CPU; None: the CPU without limit

CPU_CONTEXT = 8192  # tokens: the default on the CPU
MIN_CONTEXT = 512  # tokens; a model with less does not fit
USABLE_CONTEXT = 4096  # tokens; the least context of a suggested model
COMFORTABLE_CONTEXT = 16_384  # tokens; up to here memory is saved, and a larger format or head must leave as much
THINKING_CONTEXT = 32_768  # tokens; the same for models that think

# Nominal GiB -> MiB that the driver reports: RTX 4060, 4070, 4080, 4090 and 5090.
CARD_TOTALS_MIB = {8: 8188, 12: 12_282, 16: 16_376, 24: 24_564, 32: 32_607}
_OLDER_SIZES = (4, 11)  # GB of cards that localq does not run on, to plan for all the same
_SOLD = re.compile(r"(\d{1,4})(?:\.0+)?\s*gb?")  # "24GB", "24 gb", "24g"
CARD_RESERVE = 1 / 2048  # other cards: the share that the driver keeps back on most of the cards above


@dataclass(frozen=True)
class Ledger:
    """Component -> bytes on the device, in the order of `costs.COMPONENTS`; on the CPU also those of the "process"."""

    components: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum(self.components.values())


@dataclass(frozen=True)
class Plan:
    """Plan for loading a model. If `fits` is false, `reason` says why in a few words.

    kv_bits, embed, head  as in `placement.Placement`
    choice                what the planner reduced, in one line (`Wishes.choice`); empty if nothing
    arch                  the planned shape
    rows, input_table     as in `placement.Placement`
    draft                 the draft model that is counted, if any
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
    rows: int = 1
    draft: DraftShape | None = None
    input_table: str = "device"

    @property
    def placement(self) -> Placement:
        """Placement of embedding, head and KV cache."""
        return Placement(self.kv_bits, self.embed, self.head, self.rows, self.input_table)


def parse_card(text: str) -> int:
    """Bytes of a card, as `parse_bytes`; a plain number of GiB means the total that its driver reports.

    So does the size that a card is sold by, such as 24GB; other sizes with a unit are exact.
    """
    size, sold = parse_bytes(text), _SOLD.fullmatch(text.strip().lower())
    if sold and int(sold[1]) in _sold_sizes():
        size = int(sold[1]) * 2**30
    elif not text.strip().replace(".", "").isdecimal():
        return size
    total = CARD_TOTALS_MIB.get(size // 2**30) if size % 2**30 == 0 else None
    return total * MIB if total else size - int(size * CARD_RESERVE)


def nominal_gib(total: int) -> int | None:
    """The size in GiB of cards whose driver reports `total` bytes; None for another size."""
    nominal = round(total / 2**30)
    return nominal if nominal and parse_card(str(nominal)) == total else None


def _sold_sizes() -> set[int]:
    from localq.planner.speed import cards  # start-up cost: few runs have --vram

    return {*cards.TYPICAL, *(card.gib for card in cards.CARDS), *_OLDER_SIZES}


def comfortable_context(arch: Architecture) -> int:
    """The context that memory is saved for: 16k tokens, 32k for a model that thinks, at most the model's own."""
    return min(THINKING_CONTEXT if arch.thinks else COMFORTABLE_CONTEXT, arch.max_context)


def assess(
    arch: Architecture,
    format: str,
    budget_bytes: Budget,
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
    wishes = _with_block(wishes or Wishes(), arch, format, scheme)
    ctx = wishes.ctx
    if ctx is not None and not 0 < ctx <= arch.max_context:
        why = f"a context of {ctx} tokens is not supported"
        raise usage_error(name or "context", why, f"The model supports 1 to {arch.max_context:,} tokens.")
    stored = format
    if not isinstance(budget_bytes, int):
        arch = replace(arch, stored_head=0)  # the CPU dequantizes the head too
    if isinstance(budget_bytes, Ram):
        format, scheme, itemsize = "bf16", "", budget_bytes.itemsize
        weights = budget_bytes.weights or itemsize * (arch.linear_parameters + arch.other_parameters)
        draft = None if wishes.draft is None else wishes.draft.on_cpu(itemsize)
        wishes = replace(wishes, embed="device", draft=draft)  # there both places are RAM
    open_wishes = wishes if ctx is None else replace(wishes, ctx=None)
    chunk = footprint.prefill_chunk(isinstance(budget_bytes, int))
    tried = costs.of_placements(arch, format, scheme, weights, open_wishes, itemsize, chunk)
    if isinstance(budget_bytes, int):
        cost, chosen = _choose(tried, budget_bytes - context_bytes, arch, ctx)
    else:
        cost, context_bytes = costs.on_cpu(tried[0], budget_bytes.process if isinstance(budget_bytes, Ram) else 0), 0
        chosen = ctx or min(arch.max_context, CPU_CONTEXT)
        if isinstance(budget_bytes, Ram) and ctx is None:
            chosen = max(cost.context(budget_bytes.bytes, chosen), min(MIN_CONTEXT, arch.max_context))
    ledger = _ledger(cost, chosen, context_bytes)
    reason = _shortage(ledger.total, chosen, budget_bytes)
    placed = cost.placement
    return Plan(
        name,
        stored,
        chosen,
        placed.kv_bits,
        ledger,
        not reason,
        reason,
        placed.embed,
        placed.head,
        cost.choice,
        arch,
        placed.rows,
        wishes.draft if placed.rows > 1 else None,
        placed.input_table,
    )


def _with_block(wishes: Wishes, arch: Architecture, format: str, scheme: str) -> Wishes:
    """The wishes with the MTP block of this model, if it is to draft."""
    if not wishes.mtp or wishes.draft is not None or not arch.mtp:
        return wishes
    return replace(wishes, draft=DraftShape.of_block(arch, format, scheme))


def plan(
    arch: Architecture,
    format: str,
    budget_bytes: Budget,
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

    budget_bytes   device memory for the process, CUDA context included; or the RAM of a load on the CPU, which
                   dequantizes every format; None = the CPU without limit
    weights        exact bytes of all weights without embedding and head, if known; on the CPU `Ram.weights`
    itemsize       bytes of an element of the compute type; on the CPU that of `Ram.dtype`
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
    available = budget_bytes.bytes if isinstance(budget_bytes, Ram) else budget_bytes
    why = f"{made.reason} (bytes needed: {made.ledger.total}, available: {available})"
    instead = _that_fits(made, arch, budget_bytes, wishes or Wishes(), itemsize, context_bytes)
    found = (*_ways_out(made, arch, budget_bytes, instead, itemsize), _more(made, budget_bytes, freeing))
    ways = "; ".join(f"({number}) {way}" for number, way in enumerate(found, 1))
    raise LocalqError(name or "model", why, f"Options: {ways}.", ExitCode.DOES_NOT_FIT)


def longest(planned: Callable[..., Plan], budget_bytes: Budget, wishes: Wishes) -> Plan:
    """The plan with the largest context, or with the requested one if that is longer and fits.

    planned   `assess` of one model in one format
    """
    free = planned(budget_bytes, wishes=replace(wishes, ctx=None))
    most = free.arch.max_context if free.arch else 0
    if wishes.ctx is None or not free.fits or not free.ctx < wishes.ctx <= most:
        return free
    asked = planned(budget_bytes, wishes=wishes)
    return asked if asked.fits else free


def _choose(
    tried: tuple[PlacementCost, ...], free_bytes: int, arch: Architecture, ctx: int | None
) -> tuple[PlacementCost, int]:
    """The placement and context for `free_bytes` of GPU memory; the last placement if no context fits."""
    most = ctx or arch.max_context
    target = ctx or comfortable_context(arch)
    best, longest = tried[-1], (ctx or min(MIN_CONTEXT, arch.max_context)) - 1
    for cost in tried:
        reached = cost.context(free_bytes, target if cost.is_reduced else most)
        if reached >= (most if cost.has_free_next else target):
            return cost, reached
        if reached > longest:
            best, longest = cost, reached
    return best, max(longest, ctx or min(MIN_CONTEXT, arch.max_context))


def _ledger(cost: PlacementCost, ctx: int, context_bytes: int) -> Ledger:
    sizes = {part: fixed + growth.bytes(ctx) for part, fixed, growth in cost.components}
    sizes["cuda_context"] = context_bytes
    return Ledger(sizes)


def _shortage(total: int, ctx: int, budget: Budget) -> str:
    """Return why a plan does not fit; empty if it does."""
    if isinstance(budget, Ram) and total > budget.bytes:
        needed, free = human_bytes(total), human_bytes(budget.bytes)
        return f"needs {needed} of RAM in {budget.dtype} with {ctx:,} tokens of context, but only {free} is free"
    if isinstance(budget, int) and total > budget:
        return f"needs {_mib(total)} of VRAM with {ctx:,} tokens of context, but only {_mib(budget)} is available"
    return ""


def _ways_out(made: Plan, arch: Architecture, budget: int | Ram, other: str | None, itemsize: int) -> tuple[str, str]:
    """The first two ways out: another format or model; a shorter context, the CPU, or half the bytes there."""
    on_cpu = isinstance(budget, Ram)
    is_made = bool(other) and not on_cpu and catalog.resolve(str(other)).source is None
    first = " (after quantizing it here)" if is_made else ""
    larger = "a machine with more RAM" if on_cpu else "a GPU with more memory"
    smaller = f"use {other}, which fits{first}" if other else f"use {larger}"
    itemsize, available = (budget.itemsize, budget.bytes) if isinstance(budget, Ram) else (itemsize, budget)
    chunk = footprint.prefill_chunk(not on_cpu)
    growth = costs.growth(arch, made.placement, made.draft, itemsize, chunk)
    largest = growth.context(available - made.ledger.total + growth.bytes(made.ctx))
    if MIN_CONTEXT <= largest < made.ctx:
        return smaller, f"use a shorter context (--ctx {largest})"
    if isinstance(budget, Ram):
        half = replace(budget, dtype="bfloat16", weights=None)
        if half.itemsize < budget.itemsize and assess(arch, made.format, half).fits:
            return smaller, "use --dtype bfloat16, which needs half the memory"
    elif assess(arch, made.format, ram.free_ram()).fits:
        return smaller, "run on the CPU (--device cpu)"
    return smaller, f"use {larger}" if other else "use a smaller model"


def _more(made: Plan, budget: int | Ram, freeing: str) -> str:
    """The third way out: more memory."""
    if isinstance(budget, Ram):
        return f"free another {human_bytes(made.ledger.total - budget.bytes)} of RAM by closing other programs"
    missing = _mib(made.ledger.total - budget)
    verb = "allow" if freeing.startswith("with") else "free"
    return f"{verb} {missing} more {freeing or 'by closing other programs that are using the GPU'}"


def _that_fits(
    made: Plan, arch: Architecture, budget: int | Ram, wishes: Wishes, itemsize: int, context_bytes: int
) -> str | None:
    """The name to use instead: the same model in another format, else the largest that runs well.

    It must fit with all wishes, and with a usable context if none was requested. Among models of one size the
    catalogue's first is taken, in its default format.
    """
    candidates = []
    budget = replace(budget, weights=None) if isinstance(budget, Ram) else budget
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
                    entry.arch, format, budget, wishes=asked, scheme=source.scheme if source else "",
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
