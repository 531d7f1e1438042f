"""The routes, and the ASGI application: `Guard` around Starlette. Errors have the shape of their API."""

from __future__ import annotations

import time
import traceback
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from localq import __version__
from localq.errors import LocalqError
from localq.server import json_body, openapi
from localq.server import metrics as metrics_text
from localq.server.api import chat, completions, messages, responses
from localq.server.api.form import Call
from localq.server.api.response_store import ResponseStore
from localq.server.api_error import ApiError, of_error
from localq.server.guard import Access, App, Guard
from localq.server.names import ListedModel
from localq.server.responses import JsonResponse, error_response
from localq.server.service import GONE, Service

Handler = Callable[[Request], Awaitable[Response]]


def make(service: Service, access: Access, log: Callable[[str], None] | None = None) -> App:
    """The application of a server. log: gets a line for each response, without texts of the request."""
    application = Starlette(
        routes=routes(service),
        exception_handlers={HTTPException: _http_error, LocalqError: _localq_error, Exception: _bug},
    )
    return _Counting(Guard(application, access), service, log)


def routes(service: Service) -> list[Route]:
    """All routes. `/health` alone needs no key."""

    def of(read: Callable[[dict[str, Any]], Call]) -> Handler:
        async def answer(request: Request) -> Response:
            return await service.answer(request, read)

        return answer

    async def health(request: Request) -> Response:
        return JsonResponse({"status": "ok", "version": __version__})

    async def state(request: Request) -> Response:
        return Response(service.metrics.text(service.slot.state()), media_type=metrics_text.CONTENT_TYPE)

    async def models(request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [_model(each) for each in await service.models()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        found = [each for each in await service.models() if each.name.casefold() == name.casefold()]
        if not found and service.names.is_own(name):
            found = [ListedModel(service.names.name, 0)]
        if not found:
            raise ApiError(404, "There is no model with this name.", "model", "model_not_found")
        return JsonResponse(_model(found[0]))

    async def count(request: Request) -> Response:
        name, read = messages.read_count(json_body.parse(await request.body()))
        model = await service.find(name)
        return JsonResponse({"input_tokens": await service.count_tokens(request, model, read)})

    async def document(request: Request) -> Response:
        return JsonResponse(openapi.document())

    return [
        Route("/health", health, methods=["GET"]),
        Route("/metrics", state, methods=["GET"]),
        Route("/openapi.json", document, methods=["GET"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{name:path}", model, methods=["GET"]),
        Route("/v1/chat/completions", of(chat.read), methods=["POST"]),
        Route("/v1/completions", of(completions.read), methods=["POST"]),
        Route("/v1/responses", of(partial(responses.read, store=ResponseStore())), methods=["POST"]),
        Route("/v1/messages", of(messages.read), methods=["POST"]),
        Route("/v1/messages/count_tokens", count, methods=["POST"]),
    ]


def _model(listed: ListedModel) -> dict[str, Any]:
    return {"id": listed.name, "object": "model", "created": int(listed.used), "owned_by": "localq"}


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    texts = {404: "There is no such path.", 405: "This path does not support this method."}
    response = error_response(request.url.path, ApiError(error.status_code, texts.get(error.status_code, "Refused.")))
    response.headers.update(error.headers or {})
    return response


async def _localq_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, LocalqError)
    return error_response(request.url.path, of_error(error))


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, ApiError(500, "Internal server error; see the server log."))


class _Counting:
    """Counts responses by route; the traceback of a bug goes to the log of the server alone."""

    def __init__(self, app: App, service: Service, log: Callable[[str], None] | None) -> None:
        self._app, self._service, self._log = app, service, log
        self._paths = {route.path for route in routes(service)}

    async def __call__(self, scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begun = 0, time.monotonic()

        async def watch(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except Exception:
            traceback.print_exc()
        finally:
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._service.metrics.responded(path, status)
            if self._log is not None:
                client = scope["client"][0] if scope.get("client") else "-"
                spent = time.monotonic() - begun
                self._log(f"{client} {scope['method']} {path} {status or GONE} {spent:.3f} s")
