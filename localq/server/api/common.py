"""Fields that several APIs share: sampling, grammars, tools, texts of messages; and a reply that is collected whole."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from localq.chat import stop_strings
from localq.errors import LocalqError
from localq.sampling import MOST_BIASES, LogitOptions
from localq.sanitize import sanitize
from localq.server.api_error import ApiError, bad_field
from localq.server.events import AnswerText, CalledTool, Finished, ReplyEvent, Started, ThoughtText, TokenText
from localq.server.fields import Fields
from localq.text.grammar import ANY_JSON, Grammar

MOST_TOKENS = 2**31 - 1
MOST_MESSAGES, MOST_PARTS = 4096, 256
MAX_SEED = 2**63 - 1
NO_IMAGES = "only text is supported; this server never fetches URLs or opens files"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def new_id(prefix: str) -> str:
    """An id of a response, a call or an item."""
    return f"{prefix}{secrets.token_hex(12)}"


def read_sampling(fields: Fields, most_temperature: float = 2.0) -> dict[str, Any]:
    """The fields of `Sampling` that a request sets. top_p 0 keeps only the likeliest token."""
    found: dict[str, Any] = {
        "temperature": fields.number("temperature", 0, most_temperature),
        "top_p": fields.number("top_p", 0, 1),
        "top_k": fields.integer("top_k", 0, 2**31 - 1),
        "min_p": fields.number("min_p", 0, 0.999999),
        "repeat_penalty": fields.number("repeat_penalty", 0.01, 100),
        "seed": fields.integer("seed", -(2**63), MAX_SEED),
    }
    found = {name: value for name, value in found.items() if value is not None}
    if found.get("top_p") == 0:
        found |= {"top_p": 1.0, "temperature": 0.0}
    if "seed" in found:
        found["seed"] &= MAX_SEED
    return found


def read_logits(fields: Fields, logprobs: int | None) -> LogitOptions | None:
    """Bias, penalties and log probabilities of a request; None where it has none of them."""
    bias = fields.object("logit_bias")
    pairs = [] if bias is None else [_bias(bias, key, value) for key, value in fields.value("logit_bias").items()]
    if len(pairs) > MOST_BIASES:
        raise fields.bad("logit_bias", f"too many tokens ({len(pairs)})", f"Use at most {MOST_BIASES}.")
    found = LogitOptions(
        tuple(pairs),
        fields.number("presence_penalty", -2, 2) or 0.0,
        fields.number("frequency_penalty", -2, 2) or 0.0,
        logprobs,
    )
    return None if found.idle else found


def _bias(bias: Fields, key: str, value: Any) -> tuple[int, float]:
    if not (key.isascii() and key.isdecimal() and len(key) <= 9):
        raise bad_field(bias.path, "the keys must be token ids")
    number = bias.number(key, -100, 100)
    return int(key), 0.0 if number is None else number


def read_stops(fields: Fields, name: str) -> tuple[str, ...]:
    """Stop strings."""
    found = fields.texts(name, stop_strings.MOST)
    try:
        return stop_strings.validate(found)
    except LocalqError as error:
        raise fields.bad(name, error.why) from None


def read_format(fields: Fields, name: str) -> Grammar | None:
    """The grammar of a `response_format`, or of `text.format`. A schema is part of the request, never a file."""
    given = fields.object(name)
    if given is None:
        return None
    given.require("type")
    kind = given.choice("type", ("text", "json_object", "json_schema"))
    if kind == "text":
        return None
    schema: Any = json.loads(ANY_JSON)
    if kind == "json_schema":
        held = given.object("json_schema") or given  # of /v1/responses the schema is beside the type
        held.require("schema")
        if not isinstance(held.value("schema"), dict | bool):
            raise held.bad("schema", "must be a JSON schema")
        schema = held.value("schema")
    if schema == {}:
        schema = {"type": "object"}
    try:
        return Grammar("json_schema", json.dumps(schema))
    except LocalqError as error:
        raise fields.bad(name, error.why, error.next_step) from None


def check_grammar(grammar: Grammar, field: str) -> None:
    """Raise ApiError (400) for a grammar that cannot be used; takes up to seconds, so not in the event loop."""
    from localq.text import grammar as grammars  # start-up cost: llguidance, only where there is a grammar

    try:
        grammars.check(grammar)
    except LocalqError as error:
        raise bad_field(field, sanitize(error.why), error.next_step) from None


def read_text(fields: Fields, name: str, kinds: Iterable[str] = ("text",), required: bool = True) -> str:
    """A text that is a string or an array of parts of these kinds, which become lines."""
    value = fields.value(name)
    if isinstance(value, str):
        return value
    if value is None and not required:
        return ""
    if not isinstance(value, list):
        raise fields.bad(name, "must be a string or an array of parts")
    texts = []
    for part in fields.objects(name, MOST_PARTS):
        part.require("type")
        kind = part.text("type") or ""
        if kind == "refusal":
            texts.append(part.text("refusal") or "")
            continue
        if kind not in kinds:
            raise part.bad("type", NO_IMAGES)
        part.require("text")
        texts.append(part.text("text") or "")
    return "\n".join(texts)


def read_arguments(fields: Fields, name: str) -> str:
    """JSON text of the arguments of a call; "" counts as {}."""
    text = fields.text(name)
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        raise fields.bad(name, "must be a JSON object encoded as a string") from None
    if not isinstance(value, dict):
        raise fields.bad(name, "must be a JSON object encoded as a string")
    return text or "{}"


@dataclass
class WholeReply:
    """A reply that is collected for a client that does not stream."""

    answer: str = ""
    thought: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    calls: list[CalledTool] = field(default_factory=list)
    started: Started | None = None
    finished: Finished | None = None

    def add(self, event: ReplyEvent) -> None:
        """Add what a reply has yielded."""
        if isinstance(event, AnswerText):
            self.answer += event.text
            self.tokens += event.logprobs
        elif isinstance(event, ThoughtText):
            self.thought += event.text
        elif isinstance(event, CalledTool):
            self.calls.append(event)
        elif isinstance(event, Started):
            self.started = event
        else:
            self.finished = event

    def end(self) -> Finished:
        """The end. Raises ApiError for a reply without one."""
        if self.finished is None:
            raise ApiError(500, "The reply ended unexpectedly.")
        return self.finished
