"""Values of the settings about MCP servers: the table `[mcp]` of config.toml, and limits of tool calls.

Data without the servers, so that settings can be checked; `chat.tools` starts them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from localq.errors import usage_error

ROUNDS, TIMEOUT_S, RESULT = 10, 60, 20_000  # defaults: rounds of calls in a reply, seconds, characters
LIMITS = {"mcp_rounds": (1, 100), "mcp_timeout": (1, 3600), "mcp_result": (100, 10**6)}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,32}")


def parse(servers: Mapping[str, object]) -> dict[str, str]:
    """The table `[mcp]`: name -> command or URL. Raises LocalqError (exit 2) for anything else."""
    found: dict[str, str] = {}
    for name, server in servers.items():
        if _NAME.fullmatch(name) is None:
            raise usage_error(f"mcp.{name[:40]}", "invalid name", "Use 1 to 32 letters, digits, _ and -.")
        if not isinstance(server, str) or not server.strip():
            why = f"{server!r:.80} is not a command or URL"
            raise usage_error(f"mcp.{name}", why, 'Use text such as "npx -y SERVER" or "https://HOST/mcp".')
        found[name] = server
    return found


def check(**values: int) -> None:
    """Raise LocalqError (exit 2) for a value outside of `LIMITS`."""
    for name, value in values.items():
        least, most = LIMITS[name]
        if not least <= value <= most:
            raise usage_error(name, f"{value} is out of range", f"Use {least} to {most}.")
