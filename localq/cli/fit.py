"""`localq fit`: what a card can hold, computed from the catalogue. No torch, no network, no download."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq.cli import options
from localq.cli.output import human_bytes, note, print_json, stdout_table
from localq.errors import usage_error

if TYPE_CHECKING:
    from localq.cli.fit_rows import Memory, Row

MIB = 2**20
_MODEL_HELP = "Only this model: its memory, line by line, in every format."
Model = Annotated[str | None, typer.Argument(help=_MODEL_HELP, autocompletion=options.known_names)]
Vram = Annotated[str | None, typer.Option("--vram", metavar="SIZE", help="Of a card you do not have here, such as 24.")]
Desktop = Annotated[
    str | None, typer.Option("--desktop", metavar="SIZE", help="What other programs take, such as 1.2.")
]
Everything = Annotated[bool, typer.Option("--all", help="Every format of every model, not the best one of each.")]


def fit(
    model: Model = None,
    vram: Vram = None,
    desktop: Desktop = None,
    ctx: options.Context = None,
    kv: options.KvBits = None,
    embed: options.Embed = None,
    head: options.Head = None,
    everything: Everything = False,
    json: options.Json = False,
) -> None:
    """Say which models fit a GPU, in which format, with how much context."""
    from localq import placement
    from localq.cli import fit_rows  # start-up cost: `--help` and the other verbs do without the planner

    settings = options.effective(kv=kv, embed=embed, head=head)
    wishes = placement.Wishes(ctx, settings.kv_bits, settings.embed, settings.head)
    memory = _memory(vram, desktop)
    candidates = fit_rows.of_model(model) if model else fit_rows.of_catalogue()
    rows = [fit_rows.row_of(each, memory, wishes) for each in candidates]
    if not model:
        rows = fit_rows.ordered(rows)
    if json:
        print_json(_as_json(rows, memory, ctx, with_ledger=model is not None))
    elif model:
        _print_ledgers(rows, memory)
    else:
        _print_table(rows if everything else fit_rows.best_of_each(rows), memory)


def _memory(vram: str | None, desktop: str | None) -> Memory:
    from localq import planner  # start-up cost, as above
    from localq.cli.fit_rows import Memory

    if vram is not None:
        return Memory(options.card_bytes(vram), planner.parse_bytes(desktop) if desktop else 0)
    total, used = _detected()
    return Memory(total, planner.parse_bytes(desktop) if desktop else used)


def _detected() -> tuple[int, int]:
    """(bytes in total, bytes that other programs hold) of the GPU that localq would use."""
    from localq import gpus  # start-up cost: most runs of `fit` name a card instead

    found = gpus.probe()
    gpu = gpus.first_visible(found.gpus)
    if gpu is None or gpu.total is None or gpu.free is None:
        why = f"no NVIDIA GPU can be asked ({'; '.join(found.untold) or 'none is visible'})"
        raise usage_error("fit", why, "Say how much memory the card has: localq fit --vram 24.")
    return gpu.total, gpu.total - gpu.free


def _as_json(rows: list[Row], memory: Memory, ctx: int | None, with_ledger: bool) -> dict[str, Any]:
    def placed(row: Row) -> dict[str, Any]:
        return {"kv_bits": row.now.kv_bits, "embed": row.now.embed, "head": row.now.head}

    def body(row: Row) -> dict[str, Any]:
        fields = {
            "name": row.candidate.name,
            "format": row.candidate.format,
            "fits": row.fits,
            "runs": row.candidate.not_yet is None,
            "last": row.candidate.last,
            "bits_per_weight": round(row.candidate.bits, 3),
            "weights_bytes": row.weights,
            "ctx_max": row.ctx_max,
            "ctx_max_no_desktop": row.ctx_max_no_desktop,
            "tok_s": None,  # this version does not predict speed
            "download_bytes": row.candidate.download_bytes,
            "quality": None,  # and has measured no quality yet
            "reason": row.reason,
        }
        ledger = {"ctx": row.now.ctx, "ledger_bytes": row.now.ledger.components, **placed(row)} if with_ledger else {}
        return {**fields, **ledger}

    return {
        "vram_bytes": memory.total,
        "desktop_bytes": memory.desktop,
        "ctx": ctx,
        "rows": [body(row) for row in rows],
    }


def _print_table(rows: list[Row], memory: Memory) -> None:
    _print_memory(memory)
    contexts = ["CONTEXT", "DESKTOP CLOSED"] if memory.desktop else ["CONTEXT"]
    headers = ["MODEL", "FORMAT", "BITS", "WEIGHTS", *contexts, "DOWNLOAD", "FITS"]
    lines = []
    for row in rows:
        shown = [_tokens(row.ctx_max), _tokens(row.ctx_max_no_desktop)][: len(contexts)]
        lines.append([
            row.candidate.name, row.candidate.format, f"{row.candidate.bits:.2f}", human_bytes(row.weights), *shown,
            _size(row.candidate.download_bytes), _verdict(row),
        ])  # fmt: skip
    stdout_table(headers, lines, right=frozenset(range(2, len(headers) - 1)))


def _print_ledgers(rows: list[Row], memory: Memory) -> None:
    _print_memory(memory)
    parts = ("weights", "embedding", "head", "kv_cache", "scratch", "cuda_context")
    headers = ["MODEL", "FORMAT", "CONTEXT", "KV BITS", *(part.replace("_", " ").upper() for part in parts)]
    headers += ["OTHER", "TOTAL, MIB", "FITS"]
    lines = []
    for row in rows:
        ledger = row.now.ledger
        shown = [ledger.components[part] for part in parts]
        sizes = [f"{size / MIB:,.0f}" for size in (*shown, ledger.total - sum(shown), ledger.total)]
        name, format, bits = row.candidate.name, row.candidate.format, str(row.now.kv_bits)
        lines.append([name, format, _tokens(row.now.ctx), bits, *sizes, _verdict(row)])
    stdout_table(headers, lines, right=frozenset(range(2, len(headers) - 1)))
    note("sizes in MiB, with the context shown")


def _print_memory(memory: Memory) -> None:
    taken = f", {memory.desktop / MIB:,.0f} MiB of it taken by other programs" if memory.desktop else ""
    note(f"GPU memory {memory.total / MIB:,.0f} MiB{taken}")


def _verdict(row: Row) -> str:
    parts = [part for part in (row.reason, row.now.choice if row.fits else "", row.candidate.remark) if part]
    return f"{'yes' if row.fits else 'no'}{': ' if parts else ''}{'; '.join(parts)}"


def _tokens(count: int) -> str:
    return f"{count:,}" if count else "-"


def _size(count: int | None) -> str:
    return human_bytes(count) if count else "-"
