"""Messages with calls and results, as the chat template of a family takes them.

- Arguments are objects: templates write them as JSON, or one by one. JSON text is read.
- A result has the name of its tool, and the id of its call in the form that the family's template wants.
- A template that takes one call in a message gets the calls of a reply as messages of their own, each before its
  result, in their order.
- A template that reads no calls gets them in the content, written as the model wrote them.
- Marks in results and arguments are text: a page that a tool has read forges no turn and no result.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from localq.errors import usage_error
from localq.text.tools.declaration import NAME, escape_strings

_BREAK = "\u200b"
_NINE = "nine"  # ids of nine letters and digits, which Mistral's templates insist on
_WHAT = "messages"
_THOUGHTS = "reasoning_content"


class TemplateForm(Protocol):
    """The form of calls and results in the templates of a family; see `ToolFormat`."""

    @property
    def marks(self) -> tuple[str, ...]: ...
    @property
    def results(self) -> tuple[str, ...]: ...
    @property
    def is_single(self) -> bool: ...
    @property
    def ids(self) -> str: ...
    @property
    def thoughts(self) -> str: ...
    def write(self, calls: Sequence[tuple[str, dict[str, Any]]]) -> str: ...


def prepare(
    messages: Sequence[Mapping[str, Any]], form: TemplateForm, escape: Callable[[str], str] | None
) -> list[dict[str, Any]]:
    """See `ToolFormat.messages`."""
    broken = safe(form, escape)
    names: dict[str, str] = {}  # id of a call -> the tool
    made: list[dict[str, Any]] = []
    for message in messages:
        if message.get("role") == "tool":
            made.append(_result(message, names, form, broken))
            continue
        copied = dict(message)
        if calls := message.get("tool_calls"):
            copied["tool_calls"] = [_call(each, names, form, broken) for each in calls]
            copied["content"] = copied.get("content") or ""
            functions = [each["function"] for each in copied["tool_calls"]]
            if written := form.write([(each["name"], each["arguments"]) for each in functions]):
                copied["content"] += written
                del copied["tool_calls"]
            if form.thoughts != _THOUGHTS and (thought := copied.get(_THOUGHTS)):
                copied[form.thoughts] = thought
        elif "tool_calls" in copied:
            del copied["tool_calls"]
        made.append(copied)
    return _one_by_one(made) if form.is_single else made


def safe(form: TemplateForm, escape: Callable[[str], str] | None) -> Callable[[str], str]:
    """A function that breaks marks of turns, of calls and of results in a text, so that they are text."""
    marks = [*form.marks, *form.results]

    def broken(text: str) -> str:
        text = escape(text) if escape else text
        for mark in marks:
            text = text.replace(mark, mark[0] + _BREAK + mark[1:])
        return text

    return broken


def _call(
    call: Any, names: dict[str, str], form: TemplateForm, escape: Callable[[str], str]
) -> dict[str, Any]:  # fmt: skip
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise usage_error(
            _WHAT, "a tool call is missing its function", 'Example: {"type": "function", "function": {...}}.'
        )
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise usage_error(
            _WHAT, f"a tool call has an invalid name: {str(name)[:80]!r}", "Send it exactly as the model returned it."
        )
    id = str(call.get("id") or f"call_{len(names)}")
    names[id] = name
    made = {"name": name, "arguments": escape_strings(_arguments(arguments, name), escape)}
    return {"id": _id(id, form), "type": "function", "function": made}


def _arguments(arguments: Any, name: str) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = ""
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        why = f"the arguments of a call to {name} are not a JSON object"
        raise usage_error(_WHAT, why, "Send them exactly as the model returned them.")
    return dict(arguments)


def _result(
    message: Mapping[str, Any], names: dict[str, str], form: TemplateForm, escape: Callable[[str], str]
) -> dict[str, Any]:  # fmt: skip
    id = str(message.get("tool_call_id") or "")
    if id and id not in names:
        why = f"the tool result {id[:80]!r} does not match any earlier call"
        raise usage_error(_WHAT, why, "Send the assistant message with this tool call first.")
    if not id and len(names) == 1:
        id = next(iter(names))
    name = names.get(id) or message.get("name") or ""
    if not isinstance(message.get("content"), str):
        raise usage_error(_WHAT, "the content of a tool result is not a string", "Send plain text.")
    return {**message, "name": name, "tool_call_id": _id(id, form), "content": escape(message["content"])}


def _id(id: str, form: TemplateForm) -> str:
    if form.ids != _NINE or (len(id) == 9 and id.isascii() and id.isalnum()):
        return id
    return hashlib.sha256(id.encode("utf-8", "replace")).hexdigest()[:9]


def _one_by_one(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which each has one call at most, followed by its result."""
    made: list[dict[str, Any]] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls", [])
        if len(calls) < 2:
            made.append(message)
            continue
        end = at
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results, at = messages[at:end], end
        for number, call in enumerate(calls):
            plain = {**message, "tool_calls": [call]}
            if number:
                plain["content"] = ""
                plain.pop(_THOUGHTS, None)
            made.append(plain)
            answer = next((each for each in results if each["tool_call_id"] == call["id"]), None)
            if answer is not None:
                results.remove(answer)
                made.append(answer)
        made += results
    return made
