"""The slash commands of the line chat. Each takes the session and its argument and returns what to print."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from localq import settings
from localq.chat import ChatSession
from localq.cli.options import system_text
from localq.cli.output import memory_lines
from localq.cli.session import stats_line
from localq.errors import ExitCode, LocalqError, usage_error

HELP = """\
/help              this list
/clear             forget the conversation (the system prompt stays)
/regen             answer the last message again
/system [TEXT]     show or set the system prompt; @FILE reads it, "off" removes it
/set [NAME VALUE]  list or change sampling settings and max_tokens
/stats             speed of the last reply, model, device and memory
/exit              leave (Ctrl-D does too)

Ctrl-C stops a reply and keeps it. A line ending in \\, or lines between two lines of triple quotes, make one message;
Alt-Enter and Ctrl-J start a new line. A message that begins with a slash is written with two."""
ALIASES = {"/?": "/help", "/r": "/regen", "/retry": "/regen", "/bye": "/exit", "/quit": "/exit", "/x": "/exit"}
_SETTABLE = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "seed", "max_tokens")


def show_help(session: ChatSession, argument: str) -> str:
    """The list of commands."""
    return HELP


def clear(session: ChatSession, argument: str) -> str:
    """Forget the conversation."""
    session.clear()
    return "cleared"


def system(session: ChatSession, argument: str) -> str:
    """Show, set or remove the system prompt."""
    if argument:
        session.system = None if argument == "off" else system_text(argument)
    return f"system: {session.system}" if session.system else "no system prompt"


def set_value(session: ChatSession, argument: str) -> str:
    """List the sampling settings, or change one ("none" where a setting may be unset)."""
    values: dict[str, Any] = {**dataclasses.asdict(session.sampling), "max_tokens": session.max_tokens}
    if argument:
        name, _, text = argument.partition(" ")
        if name not in _SETTABLE:
            raise usage_error(name, "there is no such setting", f"Settings: {', '.join(_SETTABLE)}.")
        if not text.strip():
            return f"{name} = {values[name]}"
        value = None if text.strip() == "none" else settings.parse(name, text.strip(), "/set")
        if name == "max_tokens":
            session.max_tokens = settings.Settings(max_tokens=value).max_tokens
        else:
            changed: dict[str, Any] = {name: value}
            session.sampling = dataclasses.replace(session.sampling, **changed)
        return f"{name} = {value}"
    return "\n".join(f"{name} = {value}" for name, value in values.items())


def stats(session: ChatSession, argument: str) -> str:
    """The last reply's figures and what the engine holds."""
    lines = [stats_line(session.last.stats)] if session.last else ["no reply yet"]
    if session.loaded is not None:
        loaded = session.loaded
        lines.append(f"{loaded.name}: {loaded.format}, {loaded.dtype}, on {loaded.device_name}")
        lines += memory_lines(loaded.ledger, loaded.predicted)
    return "\n".join(lines)


COMMANDS: dict[str, Callable[[ChatSession, str], str]] = {
    "/help": show_help,
    "/clear": clear,
    "/system": system,
    "/set": set_value,
    "/stats": stats,
}
STREAMING = ("/regen", "/exit")  # these need the loop itself


def parse(line: str) -> tuple[str, str]:
    """(command, argument) of a line that begins with a slash; an unknown command is an error, never a message."""
    name, _, argument = line.partition(" ")
    name = ALIASES.get(name, name)
    if name not in COMMANDS and name not in STREAMING:
        raise LocalqError(name, "there is no such command", "/help lists them; // sends a slash.", ExitCode.USAGE)
    return name, argument.strip()
