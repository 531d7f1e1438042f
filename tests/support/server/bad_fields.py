"""Requests with one wrong field, by API: the field that the error must name, drawn at random or from a table."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
FLAT_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/responses": {"input": "Hello"},
    "/v1/messages": {"messages": [USER], "max_tokens": 8},
}
NO_TEXT: tuple[Any, ...] = (1, -1.5, True, [], [1], {}, {"a": 1})
NO_NUMBER: tuple[Any, ...] = ("1", "", True, [], {}, [0.5])
NO_FLAG: tuple[Any, ...] = (0, 1, "true", "", [], {})
NO_OBJECT: tuple[Any, ...] = (1, "x", True, [], [{}])
NO_LIST: tuple[Any, ...] = (1, True, {}, {"0": "x"})
HUGE: tuple[Any, ...] = (2**63, -(2**63) - 1, 10**30, -(10**30), 1e300, -1e300)


def numbers(low: float, high: float, whole: bool = False) -> tuple[Any, ...]:
    """Wrong values of a number from low to high."""
    outside = (low - 1, high + 1, low - 1e-3, high + 1e-3) if not whole else (low - 1, high + 1, 0.5)
    return (*NO_NUMBER, *HUGE, *outside)


SAMPLING = {
    "temperature": numbers(0, 2),
    "top_p": numbers(0, 1),
    "top_k": numbers(0, 2**31 - 1, whole=True),
    "min_p": numbers(0, 1),
    "seed": (*NO_NUMBER, 2**64, -(2**64), 0.5),
}
PENALTIES = {
    "presence_penalty": numbers(-2, 2),
    "frequency_penalty": numbers(-2, 2),
    "logit_bias": (*NO_OBJECT, {"a": 1}, {"-1": 1}, {"1": 101}, {"1": "x"}, {"1.5": 1}, {"1" * 20: 1}, {"\u0661": 1}),
}
STOPS = (1, True, {}, [1], [None], [["x"]], "", [""], ["x"] * 17, ["x" * 1001], ["ok", ""])
FORMATS = (
    *NO_OBJECT, {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": 1},
    {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": {"schema": "@/etc/passwd"}},
    {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}},
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
)  # fmt: skip
TOOLS = (
    *NO_LIST, "f", [1], [{}], [{"type": "retrieval"}], [{"type": "function"}], [{"type": "function", "function": {}}],
    [{"type": "function", "function": {"name": ""}}], [{"type": "function", "function": {"name": "a b"}}],
    [{"type": "function", "function": {"name": "f", "parameters": 1}}],
    [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], [TOOL, TOOL], [TOOL] * 200,
)  # fmt: skip
MESSAGES = (
    *NO_LIST, "Hello", [], [1], ["Hello"], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": 1, "content": "x"}],
    [{"role": "wizard", "content": "x"}], [{"role": "User", "content": "x"}], [{"role": "user", "content": 1}],
    [{"role": "user", "content": {}}], [{"role": "user", "content": [1]}], [{"role": "user", "content": [{}]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
    [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}],
    [{"role": "user", "content": [{"type": "text", "text": 1}]}], [USER] * 5000,
)  # fmt: skip
CHAT_MESSAGES = (
    *MESSAGES, [USER, {"role": "tool", "content": "x"}], [USER, {"role": "tool", "content": "x", "tool_call_id": "no"}],
    [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [USER, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}],
    [USER, {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "{}"}}]}],
)  # fmt: skip
WHOLE = (*NO_NUMBER, *HUGE, 0, -1, 0.5)
WRONG: dict[str, dict[str, tuple[Any, ...]]] = {
    "/v1/chat/completions": {
        **SAMPLING, **PENALTIES, "messages": CHAT_MESSAGES, "model": NO_TEXT, "stream": NO_FLAG,
        "max_tokens": WHOLE, "max_completion_tokens": WHOLE, "n": (*NO_NUMBER, 0, 2, -1, 2**63), "stop": STOPS,
        "response_format": FORMATS, "tools": TOOLS, "logprobs": NO_FLAG, "top_logprobs": (5,),
        "reasoning_effort": ("", "extreme", 1, []), "tool_choice": (1, "always", [], {"type": "function"}, "required"),
        "parallel_tool_calls": NO_FLAG, "stream_options": ({"include_usage": True}, 1), "audio": ({},),
        "modalities": (["audio"],), "functions": ([{}],), "think_budget": (*NO_NUMBER, -1),
    },
    "/v1/completions": {
        **SAMPLING, **PENALTIES, "prompt": (1, True, {}, [], [1.5], [-1], ["a", "b"], [[1], [2]], [2**31]),
        "max_tokens": WHOLE, "n": (2,), "best_of": (2,), "echo": (True,), "suffix": ("x",),
        "logprobs": (6, -1, "x", True), "stop": STOPS,
    },
    "/v1/responses": {
        **{name: values for name, values in SAMPLING.items() if name != "seed"},
        "input": (1, True, {}, [], [1], [{"type": "item_reference", "id": "x"}], [{"role": "user"}],
                  [{"role": "wizard", "content": "x"}],
                  [{"type": "function_call_output", "call_id": "x", "output": ""}],
                  [{"role": "user", "content": [{"type": "input_image", "image_url": "file:///etc/passwd"}]}]),
        "max_output_tokens": WHOLE, "instructions": NO_TEXT, "previous_response_id": ("resp_1",), "store": NO_FLAG,
        "background": (True,), "tools": ([{"type": "file_search"}], [{"type": "function"}], 1),
        "reasoning": (1, {"effort": "extreme"}), "text": (1, {"format": {"type": "xml"}}), "include": (["x"], 1),
        "truncation": ("auto",), "conversation": ("c",),
    },
    "/v1/messages": {
        "temperature": SAMPLING["temperature"], "top_p": SAMPLING["top_p"], "messages": MESSAGES,
        "max_tokens": (None, *WHOLE), "stop_sequences": STOPS, "system": (1, {}, [1], [{"type": "image"}]),
        "tools": ([{"type": "web_search_20250305", "name": "x"}], [{"name": "f"}], 1),
        "tool_choice": ({"type": "tool"}, {"type": "any"}, "auto", 1),
        "thinking": ({}, {"type": "enabled"}, {"type": "enabled", "budget_tokens": 0}, 1), "mcp_servers": ([{}],),
        "metadata": (1,), "stream": NO_FLAG,
        "output_config": (1, {"effort": "none"}, {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}),
    },
}  # fmt: skip


@dataclass(frozen=True)
class WrongField:
    """A request of an API that has one wrong field."""

    path: str
    field: str
    body: dict[str, Any]


def cases() -> list[WrongField]:
    """Every wrong value of the tables."""
    found = []
    for path, fields in WRONG.items():
        for field, values in fields.items():
            for value in values:
                body = {**copy.deepcopy(BASES[path]), field: value}
                if value is None:
                    del body[field]
                found.append(WrongField(path, field, body))
    return found


def draw(source: random.Random) -> WrongField:
    """A wrong field beside right ones, in any order."""
    case = source.choice(ALL)
    right = {name: make(source) for name, make in RIGHT.items() if source.random() < 0.3 and name not in case.body}
    if case.field == "top_logprobs" or case.field == "stream_options":
        right.pop("logprobs", None)
    items = list({**right, **case.body}.items())
    source.shuffle(items)
    return WrongField(case.path, case.field, dict(items))


RIGHT: dict[str, Callable[[random.Random], Any]] = {
    "temperature": lambda source: round(source.uniform(0, 2), 3),
    "top_p": lambda source: round(source.uniform(0.01, 1), 3),
    "user": lambda source: "".join(source.choice("ab\u00e9\u4e16\U0001f389") for _ in range(source.randrange(9))),
    "metadata": lambda source: {"a": "b"},
    "unknown_field": lambda source: source.choice([None, 1, "x", [], {"deep": [1, {"er": 2}]}]),
}
ALL = cases()
