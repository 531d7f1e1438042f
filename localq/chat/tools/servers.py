"""MCP servers as users name them: a command, an address, or a name from the table `[mcp]` of config.toml.

command   split as a shell would, started without one
address   https, or http on this machine
name      shown to the user and before equal names of tools. It comes from what the user has written, never from the
          server: a server must not call itself as it likes
"""

from __future__ import annotations

import importlib.util
import ipaddress
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from urllib.parse import urlsplit

from localq.errors import LocalqError, usage_error
from localq.sanitize import Address, sanitize

OPTION = "--mcp"
MOST_SERVERS = 16
MOST_NAME = 32
_INSTALL = "Install it: pip install 'localq[mcp]'"
# Programs that start others: the name of a server is the next word.
_LAUNCHERS = re.compile(r"(env|npx|bunx|bun|node|deno|uv|uvx|pipx|run|exec|python[\d.]*|sh|bash|docker|podman|nice)\Z")


@dataclass(frozen=True)
class ToolServer:
    """A server: its name, and a command (words) or an address."""

    name: str
    command: tuple[str, ...] = ()
    address: str = ""

    @property
    def what(self) -> str:
        """Command or address as it is shown, without passwords."""
        return sanitize(shlex.join(self.command) if self.command else str(Address(self.address)))

    @property
    def is_local(self) -> bool:
        """True if the address is on this machine."""
        return is_loopback(urlsplit(self.address).hostname or "")


def check_installed() -> None:
    """Raise LocalqError where the package `mcp` is missing."""
    if importlib.util.find_spec("mcp") is None:
        raise LocalqError(OPTION, "the `mcp` package is not installed", _INSTALL)


def parse(named: Sequence[str], configured: Mapping[str, str]) -> list[ToolServer]:
    """The servers that the user names. configured: name -> command or address, of config.toml.

    Raises LocalqError (exit 2) for an empty or malformed command, and an address that is neither https nor local.
    """
    if len(named) > MOST_SERVERS:
        raise usage_error(OPTION, f"more than {MOST_SERVERS} servers", "Use fewer servers.")
    found: list[ToolServer] = []
    for text in named:
        name, text = (text, configured[text]) if text in configured else ("", text)
        made = _address(text) if re.match(r"\s*[A-Za-z][A-Za-z0-9+.-]*://", text) else _command(text)
        found.append(ToolServer(_free(_plain(name) or made.name, found), made.command, made.address))
    return found


def is_loopback(host: str) -> bool:
    """Return whether `host` is this machine: localhost, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.casefold() == "localhost"


def _address(text: str) -> ToolServer:
    address = text.strip()
    try:
        parts = urlsplit(address)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise usage_error(f"{OPTION} {Address(address)}", f"not a valid URL ({error})", "Check the address.") from error
    if not host or sanitize(address) != address or any(each.isspace() for each in address):
        raise usage_error(f"{OPTION} {Address(address)}", "not a valid URL", "Check the address.")
    if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(host)):
        why = "MCP server URLs must begin with https:// (http:// is allowed only on this machine)"
        raise usage_error(f"{OPTION} {Address(address)}", why, "Use https.")
    return ToolServer(_plain(host), address=address)


def _command(text: str) -> ToolServer:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        why = f"cannot be split into words ({error})"
        raise usage_error(f"{OPTION} {text[:80]}", why, "Check the quotes.") from error
    if not words or not words[0] or any("\0" in each for each in words):
        raise usage_error(
            OPTION, "the command is empty", "Specify a command, a URL, or a server defined under [mcp] in config.toml."
        )
    return ToolServer(_name_of(words), command=words)


def _name_of(words: Sequence[str]) -> str:
    """The name of a command: "files" of `npx -y @scope/files`, `python files.py` and `env A=b ./files`."""
    for word in words:
        name = PurePath(word).name
        if not (word.startswith("-") or "=" in word or _LAUNCHERS.match(name)):
            return _plain(name.removesuffix(".py").removesuffix(".js"))
    return _plain(PurePath(words[0]).name)


def _plain(name: str) -> str:
    """`name` with letters, digits, - and _ only."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", name).strip("-")[:MOST_NAME]


def _free(name: str, taken: Sequence[ToolServer]) -> str:
    name, names, number = name or "server", {each.name for each in taken}, 2
    free = name
    while free in names:
        free, number = f"{name}-{number}", number + 1
    return free
