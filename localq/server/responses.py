"""Responses: JSON, errors in the shape of the API that the path belongs to, and a reply as server-sent events.

A client that does not take what is written within WRITE_S is dropped: its connection is cut, its reply cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from localq.errors import LocalqError
from localq.server import api_error
from localq.server.api.form import ReplyForm
from localq.server.events import AnswerText, ReplyEvent, ThoughtText
from localq.server.ticket import Ticket

WRITE_S = 30.0  # for a client to take what waits for it
PING_S = 10.0  # a stream in which nothing is said says so
ANTHROPIC_PATH = "/v1/messages"


class JsonResponse(Response):
    """JSON, non-ASCII as it is."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Bytes of the body."""
        return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def error_response(path: str, error: LocalqError) -> Response:
    """An error in the shape of the API that this path belongs to."""
    found = api_error.of_error(error)
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    body = api_error.anthropic_body(found) if is_anthropic else api_error.openai_body(found)
    closes = {"connection": "close"} if found.status in (408, 413, 431) else {}
    return JsonResponse(body, found.status, {**api_error.headers(found), **closes})


async def when_gone(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events of a reply, from its first event on; a client that is gone cancels it."""

    def __init__(self, form: ReplyForm, first: list[ReplyEvent], rest: AsyncIterator[list[ReplyEvent]],
                 ticket: Ticket[ReplyEvent]) -> None:  # fmt: skip
        self._form, self._first, self._rest, self._ticket = form, first, rest, ticket
        self.status_code, self.background = 200, None
        self.init_headers({"content-type": "text/event-stream; charset=utf-8", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream."""
        gone = asyncio.ensure_future(when_gone(receive))
        writing = asyncio.ensure_future(self._write(scope, send))
        try:
            await asyncio.wait([gone, writing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._ticket.cancel()
            for task in (gone, writing):
                task.cancel()
            await asyncio.gather(gone, writing, return_exceptions=True)

    async def _write(self, scope: Scope, send: Send) -> None:
        headers = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        put = _within(scope, send)
        if not await put(headers):
            return
        async for text in self._texts():
            if not await put({"type": "http.response.body", "body": text.encode("utf-8", "replace"),
                              "more_body": True}):  # fmt: skip
                return
        await put({"type": "http.response.body", "body": b"", "more_body": False})

    async def _texts(self) -> AsyncIterator[str]:
        yield self._frames(self._first)
        try:
            async for events in _with_pauses(self._rest, PING_S):
                yield self._frames(events) if events is not None else self._form.ping
        except LocalqError as error:
            yield self._form.failure(api_error.of_error(error))

    def _frames(self, events: list[ReplyEvent]) -> str:
        return "".join(text for event in _joined(events) for text in self._form.frames(event))


def _joined(events: list[ReplyEvent]) -> list[ReplyEvent]:
    """Events with neighbouring texts as one: who lags gets fewer and longer ones."""
    found: list[ReplyEvent] = []
    for each in events:
        last = found[-1] if found else None
        if isinstance(each, AnswerText) and isinstance(last, AnswerText):
            found[-1] = AnswerText(last.text + each.text, last.logprobs + each.logprobs)
        elif isinstance(each, ThoughtText) and isinstance(last, ThoughtText):
            found[-1] = ThoughtText(last.text + each.text)
        else:
            found.append(each)
    return found


def _within(scope: Scope, send: Send) -> Callable[[Mapping[str, Any]], Awaitable[bool]]:
    """A `send` with a limit of time; where it is exceeded, the connection is cut, and it returns False."""

    async def put(message: Mapping[str, Any]) -> bool:
        try:
            async with asyncio.timeout(WRITE_S):
                await send(dict(message))
        except TimeoutError:
            scope.get("state", {}).get("abort", lambda: None)()
            return False
        return True

    return put


async def _with_pauses(
    batches: AsyncIterator[list[ReplyEvent]], seconds: float
) -> AsyncIterator[list[ReplyEvent] | None]:
    """The batches; None for each stretch of `seconds` without one."""
    task = asyncio.ensure_future(anext(batches))
    try:
        while True:
            done, _ = await asyncio.wait([task], timeout=seconds)
            if not done:
                yield None
                continue
            try:
                batch = task.result()
            except StopAsyncIteration:
                return
            yield batch
            task = asyncio.ensure_future(anext(batches))
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, StopAsyncIteration, LocalqError):
            await task
