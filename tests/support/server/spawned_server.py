"""`localq serve` as a process, for campaigns: requests, and what the process and its engine hold."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Holdings:
    """What a process holds: resident memory in bytes, open descriptors, threads; of the memory, pages of files."""

    rss: int
    descriptors: int
    threads: int
    of_files: int = 0


class SpawnedServer:
    """Started with the packaged model on the CPU; `command` instead of `python -m localq` for another engine."""

    def __init__(self, home: Path, model: str = "smollm2-135m", command: tuple[str, ...] = ()) -> None:
        variables = {f"LOCALQ_{name}": str(home / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
        start = command or (sys.executable, "-m", "localq")
        arguments = ["serve", model, "--port", "0", "--ctx", "1k", "--device", "cpu"]
        self.log: list[str] = []
        self.process = subprocess.Popen(
            [*start, *arguments], stderr=subprocess.PIPE, text=True, env={**os.environ, **variables}
        )
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if "Ctrl-C to stop" in line:
                break
        urls = [word for line in self.log for word in line.split() if word.startswith("http://")]
        if not urls:
            raise SystemExit("".join(self.log))
        self.port = int(urls[0].split(":")[2].split("/")[0])
        self.known = psutil.Process(self.process.pid)

    def holdings(self) -> Holdings:
        """What the process of the server holds."""
        with self.known.oneshot():
            memory = self.known.memory_info()
            return Holdings(memory.rss, self.known.num_fds(), self.known.num_threads(), memory.shared)

    def post(self, path: str, body: Any, timeout: float = 120) -> tuple[int, Any]:
        """Status and JSON of a response."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            raw = response.read()
            return response.status, json.loads(raw) if raw.startswith(b"{") else raw.decode()
        finally:
            connection.close()

    def send(self, body: Any, path: str = "/v1/chat/completions") -> socket.socket:
        """A connection over which a request was sent."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=60)
        raw = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
        return connection

    def metric(self, name: str) -> float:
        """A metric without labels."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        finally:
            connection.close()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"localq_{name} "))

    def close(self) -> int:
        """End it; the exit code."""
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=20)
        self.process.kill()
        return self.process.wait()


def reset(connection: socket.socket) -> None:
    """Close with RST."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
