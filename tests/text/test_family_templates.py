"""Turns of families since Qwen3.5: thinking on, off and by effort, earlier thoughts.

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
    "olmo-3-think": "<think>\nhm\n</think>\n\n",
    "seed-oss": "<seed:think>hm</seed:think>",
    "exaone-4": "<think>\nhm\n</think>\n\n",
    "granite-3.3": "<think>\nhm\n</think>\n\n",
    "lfm2": "<think>\nhm\n</think>\n\n",
    "gemma-4": "<|channel>thought\nhm\n<channel|>",
    "ministral-3-reasoning": "[THINK]hm[/THINK]",
    "nemotron-3": "<think>\nhm\n</think>\n",
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


def test_gemma_4_thinks_where_the_system_turn_says_so():
    question, model = Message("user", " Q\n"), "<|turn>model\n"
    asked = "<|turn>user\nQ<turn|>\n"
    off = f"<bos>{asked}{model}<|channel>thought\n<channel|>"
    assert prompt("gemma-4", question) == prompt("gemma-4", question, think="off") == off
    assert prompt("gemma-4", question, think="on") == f"<bos><|turn>system\n<|think|><turn|>\n{asked}{model}"
    kind = prompt("gemma-4", Message("system", "Be kind."), question, think="on")
    assert kind == f"<bos><|turn>system\n<|think|>Be kind.<turn|>\n{asked}{model}"
    with pytest.raises(LocalqError, match="no thinking levels"):
        prompt("gemma-4", question, think="low")


def test_gemma_4_drops_earlier_thoughts_unless_told_to_keep_them():
    def text(**given):
        return prompt("gemma-4", *answered("gemma-4"), think="on", **given)

    assert "<|turn>model\nyes<turn|>\n" in text()
    assert "<|channel>" not in text()
    assert f"<|turn>model\n{THOUGHT['gemma-4']}yes<turn|>\n" in text(preserve="on")


def test_olmo_thinks_in_models_of_their_own():
    who = "<|im_start|>system\nYou are a model of the OLMo kind"
    assert prompt("olmo-3", Message("user", "Q")) == f"{who}.<|im_end|>\n{USER}<|im_start|>assistant\n"
    text = prompt("olmo-3-think", Message("user", "Q"), think="on")
    assert text == f"{who} that thinks.<|im_end|>\n{USER}<|im_start|>assistant\n<think>"
    kind = prompt("olmo-3-think", Message("system", "Be kind."), *answered("olmo-3-think"))
    said = "<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>\n"
    assert kind.startswith(f"<|im_start|>system\nBe kind.<|im_end|>\n{USER}{said}<|im_start|>user\nR")
    for name in ("olmo-3", "olmo-3-think"):
        with pytest.raises(LocalqError, match="no thinking mode"):
            prompt(name, Message("user", "Q"), think="off")


def test_exaone_thinks_if_told_to_and_drops_earlier_thoughts():
    asked, open_ = "[|user|]\nQ[|endofturn|]\n", "[|assistant|]\n<think>\n"
    for think in ("auto", "off"):
        assert prompt("exaone-4", Message("user", "Q"), think=think) == f"{asked}{open_}\n</think>\n\n"
    kind = prompt("exaone-4", Message("system", "Be kind."), *answered("exaone-4"), think="on")
    said = "[|assistant|]\nyes[|endofturn|]\n[|user|]\nR[|endofturn|]\n"
    assert kind == f"[|system|]\nBe kind.[|endofturn|]\n{asked}{said}{open_}"


def test_granite_thinks_where_its_system_turn_asks_for_it():
    def turn(role: str, said: str) -> str:
        return f"<|start_of_role|>{role}<|end_of_role|>{said}<|end_of_text|>\n"

    opened = "<|start_of_role|>assistant<|end_of_role|>"
    on, off, auto = (prompt("granite-3.3", Message("user", "Q"), think=each) for each in ("on", "off", "auto"))
    assert on.endswith(f"<think></think>, then your answer.<|end_of_text|>\n{turn('user', 'Q')}{opened}")
    assert "<think>" not in off
    assert off.endswith(f"Granite kind.<|end_of_text|>\n{turn('user', 'Q')}{opened}")
    assert auto == off
    kind = prompt("granite-3.3", Message("system", "Be kind."), *answered("granite-3.3"))
    said = turn("user", "Q") + turn("assistant", "yes") + turn("user", "R")
    assert kind == turn("system", "Be kind.") + said + opened


def test_lfm_is_chatml_and_drops_all_thoughts_but_the_last():
    assert prompt("lfm2", Message("user", "Q")) == f"<|startoftext|>{USER}<|im_start|>assistant\n"
    turns = (*answered("lfm2"), Message("assistant", THOUGHT["lfm2"] + "no"), Message("user", "S"))
    text = prompt("lfm2", Message("system", "Be kind."), *turns)
    assert text.startswith(f"<|startoftext|><|im_start|>system\nBe kind.<|im_end|>\n{USER}{WITHOUT}")
    assert "assistant\n<think>\nhm\n</think>\n\nno<|im_end|>" in text


def test_qwen_vl_is_chatml_without_thoughts():
    text = prompt("qwen3-vl", Message("system", "Be kind."), *answered("qwen3.8"))
    assert text.startswith(f"<|im_start|>system\nBe kind.<|im_end|>\n{USER}")
    assert text.endswith("<|im_start|>user\nR<|im_end|>\n<|im_start|>assistant\n")
    with pytest.raises(LocalqError, match="no thinking mode"):
        prompt("qwen3-vl", Message("user", "Q"), think="on")


def test_seed_has_a_budget_of_which_zero_turns_thoughts_off():
    asked = "<seed:bos>user\nQ<seed:eos>"
    for think in ("auto", "on"):
        assert prompt("seed-oss", Message("user", "Q"), think=think) == f"{asked}<seed:bos>assistant\n"
    off = prompt("seed-oss", Message("user", "Q"), think="off")
    assert off.startswith(f"<seed:bos>system\nAnswer at once, without a thought.<seed:eos>{asked}<seed:bos>assistant\n")
    assert off.endswith("the answer follows.</seed:cot_budget_reflect>\n</seed:think>")
    text = prompt("seed-oss", *answered("seed-oss"))
    said = "<seed:bos>assistant\n<seed:think>hm</seed:think>\nyes<seed:eos>"
    assert text == f"{asked}{said}<seed:bos>user\nR<seed:eos><seed:bos>assistant\n"
    with pytest.raises(LocalqError, match="no thinking levels"):
        prompt("seed-oss", Message("user", "Q"), think="low")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{% if thinking %}a{% endif %}", ("thinking", True, False)), ("{# thinking #}thinking of it", None),
        ("{{ 'budget' if thinking_budget == 0 }}", ("thinking_budget", -1, 0)), ("plain", None),
        ("{% if enable_thinking %}{{ thinking }}{% endif %}", ("enable_thinking", True, False)),
    ],
)  # fmt: skip
def test_a_switch_is_what_the_template_reads(text, found):
    assert thinking_levels.switch(text) == found


def test_nemotron_has_a_system_turn_and_closes_a_thought_that_is_off():
    question, empty = Message("user", "Q"), "<|im_start|>system\n<|im_end|>\n"
    assert prompt("nemotron-3", question) == f"{empty}{USER}<|im_start|>assistant\n<think>\n"
    assert prompt("nemotron-3", question, think="on") == prompt("nemotron-3", question)
    off = prompt("nemotron-3", Message("system", "Be kind."), question, think="off")
    kind = "<|im_start|>system\nBe kind.<|im_end|>\n"
    assert off == f"{kind}{USER}<|im_start|>assistant\n<think></think>"
    with pytest.raises(LocalqError, match="no thinking levels"):
        prompt("nemotron-3", question, think="low")


def test_nemotron_leaves_empty_thoughts_of_earlier_turns():
    text = prompt("nemotron-3", *answered("nemotron-3"))
    assert f"{USER}<|im_start|>assistant\n<think></think>yes<|im_end|>\n<|im_start|>user\nR<|im_end|>\n" in text
    plain = prompt("nemotron-3", Message("user", "Q"), Message("assistant", "yes"), Message("user", "R"))
    assert plain == text


def test_granite_has_a_system_turn_and_does_not_think():
    def turn(role: str, content: str) -> str:
        return f"<|start_of_role|>{role}<|end_of_role|>{content}<|end_of_text|>\n"

    kind, ask, end = Message("system", "Be kind."), Message("user", "Q"), "<|start_of_role|>assistant<|end_of_role|>"
    assert prompt("granite-4", kind, ask) == turn("system", "Be kind.") + turn("user", "Q") + end
    usual = "You are a helpful assistant. Please ensure responses are professional, accurate, and safe."
    assert prompt("granite-4", ask) == turn("system", usual) + turn("user", "Q") + end
    earlier = prompt("granite-4", kind, ask, Message("assistant", "yes"), Message("user", "R"))
    assert earlier == prompt("granite-4", kind, ask) + "yes<|end_of_text|>\n" + turn("user", "R") + end
    with pytest.raises(LocalqError, match="no thinking mode"):
        prompt("granite-4", ask, think="on")


def test_glm_thinks_unless_it_is_asked_not_to():
    question, asked = Message("user", "Q"), "[gMASK]<sop><|user|>Q<|assistant|>"
    assert prompt("glm-4.7", question) == prompt("glm-4.7", question, think="on") == f"{asked}<think>"
    assert prompt("glm-4.7", question, think="off") == f"{asked}</think>"
    kind = prompt("glm-4.7", Message("system", "Be kind."), question)
    assert kind == "[gMASK]<sop><|system|>Be kind.<|user|>Q<|assistant|><think>"
    with pytest.raises(LocalqError, match="no thinking levels"):
        prompt("glm-4.7", question, think="low")
    said = Message("assistant", "<think>hm</think>yes")
    earlier = prompt("glm-4.7", question, said, Message("user", "R"))
    assert earlier == f"{asked}<think>hm</think>yes<|user|>R<|assistant|><think>"


def test_laguna_thinks_only_where_it_is_asked_to():
    question, begin = Message("user", "Q"), "〈|EOS|〉<system>\n"
    direct, aloud = "Respond directly, without reasoning tags.", "Put your reasoning inside <think> </think> tags"
    asked = "\n</system>\n<user>\nQ\n</user>\n<assistant>\n"
    assert prompt("laguna", question) == prompt("laguna", question, think="off") == f"{begin}{direct}{asked}"
    assert prompt("laguna", question, think="on") == f"{begin}{aloud} before your response.{asked}"
    kind = prompt("laguna", Message("system", "Be kind."), question)
    assert kind == f"{begin}{direct}\nBe kind.{asked}"
    with pytest.raises(LocalqError, match="no thinking levels"):
        prompt("laguna", question, think="low")
    said = Message("assistant", "<think>\nhm\n</think>\n\nyes")
    earlier = prompt("laguna", question, said, Message("user", "R"), think="on")
    assert "<assistant>\n<think>hm</think>\nyes\n</assistant>\n<user>\nR\n</user>" in earlier
    assert "hm" not in prompt("laguna", question, said, Message("user", "R"))


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
