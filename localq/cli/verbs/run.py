"""`localq run`: answer one prompt; made for pipes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from localq import places
from localq.chat import stop_strings
from localq.chat.attachments import Attachment, expand_mentions, piped_attachment, read_attachments
from localq.chat.open_options import OpenOptions
from localq.cli import agree, default_model, gguf_list, help_page, options, reply_options
from localq.cli.option_values import Command as Command
from localq.cli.output import note, print_json, print_line
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog
from localq.settings import Origin, Settings
from localq.text import template

if TYPE_CHECKING:
    from localq.chat.reply import Reply, ReplyPiece
    from localq.chat.session import ChatSession
    from localq.cli.line.reply_printer import Printer
    from localq.text.grammar import Grammar
    from localq.worker.messages import Loaded

PromptOption = Annotated[
    str | None,
    typer.Option(
        "--prompt", "-p", metavar="TEXT", help="Same as the PROMPT argument.", rich_help_panel=help_page.CONVERSATION
    ),
]
Extract = Annotated[
    bool,
    typer.Option(
        "--extract", "-x", help="Print only the last code block of the answer.", rich_help_panel=help_page.ANSWER
    ),
]
Prompt = Annotated[
    list[str] | None, typer.Argument(metavar="PROMPT", help="Prompt text (piped text is placed before it).")
]


def run(
    model: options.Model = None,
    prompt: Prompt = None,
    model_named: options.ModelOption = None,
    prompt_named: PromptOption = None,
    file: reply_options.Files = None,
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
    think_out: options.ThinkOut = None,
    stop: options.Stop = None,
    loop_guard: reply_options.LoopGuard = None,
    json_schema: reply_options.JsonSchema = None,
    grammar: reply_options.GrammarText = None,
    regex: reply_options.Regex = None,
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
    desktop: options.Desktop = None,
    force: options.Force = False,
    fresh: options.Fresh = False,
    dry_run: options.DryRun = False,
    offline: options.Offline = None,
    token: options.Token = None,
    yes: agree.Yes = False,
    stats: options.ShowStats = None,
    markdown: options.Markdown = None,
    quiet: options.Quiet = False,
    extract: Extract = False,
    json: options.Json = False,
) -> int:
    """Print the answer to one prompt, or start a chat if no prompt is given."""
    words, model = _split_words(model, model_named, prompt, prompt_named)
    settings, project = options.load_reply_settings(options.setting_flags(locals()))
    with reply_options.suggest_prompt("run", (named := model is not None) and model_named is None):
        if dry_run:
            return _plan(settings, named, format, json, force)
        stops, attached = stop_strings.validate(stop or ()), read_attachments(file or ())
        wanted = reply_options.parse_grammar(json_schema, grammar, regex)
        wish = OpenOptions(format, force, agreed=yes, fresh=fresh)
        request = _Request(words, attached, stops, wanted, wish, named, think_out, quiet, extract, json, stats is True)
        return _reply(settings, request, project)


def _reply(settings: Settings, request: _Request, project: dict[str, Origin]) -> int:
    is_chat = not request.words and not request.json and not request.extract and sys.stdin.isatty()
    return _converse(settings, request, project) if is_chat else _answer(settings, request)


def _plan(settings: Settings, named: bool, format: str | None, json: bool, force: bool) -> int:
    from localq.cli.plan_report import print_plan  # start-up cost: only --dry-run needs it

    settings, best = default_model.planned(settings, named=named)
    with gguf_list.explain(settings, "run"):
        return print_plan(settings.model, format or best, settings, json, force)


def _split_words(
    model: str | None, model_named: str | None, prompt: list[str] | None, prompt_named: str | None
) -> tuple[list[str], str | None]:
    """(words of the prompt, model): with --model every word is part of the prompt."""
    words = [*(prompt or []), *([] if prompt_named is None else [prompt_named])]
    if model_named is None:
        return words, model
    return [*([] if model is None else [model]), *words], model_named


@dataclass(frozen=True)
class _Request:
    """The prompt, and options of the answer that are not settings."""

    words: list[str]
    attached: tuple[Attachment, ...]
    stops: tuple[str, ...]
    grammar: Grammar | None
    wanted: OpenOptions
    named: bool
    think_out: str | None
    quiet: bool
    extract: bool
    json: bool
    stages: bool  # --stats as a flag: also the stages of the start


def _converse(settings: Settings, request: _Request, project: dict[str, Origin]) -> int:
    """No prompt at a terminal: start a chat."""
    if request.think_out is not None:
        why, step = "cannot be used without a prompt", "Pass a prompt."
        raise usage_error("--think-out", why, step)
    if request.attached:
        why, step = "cannot be used without a prompt", "Pass a prompt, or use @FILE in a chat."
        raise usage_error("--file", why, step)
    from localq.chat import open_conversation  # start-up cost: only a chat needs it
    from localq.cli.verbs.chat import start_chat

    catalog.resolve(settings.model)
    start = open_conversation.start(None, settings, list(request.stops) or None, note, request.grammar, project)
    return start_chat(
        settings, start, request.wanted, named=request.named, plain=False, quiet=request.quiet, first=None
    )


def _answer(settings: Settings, request: _Request) -> int:
    prompt = _read_prompt(request)
    template.start_ahead()  # it gets ready while the rest is imported
    catalog.resolve(settings.model)  # a wrong name fails before the rest is imported
    from localq.chat import open_model
    from localq.cli.line.session import TerminalWatcher, print_reply, stop_on_interrupt
    from localq.cli.line.thinking_lines import check_not_of_model, open_thoughts

    opening = default_model.choose(
        settings, request.wanted, named=request.named, on_screen=False, quiet=request.quiet or request.json
    )
    settings, watcher = opening.settings, TerminalWatcher(request.quiet)
    think_out = None if request.think_out is None else places.expand(request.think_out, "--think-out")
    with (
        open_thoughts(request.quiet or request.json, think_out) as thoughts,  # first: it refuses a bad path
        gguf_list.explain(settings, "run"),
        watcher,
        open_model.open_session(settings.model, settings, watcher, opening.wanted) as opened,
    ):
        opened.session.stop_strings, opened.session.grammar = request.stops, request.grammar
        opened.answer_once()
        check_not_of_model(think_out, Path(opened.session.request.path))
        loaded = watcher.load(opened)
        with stop_on_interrupt(opened.session) as interruption:
            parts = _parts(opened.session, prompt, request.quiet)
            with _printing(settings, request, opened.session) as printer:
                reply = print_reply(parts, watcher.status, thoughts, printer)
    if reply is None:
        return ExitCode.FAILURE
    _tell(settings, request, reply, loaded)
    return ExitCode.INTERRUPTED if interruption.is_requested else ExitCode.OK


@dataclass(frozen=True)
class _GivenPrompt:
    """The words of a prompt, and what goes before them: files, and piped text."""

    words: str
    attached: tuple[Attachment, ...]


def _read_prompt(request: _Request) -> _GivenPrompt:
    """The prompt, with the files that its words mention. Raises LocalqError (exit 2) for one that cannot be read."""
    example = 'localq run MODEL "PROMPT"'
    given = options.read_prompt(request.words, "localq run", example, required=not request.attached)
    message = expand_mentions(given.words)
    for failure in message.failures:
        raise failure
    return _GivenPrompt(message.words, (*request.attached, *piped_attachment(given.piped), *message.attachments))


def _printing(settings: Settings, request: _Request, session: ChatSession) -> AbstractContextManager[Printer]:
    """The printer of the answer; answers by a grammar and completions of a base model are not Markdown."""
    from localq.cli.line.reply_printer import NullPrinter, open_printer

    if request.json or request.extract:
        return contextlib.nullcontext(NullPrinter())
    is_markdown = request.grammar is None and session.tokenizer.chat_template is not None
    return open_printer(settings.markdown and is_markdown)


def _tell(settings: Settings, request: _Request, reply: Reply, loaded: Loaded) -> None:
    """Print what follows the reply. Raises LocalqError where a grammar's answer was cut off."""
    from localq.chat.reply import check_complete
    from localq.cli.line.session import memory_line, speed_line, stage_lines
    from localq.planner.speed import roofline

    text = _last_block(reply) if request.extract else reply.text
    if request.extract and not request.json and text is not None:
        print_line(text)
    if request.json:
        body = {"model": settings.model, "text": text, "thought": reply.thought, "reason": reply.reason}
        roof = roofline.model_roof(loaded)
        rates = {"roofline_share": roof and roof.share(reply.stats)}
        start = {"start_s": {stage: round(seconds, 3) for stage, seconds in loaded.stages.items()}}
        stats = {**reply.stats.report(), **rates}
        print_json({**body, "thought_stopped": reply.thought_stopped, "stats": stats, **start})
    if not request.quiet:
        for line in () if reply.unmet and reply.reason != "cancelled" else reply.notices:
            note(line)
        if settings.stats and not request.json:
            stages = stage_lines(loaded, reply.stats.time_to_first_token_s) if request.stages else ()
            for line in filter(None, (*stages, speed_line(reply.stats, loaded), memory_line(loaded))):
                note(line)
    check_complete(reply)


def _last_block(reply: Reply) -> str | None:
    """The last code block of the answer; None where the user stopped the reply before one."""
    from localq.chat.history.export import code_blocks  # start-up cost: only --extract needs it

    blocks = code_blocks(reply.text)
    if not blocks and reply.reason == "cancelled":
        return None
    if not blocks:
        raise LocalqError("--extract", "the answer has no code block", "Remove --extract to print the whole answer.")
    return blocks[-1]


def _parts(session: ChatSession, prompt: _GivenPrompt, quiet: bool) -> Iterator[ReplyPiece | Reply]:
    files = [each.measure(session.count_tokens) for each in prompt.attached]
    for each, attached in zip(files, prompt.attached, strict=True):
        if attached.is_file and not quiet:
            note(f"(attached {each[0].summary})")
    if session.tokenizer.chat_template is not None:
        return session.ask(prompt.words, prompt.attached)
    if not quiet:
        note("this base model has no chat template, so it continues the prompt as plain text")
        if session.system:
            note("the system prompt is ignored because it needs a chat template")
    from localq.chat.history.conversation import user_message  # start-up cost: not for --help

    text = user_message(prompt.words, files).content
    return session.complete(session.tokenizer.prompt_ids(text), session.ensure_loaded())
