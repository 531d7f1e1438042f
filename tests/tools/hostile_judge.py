"""The rules of a hostile run, whatever was tried: what breaks one, in words.

traceback     no output shows one, nor does an error that nobody foresaw reach the last handler
secret        no output, no file that was written, no name and no argument of a process holds a planted one
foreign file  nothing that existed has changed, nothing appears but where the command was told to write
hang          no 10 s without output and without an end, see `hostile_process`
exit code     it is in the documented table, and tells of an interrupt, a termination or a closed pipe where one was
terminal      no sequence of a planted text acts, and the terminal is left as it was
process       no process is left behind
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

from localq.errors import EXIT_CODE_MEANINGS, ExitCode
from tests.support.cli.hostile_sequences import Watch
from tests.support.cli.terminal_stream import REORDERING, Reader, Token
from tests.tools.hostile_process import Outcome, Plan
from tests.tools.hostile_scratch import Entry, Scratch, holds, walk

TRACEBACK = re.compile(
    rb"Traceback \(most recent call last\)|Traceback.{0,40}most recent call|Exception ignored in|Fatal Python error"
    rb"|Error in sys\.excepthook|File \"[^\"\n]+\.py\", line \d+|object at 0x[0-9a-f]{6}"
    rb"|unexpected error \(|panicked at|Report this as a bug"
)
READ_BYTES = 64 * 2**20  # of a file in which a secret is looked for
SIGNALS = {ExitCode.INTERRUPTED: {2}, ExitCode.TERMINATED: {15, 1}}
_IMPORTS = (
    b"    from localq import cli\n",
    b"    from localq.worker import client\n",
)  # of the scripted engine's command
_PAGER = ("\x07", "\x0f", "\x1b=", "\x1b>", "\x1bM", "\x1b[?1h", "\x1b[?1l")  # what `less` writes by itself
_CSI = re.compile(rb"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]P^_X][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")


def judge(plan: Plan, scratch: Scratch, before: dict[str, Entry], outcome: Outcome) -> list[str]:
    """Every broken rule with what broke it, "rule: what"; empty where all hold."""
    return [
        *_tracebacks(outcome), *_logged(scratch), *_secrets_in_output(plan, scratch, outcome),
        *_secrets_in_files(scratch, before), *_files(scratch, before), *_end(plan, outcome), *_terminal(plan, outcome),
        *(f"process: still there: {each}" for each in outcome.left),
        *(f"secret: the token was sent elsewhere: {each}" for each in plan.foreign_requests()),
    ]  # fmt: skip


def _tracebacks(outcome: Outcome) -> Iterator[str]:
    """An interrupt that comes before the first line of localq is Python's own."""
    for name, data in outcome.output.items():
        plain = _CSI.sub(b"", data)
        imported = b"/localq/" in plain and not any(each in plain for each in _IMPORTS)
        before_localq = signal.SIGINT in outcome.sent and b"KeyboardInterrupt" in plain and not imported
        if (found := TRACEBACK.search(plain)) and not before_localq:
            line = plain[max(0, found.start() - 100) : found.end() + 1200].decode("utf-8", "replace")
            yield f"traceback: {name}: {line}"


def _logged(scratch: Scratch) -> Iterator[str]:
    for path in walk(scratch.root):
        if path.name == "errors.log" and path.is_file():
            yield f"traceback: in the log of unexpected errors: {path.read_text('utf-8', 'replace')[-1500:]}"


def _secrets_in_output(plan: Plan, scratch: Scratch, outcome: Outcome) -> Iterator[str]:
    wanted = scratch.secrets.credentials()
    if not plan.may_tell:
        wanted["conversation"] = scratch.secrets.conversation()
    for name, data in outcome.output.items():
        for secret, parts in wanted.items():
            if holds(data, parts) or holds(_CSI.sub(b"", data), parts):
                yield f"secret: {secret} in {name}"
    for secret, parts in scratch.secrets.credentials().items():
        for line in outcome.arguments:
            if holds(line, parts):
                yield f"secret: {secret} in the arguments of {line[:80]!r}"


