"""The packages `openai` and `anthropic` against a server with a scripted engine: chat, streams, tools, errors."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import openai
import pytest

from localq.server.api import response_store
from localq.server.api.response_store import ResponseStore
from localq.server.request import ChatMessage
from tests.support.server.live_server import KEY, LiveServer
from tests.support.server.tool_model import WEATHER, call

MESSAGES = [{"role": "user", "content": "Hello"}]
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}}}},
]
FLAT_TOOLS = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": False}]
BLOCK_TOOLS = [{"name": "weather", "description": "Weather of a city", "input_schema": WEATHER}]
TWO_CALLS = f"Let me see.\n{call('weather', city='Zürich', days=2)}\n{call('time')}"


@pytest.fixture
def client(tool_server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{tool_server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(tool_server: LiveServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=tool_server.url, api_key="none", max_retries=0) as made:
        yield made


# ---- openai, chat completions


def test_openai_chats_and_streams(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="tiny", messages=MESSAGES)
    assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Hello.", "stop")
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="tiny", messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    ):
        text += "".join(each.delta.content or "" for each in chunk.choices)
        usage = chunk.usage or usage
    assert text == "Hello."
    assert usage is not None
    assert usage.completion_tokens == 6


def test_openai_calls_tools_and_sends_results_back(client: openai.OpenAI, tool_server: LiveServer) -> None:
    tool_server.say(TWO_CALLS)
    choice = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    calls = choice.message.tool_calls or []
    assert [(each.function.name, json.loads(each.function.arguments)) for each in calls] == [
        ("weather", {"city": "Zürich", "days": 2}),
        ("time", {}),
    ]
    tool_server.say("Sunny.")
    results = [{"role": "tool", "tool_call_id": each.id, "content": "<tool_call>sun</tool_call>"} for each in calls]
    again = client.chat.completions.create(
        model="tiny", messages=[*MESSAGES, choice.message, *results], tools=TOOLS, tool_choice="none"
    )
    assert again.choices[0].message.content == "Sunny."


def test_openai_streams_calls(client: openai.OpenAI, tool_server: LiveServer) -> None:
    tool_server.say(TWO_CALLS, step=3)
    found: dict[int, list[str]] = {}
    text, reason = "", None
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, stream=True):
        choice = chunk.choices[0]
        text, reason = text + (choice.delta.content or ""), choice.finish_reason or reason
        for each in choice.delta.tool_calls or []:
            assert each.function is not None
            known = found.setdefault(each.index, ["", ""])
            known[0] += each.function.name or ""
            known[1] += each.function.arguments or ""
    assert (text, reason) == ("Let me see.", "tool_calls")
    assert [(name, json.loads(arguments)) for name, arguments in found.values()] == [
        ("weather", {"city": "Zürich", "days": 2}),
        ("time", {}),
    ]


def test_without_parallel_calls_the_first_ends_the_reply(client: openai.OpenAI, tool_server: LiveServer) -> None:
    tool_server.say(TWO_CALLS + " and so on" * 1000, step_s=0.0001)
    choice = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, parallel_tool_calls=False
    ).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert [each.function.name for each in choice.message.tool_calls or []] == ["weather"]


def test_a_call_that_is_broken_off_is_text(client: openai.OpenAI, tool_server: LiveServer) -> None:
    broken = call("weather", city="Bern")[:40]
    tool_server.say(broken)
    choice = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (broken, None, "stop")


def test_openai_raises_its_own_errors(client: openai.OpenAI, locked_server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=3)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-5", messages=MESSAGES)
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError, match="cannot be combined"):
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, response_format={"type": "json_object"}
        )
    url = f"{locked_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="wrong") as other, pytest.raises(openai.AuthenticationError):
        other.models.list()
    with openai.OpenAI(base_url=url, api_key=KEY) as other:
        assert [each.id for each in other.models.list()] == ["tiny"]
        assert other.models.retrieve("tiny").owned_by == "localq"


def test_openai_stops_a_stream(client: openai.OpenAI, tool_server: LiveServer) -> None:
    tool_server.say("word ", repeat=0, step_s=0.005)
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
    next(iter(stream))
    stream.close()
    tool_server.say("Done.")
    assert client.chat.completions.create(model="tiny", messages=MESSAGES).choices[0].message.content == "Done."


# ---- openai, completions and responses


def test_openai_completes_plain_text(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="tiny", prompt="Once upon")
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("Hello.", "stop")
    assert "".join(
        each.choices[0].text for each in client.completions.create(model="tiny", prompt=[1, 2, 3], stream=True)
    ) == "Hello."  # fmt: skip


def test_openai_responses(client: openai.OpenAI, tool_server: LiveServer) -> None:
    whole = client.responses.create(model="tiny", input="Hello", instructions="Be brief.", max_output_tokens=50)
    assert (whole.output_text, whole.status, whole.instructions) == ("Hello.", "completed", "Be brief.")
    tool_server.say("<think>\nHm.\n</think>\n\nYes. " + call("weather", city="Bern"), step=4)
    with client.responses.stream(model="tiny", input="Hello", tools=FLAT_TOOLS) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output_text == "Yes."
    called = final.output[-1]
    assert called.type == "function_call"
    assert json.loads(called.arguments) == {"city": "Bern"}
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    tool_server.say("Sunny.")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        *(each.model_dump(exclude_none=True) for each in final.output),
        {"type": "function_call_output", "call_id": called.call_id, "output": "sun"},
    ]
    assert client.responses.create(model="tiny", input=items, tools=FLAT_TOOLS).output_text == "Sunny."


def test_openai_goes_on_with_a_response(client: openai.OpenAI, tool_server: LiveServer) -> None:
    tool_server.say("<think>\nHm.\n</think>\n\n" + call("weather", city="Bern"))
    first = client.responses.create(model="tiny", input="Weather in Bern?", tools=FLAT_TOOLS, instructions="Be brief.")
    called = first.output[-1]
    assert called.type == "function_call"
    tool_server.say("Sunny.")
    result = {"type": "function_call_output", "call_id": called.call_id, "output": "sun"}
    second = client.responses.create(
        model="tiny", input=[result], tools=FLAT_TOOLS, previous_response_id=first.id, stream=True
    )
    *_, last = second
    assert last.type == "response.completed"
    assert last.response.previous_response_id == first.id
    third = client.responses.create(model="tiny", input="And in Rome?", previous_response_id=last.response.id)
    assert third.usage is not None
    alone = client.responses.create(model="tiny", input="And in Rome?", store=False)
    assert alone.usage is not None
    said = len("Weather in Bern? Hm. Bern sun Sunny.")
    assert third.usage.input_tokens > alone.usage.input_tokens + said
    for lost in ("resp_1", alone.id):
        with pytest.raises(openai.BadRequestError, match="no longer has this response"):
            client.responses.create(model="tiny", input="Hello", previous_response_id=lost)


def test_kept_responses_are_bounded() -> None:
    store = ResponseStore(most=3, most_characters=100)
    for number in range(4):
        store.keep(f"r{number}", [ChatMessage("user", "x")])
    assert [store.find(f"r{number}") is not None for number in range(4)] == [False, True, True, True]
    store.keep("large", [ChatMessage("user", "x" * 99)])
    assert [store.find(id) is not None for id in ("r1", "r2", "r3", "large")] == [False, False, True, True]
    store.keep("too large", [ChatMessage("user", "x" * 101)])
    assert store.find("too large") is None
    assert store.find("large") is None


def test_kept_responses_without_text_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MOST_MESSAGES", 10)
    store, calls = ResponseStore(), (("id", "name", ""),) * 4
    for number in range(3):
        store.keep(f"r{number}", [ChatMessage("assistant", "", calls=calls)])
    assert [store.find(f"r{number}") is not None for number in range(3)] == [False, True, True]


# ---- anthropic


def test_anthropic_chats_and_streams(claude: anthropic.Anthropic, tool_server: LiveServer) -> None:
    whole = claude.messages.create(model="tiny", max_tokens=50, messages=MESSAGES, system="Be brief.")
    assert [each.model_dump(include={"type", "text"}) for each in whole.content] == [{"type": "text", "text": "Hello."}]
    assert whole.stop_reason == "end_turn"
    assert whole.usage.output_tokens == 6
    tool_server.say("one, two, three")
    with claude.messages.stream(model="tiny", max_tokens=50, messages=MESSAGES, stop_sequences=[", three"]) as stream:
        assert "".join(stream.text_stream) == "one, two"
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", ", three")


def test_anthropic_calls_tools_and_sends_results_back(claude: anthropic.Anthropic, tool_server: LiveServer) -> None:
    tool_server.say("Let me see. " + call("weather", city="Zürich"), step=5)
    with claude.messages.stream(model="tiny", max_tokens=99, messages=MESSAGES, tools=BLOCK_TOOLS) as stream:
        final = stream.get_final_message()
    text, use = final.content
    assert (text.type, use.type, final.stop_reason) == ("text", "tool_use", "tool_use")
    assert use.input == {"city": "Zürich"}  # type: ignore[union-attr]
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sun"}]}  # type: ignore[union-attr]
    tool_server.say("Sunny.")
    again = claude.messages.create(
        model="tiny",
        max_tokens=50,
        messages=[*MESSAGES, {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}],
        tools=BLOCK_TOOLS,
    )
    assert again.content[0].text == "Sunny."  # type: ignore[union-attr]


def test_anthropic_gets_thoughts_only_where_it_asks_for_them(
    claude: anthropic.Anthropic, tool_server: LiveServer
) -> None:
    tool_server.say("<think>\nHm.\n</think>\n\nYes.")
    plain = claude.messages.create(model="tiny", max_tokens=50, messages=MESSAGES)
    assert [each.type for each in plain.content] == ["text"]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with claude.messages.stream(model="tiny", max_tokens=2000, messages=MESSAGES, thinking=thinking) as stream:
        final = stream.get_final_message()
    assert [each.type for each in final.content] == ["thinking", "text"]
    assert final.content[0].thinking == "Hm."  # type: ignore[union-attr]
    back = [*MESSAGES, {"role": "assistant", "content": final.content}, {"role": "user", "content": "And?"}]
    assert claude.messages.create(model="tiny", max_tokens=50, messages=back).stop_reason == "end_turn"


def test_anthropic_counts_tokens_as_a_prompt_has_them(claude: anthropic.Anthropic, tool_server: LiveServer) -> None:
    count = claude.messages.count_tokens(model="tiny", messages=MESSAGES, tools=BLOCK_TOOLS, system="Be brief.")
    whole = claude.messages.create(model="tiny", max_tokens=5, messages=MESSAGES, tools=BLOCK_TOOLS, system="Be brief.")
    assert count.input_tokens == whole.usage.input_tokens > 100


def test_tokens_are_counted_while_a_reply_is_made(claude: anthropic.Anthropic, tool_server: LiveServer) -> None:
    tool_server.say("word ", repeat=0, step_s=0.005)
    stream = tool_server.connect()
    assert stream.recv(10)
    assert claude.messages.count_tokens(model="tiny", messages=MESSAGES).input_tokens > 0
    assert tool_server.slot.state().busy


def test_anthropic_raises_its_own_errors(claude: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model="tiny", max_tokens=5, messages=MESSAGES, extra_body={"temperature": 3})
    with pytest.raises(anthropic.NotFoundError, match="claude-sonnet"):
        claude.messages.create(model="claude-sonnet-5", max_tokens=5, messages=MESSAGES)
