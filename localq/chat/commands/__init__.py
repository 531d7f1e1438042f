"""The slash commands of a chat, for every front end. Each takes the session, its argument and the front end it is typed
into, and returns what to tell, or a reply that streams."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from localq import settings
from localq.chat import stop_strings
from localq.chat.attachments import expand_mentions, system_text
from localq.chat.commands import bench as measuring
from localq.chat.commands import models, sessions, texts
from localq.chat.commands.host import Host
from localq.chat.commands.models import SwitchModel
from localq.chat.reply import Replies
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError, usage_error
from localq.planner.speed import roofline
from localq.sampling import Sampling
from localq.text import grammar as grammars
from localq.text import thinking
from localq.wording import memory_lines, stats_line

HELP = """\
/help                  this list
/clear, /new           begin anew in this conversation, or in another; the system prompt stays
/regen                 answer the last message again; the reply it had stays
/edit [TEXT]           say the last message otherwise; without TEXT in $VISUAL or $EDITOR. /edit -a changes the reply
/continue              go on with the last reply, where it was cut or stopped
/undo                  take back the last message and its reply; right behind /compact, that
/n [NUMBER]            list the replies that the last message has had, and what else was said here and was taken back,
                       edited or cleared; or go on with one of them
/read FILE, /glob PAT  put a text file, or all that fit a pattern, before your next message; @FILE in a message does too
/copy [N|code]         copy the last reply, the N-th last, or the last block of code, as it was written
/markdown [on|off]     whether replies are drawn as Markdown, or printed as they are written
/sessions [TEXT]       list conversations, or search them; /sessions rm N removes one, /sessions restore N undoes that
/resume N|TITLE        go on with another conversation
/save [NAME]           name this conversation; it is saved after every turn anyway, unless --no-save was given
/export md|json [FILE] write it to FILE, or print it
/system [TEXT]         show or set the system prompt; @FILE reads it, "off" removes it
/set [NAME VALUE]      list or change sampling settings, max_tokens, stop, think and grammar
/think [on|off|LEVEL]  whether, or how much, the model thinks before it answers; "auto" leaves it to the model
/grammar [KIND ...]    what answers keep to: json [SCHEMA|@FILE], lark @FILE, gbnf @FILE, regex PATTERN; "off" ends it
/tokens                how full the context is
/compact [off]         make room: the model sums up the oldest turns and reads that in their place; nothing is lost
/show prompt|template|info|params
                       the text that the model reads, the template that makes it, the model, or how replies are made
/model [NAME]          the models on this machine; or go on with another one in this conversation
/fit [NAME]            which formats of this model, or of another, fit this GPU, with how much context
/bench                 measure how fast the model reads and writes; the conversation stays as it is
/stats                 speed of the last reply, this conversation, model, device and memory
/exit                  leave (Ctrl-D does too)

