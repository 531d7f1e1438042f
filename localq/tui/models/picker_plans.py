"""Plans of the model picker: verdict, context and speed of each row on this machine's card or CPU.

Runs in a thread: it may query the driver and measure bandwidth. No network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from localq import gpus
from localq.errors import LocalqError
from localq.files import catalog
from localq.planner import card, choose, fit_rows, footprint, offers, placement, plan, uncatalogued
from localq.planner.fit_rows import FitRow, Memory
from localq.planner.offers import Offer
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

CPU_ITEM_BYTES = 4  # weights and KV cache are float32 on the CPU


@dataclass(frozen=True)
class Outlook:
    """The machine that is planned for: GPU memory, or None and free host memory; its bandwidth.

    words, basis   the same in words, and the basis of predicted speeds
    """

    words: str
    budget: int | None
    host_bytes: int = 0
    machine: Machine | None = None
    basis: str = ""


def outlook(settings: Settings, say: Say) -> Outlook:
    """The outlook of this machine. May measure the GPU's bandwidth once, which takes seconds and is announced."""
    budget = choose.budget_here(settings)
    gpu = gpus.first_visible(gpus.probe().gpus) if budget is not None else None
    if budget is None or gpu is None:
        import psutil  # type: ignore[import-untyped]  # start-up cost: needed without a GPU only; has no types

        free = int(psutil.virtual_memory().available)
        why = "--device cpu" if settings.device == "cpu" else "no NVIDIA GPU"
        return Outlook(f"On the CPU ({why}), {human_bytes(free)} of memory free", None, free)
    machine, basis = card.machine_here(gpu, say)
    limit = f" (--vram {settings.vram})" if settings.vram else ""
    words = f"{gpu.name}: {budget / footprint.MIB:,.0f} MiB available{limit}"
    return Outlook(words, budget, machine=machine, basis=basis)


def plan_rows(outlook: Outlook, settings: Settings, every: bool = False) -> list[PickerRow]:
    """Models on disk, the last used first, then those that fit best. every: all formats of each model.

    Raises LocalqError as `picker_rows.name_rows`.
    """
    known = offers.of_catalogue()
    found = [_with_plan(row, outlook, settings) for row in local_rows(known)]
    here = {row.name for row in found}
    if outlook.budget is None:
        wanted = [each for each in known if each.preferred or every]
        rows = [_on_cpu(PickerRow(each.name, each.format, offer=each), outlook) for each in wanted]
        rows.sort(key=lambda row: (row.verdict != ON_CPU, _cpu_bytes(row.offer) if row.offer else 0))
        return [*found, *(row for row in rows if row.name not in here)]
    fitted = fit_rows.sort([_fit_row(each, outlook, settings) for each in known])
    rows = [_of_row(each) for each in (fitted if every else fit_rows.best_of_each(fitted))]
    return [*found, *(row for row in rows if row.name not in here)]


def _with_plan(row: PickerRow, outlook: Outlook, settings: Settings) -> PickerRow:
    if row.offer is None:
        assert row.local is not None, "a model without an offer is on disk"
        if not row.local.complete:
            return replace(row, verdict=INCOMPLETE, why="incomplete download; opening it resumes")
        try:
            offer = uncatalogued.offer(catalog.resolve(str(row.local.path)), offline=True)
        except LocalqError as error:
            return replace(row, verdict=UNREADABLE, why=error.why)
        row = replace(row, offer=offer)
    assert row.offer is not None
    if outlook.budget is None:
        return _on_cpu(row, outlook)
    of_card = _of_row(_fit_row(row.offer, outlook, settings))
    return replace(of_card, name=row.name, format=row.format, local=row.local)


# ---- what fits


def _fit_row(offer: Offer, outlook: Outlook, settings: Settings) -> FitRow:
    memory, wishes = Memory(outlook.budget or 0, 0), choose.wishes_of(settings)
    try:
        return fit_rows.row_of(offer, memory, wishes, outlook.machine)
    except LocalqError:  # the model has no such option, which loading reports
        return fit_rows.row_of(offer, memory, placement.Wishes(), outlook.machine)


def _of_row(row: FitRow) -> PickerRow:
    offer = row.offer
    usable = row.ctx_max >= min(plan.USABLE_CONTEXT, offer.arch.max_context)
    verdict = TOO_LARGE if not row.fits else NOT_YET if offer.unsupported else FITS if usable else SHORT
    rate = row.tok_s if row.fits else None
    return PickerRow(offer.name, offer.format, verdict, row.reason, row.ctx_max or None, rate, offer=offer)


def _on_cpu(row: PickerRow, outlook: Outlook) -> PickerRow:
    assert row.offer is not None
    offer, needed = row.offer, _cpu_bytes(row.offer)
    if offer.unsupported:
        return replace(row, verdict=NOT_YET, why=offer.unsupported)
    sized = f"{fit_rows.human_count(offer.arch.parameters)} parameters need about {human_bytes(needed)} of memory"
    if needed > outlook.host_bytes:
        return replace(row, verdict=TOO_LARGE, why=f"{sized}; {human_bytes(outlook.host_bytes)} free")
    return replace(row, verdict=ON_CPU, why=sized, ctx=min(plan.CPU_CONTEXT, offer.arch.max_context))


def _cpu_bytes(offer: Offer) -> int:
    arch = offer.arch
    cache = min(plan.CPU_CONTEXT, arch.max_context) * arch.kv_bytes_per_token(16) * CPU_ITEM_BYTES // 2
    return arch.parameters * CPU_ITEM_BYTES + cache
