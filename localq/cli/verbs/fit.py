"""`localq fit`: which models fit a card, and how fast, computed from the catalogue.

No torch, no download. Only the headers of a repository that is neither in the catalogue nor on this machine are read
from the hub.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq import processes
from localq.cli import help_page, options, reply_options
from localq.cli.output import note, print_json, stdout_table
from localq.cli.pager import page_output
from localq.planner import budget
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.planner.card import PlanningCard
    from localq.planner.fit_rows import FitRow
    from localq.planner.offers import Offer

MIB = 2**20
SCORE_NOTE = (
    "score: LMArena text score (2026-01-16) minus an estimated quantization loss; ~ marks scores estimated from "
    "a related model"
)
ORDER_NOTE = (
    "sorted by score, minus {made:.0f} points if the model must first be quantized here, with smaller deductions for a "
    "short context, low speed, a lower-precision KV cache or head, or a non-default format; slow formats, base models "
    "and models that do not fit come last"
)
DISK_NOTE = (
    "disk: size of the source plus the result; `localq quantize --format vq2` downloads one source file at a time, so "
    "it needs room only for the result and two source files"
)
MEASURED_NOTE = "perplexity: relative to the unquantized model; '-' means not measured"
_MODEL_HELP = "Show every format of this model (NAME or ORG/REPO[:TAG])."
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, autocompletion=options.complete_names)]
Vram = Annotated[
    str | None,
    typer.Option(
        "--vram", metavar="SIZE", help="Plan for a GPU with this much memory (GiB).", rich_help_panel=help_page.CARD
    ),
]
Desktop = Annotated[
    str | None,
    typer.Option(
        "--desktop",
        metavar="SIZE",
        help="Memory used by other programs (GiB), such as 1.2.",
        rich_help_panel=help_page.CARD,
    ),
]
GpuName = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help='GPU to plan for, such as "RTX 4090".', rich_help_panel=help_page.CARD),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        "--bandwidth", min=1.0, max=1e6, metavar="GB/S", help="Memory bandwidth to assume for speed predictions.",
        rich_help_panel=help_page.CARD,
    ),
]  # fmt: skip
Everything = Annotated[
    bool,
    typer.Option("--all", help="List every format, not just the best one.", rich_help_panel=help_page.OUTPUT),
]


def fit(
    model: Model = None,
    vram: Vram = None,
    desktop: Desktop = None,
    gpu: GpuName = None,
    bandwidth: Bandwidth = None,
    format: options.Format = None,
    ctx: options.Context = None,
    kv: options.KvBits = None,
    embed: options.Embed = None,
    head: options.Head = None,
    draft: reply_options.Draft = None,
    reserve: options.Reserve = None,
    everything: Everything = False,
    offline: options.Offline = None,
    token: options.Token = None,
    json: options.Json = False,
) -> None:
    """List the models that fit on a GPU, with context size and speed."""
    from localq.planner import card as planner_card  # start-up cost: the other verbs skip the planner
    from localq.planner import draft_models, fit_rows, placement

    settings = options.load_settings(
        kv=kv, embed=embed, head=head, draft=draft, reserve=reserve, desktop=desktop, offline=offline
    )
    ctx, vram = options.flag_or_environment("ctx", ctx), options.flag_or_environment("vram", vram)
    drafting = draft_models.shape(settings)
    wishes = placement.Wishes(
        ctx, settings.kv_bits, settings.embed, settings.head, settings.draft_tokens, drafting, settings.takes_mtp
    )
    if vram or gpu:  # on the card of this machine only the flag replaces what is measured
        desktop = settings.desktop
    looked = planner_card.planning_card(note, vram, desktop, gpu, bandwidth, budget.reserve_bytes(settings))
    candidates = _offers(model, format, settings.offline) if model else fit_rows.of_catalogue(format)
    here = looked.is_here
    with processes.without_collections():  # a tenth of the time
        rows = [
            fit_rows.row_of(each, looked.memory, wishes, looked.machine, looked.card, is_here=here)
            for each in candidates
        ]
    if not model:
        rows = fit_rows.sort(rows)
    if json:
        print_json(_as_json(rows, looked, ctx, with_ledger=model is not None))
    elif model:
        _print_ledgers(rows, looked)
    else:
        with page_output():
            _print_table(rows if everything else fit_rows.best_of_families(rows), looked)
            if not everything:
                _note_others(rows)


def _offers(model: str, format: str | None, offline: bool) -> list[Offer]:
    """The offers of a model; of a repository with several GGUF models, one for each."""
    from localq.files import catalog
    from localq.files.gguf_choice import SeveralGgufError
    from localq.planner import fit_rows, gguf_offers  # start-up cost, as above

    try:
        return fit_rows.of_model(model, format, offline)
    except SeveralGgufError:
        found = [each.offer for each in gguf_offers.models(catalog.resolve(model), offline) if each.offer is not None]
        if not found:
            raise
        return found


def _as_json(rows: list[FitRow], looked: PlanningCard, ctx: int | None, with_ledger: bool) -> dict[str, Any]:
    from localq.planner import ranking

    def placed(row: FitRow) -> dict[str, Any]:
        return {"kv_bits": row.now.kv_bits, "embed": row.now.embed, "head": row.now.head}

    def body(row: FitRow) -> dict[str, Any]:
        fields = {
            "name": row.offer.name,
            "format": row.offer.format,
            "fits": row.fits,
            "runs": row.offer.unsupported is None,
            "last": row.offer.last,
            "family": row.offer.entry.family or None if row.offer.entry else None,
            "year": row.offer.entry.year or None if row.offer.entry else None,
            "score": round(ranking.quality(row.offer), 1),
            "score_estimated": ranking.is_estimated(row.offer),
            "bits_per_weight": round(row.offer.bits, 3),
            "stored_bits_per_weight": round(row.offer.stored_bits, 3),
            "quantized_here": row.offer.is_made_here,
            "weights_bytes": row.weights,
            "ctx_max": row.ctx_max,
            "ctx_max_no_desktop": row.ctx_max_no_desktop,
            "tok_s": None if row.tok_s is None else round(row.tok_s, 1),
            "tok_s_full": None if row.tok_s_full is None else round(row.tok_s_full, 1),
            "download_bytes": row.offer.download_bytes,
            "disk_bytes": row.disk_bytes,
            "make_s": None if row.make_s is None else round(row.make_s),
            "quality": None if row.quality is None else round(row.quality, 3),
            "reason": row.reason,
        }
        ledger = {"ctx": row.now.ctx, "ledger_bytes": row.now.ledger.components, **placed(row)} if with_ledger else {}
        return {**fields, **ledger}

    memory, machine = looked.memory, looked.machine
    return {
        "vram_bytes": memory.total,
        "desktop_bytes": memory.desktop,
        "reserve_bytes": memory.reserve,
        "ctx": ctx,
        "gpu": looked.gpu,
        "read_bytes_per_s": None if machine is None else round(machine.read_bytes_per_s),
        "tok_s_basis": looked.basis,
        "rows": [body(row) for row in rows],
    }


def _print_table(rows: list[FitRow], looked: PlanningCard) -> None:
    from localq.planner import fit_rows, making, ranking

    _print_memory(looked)
    is_known = looked.memory.desktop and not looked.desktop_assumed
    contexts = ["CONTEXT", "DESKTOP CLOSED"] if is_known else ["CONTEXT"]
    is_made, is_measured = any(row.offer.is_made_here for row in rows), any(row.quality is not None for row in rows)
    headers = ["MODEL", "YEAR", "SCORE", "FORMAT", "BITS", *contexts, "TOK/S", "WHEN FULL", "DOWNLOAD"]
    headers += [*(["TO MAKE", "DISK"] if is_made else []), *(["PERPLEXITY"] if is_measured else []), "NOTES"]
    lines = []
    for row in rows:
        offer, entry = row.offer, row.offer.entry
        shown = [_tokens(row.ctx_max), _tokens(row.ctx_max_no_desktop)][: len(contexts)]
        made = ["-" if row.make_s is None else making.duration(row.make_s), _size(row.disk_bytes)] if is_made else []
        measured = ["-" if row.quality is None else f"{row.quality:.2f}x"] if is_measured else []
        mark = "~" if ranking.is_estimated(offer) else ""
        lines.append([
            offer.name, str(entry.year or "-") if entry else "-", f"{mark}{ranking.quality(offer):.0f}", offer.format,
            f"{offer.stored_bits:.2f}", *shown, _rate(row, row.tok_s), _rate(row, row.tok_s_full),
            _size(offer.download_bytes), *made, *measured, fit_rows.notes(row),
        ])  # fmt: skip
    stdout_table(headers, lines, right=frozenset({2, *range(4, len(headers) - 1)}))
    note(SCORE_NOTE)
    note(ORDER_NOTE.format(made=ranking.MADE_POINTS))
    if any(row.offer.is_calibrated for row in rows):
        note(DISK_NOTE)
    note(MEASURED_NOTE if is_measured else "perplexity has not been measured for these models in these formats")


def _note_others(rows: list[FitRow]) -> None:
    """Note how many rows `--all` adds."""
    from localq.planner import fit_rows

    fitting = sum(row.fits for row in rows) - sum(row.fits for row in fit_rows.best_of_families(rows))
    note(f"one line per family; {fitting} more models and formats fit (--all lists them)")


def _print_ledgers(rows: list[FitRow], looked: PlanningCard) -> None:
    from localq.planner import draft_cost

    _print_memory(looked)
    parts: tuple[str, ...] = ("weights", "embedding", "head", "kv_cache", "scratch", "cuda_context")
    if rows and rows[0].now.draft is not None:
        parts = (*parts, *draft_cost.COMPONENTS)
    headers = ["MODEL", "FORMAT", "CONTEXT", "KV BITS", *(part.replace("_", " ").upper() for part in parts)]
    headers += ["OTHER", "TOTAL, MIB", "TOK/S", "NOTES"]
    lines = []
    for row in rows:
        ledger = row.now.ledger
        shown = [ledger.components[part] for part in parts]
        sizes = [f"{size / MIB:,.0f}" for size in (*shown, ledger.total - sum(shown), ledger.total)]
        name, format, bits = row.offer.name, row.offer.format, str(row.now.kv_bits)
        lines.append([name, format, _tokens(row.now.ctx), bits, *sizes, _rate(row, row.tok_s), row.reason])
    stdout_table(headers, lines, right=frozenset(range(2, len(headers) - 1)))
    note("sizes are in MiB, for the context shown")


def _print_memory(looked: PlanningCard) -> None:
    note(f"GPU memory {looked.memory_text}")
    note(f"tok/s: {looked.basis}")


def _rate(row: FitRow, tok_s: float | None) -> str:
    return "-" if tok_s is None or not row.fits else f"{tok_s:.0f}" if tok_s >= 10 else f"{tok_s:.1f}"


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "-"


def _size(count: int | None) -> str:
    return human_bytes(count) if count else "-"