Ctrl-C stops a reply and keeps it. A line ending in \\, or lines between two lines of triple quotes, make one message;
Alt-Enter and Ctrl-J start a new line, Ctrl-G opens the message in $VISUAL or $EDITOR. Two slashes send one."""
ALIASES = {
    "/?": "/help", "/r": "/regen", "/retry": "/regen", "/regenerate": "/regen", "/e": "/edit", "/cc": "/copy",
    "/load": "/model", "/tps": "/stats", "/bye": "/exit", "/quit": "/exit", "/x": "/exit",
}  # fmt: skip
_GRAMMARS = {
    "json": grammars.json_schema,
    "lark": grammars.grammar,
    "gbnf": grammars.grammar,
    "regex": grammars.regex,
}
_SETTABLE = (*(each.name for each in dataclasses.fields(Sampling)), "max_tokens")


def show_help(session: ChatSession, argument: str, host: Host) -> str:
    """The list of commands."""
    return HELP


def clear(session: ChatSession, argument: str, host: Host) -> str:
    """Forget the conversation."""
    session.clear()
    return session.try_save() or "cleared"


def system(session: ChatSession, argument: str, host: Host) -> str:
    """Show, set or remove the system prompt."""
    if argument:
        session.system = None if argument == "off" else system_text(argument)
        session.try_save()
    return f"system: {session.system}" if session.system else "no system prompt"


def set_value(session: ChatSession, argument: str, host: Host) -> str:
    """List the sampling settings, or change one ("none" where a setting may be unset)."""
    values: dict[str, Any] = {**dataclasses.asdict(session.sampling), "max_tokens": session.max_tokens}
    values["stop"] = " | ".join(session.stop_strings) or None
    if argument:
        name, _, text = argument.partition(" ")
        if name in _LISTED_TOO:
            return _LISTED_TOO[name](session, text.strip(), host)
        if name == "stop" and text.strip():
            session.stop_strings = () if text.strip() == "none" else stop_strings.validate([text.strip()])
            session.try_save()
            return f"stop = {text.strip()}"
        if name not in (*_SETTABLE, "stop"):
            known = ", ".join((*_SETTABLE, "stop", *_LISTED_TOO))
            raise usage_error(name, "there is no such setting", f"Settings: {known}.")
        if not text.strip():
            return f"{name} = {values[name]}"
        unset = text.strip() == "none" and name in ("seed", "max_tokens")
        value = None if unset else settings.parse(name, text.strip(), "/set")
        if name == "max_tokens":
            session.max_tokens = settings.Settings(max_tokens=value).max_tokens
        else:
            changed: dict[str, Any] = {name: value}
            session.sampling = dataclasses.replace(session.sampling, **changed)
        session.try_save()
        return "\n".join(filter(None, (f"{name} = {value}", session.sampling.greedy_warning([name]))))
    return models.parameters(session)


def think(session: ChatSession, argument: str, host: Host) -> str:
    """Show or set whether, or how much, the model thinks."""
    if argument:
        session.set_think(thinking.validate(argument))
        session.try_save()
    return f"think = {session.think}" + (" (as the model was made)" if session.think == "auto" else "")


def grammar(session: ChatSession, argument: str, host: Host) -> str:
    """Show, set or remove what answers keep to."""
    kind, _, text = argument.partition(" ")
    if kind == "off":
        session.grammar = None
    elif kind:
        if kind not in _GRAMMARS or not (text.strip() or kind == "json"):
            how = "Write /grammar json [SCHEMA|@FILE], lark @FILE, gbnf @FILE, regex PATTERN or off."
            raise usage_error("/grammar", f"{argument[:40]} is not understood", how)
        wanted = _GRAMMARS[kind](text.strip() or "json")
        warnings = grammars.check(wanted)
        session.grammar = wanted
        session.try_save()
        return "\n".join([f"answers keep to {wanted}", *warnings])
    session.try_save()
    return f"answers keep to {session.grammar}" if session.grammar else "answers are free"


_LISTED_TOO = {"think": think, "grammar": grammar}  # by /set, and have commands of their own


def stats(session: ChatSession, argument: str, host: Host) -> str:
    """The last reply's figures, those of the conversation, and what the engine holds."""
    roof = roofline.of_loaded(session.loaded) if session.loaded is not None else None
    last = session.last
    lines = [stats_line(last.stats, roof.text(last.stats) if roof else "") if last else "no reply yet"]
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


def ask_with_files(session: ChatSession, text: str, before: str = "") -> tuple[tuple[str, ...], Replies]:
    """What a front end does with a message: (what to tell of the files that it names, the reply).

    before   goes before it as it is: who wrote it is not known, so it must not put files of this machine into a prompt
    """
    message = expand_mentions(text)
    return message.told, session.ask("\n\n".join(filter(None, (before, message.text))))


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
    "/think": think,
    "/grammar": grammar,
    "/tokens": texts.tokens,
    "/compact": texts.compact,
    "/show": texts.show,
    "/stats": stats,
    "/bench": measuring.bench,
    "/model": models.model,
    "/fit": models.fit,
}


def parse(line: str) -> tuple[str, str]:
    """(command, argument) of a line that begins with a slash; an unknown command is an error, never a message."""
    name, _, argument = line.partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS and name != "/exit":
        near = difflib.get_close_matches(name, [*COMMANDS, *ALIASES, "/exit"], n=3)
        meant = f"Did you mean {', '.join(near)}? " if near else ""
        raise LocalqError(
            name, "there is no such command", f"{meant}/help lists them; // sends a slash.", ExitCode.USAGE
        )
    return name, argument.strip()
