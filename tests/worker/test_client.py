"""The pipe between a front end and the engine process, driven by a scripted engine."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from localq.errors import ExitCode, LocalqError
from localq.processes import last_message
from localq.worker.client import COMMAND, ONCE, EngineClient
from localq.worker.messages import Done, Generate, Load, Loading, Progress, Tokens, encode
from localq.worker.process import EngineProcess
from localq.worker.recovery import Recovery
from localq.worker.server import BATCH_S

ROOT = Path(__file__).parents[2]
SCRIPTED = (sys.executable, "-m", "tests.support.worker.scripted_engine")
PATIENCE_S = 40.0  # for what comes at once on an idle machine, and less than the minute that the engine sleeps


@pytest.fixture
def client():
    with EngineClient(SCRIPTED, Recovery(lost=lambda: "")) as client:
        yield client


def reply(client: EngineClient, *prompt: int, id: int = 1, max_tokens: int | None = None) -> tuple[list[int], str]:
    ids: list[int] = []
    for event in client.generate(Generate(id, list(prompt), max_tokens=max_tokens)):
        ids += event.ids if isinstance(event, Tokens) else []
    assert isinstance(event, Done)
    return ids, event.reason


def logged(client: EngineClient, text: str) -> bool:
    """Does a line of the log hold `text`? The log comes through a pipe of its own, perhaps after the reply."""
    deadline = time.monotonic() + PATIENCE_S
    while not any(text in line for line in client.log) and time.monotonic() < deadline:
        time.sleep(0.01)
    return any(text in line for line in client.log)


def collect(client: EngineClient, request: Generate, seen: list[int]) -> None:
    for event in client.generate(request):
        seen += event.ids if isinstance(event, Tokens) else []


def test_load_reports_progress_and_facts(client):
    events = []
    loaded = client.load(Load("tiny"), events.append)
    assert events == [Loading("loading weights", 5, 10)]
    assert (loaded.context_size, loaded.ledger, loaded.notes) == (100, {"weights": 10}, ["a note"])


def test_load_failure_keeps_the_process(client):
    with pytest.raises(LocalqError, match="no such file") as caught:
        client.load(Load("missing"))
    assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL
    assert client.alive


def test_tokens_arrive_in_order_and_in_batches(client):
    started = time.monotonic()
    events = list(client.generate(Generate(7, [5, 20], max_tokens=300)))
    elapsed = time.monotonic() - started
    tokens = [event for event in events if isinstance(event, Tokens)]
    assert [id for event in tokens for id in event.ids] == list(range(21, 321))
    assert isinstance(events[0], Progress)
    assert tokens[0].ids == [21]  # the first token is not held back
    assert len(tokens) <= elapsed / BATCH_S + 2  # the first and the last are sent at once
    assert events[-1].reason == "length"


def test_cancel_stops_the_reply(client):
    ids = []
    for event in client.generate(Generate(3, [0], max_tokens=100_000)):
        ids += event.ids if isinstance(event, Tokens) else []
        if len(ids) == 1:
            client.cancel(3)
    assert event.reason == "cancelled"
    assert len(ids) < 100_000
    assert reply(client, 0, id=4) == (list(range(1, 11)), "length")


def test_leaving_the_iterator_cancels_and_the_next_reply_is_clean(client):
    for event in client.generate(Generate(1, [0], max_tokens=100_000)):
        if isinstance(event, Tokens):
            break
    assert reply(client, 40, id=2) == (list(range(41, 51)), "length")


def test_cancel_from_another_thread(client):
    threading.Timer(0.1, client.cancel, [9]).start()
    assert reply(client, 0, id=9, max_tokens=100_000)[1] == "cancelled"


def test_what_libraries_print_does_no_harm(client):
    assert reply(client, 1001) == (list(range(1002, 1012)), "length")
    assert logged(client, "a library prints this to stdout")


def test_named_failure_keeps_tokens_and_process(client):
    seen: list[int] = []
    with pytest.raises(LocalqError, match="non-finite logits at token 3") as caught:
        collect(client, Generate(1, [1003]), seen)
    assert seen == [1004, 1005, 1006]
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert client.alive
    assert reply(client, 0, id=2)[1] == "length"


def test_bug_is_named_and_its_traceback_is_in_the_log(client):
    with pytest.raises(LocalqError, match="KeyError: 'unexpected'"):
        reply(client, 1004)
    assert client.alive
    assert logged(client, "in bug")


def test_device_fault_ends_the_process_and_the_next_load_starts_another(client):
    first = client.pid
    with pytest.raises(LocalqError, match="GPU: RuntimeError: CUDA error: an illegal memory access"):
        reply(client, 1002)
    assert not client.alive
    with pytest.raises(LocalqError, match="not running"):
        reply(client, 0)
    client.load(Load("tiny"))
    assert client.pid not in (None, first)
    assert reply(client, 0, id=2)[1] == "length"


def test_killed_process_is_reported_with_its_signal_and_last_words(client):
    seen: list[int] = []
    with pytest.raises(
        LocalqError, match=r"engine process: stopped unexpectedly \(signal SIGKILL\): last words"
    ) as caught:
        collect(client, Generate(1, [1005]), seen)
    assert seen[:1] == [1006]
    assert "will start a new engine process" in caught.value.next_step
    assert not client.alive
    client.load(Load("tiny"))
    assert reply(client, 0, id=2)[1] == "length"


def test_where_no_message_follows_none_is_promised(client):
    client.next_step = ONCE
    for script, why in ((1005, "SIGKILL"), (1002, "CUDA error")):
        client.load(Load("tiny"))
        with pytest.raises(LocalqError, match=why) as caught:
            reply(client, script)
        assert caught.value.next_step == ONCE
        client.close()
        client._recovery = Recovery(lost=lambda: "")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGABRT])
def test_a_death_in_a_load_promises_no_message_and_says_what_to_do(client, number):
    with pytest.raises(LocalqError, match=f"while loading the model .signal {number.name}") as caught:
        client.load(Load(number.name))
    assert caught.value.exit_code == ExitCode.FAILURE
    assert "message" not in caught.value.next_step
    assert ("smaller model" in caught.value.next_step) == (number == signal.SIGKILL)
    assert client.load(Load("tiny")).notes == ["a note"]  # a conversation goes on


@pytest.mark.parametrize("fault", ["single", "written", "damaged", "gone", "sound", "gguf"])
def test_sigbus_in_a_load_names_the_file_and_its_cause(client, tmp_path, fault):
    model, wait = tmp_path / "SIGBUS", tmp_path / "SIGBUS.wait"
    model.mkdir()
    files = [model / "model-00001-of-00002.safetensors", model / "model-00002-of-00002.safetensors"]
    for number, path in enumerate(files[: 1 if fault == "single" else 2]):
        save_file({str(number): torch.ones(10)}, path)
    expected = {"single": files[0], "sound": model, "gguf": model}.get(fault, files[1])
    if fault == "damaged":
        os.truncate(files[1], 90)
    elif fault == "gguf":
        shutil.rmtree(model)
        model.write_bytes(b"GGUF")
    wait.touch()

    def meanwhile(event: object) -> None:
        if fault == "written":
            os.truncate(files[1], 90)
        elif fault == "gone":
            files[1].unlink()
        wait.unlink()

    with pytest.raises(LocalqError, match="could not be read, or was modified while localq was reading it") as caught:
        client.load(Load(str(model)), meanwhile)
    assert (caught.value.what, caught.value.exit_code) == (str(expected), ExitCode.BAD_FILE)
    assert "message" not in str(caught.value)
    assert client.load(Load("tiny")).notes == ["a note"]  # a conversation goes on


def test_process_that_leaves_is_reported_with_its_code(client):
    with pytest.raises(LocalqError, match=r"stopped unexpectedly \(exit code 1\): SystemExit: left early"):
        reply(client, 1007)


def test_watchdog_ends_a_hanging_step():
    with EngineClient((*SCRIPTED, "0.4"), Recovery(lost=lambda: "")) as client:
        client.load(Load("tiny"))
        started = time.monotonic()
        with pytest.raises(LocalqError, match=r"GPU: no step finished within 0\.4 s"):
            reply(client, 1006)
        assert time.monotonic() - started < PATIENCE_S
        assert not client.alive


def test_a_stopped_front_end_is_no_hanging_step():
    """The pipe fills up while nobody reads (Ctrl-Z), for longer than a step may take; nothing is lost."""
    process = subprocess.Popen([*SCRIPTED, "0.3"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())
    assert process.stdin is not None
    assert process.stdout is not None
    long_id = b"1" * 4000  # repeated in every event, so that a few fill the pipe
    process.stdin.write(encode(Generate(1, [0], max_tokens=500)).replace(b'"id":1', b'"id":' + long_id))
    process.stdin.flush()
    time.sleep(1.5)
    kinds = (json.loads(line)["type"] for line in process.stdout)
    assert next(kind for kind in kinds if kind not in ("ready", "progress", "tokens")) == "done"
    process.communicate(timeout=20)


@pytest.mark.parametrize("path", ["tiny", "slow"])
def test_close_waits_for_nothing(path):
    client = EngineClient(SCRIPTED)
    client.start()
    loading = threading.Thread(target=_load_quietly, args=(client, path))
    loading.start()
    time.sleep(0.3)
    started = time.monotonic()
    client.close()
    assert time.monotonic() - started < PATIENCE_S
    loading.join(PATIENCE_S)
    assert not loading.is_alive()
    assert not client.alive


def _load_quietly(client: EngineClient, path: str) -> None:
    with contextlib.suppress(LocalqError):  # the process is closed under it
        client.load(Load(path))


def test_garbage_is_answered_and_survived():
    process = subprocess.Popen(SCRIPTED, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())
    lines = [b"garbage\n", b"\xff\xfe\n", b"[]\n", b'{"type":"ready","pid":1}\n', b'{"type":"generate","no":1}\n']
    out, _ = process.communicate(b"".join(lines) + encode(Generate(5, [0], max_tokens=1)), timeout=20)
    kinds = [line.split(b'"')[3] for line in out.splitlines()]
    assert kinds[:6] == [b"ready"] + [b"failed"] * 5
    assert process.returncode == 0  # the end of stdin ends the process


def test_line_over_the_limit_is_refused_and_survived():
    script = (
        "from localq.worker import messages;"
        "messages.MAX_LINE_BYTES = 1000; from tests.support.worker import scripted_engine as e;"
        "e.server.main(e.ScriptedBackend)"
    )
    command = [sys.executable, "-c", script]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment())
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(encode(Generate(1, list(range(5000)))) + encode(Generate(2, [0], max_tokens=1)))
    process.stdin.flush()
    assert b'"ready"' in process.stdout.readline()
    assert b"too large" in process.stdout.readline()
    assert b'"progress","id":2' in process.stdout.readline()
    process.communicate(timeout=20)


def test_client_refuses_a_prompt_that_is_too_long(client, monkeypatch):
    monkeypatch.setattr("localq.worker.messages.MAX_LINE_BYTES", 500)
    with pytest.raises(LocalqError, match="the prompt is too large"):
        reply(client, *range(1000))


def test_sigint_does_not_reach_the_engine(client):
    client.load(Load("tiny"))
    os.kill(client.pid, signal.SIGINT)
    assert reply(client, 0)[1] == "length"
    assert os.getpgid(client.pid) != os.getpgid(0)


def test_ready_comes_before_torch(tmp_path):
    """The real engine process says Ready although torch cannot even be imported."""
    (tmp_path / "torch.py").write_text("import time; time.sleep(60)")
    environment = {**_environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{_environment()['PYTHONPATH']}"}
    started = time.monotonic()
    process = subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
    assert process.stdout is not None
    assert b'"type":"ready"' in process.stdout.readline()
    assert time.monotonic() - started < PATIENCE_S
    process.communicate(timeout=PATIENCE_S)  # closes stdin: it ends though torch is still being imported
    assert process.returncode == 0


def test_torch_that_cannot_be_imported_is_named(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: cannot open')")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from localq.worker import server; server.main()"
    with (
        EngineClient((sys.executable, "-c", code, str(tmp_path))) as client,
        pytest.raises(LocalqError, match="libtorch") as caught,
    ):
        client.load(Load("tiny"))
    assert caught.value.exit_code == ExitCode.NO_DEVICE


def test_modules_of_the_current_folder_are_not_imported(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit('imported from the current folder')")
    process = subprocess.run(COMMAND, input=b"", capture_output=True, cwd=tmp_path, env=_environment(), timeout=60)
    assert b'"ready"' in process.stdout
    assert b"imported from" not in process.stderr


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ((), ""),
        (("Traceback (most recent call last):", '  File "x"', "MemoryError: no", ""), "MemoryError: no"),
        (("first", "   indented", "\t"), "first"),
    ],
)
def test_last_words(log, words):
    assert last_message(log) == words


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_cancelling_what_ends_just_then_is_no_error(monkeypatch):
    """From the thread that stops a reply: its traceback would stand on the screen."""
    monkeypatch.setattr(EngineClient, "alive", True)
    EngineClient(SCRIPTED).cancel(1)


@pytest.mark.parametrize("place", [1, 2])
def test_a_signal_while_a_process_starts_leaves_nothing_to_report(monkeypatch, place):
    """Ctrl-C came before the `place`-th reader was started; ending the process then failed."""
    start, calls = threading.Thread.start, []

    def interrupted(thread):
        calls.append(thread)
        if len(calls) == place:
            raise KeyboardInterrupt
        start(thread)

    process = EngineProcess([sys.executable, "-c", "input()"])
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            process.listen(queue.SimpleQueue(), collections.deque())
    process.end()
    assert not process.alive


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ["1000", None]),
        ({"GOMP_SPINCOUNT": "7"}, ["7", None]),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, [None, "ACTIVE"]),
    ],
)
def test_threads_of_an_engine_wait_briefly_unless_the_user_says_otherwise(monkeypatch, given, expected):
    """Beside other programs, threads that spin for their full time make a step take ten times as long."""
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    told = f"import os, sys; sys.stderr.write(repr([os.environ.get(each) for each in {names}]))"
    process, log = EngineProcess([sys.executable, "-c", told]), collections.deque()
    process.listen(queue.SimpleQueue(), log)
    process.code()
    process.end()
    assert list(log) == [repr(expected)]
