"""`ResponseForm`: a reply as a response of `/v1/responses`: output items, and the events of its stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from localq.server.api.chat import token_bytes
from localq.server.api.common import WholeReply, new_id
from localq.server.api.form import frame
from localq.server.api_error import ApiError
from localq.server.events import AnswerText, CalledTool, Finished, ReplyEvent, Started, ThoughtText, TokenText
from localq.server.request import ChatMessage
from localq.stats import Stats


class ResponseForm:
    """Writes a reply as output items: reasoning, message, function calls.

    asked   fields of the request, sent back
    keep    gets the id of the response and the reply as a message, at its end; None: it is not kept
    """

    ping = ": ping\n\n"

    def __init__(
        self, asked: dict[str, Any], created: float, logprobs: bool,
        keep: Callable[[str, ChatMessage], None] | None = None,
    ) -> None:  # fmt: skip
        self._asked, self._created, self._logprobs, self._keep = asked, created, logprobs, keep
        self._id, self._model, self._number = new_id("resp_"), "", 0
        self._done: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None  # that is being written
        self._text = ""
        self._tokens: list[dict[str, Any]] = []

    # ---- whole

    def whole(self, reply: WholeReply) -> dict[str, Any]:
        """A `response`."""
        finished = reply.end()
        self._model = reply.started.model if reply.started else ""
        output = []
        if reply.thought:
            output.append(_reasoning(new_id("rs_"), reply.thought))
        if reply.answer or not (reply.thought or reply.calls):
            output.append(_message(new_id("msg_"), reply.answer, [_logprob(each) for each in reply.tokens]))
        self._done = [*output, *(_function(new_id("fc_"), new_id("call_"), each) for each in reply.calls)]
        self._keep_reply()
        return self._response(finished)

    def _keep_reply(self) -> None:
        if self._keep is None:
            return
        texts = {kind: "".join(part["text"] for item in self._done if item["type"] == kind for part in item["content"])
                 for kind in ("message", "reasoning")}  # fmt: skip
        calls = tuple((item["call_id"], item["name"], item["arguments"]) for item in self._done
                      if item["type"] == "function_call")  # fmt: skip
        self._keep(self._id, ChatMessage("assistant", texts["message"], texts["reasoning"], calls))

    def _response(self, finished: Finished | None, error: ApiError | None = None) -> dict[str, Any]:
        status, details = "in_progress", None
        if error is not None:
            status = "failed"
        elif finished is not None:
            status = "incomplete" if finished.reason == "length" else "completed"
            details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": self._id, "object": "response", "created_at": int(self._created), "status": status,
            "error": None if error is None else {"code": error.code or "server_error", "message": error.message},
            "incomplete_details": details, "model": self._model, "output": list(self._done),
            "store": self._keep is not None, "truncation": "disabled",
            "usage": None if finished is None else _usage(finished.stats, finished.thought_tokens), **self._asked,
        }  # fmt: skip

    # ---- stream

    def frames(self, event: ReplyEvent) -> Iterator[str]:
        """Events of a response stream."""
        if isinstance(event, Started):
            self._model = event.model
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response(None))
        elif isinstance(event, ThoughtText):
            yield from self._open("reasoning")
            self._text += event.text
            yield self._delta("response.reasoning_text.delta", event.text)
        elif isinstance(event, AnswerText):
            yield from self._open("message")
            self._text += event.text
            tokens = [_logprob(each) for each in event.logprobs]
            self._tokens += tokens
            yield self._delta("response.output_text.delta", event.text, logprobs=tokens)
        elif isinstance(event, CalledTool):
            yield from self._call(event)
        else:
            yield from self._close()
            if not self._done:
                yield from self._open("message")
                yield from self._close()
            self._keep_reply()
            kind = "response.incomplete" if event.reason == "length" else "response.completed"
            yield self._event(kind, response=self._response(event))

    def failure(self, error: ApiError) -> str:
        """The event of a response that has failed."""
        return self._event("response.failed", response=self._response(None, error))

    def _event(self, kind: str, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        return frame({"type": kind, "sequence_number": number, **fields}, kind)

    def _place(self) -> dict[str, Any]:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._done), "content_index": 0}

    def _delta(self, kind: str, text: str, **fields: Any) -> str:
        return self._event(kind, **self._place(), delta=text, **fields)

    def _open(self, kind: str) -> Iterator[str]:
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._close()
        made = _reasoning(new_id("rs_"), "") if kind == "reasoning" else _message(new_id("msg_"), "", [])
        self._item, self._text, self._tokens = {**made, "content": [], "status": "in_progress"}, "", []
        yield self._event("response.output_item.added", output_index=len(self._done), item=self._item)
        yield self._event("response.content_part.added", **self._place(), part=made["content"][0])

    def _close(self) -> Iterator[str]:
        item = self._item
        if item is None:
            return
        if item["type"] == "reasoning":
            whole = _reasoning(item["id"], self._text)
            yield self._event("response.reasoning_text.done", **self._place(), text=self._text)
        else:
            whole = _message(item["id"], self._text, self._tokens)
            yield self._event("response.output_text.done", **self._place(), text=self._text, logprobs=self._tokens)
        yield self._event("response.content_part.done", **self._place(), part=whole["content"][0])
        yield self._event("response.output_item.done", output_index=len(self._done), item=whole)
        self._done.append(whole)
        self._item = None

    def _call(self, call: CalledTool) -> Iterator[str]:
        yield from self._close()
        whole = _function(new_id("fc_"), new_id("call_"), call)
        index, place = len(self._done), {"item_id": whole["id"], "output_index": len(self._done)}
        begun = {**whole, "arguments": "", "status": "in_progress"}
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event("response.function_call_arguments.delta", **place, delta=call.text)
        yield self._event("response.function_call_arguments.done", **place, name=call.name, arguments=call.text)
        yield self._event("response.output_item.done", output_index=index, item=whole)
        self._done.append(whole)


def _reasoning(id: str, text: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": "completed"}


def _message(id: str, text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}]
    return {"id": id, "type": "message", "role": "assistant", "status": "completed", "content": content}


def _function(id: str, call_id: str, call: CalledTool) -> dict[str, Any]:
    return {"id": id, "type": "function_call", "call_id": call_id, "name": call.name, "arguments": call.text,
            "status": "completed"}  # fmt: skip


def _logprob(each: TokenText) -> dict[str, Any]:
    top = [{"token": text, "logprob": value, "bytes": token_bytes(text) or []} for text, value in each.top]
    return {"token": each.text, "logprob": each.logprob, "bytes": token_bytes(each.text) or [], "top_logprobs": top}


def _usage(stats: Stats, thought_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens},
        "output_tokens": stats.generated_tokens,
        "output_tokens_details": {"reasoning_tokens": thought_tokens},
        "total_tokens": stats.prompt_tokens + stats.generated_tokens,
    }
