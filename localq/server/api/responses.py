"""OpenAI's `/v1/responses`: text and items in, items out. The last responses are kept in memory (`response_store`)."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from localq.sampling import MOST_LOGPROBS
from localq.server.api import tools as tool_fields
from localq.server.api.common import (
    EFFORTS,
    MOST_MESSAGES,
    MOST_TOKENS,
    read_arguments,
    read_format,
    read_logits,
    read_sampling,
    read_text,
)
from localq.server.api.form import Call
from localq.server.api.response_store import ResponseStore
from localq.server.api.response_stream import ResponseForm
from localq.server.api_error import bad_field
from localq.server.fields import Fields
from localq.server.request import ChatMessage, ReplyRequest

_TEXTS = ("input_text", "output_text", "text")
_NOT_KEPT = "this server no longer has this response; send the whole conversation as input"
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")


def read(body: dict[str, Any], store: ResponseStore) -> Call:
    """The call in the body of a request. Raises ApiError (400) for a wrong field, which it names."""
    fields = Fields(body)
    fields.refuse("conversation", "this server does not store conversations; use previous_response_id")
    fields.refuse("background", "not supported", (False,))
    fields.refuse("prompt", "prompts are not stored here")
    fields.refuse("truncation", "this server never truncates a conversation", ("disabled",))
    includes = fields.texts("include", 32)
    if any(each not in _INCLUDES for each in includes):
        raise fields.bad("include", "not supported", f"Allowed: {', '.join(_INCLUDES)}.")
    tools, choice = tool_fields.read_flat_tools(fields)
    reasoning, text = fields.object("reasoning"), fields.object("text")
    instructions, conversation = fields.text("instructions"), _conversation(fields, store)
    request = ReplyRequest(
        messages=((ChatMessage("system", instructions),) if instructions else ()) + conversation,
        sampling=read_sampling(fields),
        logits=read_logits(fields, _logprobs(fields, includes)),
        max_tokens=fields.integer("max_output_tokens", 1, MOST_TOKENS),
        grammar=read_format(text, "format") if text is not None else None,
        effort=(reasoning.choice("effort", EFFORTS) if reasoning is not None else None) or "",
        tools=tools,
        tool_choice=choice,
        field="input",
        grammar_field="text",
    )
    asked = {"previous_response_id": fields.value("previous_response_id"), "instructions": instructions,
             "max_output_tokens": request.max_tokens,
             "tool_choice": fields.value("tool_choice") or "auto", "tools": fields.value("tools") or [],
             "parallel_tool_calls": choice.parallel, "temperature": fields.value("temperature"),
             "top_p": fields.value("top_p"), "text": fields.value("text") or {"format": {"type": "text"}},
             "reasoning": fields.value("reasoning") or {"effort": None, "summary": None},
             "metadata": _metadata(fields)}  # fmt: skip
    wants_logprobs = request.logits is not None and request.logits.logprobs is not None
    keep = partial(_keep, store, conversation) if fields.flag("store", True) else None
    form = ResponseForm(asked, time.time(), wants_logprobs, keep)
    return Call(fields.text("model", 512) or "", request, fields.flag("stream"), form, fields.text("user", 512) or "")


def _keep(store: ResponseStore, before: tuple[ChatMessage, ...], id: str, reply: ChatMessage) -> None:
    store.keep(id, (*before, reply))


def _logprobs(fields: Fields, includes: list[str]) -> int | None:
    top = fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    return (top or 0) if LOGPROBS in includes else None


def _metadata(fields: Fields) -> Any:
    fields.object("metadata")
    return fields.value("metadata") or {}


def _conversation(fields: Fields, store: ResponseStore) -> tuple[ChatMessage, ...]:
    """The messages of the previous response, if one is named, and those of the input."""
    fields.require("input")
    previous = fields.text("previous_response_id", 256)
    found = () if previous is None else store.find(previous)
    if found is None:
        raise bad_field("previous_response_id", _NOT_KEPT, code="previous_response_not_found")
    if isinstance(fields.value("input"), str):
        return (*found, ChatMessage("user", fields.text("input") or ""))
    items = _Items({id: name for each in found for id, name, _ in each.calls})
    given = fields.objects("input", MOST_MESSAGES)
    if not given:
        raise fields.bad("input", "there are no items")
    for each in given:
        items.add(each)
    messages = (*found, *items.end())
    if messages and messages[-1].role == "assistant" and messages[-1].calls:
        raise fields.bad("input", "the last tool calls have no results")
    return messages


class _Items:
    """Items of an input to messages: thoughts, text and calls that follow each other are one message."""

    def __init__(self, names: dict[str, str]) -> None:
        """names: id of an earlier call -> name of its tool."""
        self._found: list[ChatMessage] = []
        self._names = names
        self._thought = self._text = ""
        self._calls: list[tuple[str, str, str]] = []
        self._open = False

    def end(self) -> list[ChatMessage]:
        """The messages."""
        self._close()
        return self._found

    def _close(self) -> None:
        if self._open:
            self._found.append(ChatMessage("assistant", self._text, self._thought, tuple(self._calls)))
        self._thought, self._text, self._calls, self._open = "", "", [], False

    def add(self, item: Fields) -> None:
        """Add an item."""
        kind = item.text("type") or "message"
        if kind == "message":
            self._message(item)
        elif kind == "function_call":
            self._call(item)
        elif kind == "function_call_output":
            self._output(item)
        elif kind == "reasoning":
            self._reasoning(item)
        else:
            raise item.bad("type", f"{kind[:40]} is not supported")

    def _message(self, item: Fields) -> None:
        item.require("role")
        role = item.choice("role", ("user", "assistant", "system", "developer")) or ""
        text = read_text(item, "content", _TEXTS)
        if role != "assistant":
            self._close()
            self._found.append(ChatMessage(role, text))
            return
        if self._text or self._calls:
            self._close()
        self._text, self._open = text, True

    def _call(self, item: Fields) -> None:
        item.require("call_id")
        item.require("name")
        id, name = item.text("call_id", 256) or "", item.text("name", 64) or ""
        self._names[id] = name
        self._calls.append((id, name, read_arguments(item, "arguments")))
        self._open = True

    def _output(self, item: Fields) -> None:
        item.require("call_id")
        id = item.text("call_id", 256) or ""
        if id not in self._names:
            raise item.bad("call_id", "no earlier item is a tool call with this id")
        self._close()
        self._found.append(ChatMessage("tool", read_text(item, "output", _TEXTS), call_id=id, name=self._names[id]))

    def _reasoning(self, item: Fields) -> None:
        if self._text or self._calls:
            self._close()
        self._thought += read_text(item, "content", ("reasoning_text",), required=False)
        self._open = bool(self._thought) or self._open
