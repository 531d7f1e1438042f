"""Tool calls as each family writes them, written apart from the parsers; tools, golden cases, random arguments."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from localq.text.tools.channel_formats import AtemFormat, HarmonyFormat
from localq.text.tools.declaration import Tool
from localq.text.tools.format import ToolFormat
from localq.text.tools.gemma_format import GemmaFormat
from localq.text.tools.json_formats import (
    ActionFormat,
    GraniteFormat,
    HermesFormat,
    LlamaFormat,
    MistralFormat,
    PhiFormat,
)
from localq.text.tools.pieces import CallArguments, CallEnd, CallStart, Piece, TextPiece
from localq.text.tools.python_format import PythonFormat
from localq.text.tools.tag_formats import PairFormat, SeedFormat, TagFormat

FOLDER = Path(__file__).parents[2] / "data" / "tools"
Call = tuple[str, dict[str, Any]]

FORMATS: dict[str, ToolFormat] = {
    "hermes": HermesFormat(), "llama": LlamaFormat(is_single=True), "qwen": TagFormat(), "seed": SeedFormat(),
    "gemma": GemmaFormat(), "glm": PairFormat("\n"), "laguna": PairFormat(), "mistral": MistralFormat(True, ids="nine"),
    "mistral-list": MistralFormat(False, ids="nine"), "action": ActionFormat(), "phi": PhiFormat(),
    "granite": GraniteFormat(), "python": PythonFormat(), "atem": AtemFormat(),
    "harmony": HarmonyFormat(is_single=True),
}  # fmt: skip
IN_TEXT = [name for name in FORMATS if name != "harmony"]  # formats whose calls stand in the answer

_STRING, _ANY_OBJECT = {"type": "string"}, {"type": "object"}
TOOLS = [
    Tool("ping", "Nothing to say."),
    Tool("get_weather", "Forecast.", {
        "type": "object", "required": ["city"],
        "properties": {"city": _STRING, "days": {"type": "integer"}, "unit": {"enum": ["C", "F"]}},
    }),
    Tool("search", "Find.", {
        "type": "object", "required": ["query"],
        "properties": {
            "query": _STRING, "limit": {"type": "integer"}, "filters": _ANY_OBJECT,
            "tags": {"type": "array", "items": _STRING},
        },
    }),
    Tool("write_file", "Write.", {
        "type": "object", "required": ["path", "content"], "properties": {"path": _STRING, "content": _STRING},
    }),
    Tool("set", "Set.", {
        "type": "object",
        "properties": {
            "on": {"type": "boolean"}, "ratio": {"type": "number"}, "note": {"type": ["string", "null"]},
            "list": {"type": "array"}, "table": _ANY_OBJECT, "text": _STRING, "count": {"type": "integer"},
        },
    }),
]  # fmt: skip


# ---- writers: how a family writes these calls


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _text(value: Any) -> str:
    """A value in tags: strings as they are."""
    return value if isinstance(value, str) else _json(value)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(
        "<tool_call>\n" + _json({"name": name, "arguments": given}) + "\n</tool_call>" for name, given in calls
    )


def _llama(calls: Sequence[Call]) -> str:
    parts = (_json({"name": name, "parameters": given}) for name, given in calls)
    return "<|python_tag|>" + "; ".join(parts)


def _tags(opening: str, closing: str, line: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        blocks = []
        for name, given in calls:
            lines = [f"<parameter={key}>{line}{_text(value)}{line}</parameter>" for key, value in given.items()]
            blocks.append("\n".join([opening, f"<function={name}>", *lines, "</function>", closing]))
        return "\n".join(blocks)

    return write


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_gemma_value(each)}" for key, each in sorted(value.items())) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return _json(value)


def _gemma(calls: Sequence[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_gemma_value(given)}<tool_call|>" for name, given in calls)


def _pairs(line: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        blocks = []
        for name, given in calls:
            pairs = (
                f"<arg_key>{key}</arg_key>{line}<arg_value>{_text(value)}</arg_value>{line}"
                for key, value in given.items()
            )
            blocks.append(f"<tool_call>{name}{line}{''.join(pairs)}</tool_call>")
        return line.join(blocks)

    return write


def _mistral(calls: Sequence[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(given)}" for name, given in calls)


def _list(opening: str, closing: str, name_key: str, key: str) -> Callable[[Sequence[Call]], str]:
    def write(calls: Sequence[Call]) -> str:
        return opening + _json([{name_key: name, key: given} for name, given in calls]) + closing

    return write


def _action(calls: Sequence[Call]) -> str:
    parts = (
        f'\n\n    {{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {_json(given)}}}'
        for number, (name, given) in enumerate(calls)
    )
    return f"<|START_ACTION|>[{','.join(parts)}\n\n]<|END_ACTION|>"


def _python(calls: Sequence[Call]) -> str:
    def value(each: Any) -> str:
        return _json(each) if isinstance(each, dict) else repr(each)

    parts = (f"{name}({', '.join(f'{key}={value(each)}' for key, each in given.items())})" for name, given in calls)
    return f"<|tool_call_start|>[{', '.join(parts)}]<|tool_call_end|>"


def _atem(calls: Sequence[Call]) -> str:
    invokes = []
    for name, given in calls:
        lines = [f'<atem:parameter name="{key}">{_text(value)}</atem:parameter>\n' for key, value in given.items()]
        invokes.append(f'<atem:invoke name="{name}">\n{"".join(lines)}</atem:invoke>\n')
    return f"<atem:function_calls>\n{''.join(invokes)}</atem:function_calls>"


def _harmony(calls: Sequence[Call]) -> str:
    return "<|start|>assistant".join(
        f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(given)}<|call|>"
        for name, given in calls
    )


WRITERS: dict[str, Callable[[Sequence[Call]], str]] = {
    "hermes": _hermes, "llama": _llama, "qwen": _tags("<tool_call>", "</tool_call>", "\n"),
    "seed": _tags("<seed:tool_call>", "</seed:tool_call>", ""), "gemma": _gemma, "glm": _pairs("\n"),
    "laguna": _pairs(""), "mistral": _mistral, "mistral-list": _list("[TOOL_CALLS]", "", "name", "arguments"),
    "action": _action, "phi": _list("<|tool_call|>", "<|/tool_call|>", "name", "arguments"), "python": _python,
    "granite": _list("<|tool_call|>", "", "name", "arguments"), "atem": _atem, "harmony": _harmony,
}  # fmt: skip


# ---- reading


def read(form: ToolFormat, pieces: Iterable[str], tools: Sequence[Tool] = TOOLS) -> tuple[str, list[Call]]:
    """Text and calls of a reply that comes in these pieces; what is streamed must be what is kept."""
    stream = form.stream(tools)
    found: list[Piece] = [each for piece in pieces for each in stream.push(piece)]
    found += stream.finish()
    calls = [(call.name, json.loads(call.arguments)) for call in stream.calls]
    assert streamed(found) == calls
    return "".join(piece.text for piece in found if isinstance(piece, TextPiece)), calls


def streamed(pieces: Iterable[Piece]) -> list[Call]:
    """The calls of pieces: each begins, has its arguments and ends, one after the other."""
    calls: list[tuple[str, str]] = []
    is_open = False
    for piece in pieces:
        if isinstance(piece, CallStart):
            assert not is_open
            assert piece.index == len(calls)
            calls.append((piece.name, ""))
            is_open = True
        elif isinstance(piece, (CallArguments, CallEnd)):
            assert is_open
            assert piece.index == len(calls) - 1
            if isinstance(piece, CallArguments):
                calls[-1] = calls[-1][0], calls[-1][1] + piece.delta
            is_open = isinstance(piece, CallArguments)
    assert not is_open
    return [(name, json.loads(text)) for name, text in calls]


def cut(text: str, draw: random.Random) -> list[str]:
    """`text` in random pieces."""
    places = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(1, 9))))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


# ---- random arguments

_WORDS = [
    "a", "Zürich", " ", "\n", "\t", '"', "'", "\\", "{", "}", "[", "]", "(", ")", ",", ":", "=", "<b>", "</b>", "&amp;",
    "日本", "👩‍👩‍👧‍👦", "שלום", "é", "\\n", "``", "null", "5", "true", "/", "|", "`", "#", "$x", "%",
]  # fmt: skip


def random_text(draw: random.Random) -> str:
    """A text of odd characters."""
    return "".join(draw.choices(_WORDS, k=draw.randrange(12)))


def random_value(draw: random.Random, depth: int = 0) -> Any:
    """A JSON value."""
    kind = draw.randrange(7 if depth < 3 else 5)
    if kind < 5:
        numbers = (draw.randrange(-999, 10**12), round(draw.uniform(-9, 9), 4), draw.random() * 10**20)
        return (random_text(draw), draw.choice(numbers), True, False, None)[kind]
    if kind == 5:
        return [random_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(("k", "key_2", "Ä", "x-y")): random_value(draw, depth + 1) for _ in range(draw.randrange(4))}


def random_call(draw: random.Random) -> Call:
    """A call of one of `TOOLS` whose arguments fit it."""
    if draw.random() < 0.1:
        return "ping", {}
    if draw.random() < 0.3:
        return "write_file", {"path": random_text(draw), "content": random_text(draw)}
    given = {
        "on": draw.random() < 0.5, "ratio": round(draw.uniform(-9, 9), 3), "count": draw.randrange(-10, 10**9),
        "list": [random_value(draw, 1) for _ in range(draw.randrange(4))], "text": random_text(draw),
        "table": {f"k{number}": random_value(draw, 1) for number in range(draw.randrange(4))},
        "note": draw.choice([None, "a note", "1 note"]),
    }  # fmt: skip
    keys = draw.sample(sorted(given), draw.randrange(len(given) + 1))
    return "set", {key: given[key] for key in keys}
