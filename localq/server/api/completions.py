"""OpenAI's older `/v1/completions`: a plain text or token ids, continued without a chat template."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from localq.server.api.chat import DONE, max_tokens, usage
from localq.server.api.common import (
    WholeReply,
    new_id,
    read_format,
    read_logits,
    read_sampling,
    read_stops,
)
from localq.server.api.form import Call, frame
from localq.server.api_error import ApiError, openai_body
from localq.server.events import AnswerText, Finished, ReplyEvent, Started, ThoughtText, TokenText
from localq.server.fields import Fields
from localq.server.request import ReplyRequest

DEFAULT_TOKENS = 16  # as in OpenAI's API
MOST_IDS = 2**20


def read(body: dict[str, Any]) -> Call:
    """The call in the body of a request. Raises ApiError (400) for a wrong field, which it names."""
    fields = Fields(body)
    model, stream = fields.text("model", 512) or "", fields.flag("stream")
    for name, most in (("n", 128), ("best_of", 20)):
        if fields.integer(name, 1, most) not in (None, 1):
            raise fields.bad(name, "only one choice per request is supported", "Allowed: 1.")
    fields.refuse("echo", "not supported", (False,))
    fields.refuse("suffix", "not supported", ("",))
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise fields.bad("stream_options", "allowed only with stream")
    logprobs = fields.integer("logprobs", 0, 5)
    request = ReplyRequest(
        prompt=_prompt(fields),
        sampling=read_sampling(fields),
        logits=read_logits(fields, logprobs),
        max_tokens=max_tokens(fields, "max_tokens") or DEFAULT_TOKENS,
        stops=read_stops(fields, "stop"),
        grammar=read_format(fields, "response_format"),
        field="prompt",
    )
    form = CompletionForm(options is not None and options.flag("include_usage"), logprobs is not None)
    return Call(model, request, stream, form, fields.text("user", 512) or "")


def _prompt(fields: Fields) -> str | tuple[int, ...]:
    fields.require("prompt")
    value = fields.value("prompt")
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(type(each) is int and 0 <= each < 2**31 for each in value):
        if len(value) > MOST_IDS:
            raise fields.bad("prompt", f"more than {MOST_IDS:,} tokens")
        return tuple(value)
    raise fields.bad("prompt", "must be a string or an array of token ids (one prompt per request)")


class CompletionForm:
    """Writes a reply as a text completion. A thought is part of the text, with no mark around it."""

    ping = ": ping\n\n"

    def __init__(self, include_usage: bool, logprobs: bool) -> None:
        self._include_usage, self._logprobs = include_usage, logprobs
        self._id, self._created, self._model, self._offset = new_id("cmpl-"), int(time.time()), "", 0

    def _head(self) -> dict[str, Any]:
        return {"id": self._id, "object": "text_completion", "created": self._created, "model": self._model}

    def whole(self, reply: WholeReply) -> dict[str, Any]:
        """A `text_completion`."""
        finished = reply.end()
        self._model = reply.started.model if reply.started else ""
        choice = self._choice(reply.thought + reply.answer, reply.tokens, _reason(finished))
        return {**self._head(), "choices": [choice], "usage": usage(finished.stats)}

    def _choice(self, text: str, tokens: list[TokenText], reason: str | None) -> dict[str, Any]:
        return {"text": text, "index": 0, "logprobs": self._columns(tokens) if self._logprobs else None,
                "finish_reason": reason}  # fmt: skip

    def _columns(self, tokens: list[TokenText]) -> dict[str, Any]:
        offsets = []
        for each in tokens:
            offsets.append(self._offset)
            self._offset += len(each.text)
        return {
            "tokens": [each.text for each in tokens],
            "token_logprobs": [each.logprob for each in tokens],
            "top_logprobs": [dict(reversed(each.top)) for each in tokens],
            "text_offset": offsets,
        }

    def frames(self, event: ReplyEvent) -> Iterator[str]:
        """`text_completion` chunks."""
        if isinstance(event, Started):
            self._model = event.model
        elif isinstance(event, ThoughtText | AnswerText):
            tokens = list(event.logprobs) if isinstance(event, AnswerText) else []
            yield frame({**self._head(), "choices": [self._choice(event.text, tokens, None)]})
        elif isinstance(event, Finished):
            yield frame({**self._head(), "choices": [self._choice("", [], _reason(event))]})
            if self._include_usage:
                yield frame({**self._head(), "choices": [], "usage": usage(event.stats)})
            yield DONE

    def failure(self, error: ApiError) -> str:
        """An error frame."""
        return frame(openai_body(error))


def _reason(finished: Finished) -> str:
    return "length" if finished.reason == "length" else "stop"
