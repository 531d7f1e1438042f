"""The text that a model is quantized on, as windows of token ids. Torch-free.

Without a file of the user's it is a slice of the training split of WikiText-2, which comes with localq. Rows are joined
as in the convention of GPTQ (`windows.py`), and tokenized some at a time: a large text is no reason to give up. Files
of chats are read as the model reads chats (`chat_lines.py`). Every file gives windows of its own, in their order, and
windows of chats begin where a chat does: what stands first in its context a model reads like nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq import places
from localq.errors import ExitCode, LocalqError, usage_error
from localq.files import json_files
from localq.files.model_folder import ModelFiles
from localq.text import thinking
from localq.text import token_windows as windows
from localq.text.tokenizer import MAX_TEXT_BYTES, Tokenizer

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
        found = json_files.parse_object(line, str(path)).get("messages")
    except LocalqError as error:
        raise usage_error(option, f"{path}, line {number}: {error.why}", _FORM) from None
    if not isinstance(found, list) or not found or not all(map(_is_message, found)):
        why = f"{path}, line {number}: its messages are no list of roles and contents, both text"
        raise usage_error(option, why, _FORM)
    return tuple({"role": each["role"], "content": each["content"]} for each in found)


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


DEFAULT = Path("default")  # names the text that localq has
DEFAULT_TEXT = places.PACKAGE_DATA / "wikitext-2-train-slice.txt"
WINDOW = 2048  # tokens of a window, less where the model has a shorter context
PIECE = 2**16  # characters that are tokenized together, and the rest of their row
OPTION = "--calibration"
Texts = Sequence[str | Chats]


def token_windows(files: ModelFiles, text: str | Texts, count: int | None, most: int | None = None) -> list[list[int]]:
    """`count` windows from all over `text`, each as long as the others; where that is None, all, or `most`.

    Of several texts every one gives as many, as far as it has them.

    Raises LocalqError: exit 2 for a text of less than one window, or of fewer than `count`, and for chats that the
    model cannot read.
    """
    context = files.text_config.get("max_position_embeddings")
    size = min(WINDOW, context) if isinstance(context, int) else WINDOW
    tokenizer = Tokenizer.load(files)
    texts = [text] if isinstance(text, str) else text
    windows = [_windows(tokenizer, each, size) for each in texts]
    found = sum(map(len, windows))
    if count is not None and count > found:
        why = f"the text has {found} windows of {size} tokens"
        raise usage_error("--windows", why, f"Ask for {found} at most, or give a longer text.")
    shares = _shares([len(each) for each in windows], min(found, most or found) if count is None else count)
    some = zip(windows, shares, strict=True)
    return [each[index * len(each) // share] for each, share in some for index in range(share)]


def _shares(counts: Sequence[int], wanted: int) -> list[int]:
    """How many of each of these, `wanted` in all, as evenly as it can be; the first have what does not divide."""
    shares = [0] * len(counts)
    while left := wanted - sum(shares):
        open_ = [at for at, count in enumerate(counts) if shares[at] < count]
        for number, at in enumerate(open_):
            more = left // len(open_) + (number < left % len(open_))
            shares[at] = min(counts[at], shares[at] + more)
    return shares


def _windows(tokenizer: Tokenizer, text: str | Chats, size: int) -> list[list[int]]:
    """Those of one text, or of one file of chats. There is one at least."""
    if isinstance(text, Chats):
        chats = token_ids(tokenizer, text, OPTION)
        found, tokens, what = _chat_windows(chats, size), sum(map(len, chats)), str(text.path)
    else:
        ids = _ids(tokenizer, text)
        found, tokens, what = [ids[at : at + size] for at in range(0, len(ids), size)], len(ids), "the text"
    if found and len(found[-1]) < size:
        found.pop()
    if not found:
        why = f"{what} has {tokens} tokens, fewer than one window of {size}"
        raise usage_error(OPTION, why, "Give a longer text.")
    return found


def _chat_windows(chats: Sequence[list[int]], size: int) -> list[list[int]]:
    """As many chats as begin in a window; the one that its end cuts stands whole in the next, if it is no longer."""
    found, window = list[list[int]](), list[int]()
    for chat in chats:
        window += chat
        if len(window) >= size:
            found.append(window[:size])
            window = list(chat) if len(chat) < size < len(window) else []
    return [*found, window]


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """All of `text`, with BOS in front where the tokenizer adds it."""
    bos = windows.bos_id(tokenizer)
    ids = [] if bos is None else [bos]
    for piece in _pieces(text):
        ids += tokenizer.encode(piece)
    return ids


def _pieces(text: str) -> Iterator[str]:
    """Joined rows, about `PIECE` characters at a time."""
    joined, size = list[str](), 0
    for row in windows.rows(text):
        joined += [row, "\n\n"]
        size += len(row) + 2
        if size >= PIECE:
            yield "".join(joined)
            joined, size = [], 0
    yield "".join(joined)


def read_texts(paths: Sequence[Path]) -> Texts:
    """What these files hold; `DEFAULT` stands for the text that localq has. Raises LocalqError (exit 2)."""
    return [_read(DEFAULT_TEXT if path == DEFAULT else path) for path in paths]


def _read(path: Path) -> str | Chats:
    text = read_text(path)
    return parse(text, path, OPTION) if path.suffix.lower() == SUFFIX else text


def read_text(path: Path) -> str:
    """The UTF-8 text of `path`. Raises LocalqError (exit 2) for a file that cannot be read or is none."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise usage_error(OPTION, f"{path} cannot be read ({error.strerror})", "Check the path.") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise usage_error(OPTION, f"{path} has more than {MAX_TEXT_BYTES:,} bytes", "Give a part of it.")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        why = f"{path} is not UTF-8 text ({error.reason} at byte {error.start})"
        raise usage_error(OPTION, why, "Give a plain text.") from None
