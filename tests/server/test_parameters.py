"""Wrong fields are refused with 400, in the shape of the API, by their name; nothing reaches the engine."""

from __future__ import annotations

import random

import pytest

from tests.support.server.bad_fields import ALL, BASES, WrongField, draw
from tests.support.server.live_server import LiveServer


def problem(server: LiveServer, case: WrongField) -> str:
    """What is wrong with the answer to a wrong field; "" if nothing."""
    answer = server.post(case.path, case.body)
    if answer.status != 400:
        return f"{answer.status}: {answer.body[:200]!r}"
    error = answer.json["error"]
    is_named = case.field in error["message"] if case.path == "/v1/messages" else case.field in (error["param"] or "")
    if not is_named or not error["message"] or error["type"] != "invalid_request_error":
        return str(error)
    return "" if " at 0x" not in error["message"] else error["message"]


def test_every_wrong_value_is_refused_by_the_name_of_its_field(server: LiveServer) -> None:
    found = {f"{case.path} {case.field}={str(case.body.get(case.field))[:60]}": said
             for case in ALL if (said := problem(server, case))}  # fmt: skip
    assert found == {}
    assert len(ALL) > 400
    assert not server.slot.state().busy


def test_wrong_fields_among_right_ones(server: LiveServer) -> None:
    """1,000 of the campaign's 100,000 (`tests.tools.serve_campaign`)."""
    source = random.Random(33)
    for _ in range(1000):
        case = draw(source)
        assert problem(server, case) == "", case


@pytest.mark.parametrize("path", BASES)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0},
        {"temperature": 2, "top_p": 1, "top_k": 0},
        {"top_p": 0},
        {"seed": -1},
        {"seed": 2**63 - 1},
        {"max_tokens": 3.0},
        {"stop": None, "tools": [], "metadata": None, "user": None, "stream": None},
        {"store": True, "service_tier": "auto", "a_field_of_next_year": {"x": 1}},
    ],
)
def test_right_values_are_taken(server: LiveServer, path: str, fields: dict[str, object]) -> None:
    answer = server.post(path, {**BASES[path], **fields})
    assert (answer.status, b"Hello." in answer.body) == (200, True), answer.body
