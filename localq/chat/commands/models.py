"""Slash commands about models: `/model`, `/fit`, `/show info` and `/show params`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from localq import settings, wording
from localq.chat.commands.host import Host
from localq.chat.session import ChatSession
from localq.errors import LocalqError, usage_error
from localq.files import catalog
from localq.wording import memory_lines, table_lines


@dataclass(frozen=True)
class SwitchModel:
    """Result of `/model NAME`: the front end opens `name` and continues the conversation with it.

    If that fails, it continues with the current model. draft: the draft model to open beside it; None: as before.
    """

    name: str
    format: str | None = None
    draft: str | None = None


def model(session: ChatSession, argument: str, host: Host) -> str | SwitchModel:
    """Name the current model and those on this machine, or switch to another."""
    name, _, format = argument.partition(" ")
    if name:
        catalog.resolve(name)  # a wrong name is an error before the current model is unloaded
        return SwitchModel(name, format.strip() or None)
    from localq.files import local_models  # start-up cost: only asked for here

    rows = [[each.name, each.format] for each in local_models.list_local() if each.complete]
    held = [f"current model: {session.record.model or session.request.options.name}"]
    return "\n".join([*held, *(["on this machine:", *table_lines(["MODEL", "FORMAT"], rows)] if rows else [])])


def fit(session: ChatSession, argument: str, host: Host) -> str:
    """List which formats of this model, or of another, fit this GPU, and with how much context."""
    from localq.planner import budget, card, fit_rows, placement  # start-up cost: only asked for here

    known = settings.load()
    notices: list[str] = []
    wishes = placement.Wishes(known.ctx, known.kv_bits, known.embed, known.head)
    looked = card.planning_card(
        notices.append, known.vram, "0" if known.vram else None, None, None, budget.reserve_bytes(known)
    )
    offers = fit_rows.of_model(argument or session.record.model, None, known.offline)
    here = looked.is_here
    found = [fit_rows.row_of(each, looked.memory, wishes, looked.machine, looked.card, is_here=here) for each in offers]
    rows = [
        [
            row.offer.name,
            row.offer.format,
            f"{row.ctx_max:,}" if row.ctx_max else "-",
            *("-" if rate is None or not row.fits else f"{rate:.0f}" for rate in (row.tok_s, row.tok_s_full)),
            row.reason,
        ]
        for row in found
    ]
    memory = looked.memory
    held = f"GPU memory {memory.total / 2**20:,.0f} MiB, {memory.desktop / 2**20:,.0f} MiB in use (including this chat)"
    headers = ["MODEL", "FORMAT", "CONTEXT", "TOK/S", "WHEN FULL", "NOTES"]
    return "\n".join([*notices, held, *table_lines(headers, rows, frozenset({2, 3, 4}))])


def info(session: ChatSession) -> str:
    """Facts of the model, for `/show info`."""
    from localq.planner import model_facts  # start-up cost: only asked for here

    name = session.record.model or session.request.options.name
    try:
        lines = model_facts.lines(model_facts.of_name(name, settings.load()))
    except LocalqError as error:  # the files were removed after loading
        lines = [str(error)]
    if session.loaded is not None:
        loaded = session.loaded
        lines += [
            "",
            f"loaded: {loaded.format}, {loaded.dtype}, on {loaded.device_name}, context {loaded.context_size}",
        ]
        lines += memory_lines(loaded.ledger, loaded.predicted, loaded.host)
    return "\n".join(lines)


def parameters(session: ChatSession) -> str:
    """The sampling settings, for `/show params` and `/set`."""
    values = {**set_values(session), "think": session.think, "preserve_thinking": session.preserve_thinking}
    values["grammar"] = session.grammar
    return "\n".join([*(f"{name} = {value}" for name, value in values.items()), *origin_lines(session)])


def origin_lines(session: ChatSession, *names: str) -> list[str]:
    """Return a line on the settings that a project's file decides, limited to `names` if given; else none."""
    decided = {name: path for name, path in session.decided.items() if name in names or not names}
    return [f"({wording.project_summary(decided)})"] if decided else []


def set_values(session: ChatSession) -> dict[str, object]:
    """Values that `/set` changes, as it shows them."""
    values: dict[str, object] = {**dataclasses.asdict(session.sampling)}
    values["max_tokens"] = settings.max_tokens_text(session.max_tokens)
    values["think_budget"] = settings.max_tokens_text(session.think_budget)
    values["loop_guard"] = "on" if session.loop_guard else "off"
    values["draft"], values["draft_max"] = session.draft, session.draft_max
    values["stop"] = " | ".join(session.stop_strings) or None
    return values


def unknown_page(name: str) -> LocalqError:
    """Error for an unknown NAME of `/show NAME`."""
    why = f"unknown page '{name[:20]}'" if name else "no page given"
    return usage_error("/show", why, "Use /show info, params, prompt or template.")
