"""Tokenizers: streaming equals the full decode, chat ids equal transformers', stop tokens, hostile files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import tiny_tokenizers
from real_model import smollm2
from tiny_tokenizers import SENTENCES
from transformers import PreTrainedTokenizerFast

from localq.errors import LocalqError
from localq.modelfiles import ModelFiles, open_model
from localq.tokenizer import Tokenizer

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
    assert Tokenizer.load(open_model(smollm2())).stop_ids == {2}


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
    with pytest.raises(LocalqError, match="larger than"):
        Tokenizer.load(files)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(LocalqError, match="no such file"):
        Tokenizer.load(files)
