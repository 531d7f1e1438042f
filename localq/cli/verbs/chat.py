"""`localq chat`: a conversation in the terminal, full screen or line by line."""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq.chat.open_options import OpenOptions
from localq.cli import agree, default_model, gguf_list, help_page, options, reply_options
from localq.cli.option_values import Command as Command
from localq.cli.output import has_screen, is_rich_terminal, note, stdout
from localq.cli.stream_encoding import is_utf8
from localq.errors import usage_error
from localq.files import catalog
from localq.settings import Origin, Settings

Origins = dict[str, Origin]

if TYPE_CHECKING:
    from localq.chat.history.record import Record
    from localq.chat.open_conversation import Start
PlanJson = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object (only with --dry-run).", rich_help_panel=help_page.OUTPUT),
]


def chat(
    model: options.Model = None,
    model_named: options.ModelOption = None,
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
    think_budget: reply_options.ThinkBudget = None,
    stop: options.Stop = None,
    loop_guard: reply_options.LoopGuard = None,
    json_schema: reply_options.JsonSchema = None,
    grammar: reply_options.GrammarText = None,
    regex: reply_options.Regex = None,
    mcp_servers: reply_options.Mcp = None,
    mcp_allow: reply_options.McpAllow = None,
    continue_: options.Continue = False,
    resume: options.Resume = None,
    save: options.Save = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    vram: options.Vram = None,
    kv: options.KvBits = None,
    embed: options.Embed = None,
    head: options.Head = None,
    draft: reply_options.Draft = None,
    draft_max: reply_options.DraftMax = None,
    format: options.Format = None,
    reserve: options.Reserve = None,
    checkpoints: options.Checkpoints = None,
    desktop: options.Desktop = None,
    force: options.Force = False,
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
    offline: options.Offline = None,
    token: options.Token = None,
    yes: agree.Yes = False,
    stats: options.ShowStats = None,
    markdown: options.Markdown = None,
    plain: options.Plain = False,
    quiet: options.Quiet = False,
    json: PlanJson = False,
) -> int:
    """Chat with MODEL in full-screen or line mode."""
    model = _only_model(model, model_named, json and not dry_run)
    of = (*options.load_reply_settings(flags := options.setting_flags(locals()), say=False), flags, continue_, resume)
    named = model is not None or continue_ or resume is not None
    wish = OpenOptions(format, force, agreed=yes, fresh=fresh)
    with reply_options.suggest_prompt("chat", model is not None and model_named is None):
        grammars = json_schema, grammar, regex
        made = _plan(_resume(*of)[0], named, format, json, force) if dry_run else _open(prompt, stop, grammars, *of)
    return made if isinstance(made, int) else _start(made, mcp_servers, mcp_allow, wish, named, plain, quiet)


def _start(
    opened: tuple[Settings, Start, options.PromptText | None], servers: list[str] | None, allowed: list[str] | None,
    wish: OpenOptions, named: bool, plain: bool, quiet: bool,
) -> int:  # fmt: skip
    """Chat with the tools of --mcp, whose servers end with the chat. opened: what `_open` returns."""
    settings, start, first = opened
    with reply_options.open_toolbox(servers, allowed, settings) as toolbox:
        start = dataclasses.replace(start, toolbox=toolbox)
        return start_chat(settings, start, wish, named=named, plain=plain, quiet=quiet, first=first)


def _first_message(prompt: str | None) -> options.PromptText | None:
    return None if prompt is None else options.read_prompt([prompt], "localq chat", 'localq chat MODEL -p "PROMPT"')


def _open(
    prompt: str | None,
    stop: list[str] | None,
    grammars: tuple[str | None, str | None, str | None],
    settings: Settings,
    project: Origins,
    flags: dict[str, Any],
    continue_: bool,
    resume: str | None,
) -> tuple[Settings, Start, options.PromptText | None]:
    """The settings, the conversation to begin with, and its first message.

    Options are checked before the model is looked up.

    grammars: --json-schema, --grammar and --regex. The others are those of `_resume`.
    """
    from localq.chat import open_conversation  # start-up cost, not for --help

    grammar, first = reply_options.parse_grammar(*grammars), _first_message(prompt)
    settings, record, project = _resume(settings, project, flags, continue_, resume)
    return settings, open_conversation.start(record, settings, stop, note, grammar, project), first


def _only_model(argument: str | None, option: str | None, answers_json: bool) -> str | None:
    if answers_json:
        raise usage_error(
            "--json",
            "`chat` supports this option only with --dry-run",
            "To get one answer as JSON, use `localq run MODEL PROMPT --json`.",
        )
    return options.single_model(argument, option)


def _plan(settings: Settings, named: bool, format: str | None, json: bool, force: bool) -> int:
    from localq.cli.plan_report import print_plan  # start-up cost: only --dry-run needs it

    settings, best = default_model.planned(settings, named=named, on_screen=has_screen())
    with gguf_list.explain(settings, "chat"):
        return print_plan(settings.model, format or best, settings, json, force)


def _resume(
    settings: Settings, project: Origins, flags: dict[str, Any], continue_: bool, resume: str | None
) -> tuple[Settings, Record | None, Origins]:
    """The settings, with those saved in the conversation to resume, and its record; None for a new one.

    The third item holds the settings that a project's file sets, here or in the saved conversation, which are also
    named on stderr.
    """
    if not continue_ and resume is None:
        options.note_project(project)
        catalog.resolve(settings.model)  # a wrong name fails before the rest is imported
        return settings, None, project
    from localq.chat import open_conversation  # start-up cost, not for --help
    from localq.cli.line.resume import find_conversation

    record = find_conversation(continue_, resume)
    if record is not None:
        settings = open_conversation.resumed_settings(record, settings, flags)
        project = open_conversation.resumed_origins(record, settings, project)
    options.note_project(project)
    return settings, record, project


def start_chat(
    settings: Settings,
    start: Start,
    wanted: OpenOptions,
    *,
    named: bool,
    plain: bool,
    quiet: bool,
    first: options.PromptText | None,
) -> int:
    """Chat on the full screen, or line by line where it is unavailable or not wanted.

    named   the user named the model; else the best for this machine is chosen
    plain   line by line; lines from a pipe are commands too
    """
    on_screen = not plain and first is None and not quiet and _on_full_screen(settings)
    if on_screen:
        from localq.cli.verbs.tui import run_app

        if named:
            gguf_list.check(settings, "chat")

        return run_app(settings, start, wanted, default_model.chooser(settings, wanted, named=named))
    from localq.cli.line.line_chat import converse

    opening = default_model.choose(settings, wanted, named=named, on_screen=False, quiet=quiet)
    with gguf_list.explain(opening.settings, "chat"):
        return converse(opening.settings, start, quiet, opening.wanted, first, scripted=plain)


def _on_full_screen(settings: Settings) -> bool:
    if settings.ui == "auto":
        if sys.stdin.isatty() and is_rich_terminal(stdout()) and not is_utf8(stdout()):
            why = "full-screen mode needs a UTF-8 locale"
            note(f"using line mode because {why}, but this terminal uses {stdout().encoding}")
        return has_screen()
    return settings.ui == "tui" and sys.stdin.isatty() and stdout().isatty()
