"""`chat --dry-run` and `run --dry-run`: the plan and its reasons, before any download."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from localq.cli.output import note, print_json, print_line
from localq.errors import ExitCode, LocalqError
from localq.files import packaged_model
from localq.files.hub import client as hub_client
from localq.files.hub import fetch as hub
from localq.planner import budget as memory_budget
from localq.planner import card as planner_card
from localq.planner import choose, draft_models, explain, fit_rows, footprint, making, offers, room
from localq.planner import plan as memory_plan
from localq.planner.draft_shape import DraftShape
from localq.planner.offers import Choice, FormatCandidate, Offer
from localq.planner.ram import Ram
from localq.planner.speed import cards, measurements, predict
from localq.planner.speed.cards import Card
from localq.planner.speed.predict import Machine
from localq.sanitize import sanitize
from localq.settings import Settings
from localq.wording import human_bytes

MIB = 2**20


@dataclass(frozen=True)
class Report:
    """The plan for a model: format, memory and predicted speed.

    memory     what is planned for
    machines   name of a GPU -> its bandwidth; `basis` names the source of these figures
    card       the usual GPU of that size, where it is not in this machine
    """

    choice: Choice
    settings: Settings
    memory: room.Room
    machines: dict[str, Machine]
    basis: str
    card: Card | None = None

    @property
    def decisions(self) -> list[explain.Line]:
        """Decisions other than the format: context, KV cache, embedding, head."""
        taken = self.choice.taken
        wishes = choose.wishes_of(self.settings)
        return explain.lines(taken.plan, wishes, taken.offer.arch, self.memory.budget, taken.offer.scheme)

    @property
    def contexts(self) -> tuple[int, int]:
        """The largest context now, and after other programs are closed; 0 if the model does not fit."""
        offer, wishes = self.choice.taken.offer, choose.wishes_of(self.settings)
        planned = functools.partial(
            memory_plan.assess, offer.arch, offer.format, weights=offer.block_bytes, scheme=offer.scheme
        )
        budgets = (self.memory.budget, self.memory.no_desktop)
        plans = (memory_plan.longest(planned, budget, wishes) for budget in budgets)
        now, alone = (plan.ctx if plan.fits else 0 for plan in plans)
        return now, alone

    @property
    def unsupported(self) -> str | None:
        """Reason the chosen format cannot run; None if it can."""
        return self.choice.taken.offer.unsupported

    def rates(self, each: FormatCandidate) -> dict[str, float]:
        """GPU -> predicted tok/s, for GPUs with a known bandwidth."""
        offer, placement = each.offer, each.plan.placement
        if offer.unsupported is not None or not each.plan.fits:
            return {}
        rates = {
            name: predict.tokens_per_s(offer.arch, offer.format, offer.scheme, placement, machine)
            for name, machine in self.machines.items()
        }
        return {name: rate for name, rate in rates.items() if rate is not None}

    @property
    def alternatives(self) -> list[FormatCandidate]:
        """Other formats that would run here."""
        return [each for each in self.choice.candidates if each.usable and each is not self.choice.taken]


def print_plan(name: str, format: str | None, settings: Settings, as_json: bool = False, force: bool = False) -> int:
    """Print the plan and return the exit code that the command itself would end with.

    Raises LocalqError after the plan where that is not 0; with `as_json` the code is returned instead.
    """
    report = make_report(name, format, settings)
    too_large = choose.too_large(report.choice.taken.offer, report.memory.budget, settings)
    refusal = _refusal(report, None if force else too_large)
    if as_json:
        print_json(to_dict(report, too_large is None))
        return refusal.exit_code if refusal else ExitCode.OK
    for title, text in lines(report):
        print_line(f"{title:<11} {sanitize(text)}".rstrip())
    if report.basis:
        note(f"tok/s: {report.basis}")
    if refusal is not None:
        raise refusal
    return ExitCode.OK


def _refusal(report: Report, too_large: LocalqError | None) -> LocalqError | None:
    """The error that `chat` or `hub.fetch` would raise before the first byte; None without one."""
    taken = report.choice.taken
    source = taken.offer.source or taken.offer.base
    if report.unsupported and source is not None:
        step = "`localq fit --vram SIZE` lists the formats that fit."
        return LocalqError(taken.offer.name, report.unsupported, step, ExitCode.FAILURE)
    if too_large is not None:
        return too_large
    if source and not _is_here(taken) and (report.settings.offline or hub_client.is_offline()):
        return hub.not_here(source.repo or source.package)
    return None


def _is_here(each: FormatCandidate) -> bool:
    """Return whether nothing must be fetched: the model, its source or its package is on this machine."""
    source = each.offer.source or each.offer.base
    if each.here is not None or source is None:
        return True
    if source.kind == "pypi" and packaged_model.installed_path(source) is not None:
        return True
    return each.offer.source is None and hub.local_source(source) is not None


def make_report(name: str, format: str | None, settings: Settings) -> Report:
    """The plan of a model on this machine; with a --vram that it does not have, on such a card."""
    memory = room.planned(settings)
    machines, basis, usual = dict[str, Machine](), "", None
    if memory.gpu is not None and isinstance(memory.budget, int):
        machine, basis = planner_card.machine_here(memory.gpu, note)
        machines = {memory.gpu.name: machine} if machine else {}
    elif isinstance(memory.budget, int):
        total = memory_budget.vram_limit(settings) or 0
        usual = planner_card.usual_card(total)
        sized = cards.of_size(memory_plan.nominal_gib(total) or 0) or ([usual] if usual else [])
        machines = {card.name: Machine.of(card) for card in sized}
        basis = planner_card.BASIS if machines else ""
    target, choice = choose.choose_target(name, format, settings, memory.budget)
    if choice is None:
        offer = fit_rows.of_model(name, offline=settings.offline)[0]
        wishes = choose.wishes_of(settings)
        plan = memory_plan.assess(
            offer.arch, offer.format, memory.budget, wishes=wishes, weights=offer.block_bytes, scheme=offer.scheme,
            name=target.name,
        )  # fmt: skip
        alone = FormatCandidate(offer, plan, hub.local_path(target), plan.fits and offer.unsupported is None)
        choice = Choice(alone, "the only format available", (alone,))
    return Report(choice, settings, memory, machines, basis, usual)


def lines(report: Report) -> list[tuple[str, str]]:
    """(title, text) of every line."""
    taken = report.choice.taken
    offer, plan = taken.offer, taken.plan
    rows = [("model", f"{offer.name}, {fit_rows.human_count(offer.arch.parameters)} parameters")]
    rows += [("memory", report.memory.text(report.settings))]
    rows += [("format", f"{offer.shown_format}, {_bits(offer)} ({report.choice.why})")]
    rows += [("source", _source(report, taken)), ("download", _download(taken).removesuffix(" to download"))]
    rows += [(line.what, f"{line.value} ({line.why}; {line.option})") for line in report.decisions]
    parts = [f"{part.replace('_', ' ')} {size / MIB:,.0f}" for part, size in plan.ledger.components.items() if size]
    if plan.draft is not None and plan.draft.is_block:
        rows += [("MTP block", "used for drafting; to turn it off, use --draft lookup")]
    elif plan.draft is not None:
        rows += [("draft model", _draft(report, plan.draft))]
    rows += [("uses", f"{plan.ledger.total / MIB:,.0f} MiB: {', '.join(parts)}")]
    if report.unsupported:
        rows += [("runs", f"no: {report.unsupported}")]
    rows += [("speed", _rates(report, taken))]
    rows += [("quality", _quality(offer))]
    rows += [row for each in report.alternatives for row in _alternative(report, each)]
    return rows


def _bits(offer: Offer) -> str:
    text = f"{offer.stored_bits:.2f} bits per weight"
    return text if offer.stored_bits == offer.bits else f"{text}, {offer.bits:.2f} in memory"


def _alternative(report: Report, each: FormatCandidate) -> list[tuple[str, str]]:
    offer = each.offer
    rows = [("or", f"{offer.name}: {each.plan.ctx:,} tokens, {_rates(report, each)}; {_download(each)}")]
    rows.append(("", f"quality: {_quality(offer)}"))
    if made_by := _made_by(report, each):
        rows.append(("", f"to quantize: {made_by}"))
        if more := _more_bits(report, each):
            rows.append(("", f"with --bits {more['bits']}: {more['ctx']:,} tokens"))
    return rows


def _made_by(report: Report, each: FormatCandidate) -> str | None:
    is_made = each.offer.is_calibrated and not each.here
    return offers.making_command(each.offer, report.card) if is_made else None


def _more_bits(report: Report, each: FormatCandidate) -> dict[str, Any] | None:
    if _made_by(report, each) is None:
        return None
    found = offers.more_bits(each.offer, report.memory.budget, choose.wishes_of(report.settings))
    return {"bits": found[0], "ctx": found[1]} if found else None


def _rates(report: Report, each: FormatCandidate) -> str:
    rates = report.rates(each)
    text = ", ".join(f"{rate:.0f} tok/s ({name})" for name, rate in rates.items())
    return f"about {text}" if text else "tok/s unknown"


def _quality(offer: Offer) -> str:
    """Measured quality, or the note on the format without a measurement."""
    remark = measurements.load().quality_notes.get(offer.format) if offers.ratio(offer) is None else None
    return f"{fit_rows.quality(offer)}{f'; {remark}' if remark else ''}"


def _source(report: Report, taken: FormatCandidate) -> str:
    offer, source = taken.offer, taken.offer.source
    if source is None and offer.base:
        made = f"quantized here from {offer.base.repo or offer.base.package}"
        if taken.here is not None:
            return made
        time = making.estimate(offer.format, offer.arch.parameters, report.card)
        size = sum(footprint.weights_bytes(offer.arch, offer.format, offer.scheme).values())
        return f"{made} ({time}, {human_bytes(size)} on disk)"
    if source is None:
        return str(taken.here)
    checked = "" if source.verified else " (catalogue entry not verified)"
    origin = f"{source.repo} at {source.revision}" if source.kind == "hub" else f"{source.package} {source.version}"
    return f"{origin}{checked}{', gated' if source.gated else ''}"


def _draft(report: Report, shape: DraftShape) -> str:
    target = draft_models.target(report.settings)
    assert target is not None
    text = f"{shape.name}, {shape.format}"
    if hub.local_path(target) is not None:
        return f"{text} (on this machine)"
    size = target.source.bytes if target.source is not None else 0
    return f"{text} ({human_bytes(size)} to download)" if size else text


def _download(each: FormatCandidate) -> str:
    if each.here is not None:
        return f"on this machine: {each.here}"
    if _is_here(each):
        return "nothing to download: the source is on this machine"
    size = each.offer.download_bytes
    return f"{human_bytes(size)} to download" if size else "unknown size"


def to_dict(report: Report, fits: bool) -> dict[str, Any]:
    """The object of `--json`; sizes in bytes, the source as in `localq show --json`."""
    taken = report.choice.taken
    offer, plan, source = taken.offer, taken.plan, taken.offer.source
    budget, contexts = report.memory.budget, report.contexts

    def rounded(each: FormatCandidate) -> dict[str, float]:
        return {name: round(rate, 1) for name, rate in report.rates(each).items()}

    return {
        "name": offer.name,
        "format": offer.shown_format,
        "why": report.choice.why,
        "fits": fits,
        "runs": report.unsupported is None,
        "reason": plan.reason or report.unsupported,
        "budget_bytes": budget if isinstance(budget, int) else None,
        "ram_bytes": budget.bytes if isinstance(budget, Ram) else None,
        "desktop_bytes": report.memory.desktop,
        "desktop_assumed": report.memory.is_assumed,
        "source": (source.repo or source.package) if source else None,
        "revision": (source.revision if source.kind == "hub" else source.version) if source else None,
        "path": str(taken.here) if taken.here else None,
        "download_bytes": 0 if _is_here(taken) else offer.download_bytes,
        "ctx": plan.ctx,
        "ctx_max": contexts[0],
        "ctx_max_no_desktop": contexts[1],
        "kv_bits": plan.kv_bits,
        "embed": plan.embed,
        "head": plan.head,
        "choices": [{"what": line.what, "value": line.value, "why": line.why} for line in report.decisions],
        "draft_model": plan.draft.name if plan.draft else None,
        "ledger_bytes": plan.ledger.components,
        "tok_s": rounded(taken),
        "tok_s_basis": report.basis,
        "alternatives": [
            {
                "name": each.offer.name, "format": each.offer.format, "ctx": each.plan.ctx, "tok_s": rounded(each),
                "path": str(each.here) if each.here else None, "download_bytes": each.offer.download_bytes,
                "made_by": _made_by(report, each), "more_bits": _more_bits(report, each),
            }
            for each in report.alternatives
        ],
    }  # fmt: skip
