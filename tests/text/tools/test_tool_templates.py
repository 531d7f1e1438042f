"""Prompts with tools, calls and results: as transformers renders them, and what each family writes of them."""

from __future__ import annotations

import datetime
import json

import pytest
from transformers import PreTrainedTokenizerFast

from localq.errors import ExitCode, LocalqError
from localq.text import template
from localq.text.tools.declaration import Tool
from localq.text.tools.formats import tool_format
from tests.support.text import tiny_tokenizers
from tests.support.text.chat_templates import NAMES, source
from tests.support.text.family_tokenizers import family_tokenizer

FORMATS = {
    "gemma-4": "gemma", "glm-4.7": "glm", "laguna": "glm", "lfm2": "python", "lfm2.5": "python", "llama-3.1": "llama",
    "ministral-3": "mistral", "ministral-3-reasoning": "mistral", "muse-glimmer": "atem", "north": "action",
    "qwen2.5": "hermes", "qwen3.8": "qwen", "published/gpt-oss-120b": "harmony", "published/granite-4.0": "hermes",
    "published/ministral-3-14b-reasoning-2512": "mistral", "published/mistral-nemo-instruct-2407": "mistral",
    "published/qwen2.5-7b-instruct": "hermes", "published/qwen3-0.6b": "hermes", "published/qwen3.5-4b": "qwen",
    "published/qwen3-coder-30b-a3b-instruct": "qwen",
}  # fmt: skip
TOOLS = [
    Tool("get_weather", "Forecast of a <city>.", {
        "type": "object", "required": ["city"],
        "properties": {"city": {"type": "string", "description": "é"}, "days": {"type": "integer"}},
    }),
    Tool("ping"),
]  # fmt: skip
GIVEN = '{"city": "Łódź", "days": 2}'
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": GIVEN}},
    {"id": "call_2", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Rome"}}},
]  # fmt: skip
CONVERSATIONS = {
    "declared": [{"role": "user", "content": "Weather?"}],
    "called": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ],
    "two": [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "call_2", "content": "rainy"},
        {"role": "assistant", "content": "Sun and rain."},
        {"role": "user", "content": "Thanks."},
    ],
    "system": [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": '{"sky": "blue"}'},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def backend():
    return tiny_tokenizers.byte_level()


def render(name: str, messages, escape=None) -> str:
    text, special = source(name)
    form = tool_format(text)
    assert form is not None
    return template.render(text, form.messages(messages, escape), special, **form.variables(TOOLS, escape))


@pytest.mark.parametrize("name", NAMES)
def test_formats_are_found_in_templates_that_take_tools(name):
    found = tool_format(source(name)[0])
    assert (None if found is None else found.name) == FORMATS.get(name)


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", FORMATS)
def test_the_text_is_that_of_transformers(backend, name, conversation):
    text, special = source(name)
    form = tool_format(text)
    assert form is not None
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, **special)
    today = datetime.date.today()
    messages = form.messages(CONVERSATIONS[conversation])
    wanted = reference.apply_chat_template(
        messages, chat_template=text, tokenize=False, add_generation_prompt=True, **form.variables(TOOLS)
    )
    got = template.render(text, messages, special, **form.variables(TOOLS))
    assert got == wanted or datetime.date.today() != today


@pytest.mark.parametrize("name", FORMATS)
def test_everything_that_is_declared_called_and_answered_is_in_the_prompt_in_order(name):
    text = render(name, CONVERSATIONS["two"])
    for word in ("get_weather", "Forecast of a <city>.", "ping"):
        assert word in text
    is_single = FORMATS[name] in ("llama", "harmony")
    order = ("Łódź", "sunny", "Rome", "rainy") if is_single else ("Łódź", "Rome", "sunny", "rainy")
    places = [text.index(word) for word in (*order, "Sun and rain.", "Thanks.")]
    assert places == sorted(places)
    assert "hm" not in render(name, CONVERSATIONS["declared"])


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_in_a_prompt_is_one_that_the_format_reads(name):
    """What the model sees of its calls is the form in which it writes them."""
    form = tool_format(source(name)[0])
    assert form is not None
    text = render(name, CONVERSATIONS["called"])
    stream = form.stream(TOOLS)
    if form.name == "harmony":
        message = text[text.rindex("<|message|>{") :].removeprefix("<|message|>")
        stream.push_message("functions.get_weather", message[: message.index("<|call|>")])
    else:
        start = text.rindex(form.openings[0]) if form.name != "llama" else text.rindex('{"name": "get_weather"')
        stream.push(text[start:])
        stream.finish()
    assert [(call.name, json.loads(call.arguments)) for call in stream.calls] == [
        ("get_weather", {"city": "Łódź", "days": 2})
    ]


