"""`/tools`: the tools of MCP servers, what the user allows, and servers that are started again."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from localq.chat.commands.host import Host
from localq.chat.session import ChatSession
from localq.chat.tools.permissions import OfferedTool, Permission
from localq.errors import usage_error
from localq.sanitize import sanitize
from localq.wording import table_lines

if TYPE_CHECKING:  # start-up cost: most chats have no servers
    from localq.chat.tools.toolbox import Toolbox

MOST_FIRST_LINE = 100  # characters of a description in the list
_STATES = {Permission.ASK: "asks", Permission.ALLOWED: "allowed", Permission.NEVER: "never"}
_SET = {"ask": Permission.ASK, "allow": Permission.ALLOWED, "never": Permission.NEVER}
_USAGE = "Use /tools, /tools TOOL, /tools allow|ask|never TOOL, or /tools restart SERVER."


def tools(session: ChatSession, argument: str, host: Host) -> str:
    """List the tools, describe one, set whether one may be called, or start a server again."""
    toolbox = session.tools.toolbox
    if toolbox is None:
        return "no MCP servers; to add one, run `localq chat --mcp COMMAND|URL`"
    word, _, name = argument.partition(" ")
    name = name.strip()
    if not argument:
        return sanitize("\n".join([*session.tool_report(summary=False), *_list(toolbox)]))
    if word == "restart" and name:
        return toolbox.restart(name)
    if word in _SET and name:
        toolbox.set_permission(name, _SET[word])
        return f"{name}: {_STATES[_SET[word]]}"
    found = toolbox.find(argument)
    if found is None:
        raise usage_error("/tools", f"no such tool: {argument[:40]!r}", _USAGE)
    return sanitize(_describe(found, toolbox))


def _list(toolbox: Toolbox) -> list[str]:
    """A table of the tools, below the servers."""
    servers = [
        f"{each.name}: {each.what}{'' if toolbox.is_running(each.name) else ' (not running)'}"
        for each in toolbox.servers
    ]
    rows = [[each.label, each.server, _STATES[toolbox.permission(each)], _first_line(each)] for each in toolbox.tools]
    return [*servers, *(table_lines(["TOOL", "SERVER", "CALLS", "DESCRIPTION"], rows) if rows else ["no tools"])]


def _first_line(tool: OfferedTool) -> str:
    line = tool.description.strip().partition("\n")[0]
    return line if len(line) <= MOST_FIRST_LINE else f"{line[:MOST_FIRST_LINE]}..."


def _describe(tool: OfferedTool, toolbox: Toolbox) -> str:
    lines = [f"{tool.label} from {tool.server}: {_STATES[toolbox.permission(tool)]}", tool.description.strip()]
    return "\n".join([*lines, "arguments:", json.dumps(tool.schema, ensure_ascii=False, indent=2)])
