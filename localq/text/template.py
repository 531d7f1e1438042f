"""Chat templates, rendered in a child process with limited time, memory and output.

A template is a program from a stranger. Jinja's immutable sandbox keeps it away from Python's internals; the child
keeps a loop of 10^9 steps or a string of a gigabyte from stopping the front end. The child is reused, because starting
one takes 0.1 s; when it exceeds a limit it is killed, and the next render starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import resource
import select
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from localq import processes
from localq.errors import ExitCode, LocalqError, bad_file, usage_error

MAX_TEMPLATE_BYTES = 64 * 1024
MAX_OUTPUT_BYTES = 2**20  # the limit of the child, which imports nothing from here
MAX_CONVERSATION_BYTES = MAX_OUTPUT_BYTES * 3 // 4  # some models' templates add a frame to every message
CPU_SECONDS = 2  # of the child, which imports nothing from here; the kernel ends it within a further second
WALL_SECONDS = 15.0  # a busy machine takes longer than the processor; beyond this the machine is at fault
_CLOCK_S = 0.2  # the kernel looks at a limit of processor time now and then
_TICKS = os.sysconf("SC_CLK_TCK")  # of /proc, in a second


class LimitExceeded(LocalqError):
    """Rendering was stopped: by the limits of the child, or because the machine is too busy."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    special_tokens: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Render a conversation. messages: {"role": str, "content": str}, and "reasoning_content": str of a thought;
    "tool_calls" and "tool_call_id" as `ToolFormat.messages` makes them. special_tokens: bos_token and others.

    Raises LocalqError: exit 1 with the template's message where it refuses the conversation (raise_exception), and
    where a busy machine does not get it done; exit 8 where it is malformed, tries to escape the sandbox or exceeds a
    limit. `LimitExceeded` where the child was stopped.
    """
    size = _bytes(template)
    if size > MAX_TEMPLATE_BYTES:
        raise _bad(f"too long ({size} bytes; limit: {MAX_TEMPLATE_BYTES})")
    _check(messages, variables)
    request = {
        "template": template,
        "variables": {
            "tools": None,  # defined but empty, as in transformers: templates test for both
            "documents": None,
            **variables,
            **(special_tokens or {}),
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
        },
    }
    answer = _CHILD.ask(json.dumps(request).encode() + b"\n")
    if "text" in answer:
        return str(answer["text"])
    if answer.get("refused"):
        raise _refusal(str(answer["error"]), messages)
    raise _bad(str(answer["error"]))


def start_ahead() -> None:
    """Start the rendering process, while other work is done: the first render then has to wait less, or not at all."""
    _CHILD.start_ahead()


def _bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _check(messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> None:
    """Refuse messages that are not text, or so long that an honest template exceeds its limits."""
    size = sum(_bytes(_json(value)) for value in variables.values() if isinstance(value, (list, dict)))
    for message in messages:
        role, content, thought = message.get("role"), message.get("content"), message.get("reasoning_content", "")
        if not isinstance(role, str) or not isinstance(content, str) or not isinstance(thought, str):
            raise usage_error(
                "chat", "each message must have a role and content, and both must be strings", "Send plain text."
            )
        size += _bytes(content) + _bytes(thought)
        if "tool_calls" in message:
            size += _checked_calls(message["tool_calls"])
    if size > MAX_CONVERSATION_BYTES:
        why = f"the conversation is too long ({size} bytes; limit: {MAX_CONVERSATION_BYTES})"
        again = "Start over with /clear, or send a shorter message." if len(messages) > 1 else "Shorten the text."
        raise usage_error("chat", why, again)


def _checked_calls(calls: Any) -> int:
    """The size of a message's calls. Refuses those that templates cannot write."""
    for call in calls if isinstance(calls, (list, tuple)) else (None,):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            why = "each tool call must have a function with a name"
            raise usage_error("chat", why, 'Example: {"type": "function", "function": {"name": ..., "arguments": {}}}.')
        if not isinstance(function.get("arguments"), Mapping):
            raise usage_error("chat", "the arguments of each tool call must be an object", "Send an object.")
    return _bytes(_json(calls))


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise usage_error("chat", "the tools or tool calls are not valid JSON", "Send valid JSON values.") from None


_NEXT_STEP = "The template is unusual, damaged or malicious. Use another copy of the model."


def _bad(why: str) -> LocalqError:
    return bad_file("chat template", why, _NEXT_STEP)


