"""Plans of the model picker: verdict, context and speed of each row on this machine's card or CPU.

Runs in a thread: it may query the driver and measure bandwidth. No network.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from localq import gpus
from localq.errors import LocalqError
from localq.files import catalog
from localq.planner import (
    card,
    choose,
    fit_rows,
    footprint,
    offers,
    placement,
    plan,
    ranking,
    recommend,
    uncatalogued,
)
from localq.planner.fit_rows import FitRow, Memory
from localq.planner.offers import Offer
from localq.planner.ram import Ram, free_ram
from localq.planner.speed import cards
from localq.planner.speed.cards import Card
from localq.planner.speed.predict import Machine
from localq.settings import Settings
from localq.tui.models.picker_rows import (  # fmt: skip
    FITS,
    INCOMPLETE,
    NOT_YET,
    ON_CPU,
    SHORT,
    TOO_LARGE,
    UNREADABLE,
    PickerRow,
    local_rows,
)
from localq.wording import Say, human_bytes


@dataclass(frozen=True)
class Outlook:
    """The machine that is planned for: GPU memory, or None and the free RAM; its bandwidth.

    words, basis   the same in words, and the basis of predicted speeds
    """

    words: str
    budget: int | None
    ram: Ram | None = None
    machine: Machine | None = None
    basis: str = ""
    card: Card | None = None


def outlook(settings: Settings, say: Say) -> Outlook:
    """The outlook of this machine. May measure the GPU's bandwidth once, which takes seconds and is announced."""
    budget = choose.budget_here(settings)
    gpu = gpus.first_visible(gpus.probe().gpus) if budget is not None else None
    if budget is None or gpu is None:
        ram = free_ram(settings.dtype)
        why = "--device cpu" if settings.device == "cpu" else "no NVIDIA GPU"
        return Outlook(f"On the CPU ({why}): {human_bytes(ram.bytes)} of RAM free", None, ram)
    machine, basis = card.machine_here(gpu, say)
    limit = f" (--vram {settings.vram})" if settings.vram else ""
    words = f"{gpu.name}: {budget / footprint.MIB:,.0f} MiB available{limit}"
    return Outlook(words, budget, machine=machine, basis=basis, card=cards.match_card(gpu.name, gpu.total))


def plan_rows(outlook: Outlook, settings: Settings) -> list[PickerRow]:
    """Models on disk, the last used first, then all models in every format, the best first.

    Raises LocalqError as `picker_rows.name_rows`.
    """
    known = offers.of_catalogue()
    found = [_with_plan(row, outlook, settings) for row in local_rows(known)]
    here = {row.name for row in found}
    if outlook.budget is None:
        rows = [_on_cpu(PickerRow(each.name, each.format, offer=each), outlook, settings) for each in known]
        rows.sort(key=_cpu_order)
    else:
        fitted = fit_rows.sort([_fit_row(each, outlook, settings) for each in known])
        rows = [_of_row(each, outlook.budget) for each in fitted]
    return [*found, *(row for row in rows if row.name not in here)]


def _cpu_order(row: PickerRow) -> tuple[bool, bool, float]:
    """The CPU's order: what fits and is quick, the best first; then what fits, and the rest, the smallest first."""
    if row.offer is None:
        return True, True, 0.0
    is_quick = recommend.is_quick_on_cpu(row.offer)
    needs = math.inf if row.needs is None else row.needs
    return row.verdict != ON_CPU, not is_quick, -ranking.quality(row.offer) if is_quick else needs


def _with_plan(row: PickerRow, outlook: Outlook, settings: Settings) -> PickerRow:
    if row.verdict == UNREADABLE:
        return row
    if row.offer is None:
        assert row.local is not None, "a model without an offer is on disk"
        if not row.local.complete:
            return replace(row, verdict=INCOMPLETE, why="incomplete download; opening the model resumes it")
        try:
            offer = uncatalogued.offer(catalog.resolve(str(row.local.path)), offline=True)
        except LocalqError as error:
            return replace(row, verdict=UNREADABLE, why=error.why)
        row = replace(row, offer=offer)
    assert row.offer is not None
    if outlook.budget is None:
        return _on_cpu(row, outlook, settings)
    of_card = _of_row(_fit_row(row.offer, outlook, settings), outlook.budget)
    return replace(of_card, name=row.name, format=row.format, local=row.local)


# ---- what fits


def _fit_row(offer: Offer, outlook: Outlook, settings: Settings) -> FitRow:
    memory, wishes = Memory(outlook.budget or 0, 0), choose.wishes_of(settings)
    try:
        return fit_rows.row_of(offer, memory, wishes, outlook.machine, outlook.card)
    except LocalqError:  # the model has no such option, which loading reports
        return fit_rows.row_of(offer, memory, placement.Wishes(), outlook.machine, outlook.card)


def _of_row(row: FitRow, budget: int | None) -> PickerRow:
    offer = row.offer
    usable = row.ctx_max >= min(plan.USABLE_CONTEXT, offer.arch.max_context)
    verdict = TOO_LARGE if not row.fits else NOT_YET if offer.unsupported else FITS if usable else SHORT
    rates = (row.tok_s, row.tok_s_full) if row.fits else (None, None)
    context, of_row = row.ctx_max or None, (offer.name, offer.format, verdict, row.reason)
    return PickerRow(
        *of_row, context, *rates, make_s=row.make_s, offer=offer, needs=row.weights, share=_share(row.weights, budget)
    )


def _share(needed: int, available: int | None) -> float | None:
    return needed / available if available else None


def _on_cpu(row: PickerRow, outlook: Outlook, settings: Settings) -> PickerRow:
    assert row.offer is not None
    offer = row.offer
    if offer.unsupported:
        return replace(row, verdict=NOT_YET, why=offer.unsupported)
    try:
        made = plan.assess(offer.arch, offer.format, outlook.ram, wishes=choose.wishes_of(settings))
    except LocalqError:  # the model has no such option, which loading reports
        made = plan.assess(offer.arch, offer.format, outlook.ram)
    needed = made.ledger.total
    row = replace(row, needs=needed, share=_share(needed, outlook.ram.bytes if outlook.ram is not None else None))
    if not made.fits:
        return replace(row, verdict=TOO_LARGE, why=made.reason)
    sized = f"{fit_rows.human_count(offer.arch.parameters)} parameters need {human_bytes(made.ledger.total)} of RAM"
    return replace(row, verdict=ON_CPU, why=sized, ctx=made.ctx)
