"""Slash commands about texts: what the model reads, what it said, and files that are put into a message."""

from __future__ import annotations

import itertools
from pathlib import Path

from localq.chat import compaction
from localq.chat.attachments import matching_files, read_attachment
from localq.chat.commands import models
from localq.chat.commands.host import Host
from localq.chat.commands.sessions import recap
from localq.chat.history import export as transcript
from localq.chat.reply import Recap, Replies
from localq.chat.session import ChatSession
from localq.disk import MOST_TEXT_BYTES
from localq.errors import LocalqError, usage_error
from localq.wording import human_bytes

MOST_FILES = 100  # of /glob


def regenerate(session: ChatSession, argument: str, host: Host) -> Replies:
    """Answer the last message again."""
    return session.regenerate()


def edit(session: ChatSession, argument: str, host: Host) -> str | Replies:
    """Say the last message otherwise, in words given here or in an editor; `-a` changes the reply instead."""
    option, _, rest = argument.partition(" ")
    conversation = session.conversation
    if option == "-a":
        old = conversation.turns[conversation.final_reply("/edit -a", "edit")].message.content
        text = rest.strip() or host.edited(old, "Write the reply behind it: /edit -a TEXT.")
        conversation.edit_reply(text)
        return session.try_save() or "the reply is changed, and /continue goes on behind it; the old one stays (/n)"
    last = conversation.last_user()
    old = "" if last is None else conversation.turns[last].message.content
    return session.edit(argument or (host.edited(old, "Write the message behind it: /edit TEXT.") if old else ""))


def undo(session: ChatSession, argument: str, host: Host) -> str:
    """Take back the last message and its reply; right behind /compact, that."""
    conversation = session.conversation
    summary, _ = conversation.model_context()
    if summary is not None and summary.made_at == conversation.head:
        return _unsummarised(session)
    said = session.conversation.undo()
    words = " ".join(said.split())
    return session.try_save() or f"taken back: {words if len(words) <= 60 else words[:57] + '...'}"


def compact(session: ChatSession, argument: str, host: Host) -> str | Replies:
    """Have the model sum up the oldest turns and read that in their place; `off` takes it back."""
    if argument == "off":
        return _unsummarised(session)
    if argument:
        raise usage_error("/compact", f"it takes nothing, or `off`, not '{argument[:20]}'", "/compact alone sums up.")
    return compaction.compact(session)


def _unsummarised(session: ChatSession) -> str:
    if not session.conversation.remove_summary():
        raise usage_error("/compact off", "nothing is summed up here", "/compact sums up the oldest turns.")
    return session.try_save() or "the model reads the turns themselves again"


def extend(session: ChatSession, argument: str, host: Host) -> Replies:
    """Go on with the last reply where it stopped."""
    return session.continue_reply()


def alternatives(session: ChatSession, argument: str, host: Host) -> str:
    """List the replies that the last message has had, and what else was said here, or go on with one of them."""
    conversation = session.conversation
    found = conversation.alternatives()
    if not found:
        raise usage_error("/n", "nothing else was said here", "Say something first.")
    if argument:
        taken = found[_number(argument, len(found), "/n") - 1]
        conversation.switch_to(taken)
        is_end = taken == conversation.head == conversation.last_reply()
        return session.try_save() or (
            Recap((conversation.turns[taken].message.answer, True)) if is_end else recap(session.record)
        )
    lines, path = [], conversation.path()
    for number, turn in enumerate(found, 1):
        message = conversation.turns[turn].message
        words = " ".join(message.answer.split())
        mark, who = "*" if turn in path else " ", ">>> " if message.role == "user" else ""
        lines.append(f"{mark} {number}  {who}{words if len(words) <= 70 else words[:67] + '...'}")
    return "\n".join(lines)


