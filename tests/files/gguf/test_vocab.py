"""Vocabularies of .gguf files give the ids of the Hugging Face tokenizers that they were converted from."""

from __future__ import annotations

import functools
import json
import random

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from localq.errors import ExitCode, LocalqError
from localq.files.gguf.vocab import build_tokenizer, special_tokens
from localq.files.model_folder import ModelFiles
from localq.text import end_of_turn
from tests.support.files.real_model import smollm2
from tests.support.text import tiny_tokenizers
from tests.support.text.tiny_tokenizers import BYTES, SENTENCES, SPECIAL

CONTROL, NORMAL, BYTE = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.BYTE
TEXTS = [
    *SENTENCES, "", " ", "   ", "\n\n\n", "1234567 89 0.5", "I'LL we've THEY'RE it's", "camelCase HTTPServer XMLÄrger",
    "a/b//c\r\n\r\n  x", "¡¿!?...---", "<|im_start|>user\nHi<|im_end|>", "x<s>y</s> z", "<unk> <|im_end|><|im_end|>",
    "हिन्दी में क\u094d", "e\u0301 \u2126 \ufb01 \uac00 \u1100\u1161", "ⅷ½²٣", "word\u00a0word\u3000word",
]  # fmt: skip
# The splitting rules as the models' tokenizer.json files state them.
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Rule -> expression (None: GPT-2's, in the library), digits one by one first, NFC, whole words first.
RULES = {
    "gpt-2": (None, False, False, False),
    "smollm": (None, True, False, False),
    "llama-bpe": (LLAMA3, False, False, True),
    "smaug-bpe": (LLAMA3, False, False, True),
    "dbrx": (LLAMA3, False, False, False),
    "qwen2": (LLAMA3.replace("{1,3}", ""), False, True, False),
    "qwen35": (QWEN35, False, True, False),
    "tekken": (TEKKEN, False, False, True),
    "gpt-4o": (O200K, False, False, False),
}


@functools.cache
def published(rule: str) -> Tokenizer:
    """A tokenizer with that rule, trained in a moment, as the model's tokenizer.json would set it up."""
    pattern, digits, nfc, whole_words = RULES[rule]
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole_words))
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    steps += [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIAL, initial_alphabet=alphabet,
                                  show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    return tokenizer


def write(path, architecture: str, kind: str, tokens: list, types: list, **more):
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def parts(tokenizer: Tokenizer) -> tuple[list[str], list[tuple[str, str]]]:
    """Tokens by id, and merges."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return sorted(vocabulary, key=vocabulary.__getitem__), [tuple(pair) for pair in merges]


def kinds(tokens: list[str]) -> list[int]:
    return [CONTROL if token in SPECIAL else BYTE if token in BYTES else NORMAL for token in tokens]


def same(ours: Tokenizer, reference: Tokenizer) -> None:
    generator = random.Random(5)
    size = reference.get_vocab_size()
    assert ours.get_vocab_size() == size
    for text in TEXTS:
        ids = reference.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids, skip_special_tokens=False)
    for _ in range(50):
        ids = [generator.randrange(size) for _ in range(12)]
        assert ours.decode(ids) == reference.decode(ids)


@pytest.mark.parametrize("rule", RULES)
def test_byte_level_ids_are_those_of_the_published_rule(tmp_path, rule):
    reference = published(rule)
    tokens, merges = parts(reference)
    path = write(tmp_path / "m.gguf", "llama", "gpt2", tokens, kinds(tokens), tokenizer_pre=rule,
                 token_merges=[" ".join(pair) for pair in merges])  # fmt: skip
    same(build_tokenizer(path), reference)


def unnamed(path, architecture: str, marks: list[str], stated: str | None, alone: bool = False):
    """A file without the name of its rule whose vocabulary has `marks`, `alone` or not; the tokenizer of the rule."""
    rules = {"llama": "llama-bpe", "gpt-oss": "gpt-4o", "qwen3moe": "qwen2", "qwen35moe": "qwen35"}
    reference = published(rules.get(architecture, architecture))
    reference.add_special_tokens(marks)
    tokens, merges = parts(reference)
    if alone:
        tokens = [f"<{token}>" if token in {*QWEN, *LLAMA, *GPT} - {*marks} else token for token in tokens]
    types = [CONTROL if token in marks else kind for token, kind in zip(tokens, kinds(tokens), strict=True)]
    more = {} if stated is None else {"tokenizer_pre": stated}
    more["token_merges"] = [" ".join(pair) for pair in merges]
    return write(path, architecture, "gpt2", tokens, types, **more), reference


QWEN, LLAMA = ["<|endoftext|>", "<|im_start|>"], ["<|begin_of_text|>", "<|start_header_id|>"]
GPT = ["<|endoftext|>", "<|start|>", "<|channel|>"]
MARKS = {"qwen2": QWEN, "qwen3moe": QWEN, "qwen35": QWEN, "qwen35moe": QWEN, "llama": LLAMA, "gpt-oss": GPT}


@pytest.mark.parametrize("stated", [None, "default"])
@pytest.mark.parametrize(("architecture", "marks"), MARKS.items())
def test_a_file_from_before_rules_were_named_has_that_of_its_model(tmp_path, architecture, marks, stated):
    path, reference = unnamed(tmp_path / "m.gguf", architecture, marks, stated)
    same(build_tokenizer(path), reference)
    assert special_tokens(path)["add_bos"] is (architecture == "llama")


@pytest.mark.parametrize("stated", [None, "default"])
@pytest.mark.parametrize(
    ("architecture", "marks"),
    [("llama", QWEN), ("qwen2", LLAMA), ("llama", LLAMA[:1]), ("gpt-oss", GPT[:2])],
)
def test_a_vocabulary_that_leaves_a_doubt_is_refused_with_the_reason(tmp_path, architecture, marks, stated):
    path, _ = unnamed(tmp_path / "m.gguf", architecture, marks, stated, alone=True)
    with pytest.raises(LocalqError, match="names no pre-tokenizer") as caught:
        build_tokenizer(path)
    assert caught.value.exit_code == ExitCode.FAILURE
    assert "again with a current version of llama.cpp" in caught.value.next_step


def test_the_rules_differ_on_these_texts():
    """So that a rule taken for another is seen; smaug-bpe and dbrx split as llama-bpe does."""
    rules = set(RULES) - {"smaug-bpe", "dbrx"}
    cuts = {
        tuple(cut for text in TEXTS for _, cut in published(rule).pre_tokenizer.pre_tokenize_str(text))
        for rule in rules
    }
    assert len(cuts) == len(rules)


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_all_merges_by_score(tmp_path, prefix):
    from transformers.convert_slow_tokenizer import generate_merges

    trained = tiny_tokenizers.llama2()
    tokens, _ = parts(trained)
    scores = [0.0 if token in (*SPECIAL, *BYTES) else -float(index) for index, token in enumerate(tokens)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = generate_merges(vocabulary, dict(zip(tokens, scores, strict=True)))
    body = json.loads(trained.to_str())
    body["model"]["merges"] = [list(pair) for pair in merges]
    if not prefix:
        body["normalizer"] = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
        body["decoder"]["decoders"].pop()
    reference = Tokenizer.from_str(json.dumps(body))
    path = write(tmp_path / "m.gguf", "llama", "llama", tokens, kinds(tokens), token_scores=scores,
                 add_space_prefix=prefix, unk_token_id=0)  # fmt: skip
    same(build_tokenizer(path), reference)


@pytest.mark.parametrize(
    ("more", "wanted"),
    [
        ({}, [1]), ({"add_bos_token": False}, []), ({"add_bos_token": True, "add_eos_token": True}, [1, 2]),
        ({"add_bos_token": False, "add_eos_token": True}, [2]),
    ],
)  # fmt: skip
def test_what_stands_around_a_plain_text(tmp_path, more, wanted):
    tokens, _ = parts(tiny_tokenizers.llama2())
    path = write(
        tmp_path / "m.gguf", "llama", "llama", tokens, kinds(tokens), token_scores=[-1.0] * len(tokens), **more
    )
    tokenizer = build_tokenizer(path)
    inside = tokenizer.encode("ship", add_special_tokens=False).ids
    ids = tokenizer.encode("ship").ids
    assert [id for id in ids if id in (1, 2)] == wanted
    assert len(ids) == len(inside) + len(wanted)
    assert special_tokens(path) == {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": None, "pad_token": None,
        "add_bos": 1 in wanted, "add_eos": 2 in wanted,
    }  # fmt: skip


def test_the_real_vocabulary():
    tokenizer = build_tokenizer(smollm2())
    assert tokenizer.get_vocab_size() == 49152
    for text in SENTENCES:
        if "\ufffd" not in text:
            assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    assert len(tokenizer.encode("1234567").ids) == 7  # digits one by one
    assert len(tokenizer.encode(" the").ids) == 1
    assert special_tokens(smollm2()) == {
        "bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>", "add_bos": False, "add_eos": False,
    }  # fmt: skip


ENDS = ["<|im_end|>", "<end_of_turn>", "<|eot_id|>", "<|eot|>", "<|return|>", "<|call|>", "<|endoftext|>", "[EOT]"]


@pytest.mark.parametrize("kind", [NORMAL, gguf.TokenType.USER_DEFINED, gguf.TokenType.UNUSED])
@pytest.mark.parametrize("end", ENDS)
def test_a_token_that_ends_a_turn_is_a_control_token_whatever_its_type(tmp_path, end, kind):
    """As in llama.cpp; the reply ends at it, and it is not shown."""
    tokens, merges = parts(published("qwen2"))
    tokens = [f"<{token}>" if token in ENDS else token for token in tokens] + [end]
    path = write(tmp_path / "m.gguf", "qwen2", "gpt2", tokens, [*kinds(tokens[:-1]), kind], tokenizer_pre="qwen2",
                 token_merges=[" ".join(pair) for pair in merges])  # fmt: skip
    backend = build_tokenizer(path)
    id = len(tokens) - 1
    assert backend.encode(f"ship{end}\n", add_special_tokens=False).ids.count(id) == 1
    assert backend.decode([id]) == ""
    files = ModelFiles(path, "gguf", {})
    assert id in end_of_turn.stop_ids(backend, {}, files)


def test_a_tag_of_html_stays_text(tmp_path):
    """Gemma's vocabulary has it among its tokens."""
    tokens, merges = parts(published("qwen2"))
    tokens = [f"<{token}>" if token == "</s>" else token for token in tokens] + ["</s>"]
    path = write(tmp_path / "m.gguf", "qwen2", "gpt2", tokens, [*kinds(tokens[:-1]), NORMAL], tokenizer_pre="qwen2",
                 token_merges=[" ".join(pair) for pair in merges])  # fmt: skip
    assert build_tokenizer(path).encode("</s>", add_special_tokens=False).ids != [len(tokens) - 1]
