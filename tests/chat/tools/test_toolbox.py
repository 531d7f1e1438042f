"""Real servers of the `mcp` package: listing, calls, failures, the end of processes; over stdio and over HTTP."""

from __future__ import annotations

import http.server
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from localq.chat.tools import mcp_client, servers, transports
from localq.chat.tools.permissions import Decision, Permission
from localq.chat.tools.toolbox import Toolbox, ToolLimits
from localq.errors import LocalqError
from localq.sanitize import sanitize
from localq.text.tools import declaration
from tests.support.chat.tool_chats import COMMAND, NAME, SERVER, at_home, serve

WAIT_S = 30.0


def run(box: Toolbox, name: str, arguments: str = "{}"):
    tool = box.find(name)
    assert tool is not None
    return box.call(tool, arguments, lambda: False)


def until(condition) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_tools_are_listed_with_sanitized_texts(box):
    assert [each.label for each in box.tools][:3] == ["add", "note", "fail"]
    assert {each.server for each in box.tools} == {NAME}  # not the name that the server gives itself
    hostile = box.find("hostile")
    assert hostile.description == sanitize(hostile.description)
    assert "red" in hostile.description
    assert box.find("add").schema["required"] == ["a", "b"]
    assert box.summary() == f"9 from {NAME}"


def test_results_and_errors_of_tools(box):
    assert run(box, "add", '{"a": 2, "b": 3}').text == "5"
    failed = run(box, "fail")
    assert (failed.failed, failed.text) == (True, "Error executing tool fail")
    assert run(box, "hostile").text == sanitize(run(box, "hostile").text)
    assert "image/png" in run(box, "picture").text
    long = run(box, "long", '{"size": 1000000}')
    assert (len(long.text), long.length) == (20_000, 10**6)


def test_a_server_gets_no_secrets_of_the_environment(box, monkeypatch):
    names = run(box, "environment").text.split()
    assert "PATH" in names
    assert not [each for each in names if each.startswith(("LOCALQ_", "HF_", "PYTEST", "PYTHON"))]


def test_a_call_is_stopped_and_the_next_one_runs(box, home):
    (home / "waiting").unlink(missing_ok=True)
    stopped = threading.Event()

    def stop() -> None:
        until((home / "waiting").exists)
        stopped.set()  # as a session does, for a stop that comes before the call is known
        box.stop()

    threading.Thread(target=stop).start()
    assert box.call(box.find("wait"), '{"seconds": 30}', stopped.is_set) is None
    assert box.call(box.find("wait"), '{"seconds": 30}', lambda: True) is None  # stopped before it began
    assert run(box, "add", '{"a": 1, "b": 1}').text == "2"


def test_permissions_and_questions(box):
    add = box.find("add")
    assert box.ask(add, "{}", lambda: False) is None  # nobody to ask
    box.asker = lambda question: question.answer(Decision.SESSION)
    assert box.permission(add) is Permission.ASK
    assert box.ask(add, "{}", lambda: False) is Decision.SESSION
    assert box.permission(add) is Permission.ALLOWED
    box.asker = lambda question: threading.Thread(target=box.stop).start()
    assert box.ask(box.find("note"), "{}", lambda: False) is Decision.STOP
    box.asker = lambda question: None  # the stop came just before the question
    assert box.ask(box.find("note"), "{}", lambda: True) is Decision.STOP
    with pytest.raises(LocalqError, match="no such tool: 'nothing'"):
        box.set_permission("nothing", Permission.NEVER)


@pytest.mark.parametrize("given", ["add", f"{NAME}.add", f"{NAME}.*"])
def test_what_is_allowed_in_advance(box, given):
    early = Toolbox(box.servers, allowed=(given,))
    assert early.permission(box.find("add")) is Permission.ALLOWED
    assert early.permission(box.find("note")) is (Permission.ALLOWED if given.endswith("*") else Permission.ASK)


def test_what_is_allowed_and_matches_nothing_is_named(monkeypatch):
    monkeypatch.setattr(mcp_client.ServerConnection, "open", lambda self: done([mcp_client.ServerTool("a", "", {})]))
    box = Toolbox(servers.parse(["./one"], {}), allowed=("a", "one.*", "b", "two.*"))
    box.wait()
    box.wait()
    assert box.take_notices() == [f"--mcp-allow {each}: no such tool" for each in ("b", "two.*")]


