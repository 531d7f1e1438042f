"""Where a reply ends: what configurations state, names of tokens, and what the chat template writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from localq.files.model_folder import ModelFiles
from localq.text import end_of_turn
from tests.support.text import tiny_tokenizers

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def backend_with(*tokens: str, special: bool = True) -> Backend:
    backend = tiny_tokenizers.byte_level()
    known = backend.get_added_tokens_decoder().values()
    assert {each.content for each in known} == {"<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"}
    backend.add_tokens([AddedToken(each, special=special, normalized=False) for each in tokens])
    return backend


def ends(
    *tokens: str, text: str | None = None, special: bool = True, named: dict[str, str] | None = None,
    **configs: dict[str, Any],
) -> set[str]:  # fmt: skip
    """Texts of the tokens at which a reply ends, without those of every tokenizer here (</s>, <|im_end|>)."""
    backend = backend_with(*tokens, special=special)
    files = ModelFiles(
        Path(),
        "safetensors",
        configs.get("config", {}),
        configs.get("generation", {}),
        configs.get("tokenizer", {}),
        text,
    )
    found = {backend.id_to_token(id) for id in end_of_turn.stop_ids(backend, named or {}, files)}
    assert {"</s>", "<|im_end|>"} <= found
    return found - {"</s>", "<|im_end|>"}


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("end", ["<|my_end|>", "<turn|>", "[STOP]", "<|user|>", "\u3008EOS\u3009"])
@pytest.mark.parametrize("gap", ["", "\\n", " "])
def test_the_token_behind_an_answer_ends_a_reply(end, special, gap):
    text = f"{{% for m in messages %}}<|{{{{ m.role }}}}|>{{{{ m.content }}}}{{{{ '{gap}{end}' }}}}{{% endfor %}}"
    assert ends(end, text=text, special=special) == {end}


def test_a_token_that_the_template_makes_of_a_variable_or_of_parts():
    text = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    assert ends("<|fin|>", text=text, named={"eos_token": "<|fin|>"}) == {"<|fin|>"}
    text = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|' + 'off' + '|>' }}{% endfor %}"
    assert ends("<|off|>", text=text, special=False) == {"<|off|>"}


@pytest.mark.parametrize(
    "configs",
    [
        {"named": {"eos_token": "<|fin|>"}},
        {"named": {"eos_token": "<|fin|>", "bos_token": "<|fin|>"}},
        {"tokenizer": {"eot_token": "<|fin|>"}},
        {"tokenizer": {"eom_token": {"content": "<|fin|>"}}},
        {"tokenizer": {"extra_special_tokens": {"eot_token": "<|fin|>"}}},
    ],
)
@pytest.mark.parametrize("text", [None, CHATML])
@pytest.mark.parametrize("special", [True, False])
def test_a_token_that_the_tokenizer_s_configuration_names_ends_a_reply(configs, text, special):
    assert ends("<|fin|>", text=text, special=special, **configs) == {"<|fin|>"}


def test_lists_of_ids():
    first = backend_with().get_vocab_size()
    tokens = ("<|a|>", "<|b|>", "<|c|>")
    assert ends(*tokens, generation={"eos_token_id": [first, first + 2]}) == {"<|a|>", "<|c|>"}
    assert ends(*tokens, config={"eos_token_id": first + 1}) == {"<|b|>"}
    assert ends(*tokens, config={"text_config": {"eos_token_id": [first + 1]}}) == {"<|b|>"}
    both = {"generation": {"eos_token_id": first}, "config": {"eos_token_id": first + 1}}
    assert ends(*tokens, **both) == {"<|a|>"}  # as transformers: the first of the two that states it
    assert ends(*tokens, generation={"eos_token_id": [first, 10**6, -1, "2", True]}) == {"<|a|>"}


@pytest.mark.parametrize("name", sorted(set(end_of_turn.NAMES) - {"</s>", "<|im_end|>"}))
def test_a_special_token_of_a_known_name_ends_a_reply_whatever_the_template(name):
    assert ends(name, text=CHATML) == ends(name) == {name}
    assert ends(name, text=CHATML, special=False) == set()  # such as an HTML tag of Gemma
    assert ends(name, text=CHATML + f"{{# {name} #}}", special=False) == {name}
    assert ends(name, text=CHATML, named={"bos_token": name}) == set()


def test_of_channels_only_the_last_mark_ends_a_reply():
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    text = "{% for m in messages %}<|start|>{{ m.role }}<|channel|>final<|message|>{{ m.content }}<|end|>{% endfor %}"
    assert ends(*marks, text=text) == ends(*marks) == {"<|return|>", "<|call|>"}


@pytest.mark.parametrize(
    "text",
    [
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ m.content",
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "no messages at all",
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}<s>{{ m.content }}{% endfor %}",
        "<|x|>{{ messages[-1].content }}",
    ],
)
def test_a_template_that_says_nothing_adds_nothing(text):
    assert ends("<|x|>", text=text, named={"bos_token": "<s>"}) == set()


@pytest.mark.parametrize("tag", ["</think>", "[/THINK]"])
def test_a_tag_of_thoughts_is_no_end(tag):
    assert ends(tag, text="{% for m in messages %}{{ m.content }}" + tag + "{% endfor %}") == set()
