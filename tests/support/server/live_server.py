"""A whole server in a thread of this process, over an engine process that says what a script tells it to."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localq.chat.open_model import OpenSession, Watcher
from localq.chat.session import ChatSession
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.sanitize import Secret
from localq.server import app
from localq.server import serve as serving
from localq.server.guard import Access
from localq.server.metrics import Metrics
from localq.server.model import ModelRequest
from localq.server.names import ModelNames
from localq.server.service import Service
from localq.server.slot import QUEUE_LIMIT, Slot
from localq.text.tokenizer import Tokenizer
from localq.worker.client import COMMAND, EngineClient
from localq.worker.messages import Load
from tests.support.cli.terminal_engine import Script, latin
from tests.support.server.scripted_model import QuietWatcher

KEY = "lq-0123456789abcdef"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@dataclass(frozen=True)
class Answer:
    """A response: status, headers in lower case, body."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """What a stream said: the JSON of each event, and texts that are none."""
        lines = self.body.decode().split("\n")
        said = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
        return [json.loads(each) if each.startswith("{") else each for each in said]


class LiveServer:
    """`say` sets what the engine answers; `post` and `get` ask. folder: a model as `terminal_localq.write_model`.

    real   the product's engine, on the CPU; else one that says what the script tells it to
    """

    def __init__(self, folder: Path, home: Path, key: str | None = None, limit: int = QUEUE_LIMIT, **more: Any) -> None:
        self.script, self.folder, self.key = home / "script.json", folder, key
        scripted = (sys.executable, "-m", "tests.support.cli.terminal_engine", str(self.script))
        self._engine = COMMAND if more.pop("real", False) else scripted
        self.say("Hello.")
        self._connections: list[socket.socket] = []
        self.watcher = QuietWatcher()
        self.slot = Slot(self.watcher, more.pop("keep_alive_s", None), limit, self._open)
        self.request = ModelRequest("tiny")
        self.loaded = self.slot.open(self.request, self.watcher)
        listening = serving.listen("127.0.0.1", 0)
        self.port: int = listening.getsockname()[1]
        self.access = Access(self.port, key=None if key is None else Secret(key), **more)
        self.names = ModelNames(self.request, "tiny", ("alias",))
        self.metrics = Metrics()
        self.app = app.make(Service(self.slot, self.names, self.metrics), self.access)
        self.server = serving.make(self.app, self.slot, self.watcher.say)
        self._thread = threading.Thread(target=self._run, args=[listening], daemon=True)
        self._thread.start()
        while not self.server.started:
            self._thread.join(0.01)

    def _run(self, listening: socket.socket) -> None:
        asyncio.run(self.server.serve(sockets=[listening]))

    @contextlib.contextmanager
    def _open(self, request: ModelRequest, watcher: Watcher) -> Iterator[OpenSession]:
        client = EngineClient(self._engine)
        client.start()
        tokenizer = Tokenizer.load(open_model(self.folder))
        session = ChatSession(client, Load(str(self.folder), LoadOptions(request.name, "cpu", ctx=4096)), tokenizer)
        session.record.model = request.name
        try:
            yield OpenSession(session, client)
        finally:
            client.close()

    def say(self, text: str = "Hello.", **more: Any) -> None:
        """What the engine says from now on (`Script`)."""
        Script(text=latin(text), **{"context": 4096, **more}).write(self.script)

    def hang_up(self) -> None:
        """Close the connections that `connect` has made."""
        for each in self._connections:
            each.close()
        self._connections.clear()

    def close(self) -> None:
        self.hang_up()
        self.server.should_exit = True
        self._thread.join(15)
        assert not self._thread.is_alive()
        self.slot.close(0)

    # ---- requests

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            given = {} if self.key is None else {"authorization": f"Bearer {self.key}"}
            connection.request(method, path, body, {**given, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, raw, {"content-type": "application/json", **headers})

    def chat(self, **fields: Any) -> Answer:
        return self.post("/v1/chat/completions", {**HELLO, **fields})

    def raw(self, request: bytes, timeout: float = 5.0) -> bytes:
        """What comes back for raw bytes until the connection is closed, or its first response is whole."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as connection:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendall(request)
            return read_response(connection)

    def connect(self, body: Any = None, path: str = "/v1/chat/completions") -> socket.socket:
        """A connection over which a request was sent; `hang_up` closes it."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20)
        self._connections.append(connection)
        raw = json.dumps({**HELLO, "stream": True} if body is None else body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        return connection


def read_response(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            found += part
            head, mark, rest = found.partition(b"\r\n\r\n")
            length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            if mark and length and len(rest) >= int(length[0].split(b":")[1]):
                break
    return found