def test_a_server_that_dies_in_a_call_and_is_started_again(tmp_path):
    with serve(tmp_path) as box:
        box.set_permission("add", Permission.ALLOWED)
        died = run(box, "die")
        assert died.failed
        assert died.text == "the server exited (exit code 3: it is over)"
        assert not box.is_running(NAME)
        assert run(box, "add", '{"a": 1, "b": 1}').text.startswith(f"the server {NAME} is not running")
        with pytest.MonkeyPatch.context() as patch:
            at_home(patch, tmp_path)
            assert box.restart(NAME) == f"{NAME}: 9 tools"
        assert box.permission(box.find("add")) is Permission.ASK  # it may be another program by now
        assert run(box, "add", '{"a": 1, "b": 1}').text == "2"
        with pytest.raises(LocalqError, match="no such server: 'other'"):
            box.restart("other")
    assert (tmp_path / ".local/state/localq/mcp" / f"{NAME}.log").stat().st_mode & 0o777 == 0o600


def test_two_servers_with_equal_tools_over_stdio_and_http(tmp_path):
    port_file = tmp_path / "port"
    environment = {**os.environ, "HOME": str(tmp_path)}
    process = subprocess.Popen([sys.executable, str(SERVER), "--http", str(port_file)], env=environment)
    try:
        until(port_file.exists)
        address = f"http://127.0.0.1:{port_file.read_text()}/mcp"
        with serve(tmp_path, f"{COMMAND} --child", address, limits=ToolLimits(seconds=0.3)) as box:
            assert box.take_notices() == []
            assert {each.server for each in box.tools} == {NAME, "127-0-0-1"}
            labels = [each.label for each in box.tools]
            assert len(set(labels)) == len(labels) == 18
            assert f"{NAME}__add" in labels
            assert run(box, "127-0-0-1__add", '{"a": 2, "b": 2}').text == "4"
            assert run(box, "127-0-0-1__wait", '{"seconds": 5}').text == "no result within 0.3 s (mcp_timeout)"
            child = int((tmp_path / "server.pid").read_text())
            assert is_alive(child)
        until(lambda: not is_alive(child))  # the launcher's child, too
    finally:
        process.kill()
        process.wait()


def test_the_processes_end_with_a_chat_that_is_killed(tmp_path):
    program = (
        "import sys, time; from localq.chat.tools import servers; from localq.chat.tools.toolbox import Toolbox\n"
        "box = Toolbox(servers.parse([sys.argv[1]], {})); box.wait(); print('ready', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "HOME": str(tmp_path)}
    environment.pop("XDG_STATE_HOME", None)
    command = [sys.executable, "-c", program, f"{COMMAND} --child --deaf"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as chat:
        assert chat.stdout is not None
        assert chat.stdout.readline() == b"ready\n"
        server = int((tmp_path / "server.pid").read_text())
        assert is_alive(server)
        chat.send_signal(signal.SIGKILL)
    until(lambda: not is_alive(server))


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("/no/such/program --x", "no such program: /no/such/program"),
        (shlex.join([sys.executable, "-c", "raise SystemExit('it is broken')"]), "exit code 1: it is broken"),
        (shlex.join([sys.executable, "-c", "print('no JSON')"]), "exit code 0"),
        ("http://127.0.0.1:9/mcp", "onnect"),
    ],
)
def test_a_server_that_does_not_start_is_a_notice(tmp_path, command, why):
    with serve(tmp_path, command) as box:
        (notice,) = box.take_notices()
        assert why in notice
        assert "Continuing without its tools. To try again, run `/tools restart " in notice
        assert notice.endswith("`.")
        assert box.tools == ()


def test_a_silent_server_and_an_endless_line(tmp_path, monkeypatch):
    monkeypatch.setattr(mcp_client, "CONNECT_S", 0.5)
    monkeypatch.setattr(transports, "GRACE_S", 0.1)
    with serve(tmp_path, "sleep 60") as box:
        assert "not ready within 0.5 s" in box.take_notices()[0]
    monkeypatch.setattr(mcp_client, "CONNECT_S", 30.0)
    monkeypatch.setattr(transports, "MOST_MESSAGE_BYTES", 2**16)
    with serve(tmp_path, shlex.join([sys.executable, "-c", "while True: print('x' * 1000, end='')"])) as box:
        assert len(box.take_notices()) == 1


