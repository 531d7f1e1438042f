"""A draft model has the tokenizer of its target, or is refused with the first difference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.text import same_tokenizer
from localq.text.tokenizer import Tokenizer
from tests.support.files.real_model import smollm2
from tests.support.models.tiny_checkpoints import write_tokenizer


@pytest.fixture
def target(tmp_path) -> Tokenizer:
    return tokenizer_of(tmp_path / "target")


def tokenizer_of(folder: Path, rows: int = 320, change=lambda body: None) -> Tokenizer:
    """The tokenizer of the tiny checkpoints, with a changed tokenizer.json."""
    folder.mkdir()
    write_tokenizer(folder)
    body = json.loads((folder / "tokenizer.json").read_text())
    change(body)
    return Tokenizer(Backend.from_str(json.dumps(body)), {}, None, frozenset(), rows)


def test_the_same_files_are_the_same(target, tmp_path):
    assert same_tokenizer.difference(target, tokenizer_of(tmp_path / "draft")) == ""
    real = Tokenizer.load(open_model(smollm2()))
    assert same_tokenizer.difference(real, real) == ""


def test_padded_rows_and_more_tokens_in_the_draft_model_are_no_difference(target, tmp_path):
    def add(body):
        body["added_tokens"].append({**body["added_tokens"][0], "id": 264, "content": "<think>"})

    assert same_tokenizer.difference(target, tokenizer_of(tmp_path / "padded", rows=384)) == ""
    assert same_tokenizer.difference(target, tokenizer_of(tmp_path / "more", change=add)) == ""


def test_names_of_padding_are_no_difference(tmp_path):
    def name_padding(body):
        body["model"]["vocab"]["[PAD264]"] = 264

    def name_otherwise(body):
        body["model"]["vocab"]["<|extra_0|>"] = 264

    pair = tokenizer_of(tmp_path / "a", change=name_padding), tokenizer_of(tmp_path / "b", change=name_otherwise)
    assert same_tokenizer.difference(*pair) == ""


def test_another_id_of_a_token_is_named(target, tmp_path):
    def swap(body):
        vocab = body["model"]["vocab"]
        vocab["th"], vocab["an"] = vocab["an"], vocab["th"]

    found = same_tokenizer.difference(target, tokenizer_of(tmp_path / "draft", change=swap))
    assert found == "token 259 is 'an' instead of 'th'"


def test_another_special_token_is_named(target, tmp_path):
    def rename(body):
        for token in body["added_tokens"]:
            token["content"] = token["content"].replace("im_start", "start_of_turn")
        vocab = body["model"]["vocab"]
        vocab["<|start_of_turn|>"] = vocab.pop("<|im_start|>")

    found = same_tokenizer.difference(target, tokenizer_of(tmp_path / "draft", change=rename))
    assert found == "token 257 is '<|start_of_turn|>' instead of '<|im_start|>'"


def test_the_same_vocabulary_that_splits_otherwise_is_refused(target, tmp_path):
    def lose_merges(body):
        body["model"]["merges"] = body["model"]["merges"][:1]

    draft = tokenizer_of(tmp_path / "draft", change=lose_merges)
    assert same_tokenizer.difference(target, draft) == "they split text into tokens differently"
    backend = Backend.from_str(target.backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    assert same_tokenizer.difference(target, replace(target, backend=backend))


def test_tokens_that_the_draft_model_lacks_are_counted(target, tmp_path):
    found = same_tokenizer.difference(target, tokenizer_of(tmp_path / "draft", rows=262))
    assert found.startswith("2 tokens are missing (first: ")


def test_the_error_names_both_and_the_way_out(target, tmp_path):
    draft = tokenizer_of(tmp_path / "draft", rows=262)
    with pytest.raises(LocalqError) as caught:
        same_tokenizer.check("large", target, "small", draft)
    assert caught.value.exit_code == ExitCode.USAGE
    assert str(caught.value).startswith("draft model small: the tokenizer differs from that of large: 2 tokens")
    assert "--draft auto" in caught.value.next_step
