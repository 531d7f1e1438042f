"""OpenAI's `/v1/chat/completions`. Thoughts are `reasoning_content`, as in DeepSeek's API and in vLLM."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from localq.sampling import MOST_LOGPROBS
from localq.server.api import tools as tool_fields
from localq.server.api.common import (
    EFFORTS,
    MOST_MESSAGES,
    MOST_TOKENS,
    WholeReply,
    new_id,
    read_format,
    read_logits,
    read_sampling,
    read_stops,
    read_text,
)
from localq.server.api.form import Call, frame
from localq.server.api_error import ApiError, openai_body
from localq.server.events import AnswerText, CalledTool, Finished, ReplyEvent, Started, ThoughtText, TokenText
from localq.server.fields import Fields
from localq.server.request import ChatMessage, ReplyRequest
from localq.stats import Stats

ROLES = ("system", "developer", "user", "assistant", "tool")
DONE = "data: [DONE]\n\n"


def read(body: dict[str, Any]) -> Call:
    """The call in the body of a request. Raises ApiError (400) for a wrong field, which it names."""
    fields = Fields(body)
    model = fields.text("model", 512) or ""
    _refuse_others(fields)
    stream = fields.flag("stream")
    usage = fields.object("stream_options")
    if usage is not None and not stream:
        raise fields.bad("stream_options", "allowed only with stream")
    tools, choice = tool_fields.read_tools(fields)
    logprobs = _logprobs(fields)
    request = ReplyRequest(
        messages=read_messages(fields),
        sampling=read_sampling(fields),
        logits=read_logits(fields, logprobs),
        max_tokens=max_tokens(fields, "max_completion_tokens", "max_tokens"),
        stops=read_stops(fields, "stop"),
        grammar=read_format(fields, "response_format"),
        effort=fields.choice("reasoning_effort", EFFORTS) or "",
        think_budget=fields.integer("think_budget", 0, MOST_TOKENS),
        tools=tools,
        tool_choice=choice,
    )
    form = ChatForm(usage is not None and usage.flag("include_usage"), logprobs is not None)
    return Call(model, request, stream, form, fields.text("user", 512) or "")


def _refuse_others(fields: Fields) -> None:
    if fields.integer("n", 1, 128) not in (None, 1):
        raise fields.bad("n", "only one choice per request is supported", "Allowed: 1.")
    fields.refuse("audio", "audio is not supported")
    fields.refuse("web_search_options", "web search is not supported")
    for each in fields.array("modalities", 8):
        if each != "text":
            raise fields.bad("modalities", "only text is supported")


def max_tokens(fields: Fields, *names: str) -> int | None:
    """The first of these fields that is there."""
    found = [value for name in names if (value := fields.integer(name, 1, MOST_TOKENS)) is not None]
    return found[0] if found else None


def _logprobs(fields: Fields) -> int | None:
    wanted, top = fields.flag("logprobs"), fields.integer("top_logprobs", 0, MOST_LOGPROBS)
    if top is not None and not wanted:
        raise fields.bad("top_logprobs", "allowed only with logprobs")
    return (top or 0) if wanted else None


def read_messages(fields: Fields) -> tuple[ChatMessage, ...]:
    """The messages of a conversation."""
    fields.require("messages")
    found: list[ChatMessage] = []
    names: dict[str, str] = {}  # id of a call -> name of its tool
    for each in fields.objects("messages", MOST_MESSAGES):
        message = _message(each, names)
        names |= {id: name for id, name, _ in message.calls}
        found.append(message)
    if not found:
        raise fields.bad("messages", "there are no messages")
    if found[-1].role == "assistant" and found[-1].calls:
        raise fields.bad("messages", "the tool calls in the last message have no results")
    return tuple(found)


def _message(fields: Fields, names: dict[str, str]) -> ChatMessage:
    fields.require("role")
    role = fields.choice("role", ROLES) or ""
    if role == "assistant":
        calls = tool_fields.read_calls(fields)
        thought = fields.text("reasoning_content") or fields.text("reasoning") or ""
        return ChatMessage(role, read_text(fields, "content", required=not calls), thought, calls)
    text = read_text(fields, "content")
    if role != "tool":
        return ChatMessage(role, text)
    fields.require("tool_call_id")
    id = fields.text("tool_call_id", 256) or ""
    if id not in names:
        raise fields.bad("tool_call_id", "no earlier assistant message has a tool call with this id")
    return ChatMessage(role, text, call_id=id, name=names[id])


def usage(stats: Stats, thought_tokens: int = 0) -> dict[str, Any]:
    """Token counts as OpenAI names them."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.generated_tokens,
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": thought_tokens},
    }


