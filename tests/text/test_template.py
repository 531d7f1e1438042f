"""Chat templates: the same text as transformers for every family, refusals in the template's words, dates, marks."""

from __future__ import annotations

import datetime
import json

import jinja2
import pytest
from transformers import PreTrainedTokenizerFast

from localq.errors import ExitCode, LocalqError
from localq.text import template
from tests.support.text import tiny_tokenizers
from tests.support.text.chat_templates import CONVERSATIONS, EVERY, source, turns

TOOLS = [
    {"type": "function", "function": {"name": "<é>", "parameters": {"type": "array", "items": {"type": "string"}}}}
]

PROPERTIES = {"city": {"type": "string", "description": "é", "enum": ["a", "b"]}, "days": {"type": "integer"}}
WEATHER = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Forecast.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": ["city"]},
        },
    }
]


@pytest.fixture(scope="module")
def backend():
    return tiny_tokenizers.byte_level()


def outcome(function, *arguments, **keywords) -> str | None:
    """The text; None where the template refuses."""
    try:
        return function(*arguments, **keywords)
    except (LocalqError, jinja2.TemplateError, TypeError):
        return None


def both(backend, name: str, messages, **variables) -> tuple[str | None, str | None]:
    text, special = source(name)
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    today = datetime.date.today()
    wanted = outcome(reference.apply_chat_template, messages, chat_template=text, tokenize=False, **variables)
    got = outcome(template.render, text, messages, special, **variables)
    if datetime.date.today() != today:
        return both(backend, name, messages, **variables)
    return wanted, got


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", EVERY)
def test_the_text_is_that_of_transformers(backend, name, conversation, prompt):
    wanted, got = both(backend, name, CONVERSATIONS[conversation], add_generation_prompt=prompt)
    assert got == wanted


@pytest.mark.parametrize("name", EVERY)
def test_every_family_renders_a_plain_conversation(name):
    text = template.render(*_with(name, turns("What is it?", "A cat.", "Sure?")))
    assert text.index("What is it?") < text.index("A cat.") < text.index("Sure?")


def _with(name: str, messages):
    text, special = source(name)
    return text, messages, special


