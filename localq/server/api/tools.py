"""Tools of a request: their declarations, the choice among them, and calls in earlier messages."""

from __future__ import annotations

from localq.errors import LocalqError
from localq.server.api.common import new_id, read_arguments
from localq.server.api_error import bad_field, of_error
from localq.server.fields import Fields
from localq.server.request import AUTO, NAMED, NONE, REQUIRED, ToolChoice
from localq.text.tools import declaration
from localq.text.tools.declaration import Tool

_SEARCHES = ("web_search", "web_search_preview")


def make_tool(fields: Fields, schema: str) -> Tool:
    """A tool from its fields: name, description, strict, and its JSON schema in the field `schema`."""
    fields.require("name")
    name, description = fields.text("name") or "", fields.text("description") or ""
    parameters = fields.object(schema)
    try:
        if parameters is None:
            return Tool(name, description, strict=fields.flag("strict"))
        return Tool(name, description, fields.value(schema), fields.flag("strict"))
    except LocalqError as error:
        raise bad_field(fields.path, error.why, error.next_step) from None


def check_tools(tools: list[Tool], choice: ToolChoice, field: str = "tools") -> tuple[Tool, ...]:
    """The tools, whose names differ; a choice names one of them."""
    try:
        named = declaration.check(tools)
    except LocalqError as error:
        raise of_error(error, field) from None
    if choice.mode == NAMED and choice.name not in named:
        raise bad_field("tool_choice", f"no tool named {choice.name[:64]} is declared")
    if choice.mode == REQUIRED and not tools:
        raise bad_field("tool_choice", "no tools are declared")
    return tuple(tools)


def read_tools(fields: Fields) -> tuple[tuple[Tool, ...], ToolChoice]:
    """`tools`, `tool_choice` and `parallel_tool_calls` of chat completions."""
    fields.refuse("functions", "this deprecated parameter is not supported; use tools", ([],))
    fields.refuse("function_call", "this deprecated parameter is not supported; use tool_choice", (NONE, AUTO))
    tools = []
    for each in fields.objects("tools", declaration.MOST):
        each.require("type")
        each.choice("type", ("function",))
        each.require("function")
        inner = each.object("function")
        assert inner is not None
        tools.append(make_tool(inner, "parameters"))
    choice = _choice(fields, "function")
    return check_tools(tools, choice), choice


def _choice(fields: Fields, inside: str) -> ToolChoice:
    parallel = fields.flag("parallel_tool_calls", True)
    value = fields.value("tool_choice")
    if value is None or isinstance(value, str):
        return ToolChoice(fields.choice("tool_choice", (AUTO, NONE, REQUIRED)) or AUTO, parallel=parallel)
    given = fields.object("tool_choice")
    assert given is not None
    given.require("type")
    given.choice("type", ("function",))
    held = given.object(inside) if inside else given
    if held is None:
        raise given.bad(inside, "this field is required")
    held.require("name")
    return ToolChoice(NAMED, held.text("name") or "", parallel)


def read_flat_tools(fields: Fields) -> tuple[tuple[Tool, ...], ToolChoice]:
    """Tools of /v1/responses, where a function is not inside another object.

    A tool that searches the web is left out: clients offer it always, and the model is not told of it.
    """
    tools = []
    for each in fields.objects("tools", declaration.MOST):
        each.require("type")
        kind = each.text("type")
        if kind in _SEARCHES:
            continue
        if kind != "function":
            raise each.bad("type", f"{(kind or '')[:40]} is not supported", "Allowed: function.")
        tools.append(make_tool(each, "parameters"))
    choice = _choice(fields, "")
    return check_tools(tools, choice), choice


def read_calls(fields: Fields) -> tuple[tuple[str, str, str], ...]:
    """`tool_calls` of a message of an assistant: (id, name, arguments) of each."""
    found = []
    for each in fields.objects("tool_calls", declaration.MOST):
        each.choice("type", ("function",))
        each.require("function")
        inner = each.object("function")
        assert inner is not None
        inner.require("name")
        found.append((each.text("id", 256) or new_id("call_"), inner.text("name", 64) or "",
                      read_arguments(inner, "arguments")))  # fmt: skip
    return tuple(found)
