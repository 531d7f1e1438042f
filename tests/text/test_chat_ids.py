"""Conversations to ids: for every family's template and tokens the ids of transformers; where a reply then ends."""

from __future__ import annotations

import json

import pytest
from transformers import PreTrainedTokenizerFast

from localq.errors import LocalqError
from localq.files.model_folder import ModelFiles
from localq.text import end_of_turn
from localq.text.tokenizer import Tokenizer
from tests.support.text.chat_templates import CONVERSATIONS, ENDS, EVERY, family, source, turns
from tests.support.text.family_tokenizers import family_backend


def saved(folder, name: str, eos_ids: list[int] | None = None) -> ModelFiles:
    text, special = source(name)
    family_backend(name).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": text, **special})
    )
    generation = {"eos_token_id": eos_ids} if eos_ids else {}
    return ModelFiles(folder, "safetensors", {"eos_token_id": 2}, generation, special, text, name)


@pytest.mark.parametrize("name", EVERY)
def test_chat_ids_are_those_of_transformers(tmp_path, name):
    tokenizer = Tokenizer.load(saved(tmp_path, name))
    reference = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    compared = 0
    for messages in CONVERSATIONS.values():
        try:
            ids = tokenizer.chat_ids(messages)
        except LocalqError:
            continue  # refused by the template; test_template.py holds that to transformers
        wanted = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert ids == wanted
        assert tokenizer.decode(ids) == reference.decode(wanted, skip_special_tokens=True)
        compared += 1
    assert compared >= 3


@pytest.mark.parametrize("name", ["llama-3.1", "mistral-v0.3", "gemma-3", "qwen3", "phi-4"])
def test_the_beginning_of_text_comes_once_in_both_uses(tmp_path, name):
    tokenizer = Tokenizer.load(saved(tmp_path, name))
    reference = PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    ids = tokenizer.prompt_ids("The ship")
    assert ids == reference("The ship")["input_ids"]
    bos = ENDS[family(name)][0]
    adds = family(name) in ("llama", "mistral", "gemma")
    if adds:
        first = tokenizer.backend.token_to_id(bos)
        assert ids.count(first) == tokenizer.chat_ids(turns("a", "b", "c")).count(first) == 1
    assert (len(ids) - len(tokenizer.encode("The ship"))) == adds


@pytest.mark.parametrize(
    ("name", "ends"),
    [
        ("llama-3.1", {"<|eot_id|>"}),
        ("mistral-v0.3", {"</s>"}),
        ("published/mistral-nemo-instruct-2407", {"</s>"}),
        ("published/qwen2.5-7b-instruct", {"<|im_end|>"}),
        ("published/qwen3-0.6b", {"<|im_end|>"}),
        ("gemma-2", {"<end_of_turn>"}),
        ("gemma-3", {"<end_of_turn>"}),
        ("published/phi-3.5-mini-instruct", {"<|end|>", "<|endoftext|>"}),
        ("phi-4", {"<|im_end|>"}),
        ("phi-4-mini", {"<|end|>"}),
        ("smollm3", {"<|im_end|>"}),
        ("qwen3.5", {"<|im_end|>"}),
        ("qwen3.8", {"<|im_end|>"}),
        ("ministral-3-reasoning", {"</s>"}),
        ("gemma-4", {"<eos>", "<turn|>"}),
        ("olmo-3-think", {"<|im_end|>", "<|endoftext|>"}),
        ("lfm2", {"<|im_end|>"}),
        ("exaone-4", {"[|endofturn|]"}),
        ("granite-3.3", {"<|end_of_text|>"}),
        ("seed-oss", {"<seed:eos>"}),
        ("nemotron-3", {"<|im_end|>"}),
        ("granite-4", {"<|end_of_text|>"}),
        ("laguna", {"</assistant>"}),
        ("glm-4.7", {"<|user|>", "<|observation|>"}),
        ("muse-glimmer", {"<|eot|>"}),  # <|eom|> ends its thoughts
        ("published/gpt-oss-120b", {"<|return|>", "<|call|>"}),  # <|end|> ends its thoughts; the answer follows
    ],
)
def test_a_reply_ends_where_the_template_ends_a_turn(tmp_path, name, ends):
    tokenizer = Tokenizer.load(saved(tmp_path, name, eos_ids=[7, 11]))
    found = {tokenizer.backend.id_to_token(id) for id in tokenizer.stop_ids - {7, 11}}
    assert tokenizer.stop_ids >= {7, 11}  # the list of generation_config.json
    assert found >= ends
    named = set(end_of_turn.NAMES) - ({"<|end|>"} if family(name) == "gpt" else set())
    assert found <= ends | set(filter(None, ENDS[family(name)])) | named  # bos doubles as the end in the Phi family


@pytest.mark.parametrize("name", [name for name in EVERY if "gpt" not in name])
def test_a_token_that_is_not_special_ends_a_reply_where_the_template_writes_it(tmp_path, name):
    def plain(files: ModelFiles) -> set[str]:
        tokenizer = Tokenizer.load(files)
        return {tokenizer.backend.id_to_token(id) for id in tokenizer.stop_ids} - {None}

    special = plain(files := saved(tmp_path, name))
    body = json.loads((tmp_path / "tokenizer.json").read_text())
    for token in body["added_tokens"]:
        token["special"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    assert plain(files) <= special
    assert any(
        end in plain(files)
        for end in ("<|im_end|>", "<|eot_id|>", "</s>", "<end_of_turn>", "<|end|>", ENDS[family(name)][1])
    )


def test_an_end_beyond_the_vocabulary_is_dropped(tmp_path):
    assert 900_000 not in Tokenizer.load(saved(tmp_path, "qwen3", eos_ids=[900_000, 3])).stop_ids