def tokens(session: ChatSession, argument: str, host: Host) -> str:
    """How full the context is."""
    if not session.conversation.path():
        return "nothing said yet"
    used, read = len(session.prompt()), len(session.prompt_messages())
    line = f"the model reads {used} tokens ({read} messages"
    line += ", the system prompt among them)" if session.system else ")"
    if session.loaded is not None:
        size = session.loaded.context_size
        line += f", {used / size:.0%} of its context of {size}"
    path, (summary, turns) = session.conversation.path(), session.conversation.model_context()
    unread = len(turns) + bool(session.system) - read
    if summary is not None:
        line += f"\nthe oldest {len(path) - len(turns)} messages are summed up (/compact off reads them again)"
    which = "others" if summary is not None else "messages"
    left_out = f"\nthe oldest {unread} {which} were left out when the context was full; the next reads what fits"
    return line + (left_out if unread else "")


def show(session: ChatSession, argument: str, host: Host) -> str:
    """The text that the model reads, the template that makes it, the model, or how replies are made."""
    if argument == "info":
        return models.info(session)
    if argument == "params":
        return models.parameters(session)
    if argument == "template":
        return session.tokenizer.chat_template or "this model has no chat template"
    if argument != "prompt":
        raise models.unknown_page(argument)
    if not session.conversation.path():
        return "nothing said yet"
    return host.show(session.prompt_text(), f"({len(session.prompt())} tokens)")


def copy(session: ChatSession, argument: str, host: Host) -> str:
    """Copy the last answer, the N-th last one, or the last block of code."""
    replies = [message.answer for message in session.messages if message.role == "assistant"]
    if not replies:
        raise usage_error("/copy", "there is no reply yet", "Say something first.")
    if argument == "code":
        blocks = transcript.code_blocks(replies[-1])
        if not blocks:
            raise usage_error("/copy code", "there is no code in the last reply", "/copy takes all of it.")
        return host.copy(blocks[-1])
    back = _number(argument, len(replies), "/copy") if argument else 1
    if not replies[-back]:
        raise usage_error("/copy", "this reply is a thought without an answer", "/continue goes on with it.")
    return host.copy(replies[-back])


def markdown(session: ChatSession, argument: str, host: Host) -> str:
    """Show or set whether replies are drawn as Markdown."""
    if argument not in ("", "on", "off"):
        raise usage_error(
            "/markdown", f"'{argument[:20]}' is neither on nor off", "/markdown off prints them as written."
        )
    drawn = host.draws(None if not argument else argument == "on")
    return "replies are drawn as Markdown" if drawn else "replies are printed as they are written"


def read(session: ChatSession, argument: str, host: Host) -> str:
    """Put a file before the next message."""
    if not argument:
        raise usage_error("/read", "there is no file", "/read FILE puts it before your next message.")
    attached = read_attachment(Path(argument))
    session.attached.append(attached.text)
    return f"{attached.told} go before your next message"


def glob_files(session: ChatSession, argument: str, host: Host) -> str:
    """Put all text files that fit a pattern before the next message; those that are no text are named."""
    if not argument:
        raise usage_error(
            "/glob", "there is no pattern", "/glob src/**/*.py puts those files before your next message."
        )
    try:
        files = sorted(set(itertools.islice(matching_files(argument), MOST_FILES + 1)))
    except (ValueError, RecursionError) as error:
        raise usage_error("/glob", f"the pattern cannot be used ({error})", "/glob src/*.py") from error
    if not files:
        raise usage_error("/glob", f"no file fits {argument[:60]!r}", "** stands for all folders below.")
    if len(files) > MOST_FILES:
        raise usage_error("/glob", f"more than {MOST_FILES} files fit", "Give a narrower pattern.")
    lines, attached = [], []
    for path in files:
        try:
            each = read_attachment(path, str(path))
        except LocalqError as error:
            lines.append(f"left out: {error}")
            continue
        attached.append(each.text)
        lines.append(each.told)
    size = sum(len(text.encode()) for text in attached)
    if size > MOST_TEXT_BYTES:
        why = f"{len(attached)} files have {human_bytes(size)} together, more than {human_bytes(MOST_TEXT_BYTES)}"
        raise usage_error("/glob", why, "Give a narrower pattern.")
    session.attached += attached
    return "\n".join([*lines, f"{len(attached)} files go before your next message"])


def _number(text: str, most: int, command: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= most):
        raise usage_error(command, f"'{text[:20]}' is none of 1 to {most}", f"{command} takes a number.")
    return int(text)
