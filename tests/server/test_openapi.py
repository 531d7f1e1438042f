"""The OpenAPI document: it has every route, and requests that schemathesis makes from it are answered as it says."""

from __future__ import annotations

import hypothesis
import jsonschema_rs
import schemathesis
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from localq.server import app, openapi
from localq.server.service import Service
from tests.support.server.bad_fields import ALL, PENALTIES, SAMPLING
from tests.support.server.live_server import LiveServer


def test_the_document_has_every_route(server: LiveServer) -> None:
    document = server.get("/openapi.json").json
    service = Service(server.slot, server.names, server.metrics)
    routes = {route.path.replace("{name:path}", "{name}"): route.methods - {"HEAD"} for route in app.routes(service)}
    assert {
        path: {name.upper() for name in item if name in ("get", "post")} for path, item in document["paths"].items()
    } == routes


SCHEMA = schemathesis.openapi.from_dict(openapi.document())


@SCHEMA.parametrize()
@hypothesis.settings(
    max_examples=8,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)
def test_requests_made_from_the_document_are_answered_as_it_says(
    case: schemathesis.Case, shared_server: LiveServer
) -> None:
    """Valid and invalid ones: no server error, and only statuses, types and bodies that the document has."""
    headers = {name: value for name, value in (case.headers or {}).items() if name.lower() not in ("host", "origin")}
    case.headers = headers
    response = case.call(base_url=shared_server.url)
    case.validate_response(
        response,
        checks=[
            checks.not_a_server_error,
            openapi_checks.status_code_conformance,
            openapi_checks.content_type_conformance,
            openapi_checks.response_schema_conformance,
        ],
    )


def test_wrong_fields_do_not_match_the_document() -> None:
    """Where the document and the code disagree about a field, one of them is wrong."""
    schemas = openapi.document()["components"]["schemas"]
    names = {"/v1/chat/completions": "ChatRequest", "/v1/completions": "CompletionRequest"}
    simple = (*SAMPLING, *PENALTIES, "max_tokens", "stream", "stop")
    for case in ALL:
        if case.path not in names or case.field not in simple:
            continue
        schema = {**schemas[names[case.path]], "components": {"schemas": schemas}}
        assert not jsonschema_rs.validator_for(schema).is_valid(case.body), case