def test_a_chat_that_ends_while_a_server_starts(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        at_home(patch, tmp_path)
        box = Toolbox(servers.parse(["sleep 60"], {}))
        box.start()
        waiting = threading.Thread(target=box.wait)
        waiting.start()
        box.wait(lambda: True)  # another thread waits: a reply that is stopped does not
        box.close()
        waiting.join(WAIT_S)
        assert not waiting.is_alive()
    assert len(box.take_notices()) == 1


class Elsewhere(http.server.BaseHTTPRequestHandler):
    """Redirects to another port, or answers with too much."""

    target = ""
    seen: list[str] = []  # noqa: RUF012 - of the class

    def do_POST(self) -> None:
        self.seen.append(self.path)
        self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/large":
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.end_headers()
            with_no_end = b'{"x": "' + b"x" * 2**16
            try:
                for _ in range(64):
                    self.wfile.write(with_no_end)
            except OSError:
                return
        else:
            self.send_response(307)
            self.send_header("location", self.target)
            self.send_header("content-length", "0")
            self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *values: object) -> None:
        """Say nothing."""


@pytest.fixture
def elsewhere():
    """Two web servers; the first redirects to the second."""
    found = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere) for _ in range(2)]
    for each in found:
        threading.Thread(target=each.serve_forever, daemon=True).start()
    Elsewhere.target, Elsewhere.seen = f"http://127.0.0.1:{found[1].server_port}/stolen", []
    yield f"http://127.0.0.1:{found[0].server_port}"
    for each in found:
        each.shutdown()
        each.server_close()


def test_a_redirect_elsewhere_is_not_followed_and_a_body_without_end_is_cut(tmp_path, elsewhere, monkeypatch):
    monkeypatch.setattr(transports, "MOST_MESSAGE_BYTES", 2**20)
    with serve(tmp_path, f"{elsewhere}/mcp", f"{elsewhere}/large") as box:
        assert len(box.take_notices()) == 2
    assert "/mcp" in Elsewhere.seen
    assert "/stolen" not in Elsewhere.seen


def test_what_cannot_be_declared_is_left_out_and_names_become_plain(monkeypatch):
    box = Toolbox(servers.parse(["./one", "./two"], {}))
    schema = {"type": "object", "properties": {}}
    long = {"type": "object", "properties": {"x": {"const": "y" * 40_000}}}
    tools = [("read file", schema), ("read/file", schema), ("x" * 90, schema), ("\u202e", schema)]
    tools += [("big", long), ("list", {"type": "array"}), ("odd", {"properties": []})]
    listed = [mcp_client.ServerTool(name, "", each) for name, each in tools]
    monkeypatch.setattr(mcp_client.ServerConnection, "open", lambda self: done(listed))
    monkeypatch.setattr(mcp_client.ServerConnection, "close", lambda self: done(None))
    box.wait()
    labels = [each.label for each in box.tools]
    assert labels[:4] == ["one__read_file", "one__read_file_2", f"one__{'x' * 55}", "one__tool"]
    assert len(labels) == len(set(labels)) == 8
    assert all(len(each) <= 64 for each in labels)
    told = box.take_notices()
    assert ["was skipped: its declaration is too long" in each for each in told] == [True, False, False] * 2
    assert sum("parameters must be a JSON schema for an object" in each for each in told) == 4
    many = [mcp_client.ServerTool(f"t{number}", "d" * 1900, schema) for number in range(100)]
    box = Toolbox(servers.parse(["./one", "./two"], {}))
    monkeypatch.setattr(mcp_client.ServerConnection, "open", lambda self: done(many))
    box.wait()
    assert 50 < len(box.tools) < 100
    assert "the limit on the number of tools has been reached" in box.take_notices()[0]
    declaration.check([each.declared for each in box.tools])


def done(value):
    from concurrent.futures import Future

    made: Future = Future()
    made.set_result(value)
    return made
