"""`Tokenizer`: text to token ids and back, with the model's template, special tokens and stop tokens.

Built on `tokenizers`, without transformers at run time; tests check that the ids are the same.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localq.errors import LocalqError, bad_file, usage_error
from localq.text import end_of_turn, harmony, template, thought_tags, turn_marks
from localq.text.tokenizer_files import (
    FETCH_AGAIN,
    SPECIAL,
    TOKENIZER,
    encode_within,
    read_backend,
    report_panics,
    special_tokens,
)
from localq.text.turn_marks import TurnMarks

if TYPE_CHECKING:
    import tokenizers

    from localq.files.model_folder import ModelFiles

MAX_TEXT_BYTES = 8 * 2**20  # more than any model's context holds
MAX_SECONDS = 5.0  # to encode the first MiB of a text; as much again for each further MiB
BREAKERS = ("\n", ":", '"', "*")  # tokens with these end a repetition for DRY, as in its proposal and in llama.cpp
_HELD_BACK = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>\Z")


@dataclass(frozen=True)
class Tokenizer:
    """Ids <-> text of one model.

    special_tokens  bos_token, eos_token and others as text, for the template
    chat_template   None for a base model
    stop_ids        the reply ends before any of these
    rows            of the model's embedding: ids below it are ones that the model knows
    """

    backend: tokenizers.Tokenizer
    special_tokens: dict[str, str]
    chat_template: str | None
    stop_ids: frozenset[int]
    rows: int = 2**32

    @functools.cached_property
    def skipped_ids(self) -> frozenset[int]:
        """The special tokens and frames of answers, which `decode` leaves out.

        Tags of thoughts are text, whatever the file calls them.
        """
        added = self.backend.get_added_tokens_decoder()
        special = {id for id, token in added.items() if token.special and not thought_tags.is_shown(token.content)}
        return frozenset(special | {id for id, token in added.items() if token.content in thought_tags.ANSWER_FRAMES})

    @functools.cached_property
    def mark_ids(self) -> dict[int, str]:
        """The special tokens that frame the messages of a reply in channels (`harmony.MARKS`)."""
        added = self.backend.get_added_tokens_decoder().items()
        return {id: token.content for id, token in added if token.special and token.content in harmony.MARKS}

    @functools.cached_property
    def turn_marks(self) -> TurnMarks:
        """Marks that the template writes around messages. Raises LocalqError if rendering it does not end."""
        return turn_marks.find(self.backend, self.special_tokens, self.stop_ids, self.chat_template)

    @functools.cached_property
    def breaker_ids(self) -> frozenset[int]:
        """Tokens that end a repetition for DRY: all whose text has one of `BREAKERS` in it, and the special ones.

        So what a template writes around every turn is no repetition, and the end of a turn is never punished.
        """
        ids = sorted(id for id in self.backend.get_vocab().values() if id < self.rows)
        with report_panics(TOKENIZER, "cannot decode these tokens", FETCH_AGAIN):
            texts = self.backend.decode_batch([[id] for id in ids], skip_special_tokens=False)
        breaking = (id for id, text in zip(ids, texts, strict=True) if any(part in text for part in BREAKERS))
        return frozenset(breaking) | self.skipped_ids

    @classmethod
    def load(cls, files: ModelFiles) -> Tokenizer:
        """The tokenizer of a model folder or .gguf file. Raises LocalqError (exit 8) where it is missing or damaged."""
        backend, special = read(files)
        rows, count = files.text_config.get("vocab_size", 2**32), backend.get_vocab_size(with_added_tokens=False)
        if count > rows:  # added tokens may lie beyond: gemma 3's for images do, in its models for text
            raise bad_file(
                TOKENIZER,
                f"vocabulary size mismatch: the tokenizer has {count:,} tokens, but the model has {rows:,}",
                FETCH_AGAIN,
            )
        return cls(backend, special, files.chat_template, end_of_turn.stop_ids(backend, special, files), rows)

    @property
    def vocab_size(self) -> int:
        """Tokens, the added ones included; a model's embedding may be padded to more."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, special: bool = False) -> list[int]:
        """Ids of `text`; `special` adds what the model wants around plain text, such as BOS.

        Raises LocalqError: exit 2 for a text beyond MAX_TEXT_BYTES, exit 8 where the tokenizer fails on it, takes
        longer than MAX_SECONDS or gives an id that the model does not know.
        """
        raw = text.encode("utf-8", "replace")  # lone surrogates are no text
        if len(raw) > MAX_TEXT_BYTES:
            why = f"too long ({len(raw)} bytes; limit: {MAX_TEXT_BYTES})"
            raise usage_error("the text", why, "Shorten the text.")
        seconds = MAX_SECONDS * max(1.0, len(raw) / 2**20)
        ids: list[int] = list(encode_within(seconds, self.backend, raw.decode(), special).ids)
        if (largest := max(ids, default=0)) >= self.rows:
            why = f"token id {largest:,} is outside the model's vocabulary of {self.rows:,} tokens"
            raise bad_file(TOKENIZER, why, FETCH_AGAIN)
        return ids

    @functools.cached_property
    def grammar_tokens(self) -> dict[str, int]:
        """Added tokens that a grammar names by id: llguidance matches no text with special tokens, nor with `<...>`."""
        added = self.backend.get_added_tokens_decoder().items()
        in_brackets = re.compile(r"<.*>", re.DOTALL)
        return {
            token.content: id
            for id, token in added
            if id < self.rows and (token.special or in_brackets.fullmatch(token.content))
        }

    def decode(self, ids: Sequence[int], skipped: frozenset[int] | None = None) -> str:
        """Text of `ids` without special tokens, or without `skipped`."""
        without = self.skipped_ids if skipped is None else skipped
        with report_panics(TOKENIZER, "cannot decode these tokens", FETCH_AGAIN):
            return self.backend.decode([id for id in ids if id not in without], skip_special_tokens=False)

    def token_text(self, id: int) -> str:
        """Text of a token by itself, special ones included; U+FFFD for each byte that is no whole character."""
        with report_panics(TOKENIZER, "cannot decode these tokens", FETCH_AGAIN):
            return self.backend.decode([id], skip_special_tokens=False)

    def stream(self, shown: Collection[str] = ()) -> Detokenizer:
        """A new detokenizer, for one reply. shown: special tokens that stay text, such as marks of tool calls."""
        return Detokenizer(self, shown)

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a plain text to complete."""
        return self.encode(text, special=True)

    def chat_ids(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """Ids of a conversation up to where the answer begins. variables: further variables of the template.

        As transformers' `apply_chat_template(tokenize=True)`: the template writes its special tokens itself, so none
        are added. Raises LocalqError for a base model and where the template refuses.
        """
        return self.encode(self.chat_text(messages, **variables))

    def chat_text(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The text of `chat_ids`, special tokens as they are written."""
        if self.chat_template is None:
            raise LocalqError("chat", "this base model has no chat template", "Use `localq run` for plain text.")
        return template.render(self.chat_template, messages, self.special_tokens, **variables)