def token_bytes(text: str) -> list[int] | None:
    """The bytes of a token's text, None where it is no whole character."""
    return None if "\ufffd" in text else list(text.encode())


def _token(each: TokenText) -> dict[str, Any]:
    top = [{"token": text, "logprob": value, "bytes": token_bytes(text)} for text, value in each.top]
    return {"token": each.text, "logprob": each.logprob, "bytes": token_bytes(each.text), "top_logprobs": top}


def _call(call: CalledTool) -> dict[str, Any]:
    return {"id": new_id("call_"), "type": "function", "function": {"name": call.name, "arguments": call.text}}


class ChatForm:
    """Writes a reply as a chat completion."""

    ping = ": ping\n\n"

    def __init__(self, include_usage: bool, logprobs: bool) -> None:
        self._include_usage, self._logprobs = include_usage, logprobs
        self._id, self._created, self._model = new_id("chatcmpl-"), int(time.time()), ""

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model,
                "system_fingerprint": None}  # fmt: skip

    def whole(self, reply: WholeReply) -> dict[str, Any]:
        """A `chat.completion`."""
        finished = reply.end()
        self._model = reply.started.model if reply.started else ""
        message: dict[str, Any] = {"role": "assistant", "content": reply.answer, "refusal": None}
        if reply.thought:
            message["reasoning_content"] = reply.thought
        if reply.calls:
            message |= {"content": reply.answer or None, "tool_calls": [_call(each) for each in reply.calls]}
        logprobs = {"content": [_token(each) for each in reply.tokens], "refusal": None} if self._logprobs else None
        choice = {"index": 0, "message": message, "logprobs": logprobs, "finish_reason": _reason(finished)}
        return {**self._head("chat.completion"), "choices": [choice],
                "usage": usage(finished.stats, finished.thought_tokens)}  # fmt: skip

    def frames(self, event: ReplyEvent) -> Iterator[str]:
        """`chat.completion.chunk`s."""
        if isinstance(event, Started):
            self._model = event.model
            yield self._chunk({"role": "assistant", "content": ""})
        elif isinstance(event, AnswerText):
            logprobs = {"content": [_token(each) for each in event.logprobs], "refusal": None}
            yield self._chunk({"content": event.text}, logprobs if self._logprobs else None)
        elif isinstance(event, ThoughtText):
            yield self._chunk({"reasoning_content": event.text})
        elif isinstance(event, CalledTool):
            yield self._chunk({"tool_calls": [{"index": event.index, **_call(event)}]})
        elif isinstance(event, Finished):
            yield self._chunk({}, reason=_reason(event))
            if self._include_usage:
                counts = usage(event.stats, event.thought_tokens)
                yield frame({**self._head("chat.completion.chunk"), "choices": [], "usage": counts})
            yield DONE

    def _chunk(self, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        body = {**self._head("chat.completion.chunk"), "choices": [choice]}
        return frame({**body, "usage": None} if self._include_usage else body)

    def failure(self, error: ApiError) -> str:
        """An error frame; no `[DONE]` follows, because the reply is not whole."""
        return frame(openai_body(error))


def _reason(finished: Finished) -> str:
    return "stop" if finished.reason == "cancelled" else finished.reason
