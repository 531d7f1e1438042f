"""Text to token ids and back: over `tokenizers`, with the model's own template, special tokens and stop tokens.

Torch-free, and without transformers at run time; equality with it is tested.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localq import template
from localq.errors import LocalqError, bad_file

if TYPE_CHECKING:
    import tokenizers

    from localq.modelfiles import ModelFiles

MAX_TOKENIZER_BYTES = 64 * 2**20
_FETCH_AGAIN = "Its files are damaged; fetch the model again."
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
# Tokens that end a turn; one stops the reply where the vocabulary has it and the chat template writes it.
_END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|endoftext|>",
    "</s>",
)
_HELD_BACK = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


@dataclass(frozen=True)
class Tokenizer:
    """Ids <-> text of one model.

    special_tokens  bos_token, eos_token and others as text, for the template
    chat_template   None for a base model
    stop_ids        the reply ends before any of these
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    stop_ids: frozenset[int]

    @functools.cached_property
    def skipped_ids(self) -> frozenset[int]:
        """The special tokens, which `decode` leaves out."""
        return frozenset(id for id, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """The tokenizer of a model folder or .gguf file. Raises LocalqError (exit 8) where it is missing or damaged."""
        backend, special = _from_gguf(files) if files.kind == "gguf" else _from_folder(files)
        vocabulary = backend.get_vocab_size(with_added_tokens=True)
        stops = {id for id in files.eos_ids if 0 <= id < vocabulary}
        for text in _END_OF_TURN:
            id = backend.token_to_id(text)
            if (
                id is not None
                and files.chat_template
                and text in files.chat_template
                and text != special.get("bos_token")
            ):
                stops.add(id)
        return cls(backend, special, files.chat_template, frozenset(stops))

    @property
    def vocab_size(self) -> int:
        """Tokens, the added ones included; a model's embedding may be padded to more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`; `special` adds what the model wants around plain text, such as BOS."""
        clean = text.encode("utf-8", "replace").decode()  # lone surrogates are no text
        with _panics_named("the model's tokenizer", "it fails on this text", _FETCH_AGAIN):
            return list(self.backend.encode(clean, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens."""
        with _panics_named("the model's tokenizer", "it fails on these tokens", _FETCH_AGAIN):
            return self.backend.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> Detokenizer:
        """A detokenizer for one reply."""
        return Detokenizer(self)

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a plain text to complete."""
        return self.encode(text, special=True)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation up to where the model answers.

        As transformers' `apply_chat_template(tokenize=True)`: the template writes its special tokens itself, so none
        are added. Raises LocalqError for a base model and where the template refuses.
        """
        if self.chat_template is None:
            raise LocalqError("chat", "this base model has no chat template", "`localq run` completes plain text.")
        return self.encode(template.render(self.chat_template, messages, self.special_tokens))


class Detokenizer:
    """Ids in, text out, piece by piece: the pieces together are exactly what `decode` gives for all ids.

    A piece is held back while its end is an incomplete character, and decoding always starts a few tokens before the
    new ones, because what a token looks like can depend on its neighbours (leading spaces, byte sequences).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped_ids
        self._ids: list[int] = []
        self._start = 0  # decoding starts here: everything before it is settled
        self._settled = 0  # ids whose text has been given out
        self._shown = ""  # text of ids[_start:_settled]

    def push(self, ids: Sequence[int]) -> str:
        """Text that is certain now."""
        pieces = []
        for id in ids:
            self._ids.append(id)
            pieces.append(self._advance())
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back; the reply is over."""
        text = self._tokenizer.decode(self._ids[self._start :])
        piece = text[len(self._shown) :] if text.startswith(self._shown) else ""
        self._settled, self._shown = len(self._ids), text
        return piece

    def _advance(self) -> str:
        last = self._ids[-1]
        if last in self._skipped or _BYTE_TOKEN.match(self._tokenizer.backend.id_to_token(last) or ""):
            # Byte tokens are decoded as a group, across skipped tokens: what one means depends on where it ends.
            return ""
        text = self._tokenizer.decode(self._ids[self._start :])
        if text.endswith(_HELD_BACK) or not text.startswith(self._shown):
            return ""
        piece = text[len(self._shown) :]
        if not piece:
            return ""
        # The window moves up to the tokens just settled: they stay as context for the next.
        self._start, self._settled = self._settled, len(self._ids)
        self._shown = self._tokenizer.decode(self._ids[self._start :])
        return piece


@contextlib.contextmanager
def _panics_named(what: str, why: str, next_step: str) -> Iterator[None]:
    """Name what the library raises over a file: plain Exception, and for some files a panic, no Exception at all."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # Ctrl-C and its like
        raise bad_file(what, f"{why} ({str(error)[:200]})", next_step) from error


def _from_gguf(files: ModelFiles) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    from localq.gguf_import import vocab  # start-up cost: only for .gguf files

    special = vocab.special_tokens(files.path)
    return vocab.build_tokenizer(files.path), {name: special[name] for name in _SPECIAL if special[name]}


def _from_folder(files: ModelFiles) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    from tokenizers import Tokenizer as Backend  # start-up cost

    path = files.path / "tokenizer.json"
    next_step = "Fetch the model again; localq needs its tokenizer.json."
    try:
        size = path.stat().st_size
        if size > MAX_TOKENIZER_BYTES:
            raise bad_file(str(path), f"it has {size} bytes, more than {MAX_TOKENIZER_BYTES}", next_step)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise bad_file(str(path), "there is no such file", next_step) from None
    except (OSError, UnicodeDecodeError) as error:
        raise bad_file(str(path), f"it cannot be read ({error})", next_step) from error
    with _panics_named(str(path), "it is malformed", next_step):
        backend = Backend.from_str(text)
    # Left over from how the file was made; a prompt must never be cut or filled up in silence.
    backend.no_truncation()
    backend.no_padding()
    return backend, _special_tokens(files)


def _special_tokens(files: ModelFiles) -> dict[str, str]:
    """From tokenizer_config.json, else special_tokens_map.json; a token is text or {"content": text}."""
    found: dict[str, str] = {}
    older = files.path / "special_tokens_map.json"
    fallback: dict[str, Any] = {}
    if older.is_file() and older.stat().st_size < 2**20:
        try:
            read = json.loads(older.read_text(encoding="utf-8"))
        except ValueError as error:
            raise bad_file(str(older), f"it is malformed ({error})", "Fetch the model again.") from error
        fallback = read if isinstance(read, dict) else {}
    for name in _SPECIAL:
        value = files.tokenizer_config.get(name) or fallback.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found