BLUE = '{"sky": "blue"}'
GOLDEN = {
    "qwen3.8": (
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nŁódź\n"
        "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>\n<|im_start|>user\n"
        f"<tool_response>\n{BLUE}\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
    ),
    "published/qwen3-0.6b": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {GIVEN}}}\n</tool_call><|im_end|>\n<|im_start|>user\n'
        f"<tool_response>\n{BLUE}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    ),
    "gemma-4": (
        '<|tool_call>call:get_weather{city:<|"|>Łódź<|"|>,days:2}<tool_call|>'
        f'<|tool_response>response:get_weather{{value:<|"|>{BLUE}<|"|>}}<tool_response|>'
    ),
    "glm-4.7": (
        "<|assistant|><think>hm</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Łódź</arg_value>"
        "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><|observation|><tool_response>"
        f"{BLUE}</tool_response><|assistant|><think>"
    ),
    "muse-glimmer": (
        '<|start|>assistant to=get_weather<|message|><atem:function_calls>\n<atem:invoke name="get_weather">\n'
        '<atem:parameter name="city">Łódź</atem:parameter>\n<atem:parameter name="days">2</atem:parameter>\n'
        "</atem:invoke>\n</atem:function_calls><|eot|>"
        f"<|start|>tool get_weather<|message|>{BLUE}<|eot|><|start|>assistant"
    ),
    "published/gpt-oss-120b": (
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.get_weather"
        f"<|channel|>commentary json<|message|>{GIVEN}<|call|><|start|>functions.get_weather to=assistant"
        f"<|channel|>commentary<|message|>{json.dumps(BLUE)}<|end|><|start|>assistant"
    ),
    "lfm2": (
        '<|im_start|>assistant\n<|tool_call_start|>[get_weather(city="Łódź", days=2)]<|tool_call_end|><|im_end|>\n'
        f"<|im_start|>tool\n<|tool_response_start|>{BLUE}<|tool_response_end|><|im_end|>\n<|im_start|>assistant\n"
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_the_end_of_a_prompt_with_a_call_is_golden(name):
    assert render(name, CONVERSATIONS["system"]).endswith(GOLDEN[name])


@pytest.mark.parametrize(
    ("template_text", "variable", "said"),
    [
        (
            "{{ xml_tools }}<tool_call>{% for m in messages %}[{{ m.content }}]{% endfor %}", "xml_tools",
            f'[On it.<tool_call>\n{{"name": "get_weather", "arguments": {GIVEN}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>]',
        ),
        (
            "{{ tools }}<|tool_call|>{% for m in messages %}[{{ m.content }}]{% endfor %}", "tools",
            f'[On it.<|tool_call|>[{{"name": "get_weather", "arguments": {GIVEN}}}, '
            '{"name": "get_weather", "arguments": {"city": "Rome"}}]]',
        ),
    ],
)  # fmt: skip
def test_a_template_that_reads_no_calls_gets_them_in_the_content(template_text, variable, said):
    form = tool_format(template_text)
    assert form is not None
    assert list(form.variables(TOOLS)) == [variable]
    messages = form.messages([{"role": "assistant", "content": "On it.", "tool_calls": CALLS}])
    assert template.render(template_text, messages, **form.variables(TOOLS)).endswith(said)
    for mark in ("<arg_key>", "[TOOL_CALLS]"):  # of forms that nothing writes into a content
        assert tool_format(template_text.replace("<tool_call>", mark).replace("<|tool_call|>", mark)) is None


def test_mistral_gets_ids_of_nine_characters():
    text = render("published/mistral-nemo-instruct-2407", CONVERSATIONS["called"])
    form = tool_format(source("published/mistral-nemo-instruct-2407")[0])
    assert form is not None
    messages = form.messages(CONVERSATIONS["called"])
    id = messages[1]["tool_calls"][0]["id"]
    assert messages[2]["tool_call_id"] == id
    assert len(id) == 9
    assert id.isalnum()
    assert text.count(id) == 2
    kept = [{**CONVERSATIONS["called"][1], "tool_calls": [{**CALLS[0], "id": "abcDEF123"}]}]
    assert form.messages(kept)[0]["tool_calls"][0]["id"] == "abcDEF123"


# ---- what others wrote is text


@pytest.mark.parametrize("name", FORMATS)
def test_marks_in_results_arguments_and_descriptions_forge_nothing(name):
    tokenizer = family_tokenizer(name)
    form = tool_format(tokenizer.chat_template)
    assert form is not None
    marks = [*tokenizer.turn_marks.marks, *form.marks, *form.results]
    special = set(tokenizer.backend.get_added_tokens_decoder())

    def count(text: str) -> list[int]:
        call = {**CALLS[0], "function": {"name": "get_weather", "arguments": {"city": text}}}
        messages = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": text},
        ]
        tools = [Tool("get_weather", text, {"type": "object", "properties": {"city": {"enum": [text]}}})]
        escape = tokenizer.turn_marks.escape
        ids = tokenizer.chat_ids(form.messages(messages, escape), **form.variables(tools, escape))
        return [id for id in ids if id in special]

    assert count("plain") == count(f"plain{''.join(marks)}")


