"""Slash commands of a chat, for every front end: `COMMANDS`, `HELP` and `parse`.

A command takes the session, its argument and the host (the front end it is typed into); it returns a notice, a reply
that streams, or `SwitchModel`. Here are the short commands; in the modules beside it: sessions (save, resume, export),
texts (edit, undo, copy, files), models (fit, show), tools, bench, completion (of commands and file names).
A command is added as a line in `COMMANDS` and in `HELP`. Not here: drawing, and the keys of a front end.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from localq import drafts, settings
from localq.chat import stop_strings
from localq.chat.attachments import expand_mentions, piped_attachment, system_text
from localq.chat.commands import bench, models, sessions, texts, tools
from localq.chat.commands.host import Host
from localq.chat.commands.models import SwitchModel
from localq.chat.reply import Replies
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError, usage_error
from localq.planner import draft_models
from localq.planner.speed import roofline
from localq.sampling import Sampling
from localq.text import grammar, thinking
from localq.wording import draft_lines, memory_lines, stats_line

HELP = """\
/help                  show this list
/clear                 start over in this conversation; the system prompt is kept
/new                   start a new conversation; the system prompt is kept
/regen                 regenerate the last reply; /n lists earlier versions
/edit [TEXT]           edit and resend the last message (without TEXT: in $VISUAL or $EDITOR); /edit -a edits the reply
/continue              continue the last reply where it stopped
/undo                  remove the last message and its reply; right after /compact, undo /compact
/n [NUMBER]            list the other versions of the last exchange, including undone, edited and cleared ones; with
                       NUMBER, switch to that version
/read FILE, /glob PAT  attach a text file (or write @FILE), or all files that match a pattern, to the next message
/copy [N|code]         copy the last reply, the Nth-to-last, or the last code block, unformatted
/markdown [on|off]     render replies as Markdown, or print them unformatted
/sessions [TEXT]       list or search conversations; /sessions rm N deletes one, /sessions restore N restores it
/resume N|TITLE        switch to another conversation
/save [NAME]           name this conversation (turns are saved automatically, unless --no-save is given)
/export md|json [FILE] write the conversation to FILE, or print it
/system [TEXT]         show or set the system prompt; @FILE reads it from a file, "off" removes it
/set [NAME VALUE]      list or change sampling settings, max_tokens, think_budget, loop_guard, stop, think, grammar,
                       draft, draft_max
