"""`localq fit`: which models fit a card, and how fast, computed from the catalogue.

No torch, no download. Only the headers of a repository that is neither in the catalogue nor on this machine are read
from the hub.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq.cli import help_page, options
from localq.cli.output import note, print_json, stdout_table
from localq.cli.pager import page_output
from localq.planner import budget
from localq.wording import human_bytes

if TYPE_CHECKING:
    from localq.planner.card import PlanningCard
    from localq.planner.fit_rows import FitRow

MIB = 2**20
_MODEL_HELP = "Details of this model in every format; ORG/REPO also works."
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, autocompletion=options.complete_names)]
Vram = Annotated[
    str | None,
    typer.Option(
        "--vram", metavar="SIZE", help="Plan for a card with this much memory (GiB).", rich_help_panel=help_page.CARD
    ),
]
Desktop = Annotated[
    str | None,
    typer.Option(
        "--desktop", metavar="SIZE", help="Memory that other programs use, such as 1.2.", rich_help_panel=help_page.CARD
    ),
]
GpuName = Annotated[
    str | None,
    typer.Option("--gpu", metavar="NAME", help='A card by name, such as "RTX 4090".', rich_help_panel=help_page.CARD),
]
Bandwidth = Annotated[
    float | None,
    typer.Option(
        "--bandwidth", min=1.0, max=1e6, metavar="GB/S", help="Memory bandwidth to assume for the prediction.",
        rich_help_panel=help_page.CARD,
    ),
]  # fmt: skip
Everything = Annotated[
    bool,
    typer.Option("--all", help="List every format, not only the best one.", rich_help_panel=help_page.OUTPUT),
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
    reserve: options.Reserve = None,
    everything: Everything = False,
    offline: options.Offline = None,
    token: options.Token = None,
    json: options.Json = False,
) -> None:
    """List the models that fit a GPU, with context and speed."""
    from localq.planner import card as planner_card  # start-up cost: the other verbs skip the planner
    from localq.planner import fit_rows, placement

    settings = options.load_settings(kv=kv, embed=embed, head=head, reserve=reserve, offline=offline)
    ctx, vram = options.flag_or_environment("ctx", ctx), options.flag_or_environment("vram", vram)
    wishes = placement.Wishes(ctx, settings.kv_bits, settings.embed, settings.head)
    looked = planner_card.planning_card(note, vram, desktop, gpu, bandwidth, budget.reserve_bytes(settings))
    candidates = fit_rows.of_model(model, format, settings.offline) if model else fit_rows.of_catalogue(format)
    rows = [fit_rows.row_of(each, looked.memory, wishes, looked.machine) for each in candidates]
    if not model:
        rows = fit_rows.sort(rows)
    if json:
        print_json(_as_json(rows, looked, ctx, with_ledger=model is not None))
    elif model:
        _print_ledgers(rows, looked)
    else:
        with page_output():
            _print_table(rows if everything else fit_rows.best_of_each(rows), looked)


def _as_json(rows: list[FitRow], looked: PlanningCard, ctx: int | None, with_ledger: bool) -> dict[str, Any]:
    def placed(row: FitRow) -> dict[str, Any]:
        return {"kv_bits": row.now.kv_bits, "embed": row.now.embed, "head": row.now.head}

    def body(row: FitRow) -> dict[str, Any]:
        fields = {
            "name": row.offer.name,
            "format": row.offer.format,
            "fits": row.fits,
            "runs": row.offer.unsupported is None,
            "last": row.offer.last,
            "bits_per_weight": round(row.offer.bits, 3),
            "weights_bytes": row.weights,
            "ctx_max": row.ctx_max,
            "ctx_max_no_desktop": row.ctx_max_no_desktop,
            "tok_s": None if row.tok_s is None else round(row.tok_s, 1),
            "download_bytes": row.offer.download_bytes,
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
    _print_memory(looked)
    contexts = ["CONTEXT", "DESKTOP CLOSED"] if looked.memory.desktop else ["CONTEXT"]
    headers = ["MODEL", "FORMAT", "BITS", "WEIGHTS", *contexts, "TOK/S", "QUALITY", "DOWNLOAD", "FITS"]
    lines = []
    for row in rows:
        shown = [_tokens(row.ctx_max), _tokens(row.ctx_max_no_desktop)][: len(contexts)]
        quality = "-" if row.quality is None else f"{row.quality:.2f}x"
        lines.append([
            row.offer.name, row.offer.format, f"{row.offer.bits:.2f}", human_bytes(row.weights), *shown,
            _rate(row), quality, _size(row.offer.download_bytes), _verdict(row),
        ])  # fmt: skip
    stdout_table(headers, lines, right=frozenset(range(2, len(headers) - 1)))
    if any(row.quality is not None for row in rows):
        note("quality: perplexity relative to the unquantized model, where measured")


def _print_ledgers(rows: list[FitRow], looked: PlanningCard) -> None:
    _print_memory(looked)
    parts = ("weights", "embedding", "head", "kv_cache", "scratch", "cuda_context")
    headers = ["MODEL", "FORMAT", "CONTEXT", "KV BITS", *(part.replace("_", " ").upper() for part in parts)]
    headers += ["OTHER", "TOTAL, MIB", "TOK/S", "FITS"]
    lines = []
    for row in rows:
        ledger = row.now.ledger
        shown = [ledger.components[part] for part in parts]
        sizes = [f"{size / MIB:,.0f}" for size in (*shown, ledger.total - sum(shown), ledger.total)]
        name, format, bits = row.offer.name, row.offer.format, str(row.now.kv_bits)
        lines.append([name, format, _tokens(row.now.ctx), bits, *sizes, _rate(row), _verdict(row)])
    stdout_table(headers, lines, right=frozenset(range(2, len(headers) - 1)))
    note("sizes in MiB, at the context shown")


def _print_memory(looked: PlanningCard) -> None:
    memory = looked.memory
    taken = f", {memory.desktop / MIB:,.0f} MiB used by other programs" if memory.desktop else ""
    kept = f", {memory.reserve / MIB:,.0f} MiB reserved" if memory.reserve else ""
    note(f"GPU memory {memory.total / MIB:,.0f} MiB{taken}{kept}")
    note(f"tok/s: {looked.basis}")


def _verdict(row: FitRow) -> str:
    return f"{'yes' if row.fits else 'no'}: {row.reason}"


def _rate(row: FitRow) -> str:
    return "-" if row.tok_s is None or not row.fits else f"{row.tok_s:.0f}" if row.tok_s >= 10 else f"{row.tok_s:.1f}"


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "-"


def _size(count: int | None) -> str:
    return human_bytes(count) if count else "-"