def _over_limit(process: subprocess.Popen[bytes]) -> LimitExceeded:
    """The error for a child that ended without an answer."""
    if (found := _over_user_limit(process)) is not None:
        return found
    why = "rendering ran out of memory or crashed"
    if process.wait() == -signal.SIGXCPU:
        why = f"rendering takes more than {CPU_SECONDS} s of CPU time"
    return LimitExceeded("chat template", why, _NEXT_STEP, ExitCode.BAD_FILE)


def _over_user_limit(process: subprocess.Popen[bytes]) -> LimitExceeded | None:
    """The error for a child that has ended, or is about to, at a limit of the user; None for another end."""
    before, most = _seconds_of_children(), _user_limit_s()
    if process.wait() not in (-signal.SIGXCPU, -signal.SIGKILL) or _seconds_of_children() - before < most - _CLOCK_S:
        return None
    why = f"rendering needs more CPU time than this process is allowed to use ({most:.0f} s)"
    return LimitExceeded("chat template", why, "Raise the limit with `ulimit -t unlimited`.")


def _seconds_of_children() -> float:
    """Processor time of the children that ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _user_limit_s() -> float:
    """Processor time that the user allows a process, which a child inherits; infinite without a limit."""
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    return math.inf if most == resource.RLIM_INFINITY else float(most)


def _busy(seconds: float) -> LimitExceeded:
    why = f"rendering got only {seconds:.1f} s of CPU time in {WALL_SECONDS:.0f} s because the machine is busy"
    return LimitExceeded("chat template", why, "Try again when the machine is less busy.")


def _refusal(words: str, messages: Sequence[Mapping[str, Any]]) -> LocalqError:
    next_step = "Use another copy of the model."
    if any(message["role"] == "system" for message in messages):
        next_step = "Remove the system prompt (--system, or /system off in a chat)."
    elif len(messages) > 1:
        next_step = "Start over with /clear."
    return LocalqError("chat template", f"the template rejects this conversation: {words}", next_step)


class _Child:
    """The rendering process: started on the first request or ahead, one request at a time, killed on a limit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False  # it has said that Python has started

    def start_ahead(self) -> None:
        """Start the process and do not wait for it; where that fails, the first request tells."""
        with self._lock, contextlib.suppress(LocalqError, OSError):
            if self._process is None:
                self._process, self._is_ready = self._start(), False

    def ask(self, line: bytes) -> dict[str, Any]:
        """Send one request and return the answer."""
        with self._lock:
            process = self._process
            if process is not None and (
                process.poll() is not None or _processor_seconds(process) + CPU_SECONDS + 1 > _user_limit_s()
            ):
                self.stop()  # it has ended, or a new one has more left of the user's limit
                process = None
            if process is None:
                process, self._is_ready = self._start(), False
                self._process = process
            try:
                self._wait_until_ready(process)
                answer = self._exchange(process, line)
            except BaseException:  # also Ctrl-C: an unread answer would be taken for the next one
                self.stop()
                raise
            return answer

    def stop(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):
                    if pipe is not None:
                        pipe.close()

    def _start(self) -> subprocess.Popen[bytes]:
        # TZ: `strftime_now` gives the user's date.
        return processes.start_module("localq.text.template_child", keep=("TZ",))

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> None:
        """Wait for the start of Python, which does not count as rendering time."""
        if self._is_ready:
            return
        if not _readable(process, time.monotonic() + 30) or _line(process) != b"ready\n":
            process.kill()
            why = "the rendering process did not start"
            raise _over_user_limit(process) or LocalqError("chat template", why, "Run `localq doctor`.")
        self._is_ready = True

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes) -> dict[str, Any]:
        assert process.stdin is not None
        deadline, used = time.monotonic() + WALL_SECONDS, _processor_seconds(process)
        try:
            process.stdin.write(line)
            process.stdin.flush()
        except BrokenPipeError:
            raise _over_limit(process) from None
        if not _readable(process, deadline):
            raise _busy(_processor_seconds(process) - used)
        raw = _line(process)
        if not raw.endswith(b"\n"):
            raise _over_limit(process)
        answer: dict[str, Any] = json.loads(raw)
        return answer


def _processor_seconds(process: subprocess.Popen[bytes]) -> float:
    """Processor time of the child; 0 where the system does not tell."""
    try:
        with open(f"/proc/{process.pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _readable(process: subprocess.Popen[bytes], deadline: float) -> bool:
    assert process.stdout is not None
    return bool(select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0])


def _line(process: subprocess.Popen[bytes]) -> bytes:
    """One line, bounded: JSON may write a byte of output as six."""
    assert process.stdout is not None
    return process.stdout.readline(8 * MAX_OUTPUT_BYTES)


_CHILD = _Child()
atexit.register(_CHILD.stop)