def _secrets_in_files(scratch: Scratch, before: dict[str, Entry]) -> Iterator[str]:
    after = scratch.snapshot()
    wanted = scratch.secrets.credentials()
    told = scratch.secrets.conversation()
    for path in walk(scratch.root):
        name = scratch.relative(path)
        if before.get(name) == after[name]:
            continue
        data = name.encode("utf-8", "surrogateescape") + after[name].content.encode("utf-8", "surrogateescape")
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                data += file.read(READ_BYTES)
        yield from (f"secret: {secret} in the file {name}" for secret, parts in wanted.items() if holds(data, parts))
        if holds(data, told) and (not name.startswith("home/.local/share/localq/") or after[name].mode & 0o077):
            yield f"secret: conversation in the file {name} ({after[name]})"


def _files(scratch: Scratch, before: dict[str, Entry]) -> Iterator[str]:
    after = scratch.snapshot()
    for name, entry in before.items():
        if after.get(name) != entry and not scratch.is_own(name):
            yield f"foreign file: {name}: {entry} became {after.get(name, 'nothing')}"
    folders = {name.rpartition("/")[0] for name in after if scratch.is_own(name)}
    for name in after.keys() - before.keys():
        is_above_own = any(each == name or each.startswith(f"{name}/") for each in folders)
        if not scratch.is_own(name) and not is_above_own:
            yield f"foreign file: {name} appeared: {after[name]}"


def _end(plan: Plan, outcome: Outcome) -> Iterator[str]:
    if outcome.hung:
        yield f"hang: {outcome.hung}"
        return
    # A signal before localq has taken it over ends the process as any other.
    if outcome.code not in EXIT_CODE_MEANINGS.keys() | {128 + number for number in outcome.sent}:
        yield f"exit code: {outcome.code} is not in the table"
    for code, numbers in SIGNALS.items():
        if outcome.code == code and not numbers & outcome.sent:
            yield f"exit code: {code}, but no signal was sent"
    if outcome.code == ExitCode.CLOSED_PIPE and "broken" not in (plan.stdout, plan.stderr):
        yield "exit code: 141, but no pipe was closed"


def _terminal(plan: Plan, outcome: Outcome) -> Iterator[str]:
    """A terminal echoes what is typed where nobody reads it: that is not written by the program."""
    typed = "".join(key if isinstance(key, str) else key.decode("utf-8", "replace") for key in plan.keys or ()
                    if isinstance(key, str | bytes))  # fmt: skip
    is_chat = plan.argv[:1] in (["chat"], ["run"], ["tui"], [])
    own = (
        () if plan.keys is None else ("\x07",) if is_chat else _PAGER
    )  # a line editor rings at a key that does nothing
    wrong = []
    for name, data in outcome.output.items():
        if name != "screen":
            text = _as_utf8(data, plan.environment.get("PYTHONIOENCODING", ""))
            wrong += [each for each in _acting(text) if each.text not in own and not _is_echo(each, typed)]
    if wrong:
        yield f"terminal: {len(wrong)} sequences act, such as {[each.text[:100] for each in wrong[:3]]}"
    # Ctrl-S stops the output of a terminal that no screen or line editor has taken: nothing can be put back there.
    is_stopped = not is_chat and typed.rfind("\x13") > typed.rfind("\x11")
    if outcome.terminal_left and not is_stopped:
        yield f"terminal: left as {', '.join(outcome.terminal_left)}"


def _as_utf8(data: bytes, encoding: str) -> bytes:
    """Output in the encoding that the user asked for, if its bytes are none of ASCII's."""
    return data.decode("utf-16", "replace").encode("utf-8", "replace") if encoding.startswith("utf-16") else data


def _acting(data: bytes) -> Iterator[Token]:
    watch, reader = Watch(), Reader()
    for token in (*reader.feed(data), *reader.finish()):
        watch(token)
        if watch.wrong:
            watch.wrong.clear()
            yield token


def _is_echo(token: Token, typed: str) -> bool:
    if token.kind not in ("text", "control"):
        return False
    acting = REORDERING.findall(token.text) if token.kind == "text" else [token.text]
    return bool(acting) and set(acting) <= set(typed)
