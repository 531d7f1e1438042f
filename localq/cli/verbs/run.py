"""`localq run`: one prompt in, one answer out, made for pipes."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from localq.chat import stop_strings
from localq.chat.history import export as transcript
from localq.cli import options
from localq.cli.option_values import Command as Command
from localq.cli.output import note, print_json
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import catalog
from localq.settings import Settings

if TYPE_CHECKING:
    from localq.chat.session import ChatSession, Piece, Reply
    from localq.cli.line.reply_printer import Printer
    from localq.text.grammar import Grammar
    from localq.worker.messages import Loaded

Prompt = Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="As the argument.")]
Extract = Annotated[bool, typer.Option("--extract", "-x", help="Print the last block of code of the answer, no more.")]


def run(
    model: options.Model = None,
    prompt: Annotated[list[str] | None, typer.Argument(help="The prompt; what comes on stdin goes before it.")] = None,
    model_named: options.ModelNamed = None,
    prompt_named: Prompt = None,
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
    think_out: options.ThinkOut = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    grammar: options.GrammarText = None,
    regex: options.Regex = None,
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
    quiet: options.Quiet = False,
    extract: Extract = False,
    json: options.Json = False,
) -> int:
    """Answer one prompt; only the answer goes to stdout. Without a prompt, at a terminal, this is `localq chat`."""
    words = [*(prompt or []), *([] if prompt_named is None else [prompt_named])]
    if model_named is not None:  # then every word is part of the prompt
        words, model = [*([] if model is None else [model]), *words], model_named
    settings = options.settled(options.among_settings(locals()), quiet)
    if dry_run:
        from localq.cli.plan_report import planned  # start-up cost: only asked for here

        return planned(settings.model, format, settings, json, force)
    stops = stop_strings.checked(stop or ())
    wanted = options.checked_grammar(json_schema, grammar, regex)
    asked = _Asked(words, stops, wanted, format, force, think_out, quiet, extract, json)
    if not words and not json and not extract and sys.stdin.isatty():
        return _converse(settings, asked)
    return _answer(settings, asked)


@dataclass(frozen=True)
class _Asked:
    """What is wanted of the answer besides what settings say."""

    words: list[str]
    stops: tuple[str, ...]
    grammar: Grammar | None
    format: str | None
    force: bool
    think_out: str | None
    quiet: bool
    extract: bool
    json: bool


def _converse(settings: Settings, asked: _Asked) -> int:
    """Nobody pipes anything in: this is a conversation."""
    if asked.think_out is not None:
        why, step = "without a prompt this is a conversation, which has no such file", "Give a prompt."
        raise usage_error("--think-out", why, step)
    from localq.chat import open_conversation  # start-up cost: only asked for here
    from localq.cli.verbs.chat import begun

    catalog.resolve(settings.model)
    start = open_conversation.start(None, settings, list(asked.stops) or None, note, asked.grammar)
    return begun(settings, start, asked.format, asked.force, plain=False, quiet=asked.quiet, first=None)


def _answer(settings: Settings, asked: _Asked) -> int:
    text = options.prompt(asked.words, "localq run", 'localq run MODEL "PROMPT"').text
    catalog.resolve(settings.model)  # a wrong name is answered before the rest is imported
    from localq.chat import open_model
    from localq.cli.line.session import TerminalWatcher, interruptible, print_reply
    from localq.cli.line.thinking_lines import shown

    watcher, wanted = TerminalWatcher(asked.quiet), open_model.Wanted(asked.format, asked.force)
    with (
        shown(asked.quiet or asked.json, asked.think_out) as thoughts,  # first: a model takes long to load
        watcher,
        open_model.open_session(settings.model, settings, watcher, wanted) as opened,
    ):
        opened.session.stop_strings, opened.session.grammar = asked.stops, asked.grammar
        loaded = watcher.load(opened)
        with interruptible(opened.session) as pressed:
            parts = _parts(opened.session, text, asked.quiet)
            with _printing(settings, asked, opened.session) as printer:
                reply = print_reply(parts, watcher.status, thoughts, printer)
    if reply is None:
        return ExitCode.FAILURE
    _tell(settings, asked, reply, loaded)
    return ExitCode.INTERRUPTED if pressed.told else ExitCode.OK


def _printing(settings: Settings, asked: _Asked, session: ChatSession) -> AbstractContextManager[Printer]:
    """Where the answer goes as it comes. What keeps to a grammar, or goes on with a text, is no Markdown."""
    from localq.cli.line.reply_printer import Nowhere, printing

    if asked.json or asked.extract:
        return contextlib.nullcontext(Nowhere())
    is_markdown = asked.grammar is None and session.tokenizer.chat_template is not None
    return printing(settings.markdown and is_markdown)


def _tell(settings: Settings, asked: _Asked, reply: Reply, loaded: Loaded) -> None:
    """What goes out behind the reply. Raises LocalqError where it was cut and had a grammar to keep to."""
    from localq.chat.reply import check_whole
    from localq.cli.line.session import memory_line, speed_line
    from localq.planner.speed import roofline

    text = _last_block(reply) if asked.extract else reply.text
    if asked.extract and not asked.json and text is not None:
        print(text)
    if asked.json:
        body = {"model": settings.model, "text": text, "thought": reply.thought, "reason": reply.reason}
        roof = roofline.of_loaded(loaded)
        rates = {"tokens_per_s": reply.stats.tokens_per_s, "roofline_share": roof and roof.share(reply.stats)}
        print_json({**body, "stats": {**dataclasses.asdict(reply.stats), **rates}})
    if not asked.quiet:
        for line in () if reply.unmet and reply.reason != "cancelled" else reply.notices:
            note(line)
        if settings.stats and not asked.json:
            for line in filter(None, (speed_line(reply.stats, loaded), memory_line(loaded))):
                note(line)
    check_whole(reply)


def _last_block(reply: Reply) -> str | None:
    """None where the user stopped the reply before there was one."""
    blocks = transcript.code_blocks(reply.text)
    if not blocks and reply.reason == "cancelled":
        return None
    if not blocks:
        raise LocalqError("the answer", "it has no block of code", "Without --extract all of it is printed.")
    return blocks[-1]


def _parts(session: ChatSession, text: str, quiet: bool) -> Iterator[Piece | Reply]:
    if session.tokenizer.chat_template is not None:
        return session.ask(text)
    if not quiet:
        note("this is a base model without a chat template: it continues the text as it stands")
        if session.system:
            note("the system prompt is left out: only a chat template has a place for it")
    return session.complete(session.tokenizer.prompt_ids(text), session.ensure_loaded())