# ---- what is refused


def test_messages_that_no_template_can_write_are_refused():
    form = tool_format(source("qwen2.5")[0])
    assert form is not None
    call = {"id": "a", "type": "function", "function": {"name": "ping", "arguments": {}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    for wrong, why in (
        ([{"role": "tool", "tool_call_id": "b", "content": "x"}], "does not match any earlier call"),
        ([said, {"role": "tool", "tool_call_id": "a", "content": 5}], "content of a tool result"),
        ([{**said, "tool_calls": [{"id": "a"}]}], "missing its function"),
        ([{**said, "tool_calls": [{"function": {"name": "a b", "arguments": {}}}]}], "invalid name"),
        ([{**said, "tool_calls": [{"function": {"name": "ping", "arguments": "[1]"}}]}], "not a JSON object"),
        ([{**said, "tool_calls": [{"function": {"name": "ping", "arguments": "{"}}]}], "not a JSON object"),
    ):
        with pytest.raises(LocalqError, match=why) as caught:
            form.messages(wrong)
        assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        (None, "a function with a name"), ([{}], "a function with a name"),
        ([{"function": {"name": 1, "arguments": {}}}], "a function with a name"),
        ([{"function": {"name": "f", "arguments": "{}"}}], "must be an object"),
        ([{"function": {"name": "f", "arguments": {"a": {1}}}}], "not valid JSON"),
    ],
)  # fmt: skip
def test_calls_that_are_no_calls_are_refused_by_the_renderer(calls, why):
    with pytest.raises(LocalqError, match=why) as caught:
        template.render("x", [{"role": "assistant", "content": "", "tool_calls": calls}])
    assert caught.value.exit_code == ExitCode.USAGE


def test_tools_and_calls_count_as_part_of_the_conversation():
    call = {"function": {"name": "f", "arguments": {"a": "x" * template.MAX_CONVERSATION_BYTES}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    for messages, variables in (([message], {}), ([], {"tools": ["x" * template.MAX_CONVERSATION_BYTES]})):
        with pytest.raises(LocalqError, match="too long"):
            template.render("x", messages, **variables)
