"""Slash commands about texts: the prompt, replies and their versions, and attached files."""

from __future__ import annotations

import itertools
from pathlib import Path

from localq.chat import compaction
from localq.chat.attachments import matching_files, read_attachment
from localq.chat.commands import models
from localq.chat.commands.host import Host
from localq.chat.commands.sessions import recap
from localq.chat.history.export import code_blocks
from localq.chat.reply import Recap, Replies
from localq.chat.session import ChatSession
from localq.disk import MOST_TEXT_BYTES
from localq.errors import LocalqError, usage_error
from localq.wording import human_bytes

MOST_FILES = 100  # of /glob


def regenerate(session: ChatSession, argument: str, host: Host) -> Replies:
    """Regenerate the last reply."""
    return session.regenerate()


def edit(session: ChatSession, argument: str, host: Host) -> str | Replies:
    """Edit and resend the last message, with the text given here or in an editor; `-a` edits the reply."""
    option, _, rest = argument.partition(" ")
    conversation = session.conversation
    if option == "-a":
        old = conversation.turns[conversation.final_reply("/edit -a", "edit")].message.content
        text = rest.strip() or host.edit(old, "Pass the new text directly: /edit -a TEXT.")
        conversation.edit_reply(text)
        return session.try_save() or "reply edited; /continue continues it, and /n lists the previous version"
    last = conversation.last_user()
    old = "" if last is None else conversation.turns[last].message.words
    return session.edit(argument or (host.edit(old, "Pass the new text directly: /edit TEXT.") if old else ""))


def undo(session: ChatSession, argument: str, host: Host) -> str:
    """Remove the last message and its reply; right after /compact, undo that."""
    conversation = session.conversation
    summary, _ = conversation.model_context()
    if summary is not None and summary.made_at == conversation.head:
        return _remove_summary(session)
    words = " ".join(session.conversation.undo().split())
    return session.try_save() or f"removed: {words if len(words) <= 60 else words[:57] + '...'}"


def compact(session: ChatSession, argument: str, host: Host) -> str | Replies:
    """Replace the oldest turns of the prompt with a summary by the model; `off` undoes it."""
    if argument == "off":
        return _remove_summary(session)
    if argument:
        raise usage_error("/compact", f"unexpected argument '{argument[:20]}'", "Use /compact or /compact off.")
    return compaction.compact(session)


def _remove_summary(session: ChatSession) -> str:
    if not session.conversation.remove_summary():
        raise usage_error(
            "/compact off", "this conversation has not been compacted", "/compact summarizes the oldest turns."
        )
    return session.try_save() or "summary removed; the prompt contains the original turns again"


def extend(session: ChatSession, argument: str, host: Host) -> Replies:
    """Continue the last reply where it stopped."""
    return session.continue_reply()


def alternatives(session: ChatSession, argument: str, host: Host) -> str:
    """List the other versions of the last exchange, or switch to one of them."""
    conversation = session.conversation
    found = conversation.alternatives()
    if not found:
        raise usage_error("/n", "there are no other versions", "/regen and /edit create them.")
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
        words = " ".join(message.shown.split()) or ", ".join(each.name for each in message.attachments)
        mark, who = "*" if turn in path else " ", ">>> " if message.role == "user" else ""
        lines.append(f"{mark} {number}  {who}{words if len(words) <= 70 else words[:67] + '...'}")
    return "\n".join(lines)


def tokens(session: ChatSession, argument: str, host: Host) -> str:
    """Report how full the context is."""
    if not session.conversation.path():
        return "the conversation is empty"
    used, read = len(session.prompt()), len(session.prompt_messages())
    line = f"prompt: {used} tokens ({read} messages"
    line += " including the system prompt)" if session.system else ")"
    if session.loaded is not None:
        size = session.loaded.context_size
        line += f", {used / size:.0%} of the {size}-token context"
    path, (summary, turns) = session.conversation.path(), session.conversation.model_context()
    unread = len(turns) + bool(session.system) - read
    if summary is not None:
        line += (
            f"\nthe oldest {len(path) - len(turns)} messages have been replaced by a summary (/compact off undoes this)"
        )
    which = "other messages" if summary is not None else "messages"
    left_out = f"\nthe oldest {unread} {which} were left out because the context was full"
    return line + (left_out if unread else "")


