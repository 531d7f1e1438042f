"""Calls that must be made, by the engine of the product: weights of zeros choose among all that the grammar allows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.server.live_server import LiveServer
from tests.support.server.tool_model import write_tool_model

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Bern", "Rome", "Z\u00fcrich", 'say "hi"']},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}}
         for name, schema in (("weather", WEATHER), ("time", NOTHING))]  # fmt: skip


@pytest.fixture(scope="module")
def real_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = write_tool_model(tmp_path_factory.mktemp("models") / "tiny")
    server = LiveServer(folder, tmp_path_factory.mktemp("real"), real=True)
    yield server
    server.close()


def calls(server: LiveServer, **fields: Any) -> list[tuple[str, Any]]:
    answer = server.chat(tools=TOOLS, temperature=1, max_tokens=300, **fields)
    assert answer.status == 200, answer.body
    choice = answer.json["choices"][0]
    if choice["finish_reason"] != "length":  # such weights may go on calling for long
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
    made = [each["function"] for each in choice["message"]["tool_calls"]]
    return [(each["name"], json.loads(each["arguments"])) for each in made]


def check(name: str, arguments: Any) -> None:
    if name == "time":
        assert arguments == {}
        return
    assert name == "weather"
    assert arguments.keys() == {"city", "days"}
    assert arguments["city"] in WEATHER["properties"]["city"]["enum"]  # type: ignore[index]
    assert type(arguments["days"]) is int
    assert 1 <= arguments["days"] <= 9


def test_required_calls_match_their_schemas(real_server: LiveServer) -> None:
    found = [each for seed in range(6) for each in calls(real_server, tool_choice="required", seed=seed)]
    assert {name for name, _ in found} == {"weather", "time"}
    for name, arguments in found:
        check(name, arguments)


def test_the_named_tool_is_called_once(real_server: LiveServer) -> None:
    choice = {"type": "function", "function": {"name": "weather"}}
    for seed in range(4):
        (found,) = calls(real_server, tool_choice=choice, seed=seed)
        assert found[0] == "weather"
        check(*found)


def test_without_parallel_calls_one_is_made(real_server: LiveServer) -> None:
    for seed in range(4):
        assert len(calls(real_server, tool_choice="required", parallel_tool_calls=False, seed=seed)) == 1
