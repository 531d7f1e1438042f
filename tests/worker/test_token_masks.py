"""Masks against the truth by hand: the bytes of every token of a small vocabulary, and languages that can be listed."""

from __future__ import annotations

import json
import random
import re

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from localq.errors import ExitCode, LocalqError
from localq.text.grammar import Grammar, json_schema, regex
from localq.worker.token_masks import GrammarConstraint, Vocabulary
from tests.support.models.tiny_checkpoints import SPECIAL_TOKENS, write_tokenizer
from tests.support.text.tiny_tokenizers import byte_level, llama2, unigram

WORDS = [b"the ship", b"the", b"thin", b"t", "süß".encode(), "süd".encode(), "今天".encode()]
LISTED = "|".join(word.decode() for word in WORDS)
MAKERS = {"byte_level": byte_level, "llama2": llama2, "unigram": unigram}


def bytes_of(tokenizer: Tokenizer, special: tuple[str, ...]) -> dict[int, bytes]:
    """What each token writes, by the rules of GPT-2's letters and of SentencePiece; special tokens write nothing."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    byte_of = {chr(value): value for value in plain}
    byte_of |= dict(zip((chr(256 + n) for n in range(256)), (v for v in range(256) if v not in plain), strict=False))
    assert sorted(byte_of) >= letters
    found = {}
    sentencepiece = tokenizer.token_to_id("<0x41>") is not None
    for text, id in tokenizer.get_vocab(with_added_tokens=True).items():
        if text in special:
            continue
        if not sentencepiece:
            found[id] = bytes(byte_of[letter] for letter in text)
        elif text.startswith("<0x"):
            found[id] = bytes([int(text[3:5], 16)])
        else:
            found[id] = text.replace("▁", " ").encode()
    return found


def allowed(constraint: GrammarConstraint, rows: int) -> set[int]:
    """The ids of a mask; no bit beyond the model's tokens may be set."""
    words = constraint.mask()
    assert len(words) == -(-rows // 32)
    ids = {32 * place + bit for place, word in enumerate(words.tolist()) for bit in range(32) if word >> bit & 1}
    assert max(ids, default=0) < rows
    return ids


@pytest.mark.parametrize("kind", MAKERS)
def test_masks_of_a_listed_language_are_those_of_its_words(kind):
    special = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
    tokenizer = MAKERS[kind]()
    tokens = bytes_of(tokenizer, special)
    end = tokenizer.token_to_id("</s>")
    rows = tokenizer.get_vocab_size() + 7
    vocabulary = Vocabulary(tokenizer, rows, [end])
    choices = random.Random(kind)
    seen = set()
    for _ in range(40):
        constraint, said = GrammarConstraint(regex(LISTED), vocabulary), b""
        while not constraint.stopped:
            truth = {id for id, text in tokens.items() if text and any(w.startswith(said + text) for w in WORDS)}
            truth |= {end} if said in WORDS else set()
            mask = allowed(constraint, rows)
            following = {word[len(said)] for word in WORDS if word.startswith(said) and word != said}
            if len(following) > 1 or said in WORDS:
                assert mask == truth, said
            else:  # where only one byte can follow, only the token that the tokenizer itself would write there
                assert mask
                assert mask <= truth, said
                truth = mask
            token = choices.choice(sorted(truth))
            if token == end:
                break
            constraint.accept(token)
            said += tokens[token]
        assert said in WORDS
        seen.add(said)
    assert len(seen) > 4


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Tokenizer:
    """The tokenizer of the tiny checkpoints: bytes, three special tokens, five merges: 264 tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("rows", [200, 262, 264, 287, 288, 289, 320])
def test_masks_have_the_size_of_the_model_whatever_the_tokenizer_has(tiny, rows):
    tokens = bytes_of(tiny, SPECIAL_TOKENS)
    constraint = GrammarConstraint(regex("(the|an)+"), Vocabulary(tiny, rows, [256, 258]))
    first = {id for id, text in tokens.items() if text in (b"t", b"th", b"the", b"a", b"an") and id < rows}
    assert allowed(constraint, rows) == first
    for letter in "an":
        constraint.accept(tiny.token_to_id(letter))
    assert allowed(constraint, rows) == first | {id for id in (256, 258) if id < rows}


def test_bit_31_of_a_word_is_cleared_without_touching_others(tiny):
    end = next(id for id in range(31, 256, 32) if tiny.id_to_token(id).isalpha())  # a letter ends replies
    vocabulary = Vocabulary(tiny, 264, [end])
    inside = GrammarConstraint(json_schema('{"type": "string", "maxLength": 9}'), vocabulary)
    inside.accept(tiny.token_to_id('"'))
    found = allowed(inside, 264)
    assert end not in found
    assert {end - 1, end + 1} & found or {end - 2, end + 2} & found
    done = GrammarConstraint(regex("0+"), vocabulary)
    done.accept(tiny.token_to_id("0"))
    assert allowed(done, 264) == {end, tiny.token_to_id("0")}


def test_without_a_stop_id_a_reply_goes_on_until_nothing_can_follow(tiny):
    constraint = GrammarConstraint(regex("0{1,2}"), Vocabulary(tiny, 264, []))
    zero = tiny.token_to_id("0")
    assert allowed(constraint, 264) == {zero}
    constraint.accept(zero)
    assert allowed(constraint, 264) == {zero}
    assert not constraint.stopped
    constraint.accept(zero)
    assert constraint.stopped


def test_a_place_where_no_token_can_follow_is_an_error(tiny):
    vocabulary = Vocabulary(tiny, tiny.token_to_id("z"), [256])  # a model that has no z
    constraint = GrammarConstraint(regex("az"), vocabulary)
    constraint.accept(tiny.token_to_id("a"))
    with pytest.raises(
        LocalqError, match="the regular expression: none of the model's tokens is allowed after token 1"
    ):
        constraint.mask()


def test_a_grammar_that_becomes_too_complex_on_the_way_is_an_error(tiny):
    constraint = GrammarConstraint(regex("(a{1000}){1000}"), Vocabulary(tiny, 264, [258]))
    constraint.mask()
    with pytest.raises(LocalqError, match=r"after token 1 of the reply: .*too many") as caught:
        constraint.accept(tiny.token_to_id("a"))
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("tag", ["</think>", "an"])
def test_a_grammar_begins_behind_a_thought(tiny, tag):
    constraint = GrammarConstraint(regex("0"), Vocabulary(tiny, 264, [256, 258]), after=tag)
    anything = set(range(264)) - {256, 258}
    for id in tiny.encode("so th</thinking " * 3 + tag).ids:
        assert allowed(constraint, 264) == anything
        assert not constraint.stopped
        constraint.accept(id)
    assert allowed(constraint, 264) == {tiny.token_to_id("0")}
    constraint.accept(tiny.token_to_id("0"))
    assert constraint.stopped


def test_a_reply_is_gone_on_with_where_it_was_cut(tiny):
    vocabulary = Vocabulary(tiny, 264, [258])
    schema = json_schema('{"type": "object", "properties": {"a": {"const": "ü"}}, "required": ["a"]}')
    constraint = GrammarConstraint(schema, vocabulary, begun='{"a": "')
    assert allowed(constraint, 264) == {tiny.encode("ü").ids[0]}
    with pytest.raises(LocalqError, match="the JSON schema: the start of the reply does not match the grammar"):
        GrammarConstraint(schema, vocabulary, begun="[")
    assert GrammarConstraint(regex("ja"), vocabulary, begun="ja").stopped


def test_special_tokens_of_a_model_can_be_named_and_unknown_ones_are_refused(tiny):
    vocabulary = Vocabulary(tiny, 264, [258])
    constraint = GrammarConstraint(Grammar("lark", 'start: <|im_start|> "a"'), vocabulary)
    assert allowed(constraint, 264) == {257}
    with pytest.raises(LocalqError, match="unknown special token") as caught:
        GrammarConstraint(Grammar("lark", 'start: <|nobody|> "a"'), vocabulary)
    assert caught.value.exit_code == ExitCode.USAGE


def test_whitespace_in_json_has_an_end_and_a_schema_may_say_otherwise(tiny):
    vocabulary = Vocabulary(tiny, 264, [258])

    def takes(text: str, **options: object) -> bool:
        constraint = GrammarConstraint(json_schema(json.dumps({"type": "object", **options})), vocabulary)
        for id in tiny.encode(text).ids:
            if id not in allowed(constraint, 264):
                return False
            constraint.accept(id)
        return True

    pretty = json.dumps({"a": [1, {"b": None}]}, indent=4)
    assert takes(pretty)
    assert takes('{"a":1}')
    assert not takes("{" + "\n" * 3)
    assert not takes("{\n" + " " * 41)
    compact = {"x-guidance": {"whitespace_flexible": False}}
    assert takes('{"a":1}', **compact)
    assert not takes(pretty, **compact)


def test_a_tokenizer_of_an_unknown_kind_is_an_error_that_names_it():
    from tokenizers import models

    with pytest.raises(LocalqError, match="the model's tokenizer: does not support grammars") as caught:
        Vocabulary(Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]")), 2, [0])
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_no_key_of_an_object_is_written_twice(tiny):
    """Any JSON, byte by byte: the mask allows the quote that ends a key unless the object has that key."""
    vocabulary = Vocabulary(tiny, 264, [258])
    quote = tiny.encode('"').ids[0]

    def ends_key(begun: str) -> bool:
        return quote in allowed(GrammarConstraint(json_schema("json"), vocabulary, begun=begun), 264)

    assert not ends_key('{"th": 1, "th')
    assert ends_key('{"th": 1, "thin')
    assert ends_key('{"th": {"th')
    assert ends_key('[{"th": 1}, {"th')
    assert ends_key('{"th": "th')
    assert not ends_key('{"a": {"th": 1}, "in": [], "a')


def test_an_object_of_any_keys_ends_or_has_other_keys(tiny):
    """Greedy choices that would write the same key for ever."""
    vocabulary = Vocabulary(tiny, 264, [258])
    constraint = GrammarConstraint(json_schema('{"type": "object", "additionalProperties": {"const": 1}}'), vocabulary)
    said = ""
    while not constraint.stopped and len(said) < 400:
        mask = allowed(constraint, 264)
        wanted = next(id for text in ("a", '"', ":", "1", ",", "{") for id in tiny.encode(text).ids if id in mask)
        constraint.accept(wanted)
        said += tiny.decode([wanted])
    keys = re.findall(r'"(a*)":', said)
    assert len(keys) == len(set(keys))
