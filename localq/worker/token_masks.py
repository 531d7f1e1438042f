"""Token masks of a grammar: for every token of a reply, the tokens that the grammar allows next.

llguidance computes them. It reads the model's own tokenizer, so the bytes of a token are those of the model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from localq.errors import usage_error
from localq.text import grammar
from localq.text.grammar import Grammar
from localq.text.json_keys import KeyScanner
from localq.text.tokenizer_files import report_panics

if TYPE_CHECKING:
    from collections.abc import Iterable

    import tokenizers
    from llguidance import LLTokenizer

WORD = 32  # bits of an element of a mask
_NO_END = "<|no reply ends with this|>"  # stands in for a missing stop id


class Vocabulary:
    """The tokens and stop ids of one model for llguidance. Takes 0.4 s for 49,152 tokens, so it is reused.

    rows     of the model's logits. The tokenizer may have fewer tokens, or more (gemma 3's for images)
    known    i32 [ceil(rows / 32)], a bit for every token of the model
    inside   without the stop ids that llguidance knows only as text
    endless  without any stop id
    """

    def __init__(self, backend: tokenizers.Tokenizer, rows: int, stop_ids: Iterable[int]) -> None:
        """May add a token to `backend`. Raises LocalqError (exit 8) for an unsupported tokenizer."""
        from llguidance import LLTokenizer  # start-up cost: only for replies with a grammar

        self.stop_ids, self.rows = frozenset(stop_ids), rows
        ends = sorted(id for id in self.stop_ids if backend.id_to_token(id) is not None)
        missing: list[int] = []  # not tokens of the model
        if not ends:  # llguidance needs a stop id: the reply ends where nothing can follow
            backend.add_special_tokens([_NO_END])
            ends = missing = [id for id in (backend.token_to_id(_NO_END),) if id is not None]
        tokens = max(rows, backend.get_vocab_size(with_added_tokens=True))
        next_step = "Use this model without a grammar."
        with report_panics("the model's tokenizer", "does not support grammars", next_step):
            self.tokens: LLTokenizer = LLTokenizer(backend.to_str(), n_vocab=tokens, eos_token=ends)
        self.known = _bits(rows, [*range(rows, -(-rows // WORD) * WORD), *missing])
        self.endless = _bits(rows, ends) & self.known
        # llguidance treats a stop id that looks like text as text.
        self.inside = _bits(rows, (id for id in ends if not self.tokens.is_special_token(id))) & self.known

    @functools.cached_property
    def quotes(self) -> QuoteTokens:
        """The tokens with a quote, for JSON."""
        found = ((id, self.tokens.decode_bytes([id])) for id in range(min(self.rows, self.tokens.vocab_size)))
        return QuoteTokens([(id, text) for id, text in found if b'"' in text])


class QuoteTokens:
    """Tokens with a quote, by which a key of a JSON object can end.

    heads   bytes before the first quote -> ids
    several id -> bytes, of those with more than one quote
    """

    def __init__(self, tokens: list[tuple[int, bytes]]) -> None:
        self.heads: dict[bytes, list[int]] = {}
        for id, text in tokens:
            self.heads.setdefault(text[: text.index(b'"')], []).append(id)
        self.several = {id: text for id, text in tokens if text.count(b'"') > 1}

    def repeating(self, keys: KeyScanner, allowed: Callable[[int], bool]) -> list[int]:
        """The ids, of those that are allowed, that write a key of an object for the second time."""
        if not keys.has_keys:
            return []
        found = [id for id, text in self.several.items() if allowed(id) and keys.would_repeat(text)]
        if keys.is_key:
            for head, ids in self.heads.items():
                if keys.ends_known(head):
                    found += [id for id in ids if allowed(id)]
        return found


class GrammarConstraint:
    """An `engine.constraint.Constraint` for one reply. Raises LocalqError (exit 2) for an invalid or complex grammar.

    begun  start of the reply that the prompt contains
    after  the grammar applies after this text, which ends the thinking; until then all but stop ids. "" = at once
    """

    def __init__(self, wanted: Grammar, vocabulary: Vocabulary, begun: str = "", after: str = "") -> None:
        self._wanted, self._vocabulary = wanted, vocabulary
        self._after, self._thought = after.encode(), b""
        self._count, self._is_fork = 0, False
        self._matcher = grammar.matcher(wanted, vocabulary.tokens)
        self._keys = KeyScanner() if wanted.kind == "json_schema" else None
        if self._keys is not None:
            self._keys.push(begun.encode("utf-8", "replace"))
        begun_ids = vocabulary.tokens.tokenize_str(begun)
        if self._matcher.try_consume_tokens(begun_ids) < len(begun_ids):
            why = "the start of the reply does not match the grammar"
            raise usage_error(wanted.label, why, "Regenerate the reply (/regen), or remove the grammar.")

    def free(self) -> int:
        """Return 0: every token has a mask, since stop ids end no thought."""
        return 0

    def mask(self) -> Tensor:
        """Return i32 [ceil(rows / 32)]: bit i % 32 of word i // 32 is set where token i may follow."""
        if self._after:
            return self._vocabulary.endless
        words = torch.empty(-(-self._vocabulary.tokens.vocab_size // WORD), dtype=torch.int32)
        self._matcher.unsafe_compute_mask_ptr(words.data_ptr(), words.nbytes)
        self._check()
        known = self._vocabulary.known if self._matcher.is_accepting() else self._vocabulary.inside
        words = words[: len(known)] & known
        if not words.any():
            why = f"none of the model's tokens is allowed after token {self._count} of the reply"
            raise usage_error(self._wanted.label, why, "Relax the grammar.")
        return words if self._keys is None else self._without_repeats(words, self._keys)

    def _without_repeats(self, words: Tensor, keys: KeyScanner) -> Tensor:
        """A mask without tokens that repeat a key; unchanged where the schema allows nothing else."""
        bits = words.tolist() if keys.has_keys else []
        repeating = self._vocabulary.quotes.repeating(keys, lambda id: bool(bits[id // WORD] >> id % WORD & 1))
        fewer = words & _bits(self._vocabulary.rows, repeating) if repeating else words
        return fewer if fewer.any() else words

    def draft(self) -> list[int]:
        """Return the ids that the grammar forces; empty where it leaves a choice."""
        if self._after or self._matcher.is_stopped():
            return []
        return [id for id in self._matcher.compute_ff_tokens() if id < self._vocabulary.rows]

    def fork(self) -> GrammarConstraint:
        """Return a copy that advances on its own; it takes a matcher of its own with its first token."""
        found = copy.copy(self)
        found._is_fork = True
        return found

    def _separate(self) -> None:
        """Take a matcher and keys of its own."""
        self._matcher, self._is_fork = self._matcher.deep_copy(), False
        if self._keys is not None:
            self._keys = self._keys.copy()

    def accept(self, token: int) -> None:
        """Advance by the next token of the reply."""
        self._count += 1
        if not self._after:
            if self._is_fork:
                self._separate()
            self._matcher.consume_token(token)
            self._check()
            if self._keys is not None:
                self._keys.push(self._vocabulary.tokens.decode_bytes([token]))
            return
        self._thought = self._thought[-len(self._after) :] + self._vocabulary.tokens.decode_bytes([token])
        if self._after in self._thought:  # only white space can follow within the token: the tag is a token
            self._after = b""

    @property
    def stopped(self) -> bool:
        """True when nothing can follow."""
        return not self._after and self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            grammar.refuse(self._wanted, self._matcher.get_error(), f"after token {self._count} of the reply: ")


def _bits(rows: int, without: Iterable[int]) -> Tensor:
    """Return i32 [ceil(rows / 32)] with all bits set but those of the ids `without`."""
    bits = bytearray(b"\xff" * (-(-rows // WORD) * WORD // 8))
    for id in without:
        if id < 8 * len(bits):
            bits[id // 8] &= ~(1 << id % 8)
    return torch.frombuffer(bits, dtype=torch.int32)
