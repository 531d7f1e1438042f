"""A connection on this machine that takes its time, as one to the other side of the world does."""

from __future__ import annotations

import asyncio
import contextlib


class SlowLink:
    """What comes to its port goes on to another, and back, each byte `delay_s` later. Nothing is lost."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, port: int) -> int:
        """The port in front of `port`."""

        async def came(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, onward = await asyncio.open_connection("127.0.0.1", port)
            self._writers += [writer, onward]
            for source, target in ((reader, onward), (there, writer)):
                task = asyncio.create_task(self._carry(source, target))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

        self._server = await asyncio.start_server(came, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        data = b"."
        while data:
            try:
                data = await source.read(65536)
            except OSError:  # cut off
                data = b""
            loop.call_later(self._delay_s, self._arrive, target, data)

    @staticmethod
    def _arrive(target: asyncio.StreamWriter, data: bytes) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            target.write(data) if data else target.close()

    async def close(self) -> None:
        """Nobody is let in any more, and all connections end."""
        self._server.close()
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*(writer.wait_closed() for writer in self._writers), return_exceptions=True)
