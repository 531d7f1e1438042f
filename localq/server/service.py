"""`Service`: what the routes of all APIs use: the slot, the names of models, metrics; a call becomes a response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from localq.server import json_body, reply
from localq.server import prompt as prompts
from localq.server.api.common import WholeReply, check_grammar
from localq.server.api.form import Call
from localq.server.api_error import ApiError
from localq.server.events import Finished, ReplyEvent, Started
from localq.server.metrics import Metrics
from localq.server.model import ModelRequest, OpenModel
from localq.server.names import ListedModel, ModelNames
from localq.server.responses import EventStream, JsonResponse, when_gone
from localq.server.slot import Slot
from localq.server.ticket import Ticket

T = TypeVar("T")
GONE = 499  # nobody reads the response; as nginx names it


class Service:
    """One server's parts."""

    def __init__(self, slot: Slot, names: ModelNames, metrics: Metrics) -> None:
        self.slot, self.names, self.metrics = slot, names, metrics

    async def answer(self, request: Request, read: Callable[[dict[str, Any]], Call]) -> Response:
        """The response to a request of an API; read: checks its body. Raises LocalqError."""
        call = read(json_body.parse(await request.body()))
        prompts.check_size(call.request)
        if call.request.grammar is not None:
            await asyncio.to_thread(check_grammar, call.request.grammar, call.request.grammar_field)
        model = await self.find(call.model)
        ticket = self.slot.submit(_client(request, call.user), model, reply.job(call.request))
        try:
            response = await self._respond(request, call, ticket)
        except BaseException:
            ticket.cancel()
            raise
        return response

    async def find(self, name: str) -> ModelRequest:
        """The model of a request."""
        if not name or self.names.is_own(name):
            return self.names.find(name, self.slot.request)
        return await asyncio.to_thread(self.names.find, name, self.slot.request)

    async def models(self) -> list[ListedModel]:
        """The models that can be asked for."""
        return await asyncio.to_thread(self.names.models)

    async def _respond(self, request: Request, call: Call, ticket: Ticket[ReplyEvent]) -> Response:
        batches = self._counted(ticket)
        gone = asyncio.ensure_future(when_gone(request.receive))
        try:
            first = await _unless_gone(gone, _next(batches))
            if call.stream:
                return EventStream(call.form, first, batches, ticket)
            whole = WholeReply()
            while first:
                for event in first:
                    whole.add(event)
                first = await _unless_gone(gone, _next(batches))
            return JsonResponse(call.form.whole(whole))
        finally:
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)

    async def _counted(self, ticket: Ticket[ReplyEvent]) -> AsyncIterator[list[ReplyEvent]]:
        async for events in ticket.batches():
            for event in events:
                if isinstance(event, Started):
                    self.metrics.started(event)
                elif isinstance(event, Finished):
                    self.metrics.finished(event)
            yield events

    async def count_tokens(self, request: Request, model: ModelRequest, count: Callable[[OpenModel], int]) -> int:
        """`count` over the model's tokenizer: beside the running job where that model is open, else in its turn.

        Raises LocalqError, also ApiError (GONE) where the client closes its connection before its turn.
        """
        opened, now = self.slot.model, self.slot.request
        if opened is not None and now is not None and now.same_load(model):
            return await asyncio.to_thread(count, opened)

        def counting(model: OpenModel) -> Iterator[int]:
            yield count(model)

        ticket = self.slot.submit(_client(request, ""), model, counting)
        gone = asyncio.ensure_future(when_gone(request.receive))
        try:
            found = await _unless_gone(gone, _next(ticket.batches()))
        finally:
            ticket.cancel()
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
        if not found:
            raise ApiError(500, "The tokens could not be counted.")
        return found[0]


async def _next(batches: AsyncIterator[list[T]]) -> list[T]:
    return await anext(batches, [])


async def _unless_gone(gone: asyncio.Future[None], work: Coroutine[Any, Any, list[T]]) -> list[T]:
    """The result of `work`. Raises ApiError (GONE) where the client closes its connection before."""
    task = asyncio.ensure_future(work)
    both: tuple[asyncio.Future[Any], ...] = (gone, task)
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise ApiError(GONE, "The client disconnected.")
    return task.result()


def _client(request: Request, user: str) -> str:
    """The client of a request, for turns: programs on one machine differ by User-Agent and `user`."""
    host = request.client.host if request.client else ""
    return f"{host} {request.headers.get('user-agent', '')[:200]} {user}"