/think [on|off|LEVEL]  control thinking before the answer: on, off, a level, or "auto" (the model's default)
/grammar [KIND ...]    constrain answers: json [SCHEMA|@FILE], lark @FILE, gbnf @FILE, regex PATTERN; "off" ends it
/tokens                show how full the context is
/compact [off]         replace the oldest turns in the prompt with a summary; "off" undoes this (no turn is deleted)
/show prompt|template|info|params
                       show the prompt text, the chat template, model details, or the sampling settings
/model [NAME]          list the models on this machine; with NAME, continue this conversation with another model
/fit [NAME]            show which formats of this or another model fit this GPU, and with how much context
/tools [allow|ask|never TOOL]
                       list MCP tools (--mcp), or set whether a tool may be called; /tools TOOL describes a tool,
                       /tools restart SERVER restarts a server
/bench                 measure prefill and decode speed without changing the conversation
/stats                 show the speed of the last reply and the conversation, plus model, device and memory
/exit                  quit (also Ctrl-D)

Ctrl-C stops a reply; its text is kept. For a multi-line message, end a line with \\ or put the lines between triple
quotes. Alt-Enter and Ctrl-J start a new line; Ctrl-G opens the message in $VISUAL or $EDITOR.
To start a message with a slash, type two slashes."""
ALIASES = {
    "/?": "/help", "/r": "/regen", "/retry": "/regen", "/regenerate": "/regen", "/e": "/edit", "/cc": "/copy",
    "/load": "/model", "/tps": "/stats", "/bye": "/exit", "/quit": "/exit", "/x": "/exit",
}  # fmt: skip
_GRAMMARS = {
    "json": grammar.json_schema,
    "lark": grammar.grammar,
    "gbnf": grammar.grammar,
    "regex": grammar.regex,
}
_SETTABLE = (*(each.name for each in dataclasses.fields(Sampling)), "max_tokens", "think_budget", "loop_guard",
              "draft", "draft_max")  # fmt: skip
_MAY_BE_NONE = ("seed", "max_tokens", "think_budget")
_SHORT = {"temp": "temperature"}


def show_help(session: ChatSession, argument: str, host: Host) -> str:
    """List the commands."""
    return HELP


def clear(session: ChatSession, argument: str, host: Host) -> str:
    """Start over in this conversation."""
    session.clear()
    return session.try_save() or "cleared; /n lists the cleared messages"


def system(session: ChatSession, argument: str, host: Host) -> str:
    """Show, set or remove the system prompt."""
    if argument:
        session.system = None if argument == "off" else system_text(argument)
        session.try_save()
    if not session.system:
        return "no system prompt"
    return "\n".join([f"system prompt: {session.system}", *models.origin_lines(session, "system")])


def set_value(session: ChatSession, argument: str, host: Host) -> str | SwitchModel:
    """List the sampling settings, or change one ("none" where a setting may be unset)."""
    values = models.set_values(session)
    if argument:
        name, _, text = argument.partition(" ")
        name = _SHORT.get(name, name)
        if name in _LISTED_TOO:
            return _LISTED_TOO[name](session, text.strip(), host)
        if name == "stop" and text.strip():
            session.stop_strings = () if text.strip() == "none" else stop_strings.validate([text.strip()])
            session.try_save()
            return f"stop = {text.strip()}"
        if name not in (*_SETTABLE, "stop"):
            known = (*_SETTABLE, "stop", *_LISTED_TOO)
            near = settings.similar(name, known)
            meant = f"Did you mean {' or '.join(near)}?" if near else f"Settings: {', '.join(known)}."
            raise usage_error(name, "unknown setting", meant)
        if not text.strip():
            return f"{name} = {values[name]}"
        unset = text.strip() == "none" and name in _MAY_BE_NONE
        value = None if unset else settings.parse(name, text.strip(), "/set")
        if name == "max_tokens":
            session.max_tokens = settings.Settings(max_tokens=value).max_tokens
        elif name == "think_budget":
            session.think_budget = settings.Settings(think_budget=value).think_budget
        elif name == "loop_guard":
            session.loop_guard = bool(value)
        elif name in ("draft", "draft_max"):
            return _set_draft(session, name, value)
        else:
            changed: dict[str, Any] = {name: value}
            session.sampling = dataclasses.replace(session.sampling, **changed)
        session.try_save()
        shown = models.set_values(session)[name]
        return "\n".join(filter(None, (f"{name} = {shown}", session.sampling.greedy_warning([name]))))
    return models.parameters(session)


def _set_draft(session: ChatSession, name: str, value: Any) -> str | SwitchModel:
    """Set the source of drafts or their length; another draft model is opened together with the model."""
    chosen = settings.Settings(**{name: value})
    drafting = draft_models.target(chosen)  # a wrong name is an error before the model is unloaded
    is_new = drafting is not None and drafting.name != session.request.options.draft_name
    if is_new or (name == "draft" and _needs_block(session, chosen)):
        return SwitchModel(session.record.model or session.request.options.name, draft=chosen.draft)
    if name == "draft":
        session.draft = chosen.draft
    else:
        session.draft_max = chosen.draft_max
    shown = f"{name} = {value}"
    loaded = session.loaded
    if session.draft == "off" or loaded is None:
        return shown
    if loaded.no_drafts:
        return f"{shown}, but drafts stay off: {loaded.no_drafts}"
    if loaded.draft_tokens < session.draft_max:
        most = f"drafts of at most {loaded.draft_tokens} tokens" if loaded.draft_tokens else "no drafts"
        return f"{shown}; this model was loaded with {most}, so restart localq with --{name.replace('_', '-')} {value}"
    return shown


def _needs_block(session: ChatSession, chosen: settings.Settings) -> bool:
    """Return whether these settings require loading an MTP block. Raises LocalqError (exit 2) if there is none."""
    options, loaded = session.request.options, session.loaded
    if chosen.draft != drafts.MTP or (loaded is not None and loaded.no_drafts):
        return False
    if options.mtp and loaded is not None and not loaded.draft_model:
        raise drafts.no_mtp(options.name, loaded.no_mtp or "the model was loaded without drafts")
    return not options.mtp


def set_think(session: ChatSession, argument: str, host: Host) -> str:
    """Show or set thinking: on, off, a level or auto."""
    if argument:
        session.set_think(thinking.validate(argument))
        session.try_save()
    return f"think = {session.think}" + (" (the model's default)" if session.think == "auto" else "")


def set_preserve_thinking(session: ChatSession, argument: str, host: Host) -> str:
    """Show or set whether the prompt keeps the thinking of earlier replies."""
    if argument:
        session.set_preserve_thinking(settings.Settings(preserve_thinking=argument).preserve_thinking)
        session.try_save()
    default = " (the model's default)" if session.preserve_thinking == "auto" else ""
    return f"preserve_thinking = {session.preserve_thinking}{default}"


def set_grammar(session: ChatSession, argument: str, host: Host) -> str:
    """Show, set or remove the grammar of answers."""
    kind, _, text = argument.partition(" ")
    if kind == "off":
        session.grammar = None
    elif kind:
        if kind not in _GRAMMARS or not (text.strip() or kind == "json"):
            how = "Use /grammar json [SCHEMA|@FILE], lark @FILE, gbnf @FILE, regex PATTERN or off."
            raise usage_error("/grammar", f"invalid argument {argument[:40]!r}", how)
        wanted = _GRAMMARS[kind](text.strip() or "json")
        warnings = grammar.check(wanted)
        session.grammar = wanted
        session.try_save()
        return "\n".join([f"answers are now constrained by {wanted}", *warnings])
    session.try_save()
    return f"answers are now constrained by {session.grammar}" if session.grammar else "no grammar"


# Settings of /set that other functions change, of their own commands or not.
_LISTED_TOO = {"think": set_think, "preserve_thinking": set_preserve_thinking, "grammar": set_grammar}


def stats(session: ChatSession, argument: str, host: Host) -> str:
    """Speed of the last reply and of the conversation, and the memory of the engine."""
    roof = roofline.model_roof(session.loaded) if session.loaded is not None else None
    last = session.last
    lines = [stats_line(last.stats, roof.text(last.stats) if roof else "") if last else "no reply yet"]
    lines += draft_lines(last.stats) if last else []
    given = [turn.stats for turn in session.conversation.replies() if turn.stats is not None]
    if given:
        made, seconds = sum(each.generated_tokens for each in given), sum(each.decode_s for each in given)
        decoded = sum(max(0, each.generated_tokens - 1) for each in given)  # the first belongs to the prefill
        speed = f", {decoded / seconds:.1f} tok/s" if seconds > 0 else ""
        lines.append(f"this conversation: {len(given)} replies, {made} tokens{speed}")
    if session.loaded is not None:
        loaded = session.loaded
        lines.append(f"{loaded.name}: {loaded.format}, {loaded.dtype}, on {loaded.device_name}")
        lines += memory_lines(loaded.ledger, loaded.predicted, loaded.host)
    return "\n".join(lines)


def ask_with_files(
    session: ChatSession, text: str, before: str = "", shows_chips: bool = False
) -> tuple[tuple[str, ...], Replies]:
    """Send a message with the files that it mentions; returns (notices about the files, the reply).

    before       text put before it unchanged: it may come from a stranger, so its @words must not read files
    shows_chips  the front end shows attachments itself: notices name only files that could not be attached
    """
    message = expand_mentions(text)
    named = () if shows_chips else message.attachments
    attached = [each.measure(session.count_tokens)[0].summary for each in named]
    failed = [f"could not attach {each.what}: {each.why}" for each in message.failures]
    notices = (*(f"attached {each}" for each in attached), *failed)
    return notices, session.ask(message.words, (*piped_attachment(before), *message.attachments))


COMMANDS: dict[str, Callable[[ChatSession, str, Host], str | Replies | SwitchModel]] = {
    "/help": show_help,
    "/clear": clear,
    "/new": sessions.new,
    "/regen": texts.regenerate,
    "/edit": texts.edit,
    "/continue": texts.extend,
    "/undo": texts.undo,
    "/n": texts.alternatives,
    "/read": texts.read,
    "/glob": texts.glob_files,
    "/copy": texts.copy,
    "/markdown": texts.markdown,
    "/sessions": sessions.sessions,
    "/resume": sessions.resume,
    "/save": sessions.save,
    "/export": sessions.export,
    "/system": system,
    "/set": set_value,
    "/think": set_think,
    "/grammar": set_grammar,
    "/tokens": texts.tokens,
    "/compact": texts.compact,
    "/show": texts.show,
    "/stats": stats,
    "/bench": bench.bench,
    "/model": models.model,
    "/fit": models.fit,
    "/tools": tools.tools,
}


def parse(line: str) -> tuple[str, str]:
    """Return (command, argument) of a line that begins with a slash. Raises LocalqError for an unknown command."""
    name, _, argument = line.partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS and name != "/exit":
        near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES, "/exit"], n=3)
        meant = f"Did you mean {' or '.join(near)}? " if near else ""
        step = f"{meant}See /help. To send a message that starts with a slash, type two slashes."
        raise LocalqError(name, "unknown command", step, ExitCode.USAGE)
    return name, argument.strip()