class Detokenizer:
    """Ids in, text out, piece by piece; the pieces together equal `decode` of all ids.

    A piece is held back while its end is an incomplete character. Decoding starts a few tokens before the new ones,
    because the text of a token can depend on its neighbours (leading spaces, byte sequences).
    """

    over = False  # only channel marks end an answer (`harmony.ChannelDetokenizer`)

    def __init__(self, tokenizer: Tokenizer, shown: Collection[str] = ()) -> None:
        """shown: see `Tokenizer.stream`."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.skipped_ids.difference(map(tokenizer.backend.token_to_id, shown))
        self._ids: list[int] = []
        self._start = 0  # decoding starts here; earlier text is final
        self._settled = 0  # ids whose text was returned
        self._shown = ""  # text of ids[_start:_settled]

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; return the text that is final now."""
        pieces = []
        for id in ids:
            self._ids.append(id)
            pieces.append(self._advance())
        return "".join(pieces)

    def finish(self) -> str:
        """End the reply; return the held text."""
        text = self._text()
        piece = text[len(self._shown) :] if text.startswith(self._shown) else ""
        self._settled, self._shown = len(self._ids), text
        return piece

    def _advance(self) -> str:
        last = self._ids[-1]
        token = self._tokenizer.backend.id_to_token(last)
        if token is None or last in self._skipped or _BYTE_TOKEN.match(token):
            # Byte tokens are decoded as a group, across skipped tokens and ids of the padding of an embedding: their
            # text depends on where the group ends.
            return ""
        text = self._text()
        if text.endswith(_HELD_BACK) or not text.startswith(self._shown):
            return ""
        piece = text[len(self._shown) :]
        if not piece:
            return ""
        # The window moves to the tokens just returned: they are the context of the next.
        self._start, self._settled = self._settled, len(self._ids)
        self._shown = self._text()
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids[self._start :], self._skipped)


def read(files: ModelFiles) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """The tokenizer of a model folder or .gguf file, and its special tokens (name -> text). Raises as `load`."""
    return _from_gguf(files) if files.kind == "gguf" else (read_backend(files), special_tokens(files))


def _from_gguf(files: ModelFiles) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    from localq.files.gguf import vocab  # start-up cost: only for .gguf files

    special = vocab.special_tokens(files.path)
    return vocab.build_tokenizer(files.path), {name: special[name] for name in SPECIAL if special[name]}
