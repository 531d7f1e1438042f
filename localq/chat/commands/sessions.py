"""Slash commands about whole conversations: listing, naming, changing to another, exporting."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from rich.cells import cell_len, set_cell_size

from localq import disk
from localq.chat.commands.host import Host
from localq.chat.history import export as transcript
from localq.chat.history.record import Record, RecordSummary
from localq.chat.history.store import ConversationStore
from localq.chat.reply import Recap
from localq.chat.session import ChatSession
from localq.errors import usage_error
from localq.sanitize import sanitize
from localq.wording import human_bytes, local_time

SHOWN = 20  # of the last conversations
LEAST = 20  # cells of a title that are shown


def store_of(session: ChatSession) -> ConversationStore:
    """Where conversations are, also when this one is not saved."""
    return session.store or ConversationStore()


def table(summaries: list[RecordSummary], current: int | None = None) -> str:
    """One line each: number, when, turns, model, title, which is cut where the terminal ends."""
    room = shutil.get_terminal_size((1000, 24)).columns
    models = [each.model.rpartition("/")[2] for each in summaries]
    wide = max(map(len, models), default=0)
    lines = []
    for each, model in zip(summaries, models, strict=True):
        when = local_time(each.changed_s, "%Y-%m-%d %H:%M")
        turns = f"{each.turns:>4} turn{' ' if each.turns == 1 else 's'}"
        told = f"{'*' if each.id == current else ' '}{each.id:>5}  {when}  {turns}  {model:<{wide}}  "
        title, left = sanitize(each.title).replace("\n", " "), max(room - cell_len(told), LEAST)
        lines.append(told + (title if cell_len(title) <= left else f"{set_cell_size(title, left - 1).rstrip()}…"))
    return sanitize("\n".join(lines))


def sessions(session: ChatSession, argument: str, host: Host) -> str:
    """List conversations, the last used first; search them; remove one or bring it back."""
    store, (word, _, rest) = store_of(session), argument.partition(" ")
    if word in ("rm", "restore") and rest.strip().isascii() and rest.strip().isdigit():
        number = int(rest.strip()[:18])
        if word == "restore":
            store.restore(number)
            return f"{number} is back"
        if number == session.record.id:
            raise usage_error("/sessions rm", "this is the conversation you are in", "/new begins another.")
        store.delete(number)
        return f"{number} is removed; /sessions restore {number} brings it back until tomorrow"
    found = store.summaries(argument, SHOWN + 1)
    if not found:
        return "no conversation has that in it" if argument else "no conversation was saved yet"
    more = "\n(there are more: /sessions TEXT searches them)" if len(found) > SHOWN else ""
    return table(found[:SHOWN], session.record.id) + more


def resume(session: ChatSession, argument: str, host: Host) -> str:
    """Go on with another conversation, with the model that is loaded."""
    if not argument:
        return sessions(session, "", host) + "\n/resume NUMBER or TITLE goes on with one"
    record = store_of(session).find(argument)
    was_with = record.model
    session.save()
    session.switch_to(record)
    told = recap(record)
    if was_with == record.model:
        return told
    return Recap(*told.parts, (f"it was with {was_with}; it goes on with {record.model}", False))


def new(session: ChatSession, argument: str, host: Host) -> str:
    """Begin another conversation; the system prompt stays."""
    session.save()
    record = Record(model=session.record.model)
    record.conversation.system = session.system
    session.switch_to(record)
    return "a new conversation"


def save(session: ChatSession, argument: str, host: Host) -> str:
    """Give the conversation a name; one that was not saved so far is from now on."""
    if not session.conversation.turns:
        raise usage_error("/save", "there is nothing to save yet", "Say something first.")
    session.store = store_of(session)
    session.record.title = " ".join(sanitize(argument).split())[:200] or session.record.title
    session.save()
    record = session.record
    assert record.id is not None
    session.store.rename(record.id, record.name())
    return f"saved as {record.id}: {record.name()}"


def export(session: ChatSession, argument: str, host: Host) -> str:
    """Write the conversation to a file, or print it."""
    format, _, name = argument.partition(" ")
    if format not in transcript.FORMATS:
        raise usage_error("/export", "it takes `md` or `json`, and a file", "/export md notes.md")
    text = transcript.export(session.record, format)
    if not name.strip():
        return host.show(text.rstrip("\n"), "(printed; /export md FILE writes a file)")
    path = Path(name.strip())
    try:
        path = path.expanduser()
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as error:
        raise usage_error(str(path), "it exists already", "Give another name.") from error
    except (OSError, ValueError, RuntimeError) as error:
        why = f"it cannot be written ({getattr(error, 'strerror', None) or error})"
        raise usage_error(str(path), why, "Check the path.") from error
    with disk.disk_errors(path), os.fdopen(descriptor, "w", encoding="utf-8", errors="replace") as file:
        file.write(text)
    return f"{path}: {human_bytes(len(text.encode('utf-8', 'replace')))}"


def recap(record: Record) -> Recap:
    """What to tell of a conversation that is gone on with: its name, and how it ended."""
    messages = record.conversation.messages()
    parts = [(f"{record.name()} ({len(messages)} messages)", False)]
    for message in messages[-2:]:
        is_reply = message.role != "user"
        parts.append((f"{'' if is_reply else '>>> '}{message.answer}", is_reply))
    if len(record.conversation.path()) > len(messages):
        parts.append(("(the last message has no answer: /regen answers it)", False))
    return Recap(*((sanitize(text), is_reply) for text, is_reply in parts))
