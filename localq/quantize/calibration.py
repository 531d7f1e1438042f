"""Calibration text as windows of token ids. Torch-free.

The default is a slice of the training split of WikiText-2, packaged with localq. Rows are joined as GPTQ does
(`text/token_windows.py`) and tokenized in pieces, so that a large text needs little memory. Chats go through the
model's template. Every file gives its own windows, in order, and a window of chats starts at the start of a chat: a
model reads the first tokens of its context unlike any others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import disk, places
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import json_files
from localq.files.model_folder import ModelFiles
from localq.text import thinking
from localq.text.token_windows import bos_id, rows
from localq.text.tokenizer import MAX_TEXT_BYTES, Tokenizer

SUFFIX = ".jsonl"
_FORM = 'Each line must be {"messages": [{"role": "user", "content": "..."}, ...]}.'
Message = dict[str, str]  # role and content


@dataclass(frozen=True)
class ChatFile:
    """A file of chats: for each its line number and its messages."""

    path: Path
    chats: tuple[tuple[int, tuple[Message, ...]], ...]


def parse_chats(text: str, path: Path, option: str) -> ChatFile:
    """Parse `text`, the content of `path`, an argument of `option`. Blank lines are skipped.

    Raises LocalqError (exit 2), with the line number, for a malformed chat, and for a file without chats.
    """
    lines = enumerate(text.split("\n"), 1)
    chats = tuple((number, _messages(line, number, path, option)) for number, line in lines if line.strip())
    if not chats:
        raise usage_error(option, f"no chats found in {path}", _FORM)
    return ChatFile(path, chats)


def token_ids(tokenizer: Tokenizer, chats: ChatFile, option: str) -> list[list[int]]:
    """Return the token ids of each chat.

    Raises LocalqError: exit 2 for a model without a chat template, and for a chat that its template rejects; 8 for a
    malformed template.
    """
    if tokenizer.chat_template is None:
        why = f"{chats.path} contains chats, but this base model has no chat template"
        raise usage_error(option, why, "Use plain text.")
    ids = list[list[int]]()
    for number, messages in chats.chats:
        try:
            shown = [
                {**each, "content": thinking.template_content(tokenizer, each["role"], each["content"])}
                for each in messages
            ]
            ids.append(tokenizer.encode(tokenizer.chat_text(shown, add_generation_prompt=False)))
        except LocalqError as error:
            if error.exit_code == ExitCode.BAD_FILE:
                raise
            why = f"{chats.path}, line {number}: {error.why}"
            raise usage_error(option, why, "Fix or remove that line.") from error
    return ids


def _messages(line: str, number: int, path: Path, option: str) -> tuple[Message, ...]:
    """Return the messages of one line."""
    try:
        found = json_files.parse_object(line, str(path)).get("messages")
    except LocalqError as error:
        raise usage_error(option, f"{path}, line {number}: {error.why}", _FORM) from None
    if not isinstance(found, list) or not found or not all(map(_is_message, found)):
        why = f"{path}, line {number}: messages must be a list of objects with role and content strings"
        raise usage_error(option, why, _FORM)
    return tuple({"role": each["role"], "content": each["content"]} for each in found)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


DEFAULT = Path("default")  # names the packaged text
DEFAULT_TEXT = places.PACKAGE_DATA / "wikitext-2-train-slice.txt"
WINDOW = 2048  # tokens of a window, less where the model has a shorter context
PIECE = 2**16  # characters that are tokenized together, rounded up to whole rows
OPTION = "--calibration"
Texts = Sequence[str | ChatFile]


def token_windows(files: ModelFiles, text: str | Texts, count: int | None, most: int | None = None) -> list[list[int]]:
    """Return `count` windows of equal length from all over `text`; with count None all of them, or `most`.

    Several texts contribute equally, as far as their length allows.

    Raises LocalqError (exit 2) for a text of less than one window or of fewer than `count`, and for chats that the
    model cannot read.
    """
    context = files.text_config.get("max_position_embeddings")
    size = min(WINDOW, context) if isinstance(context, int) else WINDOW
    tokenizer = Tokenizer.load(files)
    texts = [text] if isinstance(text, str) else text
    windows = [_windows(tokenizer, each, size) for each in texts]
    found = sum(map(len, windows))
    if count is not None and count > found:
        why = f"the text has only {found} windows of {size} tokens"
        raise usage_error("--windows", why, f"Use at most {found} windows, or a longer text.")
    shares = _shares([len(each) for each in windows], min(found, most or found) if count is None else count)
    some = zip(windows, shares, strict=True)
    return [each[index * len(each) // share] for each, share in some for index in range(share)]


def _shares(counts: Sequence[int], wanted: int) -> list[int]:
    """Split `wanted` as evenly as `counts` allow; the first ones take the remainder."""
    shares = [0] * len(counts)
    while left := wanted - sum(shares):
        open_ = [at for at, count in enumerate(counts) if shares[at] < count]
        for number, at in enumerate(open_):
            more = left // len(open_) + (number < left % len(open_))
            shares[at] = min(counts[at], shares[at] + more)
    return shares


def _windows(tokenizer: Tokenizer, text: str | ChatFile, size: int) -> list[list[int]]:
    """Return the windows of one text or file of chats, at least one."""
    if isinstance(text, ChatFile):
        chats = token_ids(tokenizer, text, OPTION)
        found, tokens, what = _chat_windows(chats, size), sum(map(len, chats)), str(text.path)
    else:
        ids = _ids(tokenizer, text)
        found, tokens, what = [ids[at : at + size] for at in range(0, len(ids), size)], len(ids), "the text"
    if found and len(found[-1]) < size:
        found.pop()
    if not found:
        why = f"{what} has only {tokens} tokens, fewer than one {size}-token window"
        raise usage_error(OPTION, why, "Use a longer text.")
    return found


def _chat_windows(chats: Sequence[list[int]], size: int) -> list[list[int]]:
    """Pack chats into windows; a chat that a window cuts starts the next one again, if it fits into one."""
    found, window = list[list[int]](), list[int]()
    for chat in chats:
        window += chat
        if len(window) >= size:
            found.append(window[:size])
            window = list(chat) if len(chat) < size < len(window) else []
    return [*found, window]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the token ids of `text`, with BOS in front where the tokenizer adds it."""
    bos = bos_id(tokenizer)
    ids = [] if bos is None else [bos]
    for piece in _pieces(text):
        ids += tokenizer.encode(piece)
    return ids


