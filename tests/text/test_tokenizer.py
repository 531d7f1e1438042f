"""Tokenizers: streaming equals the full decode, chat ids equal transformers', stop tokens, hostile files."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import ModelFiles, open_model
from localq.text.tokenizer import MAX_TEXT_BYTES, Tokenizer
from tests.support.files.real_model import smollm2
from tests.support.text import tiny_tokenizers
from tests.support.text.tiny_tokenizers import SENTENCES

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
KINDS = ["byte_level", "llama2", "unigram"]


def folder_files(folder: Path, kind: str, **tokenizer_config: object) -> ModelFiles:
    backend = getattr(tiny_tokenizers, kind)()
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, **tokenizer_config}
    return ModelFiles(folder, "safetensors", {"eos_token_id": 2}, {}, config, TEMPLATE, "tiny")


@pytest.fixture(scope="module", params=[*KINDS, "smollm2"])
def tokenizer(request, tmp_path_factory) -> Tokenizer:
    if request.param == "smollm2":
        return Tokenizer.load(open_model(smollm2()))
    return Tokenizer.load(folder_files(tmp_path_factory.mktemp(request.param), request.param))


def streamed(tokenizer: Tokenizer, ids: list[int], generator: random.Random) -> tuple[list[str], str]:
    stream, pieces, at = tokenizer.stream(), [], 0
    while at < len(ids):
        count = generator.choice((1, 1, 1, 2, 5))
        pieces.append(stream.push(ids[at : at + count]))
        at += count
    return pieces, stream.finish()


@pytest.mark.parametrize("sentence", SENTENCES)
def test_the_stream_equals_the_decode_over_many_scripts(tokenizer, sentence):
    ids = tokenizer.encode(sentence)
    pieces, rest = streamed(tokenizer, ids, random.Random(7))
    assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_the_stream_equals_the_decode_over_random_ids(tokenizer):
    generator = random.Random(11)
    for _ in range(300):
        ids = [generator.randrange(tokenizer.vocab_size) for _ in range(generator.randrange(1, 40))]
        pieces, rest = streamed(tokenizer, ids, generator)
        assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_the_stream_equals_the_decode_over_texts_cut_anywhere(tokenizer):
    """As a reply that is stopped: the ids of a text, from any to any, some of them doubled or dropped."""
    generator = random.Random(13)
    for _ in range(250):
        text = "".join(generator.sample(SENTENCES, 2))
        ids = [id for id in tokenizer.encode(text) for _ in range(generator.choice((1,) * 12 + (0, 2)))]
        ids = ids[generator.randrange(9) : len(ids) - generator.randrange(9)]
        pieces, rest = streamed(tokenizer, ids, generator)
        assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_the_stream_equals_the_decode_over_bytes_and_ids_that_only_a_padded_embedding_has(tokenizer):
    generator = random.Random(17)
    by_token = {token: id for token, id in tokenizer.backend.get_vocab().items() if token.startswith("<0x")}
    if by_token:
        values = [by_token[f"<0x{value:02X}>"] for value in range(256)]
    else:
        found = [tokenizer.backend.token_to_id(letter) for letter in sorted(ByteLevel.alphabet())]
        values = [id for id in found if id is not None]  # SmolLM2 lacks a few
        assert len(values) > 200
    others = [*tokenizer.skipped_ids, tokenizer.vocab_size, tokenizer.vocab_size + 63, *tokenizer.encode("a b")]
    for _ in range(300):
        count = generator.randrange(1, 30)
        ids = [generator.choice(values if generator.random() < 0.8 else others) for _ in range(count)]
        pieces, rest = streamed(tokenizer, ids, generator)
        assert "".join(pieces) + rest == tokenizer.decode(ids)


def test_a_stream_shows_a_text_soon(tokenizer):
    """All but the last word is out before `finish`: holding everything back would also equal the decode."""
    ids = tokenizer.encode("The ship leaves at ten, not a minute later")
    stream = tokenizer.stream()
    shown = stream.push(ids)
    assert len(shown) >= len(tokenizer.decode(ids)) - 8


def test_no_piece_holds_a_part_of_a_character(tokenizer):
    text = "né 日本 👩‍👩‍👧 값"
    ids = tokenizer.encode(text)
    if tokenizer.decode(ids) != text:
        pytest.skip("this vocabulary cannot write the text")
    stream = tokenizer.stream()
    for id in ids:
        assert "\ufffd" not in stream.push([id])


@pytest.mark.parametrize("kind", KINDS)
def test_chat_ids_equal_transformers(tmp_path, kind):
    files = folder_files(tmp_path, kind)
    path = str(tmp_path / "tokenizer.json")
    reference = PreTrainedTokenizerFast(tokenizer_file=path, bos_token="<s>", chat_template=TEMPLATE)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Où? <|im_end|> 日本\n"},
        {"role": "assistant", "content": "Là."},
        {"role": "user", "content": " und jetzt?"},
    ]
    expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.load(files).chat_ids(messages) == expected


def test_stop_ids_are_the_models_own_and_the_templates_end_of_turn(tmp_path):
    tokenizer = Tokenizer.load(folder_files(tmp_path, "byte_level"))
    assert tokenizer.stop_ids == {2, 4}  # </s> of the configuration, <|im_end|> of the template
    assert Tokenizer.load(open_model(smollm2())).stop_ids == {0, 2}  # <|endoftext|>, <|im_end|>


def test_tokens_that_only_the_configuration_declares_are_found_as_by_transformers(tmp_path):
    backend = tiny_tokenizers.byte_level()
    size = backend.get_vocab_size()
    declared = {
        str(backend.token_to_id("e")): {"content": "e", "special": True},  # of the vocabulary, and no added token yet
        str(size): {"content": "<|new|>", "special": True, "rstrip": True},
        str(size + 1): {"content": "<plain>", "special": False},
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    config = {"added_tokens_decoder": {id: {**flags, **token} for id, token in declared.items()}}
    files = folder_files(tmp_path, "byte_level", **config)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", **config})
    )
    reference = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    tokenizer = Tokenizer.load(files)
    text = "the <|new|>  ship <plain> <|im_end|> e"
    ids = tokenizer.encode(text)
    assert ids == reference(text, add_special_tokens=False)["input_ids"]
    assert {size, size + 1} <= set(ids)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    "declared",
    [[], {"x": {"content": "<new>"}}, {"9999": {"content": "<new>"}}, {"405": "<new>"}, {"405": {"content": 3}}],
    ids=str,
)
def test_a_declaration_that_does_not_fit_adds_nothing(tmp_path, declared):
    tokenizer = Tokenizer.load(folder_files(tmp_path, "byte_level", added_tokens_decoder=declared))
    assert tokenizer.vocab_size == tiny_tokenizers.byte_level().get_vocab_size()


def test_a_text_beyond_any_context_is_refused(tokenizer):
    with pytest.raises(LocalqError, match="8388610 bytes") as caught:
        tokenizer.prompt_ids("é" * (MAX_TEXT_BYTES // 2 + 1))
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_mebibyte_is_encoded_in_time(tokenizer):
    used = time.process_time()
    assert tokenizer.encode("a" * 2**20)
    assert time.process_time() - used < 5.0


def test_lone_surrogates_are_encoded_as_something(tokenizer):
    assert tokenizer.encode("a\ud800b")


def test_a_base_model_completes_but_does_not_chat(tmp_path):
    files = folder_files(tmp_path, "byte_level")
    base = Tokenizer.load(ModelFiles(files.path, files.kind, files.config, {}, files.tokenizer_config, None, "base"))
    assert base.prompt_ids("The ship")
    with pytest.raises(LocalqError, match="no chat template"):
        base.chat_ids([{"role": "user", "content": "hi"}])


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"model": {"type": "BPE", "vocab": 3}}', "\x00"])
def test_a_malformed_file_is_named(tmp_path, content):
    files = folder_files(tmp_path, "byte_level")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(LocalqError, match=r"tokenizer\.json") as caught:
        Tokenizer.load(files)
    assert caught.value.exit_code == 8


def test_a_missing_or_huge_file_is_named(tmp_path):
    files = folder_files(tmp_path, "byte_level")
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(65 * 2**20)
    with pytest.raises(LocalqError, match="too large"):
        Tokenizer.load(files)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(LocalqError, match="no such file"):
        Tokenizer.load(files)
