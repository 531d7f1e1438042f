"""Transports of MCP: the process of a command, and an address, with limits that `mcp` itself does not set.

A transport is an async context that yields two streams of messages, as `mcp.Client` takes it. A line or a body over
MOST_MESSAGE_BYTES ends the connection. Redirects are followed within the origin of the address only, by `mcp`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from localq.chat.tools.servers import ToolServer
from localq.errors import LocalqError

if TYPE_CHECKING:  # start-up cost, and an optional package
    import httpx2
    from mcp.client._transport import TransportStreams

MOST_MESSAGE_BYTES = 16 * 2**20
GRACE_S = 1.0  # for a server to end by itself at the end of its stdin
KILL_S = 4.0  # for `server_process` to end the group, which takes up to 2 s
_PROGRAM = Path(__file__).with_name("server_process.py")
# Of the chat's environment: no tokens and no settings of localq. `env NAME=VALUE COMMAND` adds to it.
_INHERITED = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR")


@contextlib.asynccontextmanager
async def process_streams(
    server: ToolServer, log: Path, ended: Callable[[int], None] = lambda code: None
) -> AsyncIterator[TransportStreams]:
    """Streams of the command of a server, which runs until the context ends. ended: gets its exit code.

    Raises OSError where it cannot be started.
    """
    import anyio
    from mcp.shared.message import SessionMessage

    environment = {name: os.environ[name] for name in _INHERITED if name in os.environ}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", str(_PROGRAM), str(os.getpid()), str(log), *server.command),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=environment,
        limit=MOST_MESSAGE_BYTES,
        start_new_session=True,  # a group of its own; Ctrl-C does not reach it
    )
    incoming, read = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    tasks = [asyncio.create_task(_read(process, incoming, ended)), asyncio.create_task(_write(process, outgoing))]
    try:
        yield read, write
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.shield(asyncio.create_task(_stop(process)))
        process._transport.close()  # type: ignore[attr-defined]  # no public name; a process left over may hold a pipe
        for stream in (incoming, read, write, outgoing):
            stream.close()


async def _read(process: asyncio.subprocess.Process, into: Any, ended: Callable[[int], None]) -> None:
    """Pass on each line that is a message; other lines, such as banners, are left out."""
    import anyio
    from mcp.shared.message import SessionMessage
    from mcp_types import jsonrpc_message_adapter

    assert process.stdout is not None
    try:
        with contextlib.suppress(ValueError, anyio.BrokenResourceError, anyio.ClosedResourceError):  # a line too long
            while line := await process.stdout.readline():
                with contextlib.suppress(ValueError):
                    message = SessionMessage(jsonrpc_message_adapter.validate_json(line, by_name=False))
                    await into.send(message)
        with contextlib.suppress(TimeoutError):
            ended(await asyncio.wait_for(process.wait(), GRACE_S))
    finally:
        into.close()  # what waits for an answer gets an error


async def _write(process: asyncio.subprocess.Process, outgoing: Any) -> None:
    assert process.stdin is not None
    with contextlib.suppress(OSError):
        async for message in outgoing:
            text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            process.stdin.write(text.encode("utf-8", "replace") + b"\n")
            await process.stdin.drain()


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the server: by the end of its stdin, then by a signal to its program, which ends the group."""
    if process.stdin is not None:
        process.stdin.close()
    for wait_s, number in ((GRACE_S, signal.SIGTERM), (KILL_S, signal.SIGKILL)):
        try:
            await asyncio.wait_for(process.wait(), wait_s)
            return
        except TimeoutError:
            with contextlib.suppress(OSError):
                process.send_signal(number) if number is signal.SIGTERM else os.killpg(process.pid, number)


@contextlib.asynccontextmanager
async def address_streams(server: ToolServer) -> AsyncIterator[TransportStreams]:
    """Streams of a server at an address (streamable HTTP). A proxy is used for other machines only."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    # A stream may be silent for long: the time limit of a call is set by its caller.
    timeout = httpx2.Timeout(30.0, read=None)
    async with (
        httpx2.AsyncClient(
            timeout=timeout, follow_redirects=False, trust_env=not server.is_local, event_hooks={"response": [_limit]}
        ) as client,
        streamable_http_client(server.address, http_client=client) as streams,
    ):
        yield streams


async def _limit(response: httpx2.Response) -> None:
    """Limit the body of a response; an event stream has a limit for each event, which `mcp` sets."""
    import httpx2

    class Limited(httpx2.AsyncByteStream):
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        async def __aiter__(self) -> AsyncIterator[bytes]:
            size = 0
            async for part in self._stream:
                size += len(part)
                if size > MOST_MESSAGE_BYTES:
                    raise too_large()
                yield part

        async def aclose(self) -> None:
            await self._stream.aclose()

    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        response.stream = Limited(response.stream)


def too_large() -> LocalqError:
    """The error for a message over the limit."""
    return LocalqError("MCP server", f"sent more than {MOST_MESSAGE_BYTES / 2**20:.0f} MiB at once")
