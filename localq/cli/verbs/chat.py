"""`localq chat`: a conversation in the terminal, on the full screen or line by line."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq.cli import options
from localq.cli.option_values import Command as Command
from localq.cli.output import has_screen, is_rich_terminal, note
from localq.cli.stream_encoding import is_utf8
from localq.errors import usage_error
from localq.files import catalog
from localq.settings import Settings

if TYPE_CHECKING:
    from localq.chat.history.record import Session
    from localq.chat.open_conversation import Start


def chat(
    model: options.Model = None,
    model_named: options.ModelNamed = None,
    prompt: options.Prompt = None,
    system: options.System = None,
    ctx: options.Context = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    dry_multiplier: options.DryMultiplier = None,
    dry_base: options.DryBase = None,
    dry_allowed_length: options.DryAllowedLength = None,
    xtc_probability: options.XtcProbability = None,
    xtc_threshold: options.XtcThreshold = None,
    seed: options.Seed = None,
    think: options.Think = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    grammar: options.GrammarText = None,
    regex: options.Regex = None,
    continue_: options.Continue = False,
    resume: options.Resume = None,
    save: options.Save = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    vram: options.Vram = None,
    kv: options.KvBits = None,
    embed: options.Embed = None,
    head: options.Head = None,
    format: options.Format = None,
    reserve: options.Reserve = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    offline: options.Offline = None,
    token: options.Token = None,
    stats: options.ShowStats = None,
    markdown: options.Markdown = None,
    plain: options.Plain = False,
    quiet: options.Quiet = False,
    json: Annotated[bool, typer.Option("--json", help="Of --dry-run: print one JSON object.")] = False,
) -> int:
    """Hold a conversation with MODEL."""
    if json and not dry_run:
        raise usage_error("--json", "a conversation has none", "`localq run MODEL PROMPT --json` answers once.")
    model = options.one_model(model, model_named)
    flags = options.among_settings(locals())
    settings = options.settled(flags, quiet)
    if dry_run:
        return _plan(_gone_on_with(settings, flags, continue_, resume)[0], format, json, force)
    wanted = options.checked_grammar(json_schema, grammar, regex)
    first = None if prompt is None else options.prompt([prompt], "localq chat", 'localq chat MODEL -p "PROMPT"')
    settings, record = _gone_on_with(settings, flags, continue_, resume)
    from localq.chat import open_conversation  # start-up cost, not for --help

    start = open_conversation.start(record, settings, stop, note, wanted)
    return begun(settings, start, format, force, plain=plain or prompt is not None, quiet=quiet, first=first)


def _plan(settings: Settings, format: str | None, json: bool, force: bool) -> int:
    from localq.cli.plan_report import planned  # start-up cost: only asked for here

    return planned(settings.model, format, settings, json, force)


def _gone_on_with(
    settings: Settings, flags: dict[str, Any], continue_: bool, resume: str | None
) -> tuple[Settings, Session | None]:
    """The conversation to go on with, None for a new one, and the settings with those that it had."""
    if not continue_ and resume is None:
        catalog.resolve(settings.model)  # a wrong name is answered before the rest is imported
        return settings, None
    from localq.chat import open_conversation  # start-up cost, not for --help
    from localq.cli.line.resume import wanted_session

    record = wanted_session(continue_, resume)
    return (settings if record is None else open_conversation.settings_of(record, settings, flags)), record


def begun(
    settings: Settings,
    start: Start,
    format: str | None,
    force: bool,
    *,
    plain: bool,
    quiet: bool,
    first: options.Given | None,
) -> int:
    """Chat on the full screen, or line by line where there is none or it is not wanted."""
    from localq.chat.open_options import Wanted

    if not plain and not quiet and _on_full_screen(settings):
        from localq.cli.verbs.tui import shown

        return shown(settings, start, Wanted(format, force))
    from localq.cli.line.line_chat import converse

    return converse(settings, start, quiet, Wanted(format, force), first)


def _on_full_screen(settings: Settings) -> bool:
    if settings.ui == "auto":
        if sys.stdin.isatty() and is_rich_terminal(sys.stdout) and not is_utf8(sys.stdout):
            note(f"line by line: the full screen wants UTF-8, and this terminal's locale says {sys.stdout.encoding}")
        return has_screen()
    return settings.ui == "tui" and sys.stdin.isatty() and sys.stdout.isatty()
