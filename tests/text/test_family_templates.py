"""Turns of Qwen3.5 to 3.8, Ministral 3 and Muse Glimmer: thinking on, off and by effort, earlier thoughts kept or not.

The expected texts follow the turn formats that these families document; the templates are those of tests/data.
"""

from __future__ import annotations

import datetime

import pytest

from localq.chat.history.conversation import Message
from localq.chat.prompt import PromptBuilder
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.text import template, thinking, thinking_levels
from localq.text.tokenizer import Tokenizer
from localq.worker.messages import Load
from tests.support.chat.scripted_client import ScriptedClient
from tests.support.text.chat_templates import source
from tests.support.text.family_tokenizers import family_tokenizer

QWEN = ("qwen3.5", "qwen3.6", "qwen3.8")
USER = "<|im_start|>user\nQ<|im_end|>\n"
XHIGH, LOW = (f"<|im_start|>system\nReasoning effort is set to {each}" for each in ("xhigh", "low"))
THOUGHT = {
    "qwen3.5": "<think>\nhm\n</think>\n\n",
    "qwen3.6": "<think>\nhm\n</think>\n\n",
    "qwen3.8": "<think>\nhm\n</think>\n\n",
    "ministral-3-reasoning": "[THINK]hm[/THINK]",
    "muse-glimmer": " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>",
}
WITHOUT, KEPT = (f"<|im_start|>assistant\n{thought}yes<|im_end|>\n" for thought in ("", THOUGHT["qwen3.8"]))


def prompt(name: str, *messages: Message, think: str = "auto", preserve: str = "auto") -> str:
    return PromptBuilder(family_tokenizer(name), preserve=preserve).text(messages, think)


def answered(name: str) -> tuple[Message, ...]:
    return Message("user", "Q"), Message("assistant", THOUGHT[name] + "yes"), Message("user", "R")


@pytest.mark.parametrize("name", ["qwen3.5", "qwen3.6"])
def test_qwen_opens_the_thought_or_leaves_it_empty(name):
    assert prompt(name, Message("user", " Q\n")) == f"{USER}<|im_start|>assistant\n<think>\n"
    assert prompt(name, Message("user", "Q"), think="on") == prompt(name, Message("user", "Q"))
    off = prompt(name, Message("system", " Be kind. "), Message("user", "Q"), think="off")
    kind = "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert off == f"{kind}{USER}<|im_start|>assistant\n<think>\n\n</think>\n\n"
    with pytest.raises(LocalqError, match="no thinking levels"):
        prompt(name, Message("user", "Q"), think="low")


def test_effort_of_qwen_3_8_is_in_the_system_turn():
    question = Message("user", "Q")
    assert prompt("qwen3.8", question) == f"{XHIGH}. Think with care.<|im_end|>\n{USER}<|im_start|>assistant\n<think>\n"
    assert prompt("qwen3.8", question, think="xhigh") == prompt("qwen3.8", question, think="on")
    assert prompt("qwen3.8", question, think="medium") == f"{USER}<|im_start|>assistant\n<think>\n"
    kind = prompt("qwen3.8", Message("system", "Be kind."), question, think="low")
    assert kind.startswith(f"{LOW}. Keep it brief.\n\nBe kind.<|im_end|>\n{USER}")
    off = prompt("qwen3.8", question, think="off")
    assert off == f"{USER}<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.mark.parametrize("name", QWEN)
def test_qwen_keeps_earlier_thoughts_as_told(name):
    default = KEPT if name == "qwen3.8" else WITHOUT
    end = "<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert prompt(name, *answered(name)).endswith(f"{USER}{default}{end}")
    if name == "qwen3.5":
        with pytest.raises(LocalqError, match="does not support this option") as caught:
            prompt(name, *answered(name), preserve="on")
        assert caught.value.exit_code == ExitCode.USAGE
        return
    assert prompt(name, *answered(name), preserve="on").endswith(f"{USER}{KEPT}{end}")
    assert prompt(name, *answered(name), preserve="off").endswith(f"{USER}{WITHOUT}{end}")


@pytest.mark.parametrize("name", QWEN)
def test_a_tag_in_an_answer_stays_text(name):
    said = Message("assistant", f"{THOUGHT[name]}write </think> to end it")
    text = prompt(name, Message("user", "Q"), said, Message("user", "R"))
    assert "write </think> to end it<|im_end|>" in text
    half = prompt(name, Message("user", "Q"), Message("assistant", "<think>\nhalf"), Message("user", "R"))
    assert ("half\n</think>\n\n<|im_end|>" in half) == (name == "qwen3.8")


def test_ministral_explains_the_thought_unless_a_system_prompt_replaces_it():
    own = "[SYSTEM_PROMPT]# HOW TO ANSWER\n\nFirst draft your thoughts, as in:[THINK]Thoughts, as on scratch paper."
    text = prompt("ministral-3-reasoning", Message("user", "Q"))
    assert text == f"<s>{own}[/THINK]Here, provide a response.[/SYSTEM_PROMPT][INST]Q[/INST]"
    text = prompt(
        "ministral-3-reasoning", Message("system", "Be kind."), *answered("ministral-3-reasoning"), think="on"
    )
    assert text == "<s>[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][INST]Q[/INST][THINK]hm[/THINK]yes</s>[INST]R[/INST]"
    with pytest.raises(LocalqError, match="no thinking mode"):
        prompt("ministral-3-reasoning", Message("user", "Q"), think="off")
    plain, special = source("ministral-3")
    assert "[THINK]" not in plain
    today = datetime.date.today()
    rendered = template.render(plain, [{"role": "user", "content": "Q"}], special)
    assert today != datetime.date.today() or f"The current date is {today}." in rendered


