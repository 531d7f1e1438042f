"""What `--mcp` names: commands, addresses, names of config.toml; and what is refused before anything starts."""

from __future__ import annotations

import importlib.util

import pytest

from localq.chat.tools import servers
from localq.errors import LocalqError


@pytest.mark.parametrize(
    ("text", "name", "command"),
    [
        ("./files", "files", ("./files",)),
        ("npx -y @scope/server-files '/my notes'", "server-files", ("npx", "-y", "@scope/server-files", "/my notes")),
        ("python3.12 -u tools/search.py", "search", ("python3.12", "-u", "tools/search.py")),
        ("env TOKEN=x uvx mcp-git", "mcp-git", ("env", "TOKEN=x", "uvx", "mcp-git")),
        ("env", "env", ("env",)),
        ("'/opt/\x1b[31mred $(rm)'", "31mred-rm", ("/opt/\x1b[31mred $(rm)",)),
    ],
)
def test_a_command_is_split_without_a_shell_and_names_its_server(text, name, command):
    assert servers.parse([text], {}) == [servers.ToolServer(name, command)]
    assert "\x1b" not in servers.parse([text], {})[0].what


@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:8000/mcp", "http://localhost/mcp", "http://[::1]:80/", "https://h.example/mcp"]
)
def test_an_address_is_https_or_of_this_machine(address):
    (found,) = servers.parse([address], {})
    assert (found.address, found.command) == (address, ())
    assert found.is_local == ("example" not in address)


@pytest.mark.parametrize(
    "address",
    [
        "http://192.168.0.1/mcp", "http://127.0.0.1.example/mcp", "ftp://localhost/x", "file:///etc/passwd",
        "https://", "https://h example/", "http://localhost:99999/", "https://h.example/\u202e",
    ],
)  # fmt: skip
def test_other_addresses_are_refused(address):
    with pytest.raises(LocalqError) as caught:
        servers.parse([address], {})
    assert caught.value.exit_code == 2


def test_a_password_in_an_address_is_not_shown():
    (found,) = servers.parse(["https://me:hunter22@h.example/mcp?key=abcdef123"], {})
    assert found.what == "https://h.example/mcp"
    with pytest.raises(LocalqError) as caught:
        servers.parse(["http://me:hunter22@h.example/mcp"], {})
    assert "hunter22" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "  ", "''", "open 'quote"])
def test_a_command_that_is_none_is_refused(text):
    with pytest.raises(LocalqError) as caught:
        servers.parse([text], {})
    assert caught.value.exit_code == 2


def test_names_of_config_are_used_and_made_different():
    found = servers.parse(["notes", "./notes", "./notes"], {"notes": "npx files"})
    assert [(each.name, each.command) for each in found] == [
        ("notes", ("npx", "files")), ("notes-2", ("./notes",)), ("notes-3", ("./notes",)),
    ]  # fmt: skip
    with pytest.raises(LocalqError, match="more than 16"):
        servers.parse(["a"] * 17, {})


def test_a_missing_package_names_how_it_is_installed(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mcp" else find(name))
    with pytest.raises(LocalqError, match=r"pip install 'localq\[mcp\]'"):
        servers.check_installed()