def _pieces(text: str) -> Iterator[str]:
    """Joined rows, about `PIECE` characters at a time."""
    joined, size = list[str](), 0
    for row in rows(text):
        joined += [row, "\n\n"]
        size += len(row) + 2
        if size >= PIECE:
            yield "".join(joined)
            joined, size = [], 0
    yield "".join(joined)


def read_texts(paths: Sequence[Path]) -> Texts:
    """Read these files; `DEFAULT` stands for the packaged text. Raises LocalqError (exit 2)."""
    return [_read_file(DEFAULT_TEXT if path == DEFAULT else path) for path in paths]


def _read_file(path: Path) -> str | ChatFile:
    text = read_text(path)
    return parse_chats(text, path, OPTION) if path.suffix.lower() == SUFFIX else text


def read_text(path: Path) -> str:
    """Read the UTF-8 text of `path`. Raises LocalqError (exit 2) where that fails."""
    try:
        raw = disk.read_start(path, MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise usage_error(OPTION, f"{path} cannot be read ({error.strerror})", "Check the path.") from None
    except LocalqError as error:
        raise usage_error(OPTION, f"{path} is {error.why}", error.next_step) from None
    if len(raw) > MAX_TEXT_BYTES:
        raise usage_error(
            OPTION, f"{path} is too large (limit: {MAX_TEXT_BYTES:,} bytes)", "Use only part of the file."
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"{path} is not UTF-8 text ({error.reason} at byte {error.start})"
        raise usage_error(OPTION, why, "Use plain UTF-8 text.") from None