def show(session: ChatSession, argument: str, host: Host) -> str:
    """The prompt text, the chat template, facts of the model, or the sampling settings."""
    if argument == "info":
        return models.info(session)
    if argument == "params":
        return models.parameters(session)
    if argument == "template":
        return session.tokenizer.chat_template or "this model has no chat template"
    if argument != "prompt":
        raise models.unknown_page(argument)
    if not session.conversation.path():
        return "the conversation is empty"
    below = [f"({len(session.prompt())} tokens)", *models.origin_lines(session, "system")]
    return host.show(session.prompt_text(), "\n".join(below))


def copy(session: ChatSession, argument: str, host: Host) -> str:
    """Copy the last answer, the N-th last one, or the last code block."""
    replies = [message.answer for message in session.messages if message.role == "assistant"]
    if not replies:
        raise usage_error("/copy", "there is no reply yet", "Send a message first.")
    if argument == "code":
        blocks = code_blocks(replies[-1])
        if not blocks:
            raise usage_error("/copy code", "the last reply has no code block", "/copy copies the whole reply.")
        return host.copy(blocks[-1])
    back = _number(argument, len(replies), "/copy") if argument else 1
    if not replies[-back]:
        raise usage_error("/copy", "this reply contains thinking but no answer", "Continue it with /continue.")
    return host.copy(replies[-back])


def markdown(session: ChatSession, argument: str, host: Host) -> str:
    """Show or set whether replies are rendered as Markdown."""
    if argument not in ("", "on", "off"):
        raise usage_error("/markdown", f"unexpected argument '{argument[:20]}'", "Use /markdown on or /markdown off.")
    drawn = host.set_markdown(None if not argument else argument == "on")
    return "replies are rendered as Markdown" if drawn else "replies are printed unformatted"


def read(session: ChatSession, argument: str, host: Host) -> str:
    """Attach a file to the next message."""
    if not argument:
        raise usage_error("/read", "no file given", "Use /read FILE.")
    attached = read_attachment(Path(argument))
    session.attached.append(attached)
    return f"attached to your next message: {attached.measure(session.count_tokens)[0].summary}"


def glob_files(session: ChatSession, argument: str, host: Host) -> str:
    """Attach all text files that match a pattern to the next message; other files are named."""
    if not argument:
        raise usage_error("/glob", "no pattern given", "Example: /glob src/**/*.py")
    try:
        files = sorted(set(itertools.islice(matching_files(argument), MOST_FILES + 1)))
    except (ValueError, RecursionError) as error:
        raise usage_error("/glob", f"invalid pattern ({error})", "Example: /glob src/*.py") from error
    if not files:
        raise usage_error("/glob", f"no file matches {argument[:60]!r}", "Use ** to include subfolders.")
    if len(files) > MOST_FILES:
        raise usage_error("/glob", f"more than {MOST_FILES} files match", "Use a narrower pattern.")
    lines, attached = [], []
    for path in files:
        try:
            each = read_attachment(path, str(path))
        except LocalqError as error:
            lines.append(f"skipped: {error}")
            continue
        attached.append(each)
    measured = [each.measure(session.count_tokens)[0] for each in attached]
    lines += [each.summary for each in measured]
    size = sum(each.bytes for each in measured)
    if size > MOST_TEXT_BYTES:
        why = f"the {len(attached)} files total {human_bytes(size)}; the limit is {human_bytes(MOST_TEXT_BYTES)}"
        raise usage_error("/glob", why, "Use a narrower pattern.")
    session.attached += attached
    return "\n".join([*lines, f"{len(attached)} files attached to your next message"])


def _number(text: str, most: int, command: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 1 <= int(text) <= most):
        raise usage_error(command, f"'{text[:20]}' is not a number from 1 to {most}")
    return int(text)
