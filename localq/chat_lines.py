"""Files of chats, a JSON object a line with `messages` of `role` and `content`, and how a model reads them. Torch-free.

That is the form that chats are published in. A model reads them as `localq chat` has it read: through its own template,
special tokens as tokens, while what looks like them in what was said is text.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import jsonfile, thinking
from localq.errors import ExitCode, LocalqError, usage_error
from localq.tokenizer import Tokenizer

SUFFIX = ".jsonl"
_FORM = 'A line is {"messages": [{"role": "user", "content": "..."}, ...]}.'
Message = dict[str, str]  # role and content


@dataclass(frozen=True)
class Chats:
    """What `path` holds: of every chat the number of its line, and its messages."""

    path: Path
    chats: tuple[tuple[int, tuple[Message, ...]], ...]


def parse(text: str, path: Path, option: str) -> Chats:
    """The chats in `text`, which is that of `path`, an argument of `option`. Blank lines are none.

    Raises LocalqError (exit 2), with the line, for one that is no chat, and where there is not one.
    """
    lines = enumerate(text.split("\n"), 1)
    chats = tuple((number, _messages(line, number, path, option)) for number, line in lines if line.strip())
    if not chats:
        raise usage_error(option, f"{path} is empty: it holds no chat", _FORM)
    return Chats(path, chats)


def token_ids(tokenizer: Tokenizer, chats: Chats, option: str) -> list[list[int]]:
    """Those of each chat.

    Raises LocalqError: exit 2 for a model without a chat template, and for a chat that its template refuses; 8 for a
    template that is malformed.
    """
    template = tokenizer.chat_template
    if template is None:
        why = f"{chats.path} holds chats, and this base model has no chat template"
        raise usage_error(option, why, "Give plain text.")
    ids = list[list[int]]()
    for number, messages in chats.chats:
        told = [{**each, "content": thinking.read_by(template, each["role"], each["content"])} for each in messages]
        try:
            ids.append(tokenizer.encode(tokenizer.chat_text(told, add_generation_prompt=False)))
        except LocalqError as error:
            if error.exit_code == ExitCode.BAD_FILE:
                raise
            why = f"{chats.path}, line {number}: {error.why}"
            raise usage_error(option, why, "Change that line, or leave it out.") from error
    return ids


def _messages(line: str, number: int, path: Path, option: str) -> tuple[Message, ...]:
    """Of one line."""
    try:
        found = jsonfile.parse_object(line, str(path)).get("messages")
    except LocalqError as error:
        raise usage_error(option, f"{path}, line {number}: {error.why}", _FORM) from None
    if not isinstance(found, list) or not found or not all(map(_is_message, found)):
        why = f"{path}, line {number}: its messages are no list of roles and contents, both text"
        raise usage_error(option, why, _FORM)
    return tuple({"role": each["role"], "content": each["content"]} for each in found)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))