def test_muse_writes_the_strength_and_thoughts_to_itself():
    def closing(strength: str) -> str:
        return f'\n\nReasoning strength: {strength}.\n\n# Valid recipients: "self", "user".<|eot|>'

    kind, bos = Message("system", "Be kind."), "<|begin_of_text|>"
    for think, strength in (("auto", "high"), ("on", "high"), ("low", "low"), ("xhigh", "xhigh")):
        text = prompt("muse-glimmer", kind, Message("user", "Q"), think=think)
        system = f"{bos}<|start|>system<|message|>Be kind.{closing(strength)}"
        assert text == f"{system}<|start|>user<|message|>Q<|eot|><|start|>assistant"
    text = prompt("muse-glimmer", kind, *answered("muse-glimmer"))
    said = "<|start|>assistant to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>yes<|eot|>"
    assert f"Q<|eot|>{said}<|start|>user<|message|>R<|eot|><|start|>assistant" in text
    assert "Current date: 20" in prompt("muse-glimmer", Message("user", "Q"))
    with pytest.raises(LocalqError, match=r"always thinks.*--think low"):
        prompt("muse-glimmer", kind, Message("user", "Q"), think="off")


@pytest.mark.parametrize("name", ["qwen3.8", "muse-glimmer", "ministral-3-reasoning"])
def test_the_next_prompt_begins_with_the_last_and_its_reply(name):
    """So that nothing of an earlier turn is computed again."""
    tokenizer = family_tokenizer(name)
    if name.startswith("qwen"):
        tokenizer = Tokenizer(tokenizer.backend, tokenizer.special_tokens, tokenizer.chat_template, tokenizer.stop_ids)
    reply = tokenizer.encode((THOUGHT[name] + "yes").removeprefix("<think>\n"))
    client = ScriptedClient([reply], [reply], [reply])
    session = ChatSession(client, Load("path"), tokenizer)
    for question in ("Q", "R", "S"):
        list(session.ask(question))
    for before, after in zip(client.generated, client.generated[1:], strict=False):
        assert after.prompt[: len(before.prompt) + len(reply)] == [*before.prompt, *reply]


# ---- levels


@pytest.mark.parametrize(
    ("name", "levels"),
    [
        ("qwen3.8", ("low", "medium", "xhigh")), ("muse-glimmer", ("low", "medium", "high", "xhigh")),
        ("gpt-oss", ("low", "medium", "high")), ("published/gpt-oss-120b", ("low", "medium", "high")),
        ("qwen3.5", ()), ("qwen3", ()), ("ministral-3-reasoning", ()), ("smollm3", ()),
    ],
)  # fmt: skip
def test_levels_are_those_that_the_template_takes(name, levels):
    text, _ = source(name)
    assert thinking_levels.levels(text) == levels
    for level in levels:
        assert level in thinking.variables(text, level).values()
    for level in {"low", "medium", "high", "xhigh"} - set(levels):
        with pytest.raises(LocalqError) as caught:
            thinking.variables(text, level)
        assert caught.value.exit_code == ExitCode.USAGE
        assert all(each in str(caught.value) for each in levels)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("{{ {'low': 'a', 'high': 'b'}[reasoning_effort] }}", ("low", "high")),
        ("{% if reasoning_effort == 'low' %}a{% elif reasoning_effort == 'high' %}b{% endif %}", ("low", "high")),
        ("{% if reasoning_effort == 'low' %}a{% elif reasoning_effort == 'medium' %}{% endif %}", ("low", "medium")),
        ("{# reasoning_effort #}hi", ()),
        ("{{ raise_exception('never') }}{{ reasoning_effort }}", ("low", "medium", "high")),
        ("{% if enable_thinking %}{{ reasoning_effort }}{% endif %}", ("low", "medium", "high")),
    ],
)
def test_templates_that_know_ignore_or_write_levels(text, levels):
    assert thinking_levels.levels(text) == levels


def test_a_switch_that_the_template_refuses_to_turn_off():
    text = "{% if enable_thinking is defined and not enable_thinking %}{{ raise_exception('no') }}{% endif %}<think>"
    assert not thinking_levels.can_switch_off(text)
    assert thinking.variables(text, "on") == {"enable_thinking": True}
    with pytest.raises(LocalqError, match=r"always thinks.*--think-budget"):
        thinking.variables(text, "off")
    assert thinking.minimal_variables(text) == {}
    effort, _ = source("qwen3.8")
    assert thinking.minimal_variables(effort) == {"enable_thinking": False}
    assert thinking.minimal_variables(effort.replace("enable_thinking", "x")) == {"reasoning_effort": "low"}
