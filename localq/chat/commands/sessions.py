"""Slash commands about whole conversations: list, search, name, switch, export."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil

from rich.cells import cell_len, set_cell_size

from localq import disk, places
from localq.chat.commands.host import Host
from localq.chat.commands.models import origin_lines
from localq.chat.history.export import FORMATS, export_record
from localq.chat.history.record import Record, RecordSummary
from localq.chat.history.store import ConversationStore
from localq.chat.reply import Recap
from localq.chat.session import ChatSession
from localq.errors import usage_error
from localq.sanitize import sanitize
from localq.wording import human_bytes, local_time

SHOWN = 20  # conversations in the list
LEAST = 20  # cells of a title, also on a narrow terminal


def store_of(session: ChatSession) -> ConversationStore:
    """The store of conversations, also where this one is not saved."""
    return session.store or ConversationStore()


def table(summaries: list[RecordSummary], current: int | None = None) -> str:
    """One line for each: number, time, turns, model, title (cut at the edge of the terminal)."""
    room = shutil.get_terminal_size((1000, 24)).columns
    models = [each.model.rpartition("/")[2] for each in summaries]
    wide = max(map(len, models), default=0)
    lines = []
    for each, model in zip(summaries, models, strict=True):
        when = local_time(each.changed_s, "%Y-%m-%d %H:%M")
        turns = f"{each.turns:>4} turn{' ' if each.turns == 1 else 's'}"
        start = f"{'*' if each.id == current else ' '}{each.id:>5}  {when}  {turns}  {model:<{wide}}  "
        title, left = sanitize(each.title).replace("\n", " "), max(room - cell_len(start), LEAST)
        lines.append(start + (title if cell_len(title) <= left else f"{set_cell_size(title, left - 1).rstrip()}…"))
    return sanitize("\n".join(lines))


def sessions(session: ChatSession, argument: str, host: Host) -> str:
    """List conversations, the last used first; search, delete or restore them."""
    store, (word, _, rest) = store_of(session), argument.partition(" ")
    if word in ("rm", "restore") and rest.strip().isascii() and rest.strip().isdigit():
        number = int(rest.strip()[:18])
        if word == "restore":
            store.restore(number)
            return f"restored conversation {number}"
        if number == session.record.id:
            raise usage_error("/sessions rm", "this is the current conversation", "Start a new one first with /new.")
        store.delete(number)
        return f"deleted conversation {number}; restore it within a day with /sessions restore {number}"
    found = store.summaries(argument, SHOWN + 1)
    if not found:
        return "no matching conversations" if argument else "no saved conversations"
    more = "\n(some conversations are not shown; search with /sessions TEXT)" if len(found) > SHOWN else ""
    return table(found[:SHOWN], session.record.id) + more


def resume(session: ChatSession, argument: str, host: Host) -> str:
    """Switch to another conversation, with the model that is loaded."""
    if not argument:
        return sessions(session, "", host) + "\nSwitch to one with /resume NUMBER or /resume TITLE"
    record = store_of(session).find(argument)
    was_with = record.model
    session.save()
    session.switch_to(record)
    shown = recap(record)
    below = [] if was_with == record.model else [f"model changed: {was_with} -> {record.model}"]
    return Recap(*shown.parts, *((line, False) for line in [*below, *origin_lines(session)]))


def new(session: ChatSession, argument: str, host: Host) -> str:
    """Start a new conversation; the system prompt is kept."""
    session.save()
    record = Record(model=session.record.model)
    record.conversation.system = session.system
    session.switch_to(record)
    return "\n".join(["new conversation", *origin_lines(session)])


def save(session: ChatSession, argument: str, host: Host) -> str:
    """Name the conversation, and save it from now on if it was not saved."""
    if not session.conversation.turns:
        raise usage_error("/save", "nothing to save yet", "Send a message first.")
    session.store = store_of(session)
    session.record.title = " ".join(sanitize(argument).split())[:200] or session.record.title
    session.save()
    record = session.record
    assert record.id is not None
    session.store.rename(record.id, record.name())
    return f"saved as conversation {record.id}: {record.name()}"


def export(session: ChatSession, argument: str, host: Host) -> str:
    """Write the conversation to a file, or print it."""
    format, _, name = argument.partition(" ")
    if format not in FORMATS:
        raise usage_error("/export", "the first argument must be `md` or `json`", "Example: /export md notes.md")
    text = export_record(dataclasses.replace(session.record, settings=session.settings()), format)
    if not name.strip():
        return host.show(text.rstrip("\n"), "(to write to a file, use /export md FILE)")
    path = places.expand(name.strip())
    content = text.encode("utf-8", "replace")
    opened = contextlib.ExitStack()
    try:
        file = opened.enter_context(disk.new_file(path))
    except FileExistsError as error:
        raise usage_error(str(path), "the file already exists", "Choose another name.") from error
    except (OSError, ValueError) as error:
        why = f"cannot be written ({getattr(error, 'strerror', None) or error})"
        raise usage_error(str(path), why, "Check the path.") from error
    with disk.disk_errors(path), opened:
        file.write(content)
        file.flush()
    return f"{path}: {human_bytes(len(content))}"


def recap(record: Record) -> Recap:
    """A recap of a resumed conversation: its name and its last exchange."""
    messages = record.conversation.messages()
    parts = [(f"{record.name()} ({len(messages)} messages)", False)]
    for message in messages[-2:]:
        is_reply = message.role != "user"
        parts += [(f"[{each.summary}]", False) for each in message.attachments]
        parts += [(f"({call.line})", False) for each in message.rounds for call in each.calls]
        parts.append((f"{'' if is_reply else '>>> '}{message.shown}", is_reply))
    if len(record.conversation.path()) > len(messages):
        parts.append(("(the last message has no reply; /regen generates one)", False))
    return Recap(*((sanitize(text), is_reply) for text, is_reply in parts))
