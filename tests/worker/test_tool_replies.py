"""Replies of a real engine with random weights keep to grammars of tool calls, and are read as calls of the tools."""

from __future__ import annotations

import json
from typing import Any

import pytest

from localq.chat.reply import Reply
from localq.chat.reply_limits import NO_LIMITS
from localq.chat.reply_stream import reply_decoder, stream
from localq.chat.session import ChatSession
from localq.sampling import Sampling
from localq.text.tools.declaration import Tool
from localq.worker.messages import Generate
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.text.tool_calls import FORMATS
from tests.support.worker.in_process_client import session_over

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 2, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days"],
}
NOTHING = {"type": "object", "additionalProperties": False}
TOOLS = [Tool("weather", "", SCHEMA, strict=True), Tool("clock", "", NOTHING, strict=True)]


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> ChatSession:
    return session_over(make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny", initializer_range=0.15))


def reply_of(session: ChatSession, name: str, choice: str, seed: int, draft_tokens: int = 0) -> Reply:
    session.ensure_loaded()
    tokenizer, form = session.tokenizer, FORMATS[name]
    prompt = tokenizer.encode("The ship")
    request = Generate(
        next(session.request_ids), prompt, Sampling(temperature=1.5, seed=seed), sorted(tokenizer.stop_ids), 400,
        grammar=form.grammar(TOOLS, choice, tokenizer.grammar_tokens, parallel=False), draft_tokens=draft_tokens,
    )  # fmt: skip
    into = reply_decoder(tokenizer, prompt, tools=form.stream(TOOLS))
    *_, reply = stream(session.client, request, into, False, NO_LIMITS, tokenizer.decode)
    assert isinstance(reply, Reply)
    return reply


@pytest.mark.parametrize("name", ["hermes", "qwen", "gemma", "glm", "mistral", "python", "action"])
def test_a_random_model_makes_the_calls_that_it_must_make(session, name):
    for seed, choice in enumerate(("required", "weather", "required")):
        reply = reply_of(session, name, choice, seed)
        assert (reply.reason, reply.text) == ("stop", "")
        (call,) = reply.calls
        given = json.loads(call.arguments)
        if call.name == "clock":
            assert choice == "required"
            continue
        assert 2 <= len(given["city"]) <= 8
        assert given["days"] in range(1, 15)
        assert given.get("unit", "C") in ("C", "F")


def test_what_a_grammar_forces_is_drafted_and_changes_no_call(session):
    for name in ("hermes", "qwen"):
        plain, drafted = (reply_of(session, name, "weather", 3, draft_tokens=each) for each in (0, 4))
        assert plain.calls == drafted.calls != ()
        assert drafted.stats.generated_tokens == plain.stats.generated_tokens
