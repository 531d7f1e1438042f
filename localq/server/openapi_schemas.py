"""Schemas of requests and responses, for the OpenAPI document. What `api` reads decides; these describe it."""

from __future__ import annotations

from typing import Any

from localq.chat import stop_strings
from localq.sampling import MOST_LOGPROBS
from localq.server.api.common import EFFORTS, MOST_TOKENS

Schema = dict[str, Any]


def _optional(kind: str, **more: Any) -> Schema:
    return {"type": [kind, "null"], **more}


def _number(low: float, high: float) -> Schema:
    return _optional("number", minimum=low, maximum=high)


def _object(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(required)}


def _of(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _words(*words: str) -> Schema:
    return {"enum": [*words, None]}


TEXT, FLAG, ANY = {"type": "string"}, _optional("boolean"), _optional("object")
COUNT: Schema = {"type": "integer", "minimum": 0}
TOKENS = _optional("integer", minimum=1, maximum=MOST_TOKENS)
STOP: Schema = {"type": "string", "minLength": 1, "maxLength": stop_strings.LONGEST}
STOPS: Schema = {"anyOf": [STOP, {"type": "array", "maxItems": stop_strings.MOST, "items": STOP}, {"type": "null"}]}
SAMPLING: dict[str, Schema] = {
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _optional("integer", minimum=0, maximum=2**31 - 1),
    "min_p": _number(0, 0.999999),
    "repeat_penalty": _number(0.01, 100),
    "seed": _optional("integer", minimum=-(2**63), maximum=2**63 - 1),
}
LOGITS: dict[str, Schema] = {
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "logit_bias": _optional(
        "object", propertyNames={"pattern": "^[0-9]{1,9}$"}, additionalProperties={"type": "number", "minimum": -100,
                                                                                "maximum": 100}, maxProperties=300,
    ),
}  # fmt: skip
HEAD: dict[str, Schema] = {
    "model": _optional("string", maxLength=512, description="Default: the model that the server was started with"),
    "stream": FLAG,
    "user": _optional("string", maxLength=512, description="Requests from different users take turns"),
}
STREAM_OPTIONS = _optional("object", properties={"include_usage": FLAG}, description="Only with stream")
TEXT_PART = _object(("type", "text"), type={"enum": ["text", "input_text", "output_text"]}, text=TEXT)
CONTENT: Schema = {"anyOf": [TEXT, {"type": "array", "maxItems": 256, "items": TEXT_PART}, {"type": "null"}]}
TOOL_SCHEMA = _optional("object", description="JSON schema for an object")
FUNCTION = _object(
    ("name",), name={"type": "string", "pattern": "^[a-zA-Z0-9_-]{1,64}$"}, description=_optional("string"),
    parameters=TOOL_SCHEMA, strict=FLAG,
)  # fmt: skip
CHOICE: Schema = {"anyOf": [_words("auto", "none", "required"), {"type": "object"}]}
FORMAT = _optional(
    "object", properties={"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": ANY},
    required=["type"],
)  # fmt: skip

REQUESTS: dict[str, Schema] = {
    "ChatMessage": _object(
        ("role",), role={"enum": ["system", "developer", "user", "assistant", "tool"]}, content=CONTENT,
        reasoning_content=_optional("string"), tool_call_id=_optional("string"),
        tool_calls=_optional(
            "array", items=_object(("function",), id=_optional("string"), function={"type": "object"})
        ),
    ),
    "ChatRequest": _object(
        ("messages",), messages={"type": "array", "minItems": 1, "items": _of("ChatMessage")}, **HEAD, **SAMPLING,
        **LOGITS, max_tokens=TOKENS, max_completion_tokens=TOKENS, stop=STOPS,
        n=_optional("integer", minimum=1, maximum=1), logprobs=FLAG,
        top_logprobs=_optional("integer", minimum=0, maximum=MOST_LOGPROBS), response_format=FORMAT,
        reasoning_effort=_words(*EFFORTS), stream_options=STREAM_OPTIONS, tool_choice=CHOICE,
        think_budget=_optional("integer", minimum=0, maximum=MOST_TOKENS), parallel_tool_calls=FLAG,
        tools=_optional("array", maxItems=128,
                        items=_object(("type", "function"), type={"const": "function"}, function=FUNCTION)),
    ),
    "CompletionRequest": _object(
        ("prompt",), prompt={"anyOf": [TEXT, {"type": "array", "minItems": 1, "items": COUNT}]}, **HEAD, **SAMPLING,
        **LOGITS, max_tokens=TOKENS, stop=STOPS, logprobs=_optional("integer", minimum=0, maximum=5),
        response_format=FORMAT, stream_options=STREAM_OPTIONS, n=_optional("integer", minimum=1, maximum=1),
    ),
    "ResponseRequest": _object(
        ("input",), input={"anyOf": [TEXT, {"type": "array", "minItems": 1, "items": {"type": "object"}}]}, **HEAD,
        **SAMPLING, instructions=_optional("string"), max_output_tokens=TOKENS, tool_choice=CHOICE,
        parallel_tool_calls=FLAG, text=ANY, reasoning=_optional("object", properties={"effort": _words(*EFFORTS)}),
        tools=_optional("array", maxItems=128, items=FUNCTION), store=FLAG,
        previous_response_id=_optional("string", maxLength=256),
    ),
    "MessageRequest": _object(
        ("messages", "max_tokens"), messages={"type": "array", "minItems": 1, "items": _of("BlockMessage")},
        max_tokens={"type": "integer", "minimum": 1, "maximum": MOST_TOKENS}, model=HEAD["model"], stream=FLAG,
        system=CONTENT, stop_sequences=_optional("array", maxItems=stop_strings.MOST, items=STOP),
        thinking=ANY, output_config=ANY, metadata=ANY, tools=_optional("array", maxItems=128), tool_choice=ANY,
        **{name: SAMPLING[name] for name in ("temperature", "top_p", "top_k")},
    ),
    "BlockMessage": _object(
        ("role", "content"), role={"enum": ["user", "assistant", "system"]},
        content={"anyOf": [TEXT, {"type": "array", "items": _object(("type",), type=TEXT)}]},
    ),
    "CountRequest": _object(
        ("messages",), messages={"type": "array", "minItems": 1, "items": _of("BlockMessage")}, model=HEAD["model"],
        system=CONTENT,
    ),
}  # fmt: skip

USAGE = _object(
    ("prompt_tokens", "completion_tokens", "total_tokens"), prompt_tokens=COUNT, completion_tokens=COUNT,
    total_tokens=COUNT, prompt_tokens_details={"type": "object"}, completion_tokens_details={"type": "object"},
)  # fmt: skip
RESPONSES: dict[str, Schema] = {
    "Error": _object(("error",), error=_object(("message", "type", "param", "code"), message=TEXT, type=TEXT,
                                               param=_optional("string"), code=_optional("string"))),
    "AnthropicError": _object(("type", "error"), type={"const": "error"},
                              error=_object(("type", "message"), type=TEXT, message=TEXT)),
    "Health": _object(("status", "version"), status={"const": "ok"}, version=TEXT),
    "Document": _object(("openapi", "paths"), openapi=TEXT, paths={"type": "object"}),
    "Model": _object(("id", "object", "created", "owned_by"), id=TEXT, object={"const": "model"}, created=COUNT,
                     owned_by=TEXT),
    "ModelList": _object(("object", "data"), object={"const": "list"},
                         data={"type": "array", "items": _of("Model")}),
    "ChatCompletion": _object(
        ("id", "object", "created", "model", "choices", "usage"), id=TEXT, object={"const": "chat.completion"},
        created=COUNT, model=TEXT, usage=USAGE,
        choices={"type": "array", "minItems": 1, "maxItems": 1, "items": _object(
            ("index", "message", "finish_reason"), index=COUNT,
            message=_object(("role", "content"), role={"const": "assistant"}, content=_optional("string"),
                            reasoning_content=TEXT, tool_calls={"type": "array", "items": {"type": "object"}}),
            finish_reason={"enum": ["stop", "length", "tool_calls"]}, logprobs=ANY,
        )},
    ),
    "TextCompletion": _object(
        ("id", "object", "created", "model", "choices", "usage"), id=TEXT, object={"const": "text_completion"},
        created=COUNT, model=TEXT, usage=USAGE,
        choices={"type": "array", "minItems": 1, "maxItems": 1, "items": _object(
            ("text", "index", "finish_reason"), text=TEXT, index=COUNT, finish_reason={"enum": ["stop", "length"]},
        )},
    ),
    "Response": _object(
        ("id", "object", "created_at", "status", "model", "output", "usage"), id=TEXT, object={"const": "response"},
        created_at=COUNT, status={"enum": ["completed", "incomplete"]}, model=TEXT, usage={"type": "object"},
        output={"type": "array", "items": _object(("id", "type"), id=TEXT,
                                                  type={"enum": ["message", "reasoning", "function_call"]})},
    ),
    "Message": _object(
        ("id", "type", "role", "model", "content", "stop_reason", "usage"), id=TEXT, type={"const": "message"},
        role={"const": "assistant"}, model=TEXT, usage={"type": "object"}, stop_sequence=_optional("string"),
        content={"type": "array", "items": _object(("type",), type={"enum": ["text", "thinking", "tool_use"]})},
        stop_reason={"enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use"]},
    ),
    "Count": _object(("input_tokens",), input_tokens=COUNT),
}  # fmt: skip
