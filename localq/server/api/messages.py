"""Anthropic's `/v1/messages` and its `count_tokens`. Thoughts are `thinking` blocks, where they are asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from localq.server import prompt as prompts
from localq.server.api import tools as tool_fields
from localq.server.api.common import (
    EFFORTS,
    MOST_MESSAGES,
    MOST_PARTS,
    MOST_TOKENS,
    NO_IMAGES,
    WholeReply,
    new_id,
    read_format,
    read_sampling,
    read_stops,
    read_text,
)
from localq.server.api.form import Call, frame
from localq.server.api_error import ApiError, anthropic_body
from localq.server.events import AnswerText, CalledTool, Finished, ReplyEvent, Started, ThoughtText
from localq.server.fields import Fields
from localq.server.model import OpenModel
from localq.server.request import AUTO, NAMED, NONE, REQUIRED, ChatMessage, ReplyRequest, ToolChoice
from localq.stats import Stats
from localq.text.tools import declaration
from localq.text.tools.declaration import Tool

_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE, "tool": NAMED}
SIGNATURE = "localq"  # clients send a thinking block back only with one


def read(body: dict[str, Any]) -> Call:
    """The call in the body of a request. Raises ApiError (400) for a wrong field, which it names."""
    fields = Fields(body)
    fields.require("max_tokens")
    longest = fields.integer("max_tokens", 1, MOST_TOKENS)
    fields.refuse("mcp_servers", "this server never runs or calls other programs", ([],))
    fields.refuse("container", "not supported")
    effort, budget, wanted = _thinking(fields)
    output = fields.object("output_config")
    messages, tools, choice = read_conversation(fields)
    request = ReplyRequest(
        messages=messages,
        sampling=read_sampling(fields),
        max_tokens=longest,
        stops=read_stops(fields, "stop_sequences"),
        grammar=read_format(output, "format") if output is not None else None,
        effort=effort,
        think_budget=budget,
        tools=tools,
        tool_choice=choice,
        wants_thought=wanted,
        grammar_field="output_config",
    )
    metadata = fields.object("metadata")
    user = (metadata.text("user_id", 512) if metadata else None) or ""
    return Call(fields.text("model", 512) or "", request, fields.flag("stream"), MessageForm(wanted), user)


def read_count(body: dict[str, Any]) -> tuple[str, Callable[[OpenModel], int]]:
    """The model of a request to count tokens, and how they are counted. Raises as `read`."""
    fields = Fields(body)
    effort, _, _ = _thinking(fields)
    messages, tools, choice = read_conversation(fields)
    request = ReplyRequest(messages=messages, effort=effort, tools=tools, tool_choice=choice)
    return fields.text("model", 512) or "", lambda model: len(prompts.build(request, model.tokenizer).ids)


def read_conversation(fields: Fields) -> tuple[tuple[ChatMessage, ...], tuple[Tool, ...], ToolChoice]:
    """System prompt, messages and tools: what the prompt is made of."""
    tools, choice = _tools(fields)
    return _messages(fields), tools, choice


def _thinking(fields: Fields) -> tuple[str, int | None, bool]:
    """(effort, budget of the thought, whether the client gets it). Without the field the model thinks little."""
    given, output = fields.object("thinking"), fields.object("output_config")
    effort = (output.choice("effort", EFFORTS[2:]) if output is not None else None) or ""
    if given is None:
        return "none", None, False
    given.require("type")
    kind = given.choice("type", ("enabled", "disabled", "adaptive", "between_tools"))
    if kind == "disabled":
        return "none", None, False
    if kind != "enabled":
        return effort, None, given.text("display") != "omitted"
    given.require("budget_tokens")
    return effort or "on", given.integer("budget_tokens", 1, MOST_TOKENS), True


def _tools(fields: Fields) -> tuple[tuple[Tool, ...], ToolChoice]:
    tools = []
    for each in fields.objects("tools", declaration.MOST):
        kind = each.text("type")
        if kind not in (None, "custom"):
            raise each.bad("type", f"{kind[:40]} is a tool that only Anthropic's servers provide", "Allowed: custom.")
        each.require("input_schema")
        tools.append(tool_fields.make_tool(each, "input_schema"))
    given, choice = fields.object("tool_choice"), ToolChoice()
    if given is not None:
        given.require("type")
        mode = _CHOICES[given.choice("type", tuple(_CHOICES)) or "auto"]
        if mode == NAMED:
            given.require("name")
        choice = ToolChoice(mode, given.text("name") or "", not given.flag("disable_parallel_tool_use"))
    return tool_fields.check_tools(tools, choice), choice


def _messages(fields: Fields) -> tuple[ChatMessage, ...]:
    fields.require("messages")
    system = read_text(fields, "system", required=False)
    found = [ChatMessage("system", system)] if system else []
    names: dict[str, str] = {}  # id of a call -> name of its tool
    given = fields.objects("messages", MOST_MESSAGES)
    if not given:
        raise fields.bad("messages", "there are no messages")
    for each in given:
        each.require("role")
        role = each.choice("role", ("user", "assistant", "system"))
        found += _assistant(each, names) if role == "assistant" else _user(each, role or "", names)
    if found[-1].role == "assistant" and found[-1].calls:
        raise fields.bad("messages", "the tool calls in the last message have no results")
    return tuple(found)


def _blocks(fields: Fields) -> Sequence[Fields]:
    value = fields.value("content")
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, fields.name("content"))]
    fields.require("content")
    blocks = fields.objects("content", MOST_PARTS)
    for each in blocks:
        each.require("type")
    return blocks


def _user(fields: Fields, role: str, names: dict[str, str]) -> list[ChatMessage]:
    """A message of the user: results of tools first, as templates want them, then its text."""
    results, texts = [], []
    for block in _blocks(fields):
        kind = block.text("type")
        if kind == "text":
            block.require("text")
            texts.append(block.text("text") or "")
        elif kind == "tool_result":
            results.append(_result(block, names))
        else:
            raise block.bad("type", NO_IMAGES)
    return [*results, *([ChatMessage(role, "\n".join(texts))] if texts or not results else [])]


def _result(block: Fields, names: dict[str, str]) -> ChatMessage:
    block.require("tool_use_id")
    id = block.text("tool_use_id", 256) or ""
    if id not in names:
        raise block.bad("tool_use_id", "no earlier assistant message has a tool call with this id")
    text = read_text(block, "content", required=False)
    if block.flag("is_error"):
        text = f"Error: {text}"
    return ChatMessage("tool", text, call_id=id, name=names[id])


def _assistant(fields: Fields, names: dict[str, str]) -> list[ChatMessage]:
    texts: list[str] = []
    thought, calls = "", []
    for block in _blocks(fields):
        kind = block.text("type")
        if kind == "text":
            texts.append(block.text("text") or "")
        elif kind == "thinking":
            thought += block.text("thinking") or ""
        elif kind == "tool_use":
            block.require("name")
            block.require("id")
            block.object("input")
            id, name = block.text("id", 256) or "", block.text("name", 64) or ""
            names[id] = name
            calls.append((id, name, json.dumps(block.value("input") or {}, ensure_ascii=False)))
        elif kind != "redacted_thinking":
            raise block.bad("type", "not supported in an assistant message")
    return [ChatMessage("assistant", "\n".join(texts), thought, tuple(calls))]


def _usage(stats: Stats) -> dict[str, int]:
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.generated_tokens,
    }


class MessageForm:
    """Writes a reply as a message of content blocks. wants_thought: thinking blocks are sent."""

    ping = frame({"type": "ping"}, "ping")

    def __init__(self, wants_thought: bool) -> None:
        self._wants_thought = wants_thought
        self._id, self._model = new_id("msg_"), ""
        self._index, self._open = -1, ""  # of the block that is being written, and its type

    def _message(self, content: list[Any], finished: Finished | None, stats: dict[str, int]) -> dict[str, Any]:
        return {"id": self._id, "type": "message", "role": "assistant", "model": self._model, "content": content,
                "stop_reason": None if finished is None else _reason(finished),
                "stop_sequence": None if finished is None else finished.stop_string, "usage": stats}  # fmt: skip

    def whole(self, reply: WholeReply) -> dict[str, Any]:
        """A `message`."""
        finished = reply.end()
        self._model = reply.started.model if reply.started else ""
        content: list[dict[str, Any]] = []
        if reply.thought and self._wants_thought:
            content.append({"type": "thinking", "thinking": reply.thought, "signature": SIGNATURE})
        if reply.answer or not (content or reply.calls):
            content.append({"type": "text", "text": reply.answer})
        content += [{**_tool_use(each), "input": json.loads(each.text)} for each in reply.calls]
        return self._message(content, finished, _usage(finished.stats))

    def frames(self, event: ReplyEvent) -> Iterator[str]:
        """Events of a message stream."""
        if isinstance(event, Started):
            self._model = event.model
            empty = {"input_tokens": event.prompt_tokens, "cache_creation_input_tokens": 0,
                     "cache_read_input_tokens": 0, "output_tokens": 0}  # fmt: skip
            yield _event("message_start", message=self._message([], None, empty))
        elif isinstance(event, ThoughtText) and self._wants_thought:
            yield from self._in_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta({"type": "thinking_delta", "thinking": event.text})
        elif isinstance(event, AnswerText) and event.text:
            yield from self._in_block("text", {"type": "text", "text": ""})
            yield self._delta({"type": "text_delta", "text": event.text})
        elif isinstance(event, CalledTool):
            yield from self._end_block()
            yield from self._in_block("tool_use", {**_tool_use(event), "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": event.text})
            yield from self._end_block()
        elif isinstance(event, Finished):
            yield from self._end_block()
            delta = {"stop_reason": _reason(event), "stop_sequence": event.stop_string}
            yield _event("message_delta", delta=delta, usage=_usage(event.stats))
            yield _event("message_stop")

    def _in_block(self, kind: str, block: dict[str, Any]) -> Iterator[str]:
        if self._open == kind:
            return
        yield from self._end_block()
        self._index, self._open = self._index + 1, kind
        yield _event("content_block_start", index=self._index, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> str:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _end_block(self) -> Iterator[str]:
        if self._open == "thinking":
            yield self._delta({"type": "signature_delta", "signature": SIGNATURE})
        if self._open:
            self._open = ""
            yield _event("content_block_stop", index=self._index)

    def failure(self, error: ApiError) -> str:
        """An error event."""
        return frame(anthropic_body(error), "error")


def _event(kind: str, **fields: Any) -> str:
    return frame({"type": kind, **fields}, kind)


def _tool_use(call: CalledTool) -> dict[str, Any]:
    return {"type": "tool_use", "id": new_id("toolu_"), "name": call.name}


def _reason(finished: Finished) -> str:
    if finished.stop_string is not None:
        return "stop_sequence"
    return {"tool_calls": "tool_use", "length": "max_tokens"}.get(finished.reason, "end_turn")