@pytest.mark.parametrize(
    ("name", "variables"),
    [
        ("qwen3", {"enable_thinking": False}),
        ("qwen3.5", {"enable_thinking": False}),
        ("qwen3.6", {"enable_thinking": True, "preserve_thinking": True}),
        ("qwen3.8", {"enable_thinking": False, "preserve_thinking": False}),
        ("qwen3.8", {"reasoning_effort": "low"}),
        ("ministral-3-reasoning", {"tools": TOOLS}),
        ("muse-glimmer", {"reasoning_strength": "xhigh"}),
        ("qwen2.5", {"tools": TOOLS}),
        ("published/qwen2.5-7b-instruct", {"tools": TOOLS}),
        ("published/qwen3-0.6b", {"tools": TOOLS, "enable_thinking": False}),
        ("published/mistral-nemo-instruct-2407", {"tools": TOOLS}),
        ("published/gpt-oss-120b", {"tools": WEATHER, "reasoning_effort": "high", "builtin_tools": ["python"]}),
        ("llama-3.1", {"date_string": "1 Jan 2020", "tools": TOOLS}),
        ("llama-3.3", {"custom_tools": TOOLS}),
        ("mistral-nemo", {"tools": TOOLS}),
        ("gpt-oss", {"tools": TOOLS, "reasoning_effort": "high", "model_identity": "Me."}),
        ("smollm3", {"enable_thinking": False}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_variables_reach_the_template(backend, name, variables):
    messages = turns("Hi", "Yes", "Where?", system="Be kind.")
    wanted, got = both(backend, name, messages, add_generation_prompt=True, **variables)
    assert got == wanted is not None
    assert got != template.render(*_with(name, messages))


def test_a_refusal_has_the_template_s_words_and_a_next_step():
    with pytest.raises(LocalqError) as caught:
        template.render(*_with("gemma-2", turns("Hi", system="Be kind.")))
    assert caught.value.exit_code == ExitCode.FAILURE
    assert "There is no system role in this model" in str(caught.value)
    assert "/system off" in caught.value.next_step
    with pytest.raises(LocalqError, match=r"must alternate.*/clear"):
        template.render(*_with("gemma-2", turns("Hi") * 2))


@pytest.mark.parametrize("content", [None, 3, ["a"], [{"type": "text", "text": "a"}], {"a": 1}, b"a"])
def test_content_that_is_no_text_is_refused(content):
    with pytest.raises(LocalqError, match="both must be strings") as caught:
        template.render("{{ messages[0].content }}", [{"role": "user", "content": content}])
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("message", [{}, {"content": "a"}, {"role": "user"}, {"role": 1, "content": "a"}])
def test_a_message_without_role_or_content_is_refused(message):
    with pytest.raises(LocalqError, match="a role and content"):
        template.render("x", [message])


@pytest.mark.parametrize(
    "value", ["'<é> & \"q\"'", "{'b': [1, none, true], 'a': 'ü'}", "1.5", "messages", "none", "[]"]
)
@pytest.mark.parametrize("options", ["", "(indent=2)", "(true)", "(separators=(',', ':'), sort_keys=true)"])
def test_tojson_is_that_of_transformers(backend, value, options):
    text = "{{ " + value + " | tojson" + options + " }}"
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    wanted = reference.apply_chat_template(turns("é"), chat_template=text, tokenize=False)
    assert template.render(text, turns("é")) == wanted
    json.loads(wanted)


def test_an_option_that_tojson_lacks_is_an_error():
    with pytest.raises(LocalqError, match="unexpected keyword"):
        template.render("{{ 1 | tojson(default=2) }}", turns("a"))


@pytest.mark.parametrize(
    "text",
    [
        "{% generation %}{{ messages[0].content }}{% endgeneration %}|",
        "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
        "{% for m in messages %}{% generation %}{{ loop.index }}{% endgeneration %}\n{% endfor %}",
        "  {% generation -%}\n  a\n  {%- endgeneration %}\n b\n",
        "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 5 %}{% endgeneration %}{{ n.x }}",
    ],
)
def test_generation_marks_are_those_of_transformers(backend, text):
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    wanted = reference.apply_chat_template(turns("é", "b"), chat_template=text, tokenize=False)
    assert template.render(text, turns("é", "b")) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "{{ namespace(self=1).self }}",
        "{{ dict(a=1) }}",
        "{{ namespace({'a': 2}, b=3).a }}",
        "{{ tools is none }}{{ documents is none }}",
    ],
)
def test_the_globals_are_those_of_transformers(backend, text):
    reference = PreTrainedTokenizerFast(tokenizer_object=backend)
    wanted = reference.apply_chat_template(turns("a"), chat_template=text, tokenize=False)
    assert template.render(text, turns("a")) == wanted


def test_lone_surrogates_pass_through():
    assert template.render("{{ messages[0].content }}|", turns("a\ud83d b\udc00")) == "a\ud83d b\udc00|"
    assert template.render("\udc00{{ messages[0].content | length }}", turns("\ud83d")) == "\udc001"


def test_a_long_conversation_is_rendered_and_a_longer_one_named():
    # Every character takes six bytes in the pipe; the pipe itself holds 64 KiB.
    text = "\x01" * template.MAX_CONVERSATION_BYTES
    assert template.render("{{ messages[0].content }}", turns(text)) == text
    with pytest.raises(LocalqError, match=r"the conversation is too long \(786433 bytes") as caught:
        template.render("{{ messages[0].content }}", turns(text + "a"))
    assert caught.value.exit_code == ExitCode.USAGE


def test_the_date_follows_the_user_s_time_zone(monkeypatch):
    dates = set()
    for zone in ("Pacific/Kiritimati", "Pacific/Niue"):  # 25 hours apart: never the same date
        monkeypatch.setenv("TZ", zone)
        template._CHILD.stop()
        dates.add(template.render("{{ strftime_now('%Y-%m-%d') }}", turns("a")))
    template._CHILD.stop()
    assert len(dates) == 2


def test_a_process_that_is_started_ahead_renders():
    template._CHILD.stop()
    template.start_ahead()
    child = template._CHILD._process
    template.start_ahead()
    assert template.render("{{ 1 + 1 }}", turns("a")) == "2"
    assert template._CHILD._process is child is not None


def test_one_that_did_not_start_is_told_by_the_first_render(monkeypatch):
    def fail(start: object) -> None:
        raise BlockingIOError

    template._CHILD.stop()
    with monkeypatch.context() as patch:
        patch.setattr(template.processes, "start_child", fail)
        template.start_ahead()
        with pytest.raises(BlockingIOError):
            template.render("{{ 1 + 1 }}", turns("a"))
    assert template.render("{{ 1 + 1 }}", turns("a")) == "2"


def test_one_that_was_killed_before_is_replaced():
    template._CHILD.stop()
    template.start_ahead()
    child = template._CHILD._process
    assert child is not None
    child.kill()
    child.wait()
    assert template.render("{{ 1 + 1 }}", turns("a")) == "2"


def test_modules_in_the_working_folder_are_not_run(tmp_path, monkeypatch):
    for name in ("jinja2", "json", "datetime"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'run')!r}, 'w')\nraise SystemExit\n")
    monkeypatch.chdir(tmp_path)
    template._CHILD.stop()
    assert template.render("{{ 1 + 1 }}", turns("a")) == "2"
    assert not (tmp_path / "run").exists()


def test_nothing_stays_from_one_render_to_the_next():
    text = (
        "{% set n = namespace(x=0, seen=[]) %}{% set c = cycler('a', 'b') %}{% macro m() %}{{ c.next() }}{% endmacro %}"
        "{% for t in messages %}{% set n.x = n.x + 1 %}{{ m() }}{{ joiner('-')() }}{% endfor %}{{ n.x }}{{ late }}"
    )
    assert template.render(text, turns("q"), late="!") == "a1!"
    for count in (1, 3, 2):
        assert template.render(text, turns(*"q" * count)) == "aba"[:count] + str(count)
    assert template.render(text, turns("q"), raise_exception="own", late="!") == "a1!"
    with pytest.raises(LocalqError, match="no!"):
        template.render("{{ raise_exception('no!') }}", turns("q"))


@pytest.mark.parametrize(
    ("messages", "step"),
    [
        (turns("Hi"), "Use another copy of the model."),  # as of `localq run`: there is nothing to clear
        (turns("Hi", "a", "b"), "Start over with /clear."),
        (turns("Hi", system="x"), "Remove the system prompt (--system, or /system off in a chat)."),
    ],
)
def test_the_advice_for_a_refusal_can_be_followed(messages, step):
    with pytest.raises(LocalqError) as caught:
        template.render("{{ raise_exception('no') }}", messages)
    assert caught.value.next_step == step
