"""The OpenAPI document of this server: its paths. Their schemas are in `openapi_schemas`.

Fields that an API has and this server ignores are not listed; requests may have them.
"""

from __future__ import annotations

from typing import Any

from localq import __version__
from localq.server.openapi_schemas import REQUESTS, RESPONSES

_REFUSALS = ("400", "401", "403", "404", "405", "408", "413", "414", "415", "421", "431", "500", "503")
_OPENAI, _ANTHROPIC = "Error", "AnthropicError"
_POSTS = {  # path: (summary, schema of the request, of the response, of an error, whether it streams)
    "/v1/chat/completions": ("Chat completion (OpenAI)", "ChatRequest", "ChatCompletion", _OPENAI, True),
    "/v1/completions": ("Text completion (OpenAI)", "CompletionRequest", "TextCompletion", _OPENAI, True),
    "/v1/responses": ("Response (OpenAI)", "ResponseRequest", "Response", _OPENAI, True),
    "/v1/messages": ("Message (Anthropic)", "MessageRequest", "Message", _ANTHROPIC, True),
    "/v1/messages/count_tokens": ("Message token count (Anthropic)", "CountRequest", "Count", _ANTHROPIC, False),
}


def document() -> dict[str, Any]:
    """The document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "localq",
            "version": __version__,
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
            "description": "A language model on this machine, served through the OpenAI and Anthropic APIs.",
        },
        "security": [{}, {"bearer": []}, {"header": []}],
        "paths": {
            "/health": {"get": _get("Health check; no key required", "Health", security=[{}])},
            "/metrics": {"get": _get("Prometheus metrics", None)},
            "/openapi.json": {"get": _get("This document", "Document")},
            "/v1/models": {"get": _get("Models available to requests", "ModelList")},
            "/v1/models/{name}": {
                "get": _get("A model", "Model"),
                "parameters": [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}],
            },
            **{path: {"post": _post(*fields)} for path, fields in _POSTS.items()},
        },
        "components": {
            "schemas": REQUESTS | RESPONSES,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _ref(name: str) -> dict[str, Any]:
    return {"schema": {"$ref": f"#/components/schemas/{name}"}}


def _refusals(error: str) -> dict[str, Any]:
    body = {"description": "Rejected; the body explains why", "content": {"application/json": _ref(error)}}
    return dict.fromkeys(_REFUSALS, body)


def _get(summary: str, schema: str | None, **more: Any) -> dict[str, Any]:
    text = {"text/plain": {"schema": {"type": "string"}}}
    content = text if schema is None else {"application/json": _ref(schema)}
    return {"summary": summary, "responses": {"200": {"description": "OK", "content": content}, **_refusals(_OPENAI)},
            **more}  # fmt: skip


def _post(summary: str, request: str, response: str, error: str, streams: bool) -> dict[str, Any]:
    content = {"application/json": _ref(response)}
    if streams:
        content["text/event-stream"] = {"schema": {"type": "string", "description": "With stream: true"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": _ref(request)}},
        "responses": {"200": {"description": "OK", "content": content}, **_refusals(error)},
    }
