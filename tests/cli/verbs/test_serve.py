"""`localq serve` as a command: what it says, who may use it, and how it ends."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import stat
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from localq.cli import execute
from localq.errors import ExitCode, LocalqError
from localq.server import key_file
from tests.support.cli.terminal_engine import Script
from tests.support.cli.terminal_localq import COMMAND, ROOT, environment, write_model

BODY = json.dumps({"messages": [{"role": "user", "content": "Hello"}]}).encode()


class Served:
    """A running `localq serve`."""

    def __init__(self, process: subprocess.Popen[str], home: Path) -> None:
        self.process, self.home = process, home
        self.lines: list[str] = []
        assert process.stderr is not None
        for line in process.stderr:
            self.lines.append(line.rstrip("\n"))
            if "Ctrl-C to stop" in line:
                break
        found = re.search(r"at (http://\S+)/v1", "\n".join(self.lines))
        assert found, self.lines
        self.url = found[1]

    def ask(self, path: str, body: bytes | None = None, key: str = "") -> dict[str, object]:
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        with urllib.request.urlopen(urllib.request.Request(self.url + path, body, headers), timeout=10) as response:
            found: dict[str, object] = json.load(response)
            return found

    def end(self, number: int) -> tuple[int, str]:
        """Exit code, and what was said at the end."""
        self.process.send_signal(number)
        _, rest = self.process.communicate(timeout=15)
        return self.process.returncode, rest


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    running: list[subprocess.Popen[str]] = []
    script = Script(text="Hello.", context=4096).write(tmp_path / "script.json")
    folder = write_model(tmp_path / "tiny")

    def begin(*arguments: str, **script_fields: object) -> Served:
        if script_fields:
            Script(context=4096, **script_fields).write(script)  # type: ignore[arg-type]
        home = tmp_path / "home"
        home.mkdir(exist_ok=True)
        command = [*COMMAND, str(script), "serve", str(folder), "--port", "0", *arguments]
        variables = environment(home, LOCALQ_RUNTIME=str(tmp_path / "runtime"))
        process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT
        )
        running.append(process)
        return Served(process, home)

    yield begin
    for process in running:
        process.kill()
        process.communicate()


def test_it_says_where_it_is_and_ends_at_ctrl_c(start) -> None:
    server = start()
    serving = next(line for line in server.lines if line.startswith("serving"))
    assert re.fullmatch(
        r"serving tiny \(CPU, bf16, context 4096\) at http://127\.0\.0\.1:\d+/v1 \(no key, this machine only\)", serving
    )
    example = next(line for line in server.lines if line.startswith("try: "))
    done = subprocess.run(
        ["bash", "-c", example.removeprefix("try: ").replace("curl", "curl -s")], capture_output=True, check=True
    )
    assert json.loads(done.stdout)["choices"][0]["message"]["content"] == "Hello."
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as connection:
        connection.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        assert connection.recv(12) == b"HTTP/1.1 400"
    code, rest = server.end(signal.SIGINT)
    assert (code, rest) == (ExitCode.OK, "")


def test_sigterm_gives_a_running_reply_time_and_a_second_ctrl_c_does_not(start) -> None:
    server = start(text="word ", repeat=0, step_s=0.01)
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as connection:
        body = json.dumps({**json.loads(BODY), "stream": True}).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(10)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stderr is not None
        assert server.process.stderr.readline() == "stopping: the current reply has 6 s to finish\n"
        code, _ = server.end(signal.SIGINT)
        whole = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                whole += part
    assert code == ExitCode.OK
    assert b"server: shutting down" in whole


def test_a_key_is_made_in_a_file_of_its_own_and_asked_for(start) -> None:
    server = start("--key", "auto", "--alias", "gpt-4o", "--log")
    path = server.home / "server-key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    key = path.read_text().strip()
    assert key not in "\n".join(server.lines)
    assert str(path) in "\n".join(server.lines)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        server.ask("/v1/models")
    assert server.ask("/v1/chat/completions", BODY[:-1] + b', "model": "gpt-4o"}', key)["model"] == "tiny"
    code, said = server.end(signal.SIGTERM)
    assert code == ExitCode.OK
    lines = [re.sub(r"[0-9.]+ s$", "", line) for line in said.splitlines()]
    assert lines == ["127.0.0.1 GET /v1/models 401 ", "127.0.0.1 POST /v1/chat/completions 200 "]
    assert key not in said


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--host", "0.0.0.0"], ExitCode.USAGE, "without a key. Add --key auto"),
        (["--host", "192.0.2.1"], ExitCode.USAGE, "--key auto"),
        (["--host", "192.0.2.1", "--key", "auto"], ExitCode.USAGE, "cannot listen on this address"),
        (["--host", "no.such.host.invalid", "--key", "auto"], ExitCode.USAGE, "cannot be resolved to an address"),
        (["--port", "70000"], ExitCode.USAGE, "out of range"),
        (["--origin", "evil"], ExitCode.USAGE, "not a valid origin"),
        (["--keep-alive", "soon"], ExitCode.USAGE, "not a valid time"),
        (["--key", "/nonexistent"], ExitCode.DISK, "nonexistent"),
        (["--key", "/"], ExitCode.USAGE, "not a regular file"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(
    own_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, says: str
) -> None:
    assert execute(["serve", "smollm2-135m", *arguments]) == code
    assert says in capsys.readouterr().err


def test_a_port_in_use_is_refused(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert execute(["serve", "smollm2-135m", "--port", str(other.getsockname()[1])]) == ExitCode.FAILURE
    assert "this port is already in use" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("x" * 20, 0o640, "other users"),
        ("x" * 20, 0o604, "other users"),
        ("short", 0o600, "16 to 256"),
        ("two lines\n" * 4, 0o600, "16 to 256"),
        ("", 0o600, "16 to 256"),
    ],
)
def test_a_key_file_that_others_read_or_that_is_weak_is_refused(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(LocalqError, match=says):
        key_file.read(str(path))


def test_a_key_stays_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config" / "config.toml"))
    first, path = key_file.read("auto")
    assert key_file.read("auto")[0].reveal() == first.reveal()
    assert str(first) == "***"
    assert path == tmp_path / "config" / "server-key"


def test_the_settings_of_the_file_are_used_and_shown(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (own_folder / "config.toml").write_text('host = "0.0.0.0"\nport = 9000\nkeep_alive = "10m"\n')
    assert execute(["serve", "smollm2-135m"]) == ExitCode.USAGE
    assert "--host 0.0.0.0" in capsys.readouterr().err
