"""One writer to the terminal: nothing else of localq names the streams, and no verb lets a name act on a terminal."""

from __future__ import annotations

import ast
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from localq import cli, settings
from localq.cli import registry
from localq.cli.output import stderr_console
from localq.sanitize import clean_stream, json_text, print_lines, sanitize, unfiltered, write_json
from tests.support.files.hostile_models import write_sound

ROOT = Path(__file__).parents[2]
ACTS = ("\x1b", "\x07", "\x9b", "\x85", "\x7f", "\r", "\u202e", "\u2066", "\u2028")  # each acts on some terminal
EVIL = "evil\x1b]0;title\x07\x1b[2J\x9b31m\x85\x7f\r\u202e\u2066\u2028name"
SHOWN = sanitize(EVIL)
# The only places that name a stream of the process or call `print`: file -> why.
WRITERS = {
    "cli/output.py": "the writer of the command line",
    "cli/__init__.py": "a start that fails before there is a writer",
    "cli/command_line.py": "puts the filter in front of the streams",
    "kernels/setup/__main__.py": "`make`: a program of its own, which shows no name of a model",
    "text/template_child.py": "a pipe to the front end",
    "bench/quality/code_child.py": "a pipe to the evaluation",
    "server/background.py": "a program of its own, whose streams are its log",
    "worker/server.py": "flushes the log, a pipe to the front end",
    "worker/probe.py": "a pipe to the front end",
    "bench/bandwidth.py": "a pipe to the front end",
    "planner/prepare.py": "gives the stream to a child, which is localq",
    "quantize/codebooks/initial_codebooks.py": "a program for developers",
    "tui/terminal/terminal_input.py": "the full screen, whose driver needs the terminal itself",
}
# Files that draw with escape sequences of localq and therefore pass the filter: file -> what.
DRAWERS = {
    "cli/output.py": "progress bars, with texts sanitized",
    "cli/pager.py": "text that went through the filter",
    "cli/line/clipboard.py": "the sequence of the clipboard",
    "cli/line/line_editor.py": "the line editor",
    "cli/line/reply_printer.py": "Markdown of a sanitized reply",
    "cli/line/session.py": "the status line, sanitized",
    "cli/line/thinking_lines.py": "dim text, sanitized",
}
STREAMS = ("stdout", "stderr", "__stdout__", "__stderr__")


def uses(tree: ast.AST) -> Iterator[str]:
    """What writes to a stream of the process without the writer."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
            if (node.value.id == "sys" and node.attr in STREAMS) or name in ("typer.echo", "typer.secho", "click.echo"):
                yield name
        elif isinstance(node, ast.ImportFrom) and node.module in ("sys", "rich", "typer", "click"):
            yield from (each.name for each in node.names if each.name in (*STREAMS, "print", "echo", "secho"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield "print"
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "os.write" and ast.unparse(node.args[0]) in "12":
            yield "os.write"


def test_only_the_writer_names_the_streams():
    found = {
        str(path.relative_to(ROOT / "localq")): sorted(set(names))
        for path in sorted((ROOT / "localq").rglob("*.py"))
        if (names := list(uses(ast.parse(path.read_text()))))
    }
    assert {name: each for name, each in found.items() if name not in WRITERS} == {}
    assert set(WRITERS) == set(found), "a file that writes no more leaves the list"


def test_the_search_for_writers_finds_each_kind():
    for line in ("print(1)", "sys.stderr.write('')", "from sys import stdout", "os.write(2, b'')", "typer.echo('')",
                 "x = sys.__stdout__", "from rich import print"):  # fmt: skip
        assert list(uses(ast.parse(line))), line
    assert not list(uses(ast.parse("os.write(descriptor, b'')\nprint_line('')\nprocess.stdout.read()")))


def test_only_what_draws_passes_the_filter():
    found = {
        str(path.relative_to(ROOT / "localq"))
        for path in (ROOT / "localq").rglob("*.py")
        if "unfiltered(" in path.read_text() and path.name != "sanitize.py"
    }
    assert found == set(DRAWERS)


# ---- the streams


def test_a_clean_stream_passes_on_what_does_not_act():
    behind = io.StringIO()
    stream = clean_stream(behind)
    print(f"a{EVIL}\tb", file=stream)
    assert behind.getvalue() == f"a{SHOWN}\tb\n"
    assert unfiltered(stream) is behind
    assert unfiltered(behind) is behind
    assert not hasattr(stream, "buffer"), "bytes would pass by the filter"
    del stream
    assert not behind.closed


def test_lines_are_clean_where_the_stream_is_not():
    out = io.StringIO()
    print_lines(out, EVIL, "b")
    assert out.getvalue() == f"{SHOWN}\nb\n"


def test_json_keeps_what_acts_as_escapes():
    text = json_text({"name": EVIL, "é": 1})
    assert not set(text) & set(ACTS)
    assert json.loads(text) == {"name": EVIL, "é": 1}
    assert "é" in json_text({"é": 1})


@pytest.mark.parametrize(("encoding", "written"), [("utf-8", "é"), ("ascii", r"\u00e9"), ("latin-1", r"\u00e9")])
def test_json_is_written_in_the_encoding_of_its_stream(encoding, written):
    behind = io.BytesIO()
    stream = clean_stream(io.TextIOWrapper(behind, encoding, errors="replace"))
    write_json(stream, {"text": "é"})
    assert behind.getvalue().decode(encoding) == f'{{"text": "{written}"}}\n'


class Full(io.StringIO):
    """A stream on a full disk."""

    def write(self, text: str) -> int:
        raise OSError(28, "No space left on device")

    def flush(self) -> None:
        raise OSError(28, "No space left on device")


def test_an_optional_stream_leaves_out_what_it_cannot_write():
    stream = clean_stream(Full(), optional=True)
    print("a note", file=stream, flush=True)
    closed = io.StringIO()
    closed.close()
    print_lines(clean_stream(closed, optional=True), "a note")
    with pytest.raises(OSError, match="No space"):
        print_lines(clean_stream(Full()), "an answer")


def test_bars_show_names_that_do_not_act(monkeypatch):
    from rich.progress import Progress, TextColumn

    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", clean_stream(out, optional=True))
    with Progress(TextColumn("{task.description}", markup=False), console=stderr_console()) as bar:
        bar.add_task(EVIL)
        bar.refresh()
    assert SHOWN[:12] in out.getvalue()
    assert "\x1b[" in out.getvalue(), "the bar itself is drawn"
    assert not {"\x07", "\x9b", "\u202e", "\x1b]"} & {each for each in (*ACTS, "\x1b]") if each in out.getvalue()}


# ---- the verbs


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    for name in ("CONFIG", "DATA", "CACHE", "MODELS"):
        monkeypatch.setenv(f"LOCALQ_{name}", str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def said(monkeypatch, *arguments: str) -> tuple[int, str]:
    """Run the command as the script does: (exit code, all that it writes to both streams)."""
    raw = io.BytesIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(raw, "utf-8", newline="", write_through=True))
    monkeypatch.setattr(sys, "argv", ["localq", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0), raw.getvalue().decode()


def acting(text: str) -> list[str]:
    return [repr(each) for each in ACTS if each in text]


def command_of(verb: str):
    return registry.Verbs(name="localq").commands[verb]


def options_of(verb: str) -> list[str]:
    """The options of a verb that take a value."""
    command = command_of(verb)
    return [each.opts[0] for each in command.params if each.param_type_name == "option" and not each.is_flag]


MODEL = ("chat", "run", "pull", "show", "verify", "rm", "fit", "bench", "eval", "quantize")  # verbs that take one


@pytest.mark.parametrize("verb", registry.VERBS)
def test_no_verb_option_value_or_name_acts(monkeypatch, verb):
    """A wrong option, a value of each option, a name, an argument too many."""
    model = [EVIL] if verb in MODEL else []
    lines = [
        [verb, f"--{EVIL}"], [verb, f"-{EVIL[4:]}"], [verb, EVIL], [verb, EVIL, EVIL], [verb, "--", f"./{EVIL}"],
        [verb, "--json", EVIL], *([verb, *model, option, EVIL] for option in options_of(verb)),
        *([verb, *model, f"{option}={EVIL}"] for option in options_of(verb)),
    ]  # fmt: skip
    for line in lines:
        code, text = said(monkeypatch, *line)
        assert acting(text) == [], (line, text)
        assert "Traceback" not in text, (line, text)
        assert code in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9), (line, text)


@pytest.mark.parametrize("line", [[EVIL], [f"--{EVIL}"], ["help", EVIL], ["config", EVIL], ["config", "get", EVIL],
                                  ["config", "set", EVIL, "1"], ["config", "set", "model", EVIL],
                                  ["config", "set", "ctx", EVIL], ["config", "unset", EVIL]],
                         ids=lambda line: sanitize(" ".join(line)))  # fmt: skip
def test_no_unknown_verb_topic_or_setting_acts(monkeypatch, line):
    code, text = said(monkeypatch, *line)
    assert acting(text) == []
    assert SHOWN in text or code == 2
    assert code in (0, 2)


@pytest.mark.parametrize("verb", ["ls", "config", "doctor", "fit"])
def test_no_setting_of_the_environment_acts(monkeypatch, verb):
    for name in settings.origins():
        with monkeypatch.context() as patch:
            patch.setenv(f"LOCALQ_{name.upper()}", EVIL)
            code, text = said(patch, verb)
        assert acting(text) == [], (name, text)
        assert code in (0, 2, 4, 7), (name, text)


BENCH = ["-p", "8", "-n", "2", "-r", "1", "--against", "none", "--no-baseline", "--device", "cpu"]
FOLDER_LINES = [
    ["show"], ["show", "--json"], ["verify"], ["fit", "--vram", "8"], ["eval", "--plot", "-"], ["eval", "--json"],
    ["pull", "--dry-run"], ["quantize", "--format", "nf4"], ["rm", "-y"],
    *(["bench", *BENCH, "--plot", "-", "-o", form] for form in ("table", "md", "csv", "jsonl", "json")),
]  # fmt: skip


@pytest.mark.parametrize("line", FOLDER_LINES, ids=" ".join)
def test_no_folder_acts(monkeypatch, tmp_path, line):
    folder = write_sound(tmp_path / "sound").rename(tmp_path / EVIL)
    more = []
    if line[0] == "eval":
        (tmp_path / f"{EVIL}.txt").write_text("a red boat and a blue boat " * 20)
        more = ["--text", str(tmp_path / f"{EVIL}.txt"), "--window", "16", "--max-windows", "1", "--device", "cpu"]
    elif line[0] == "quantize":
        more = ["--out", str(tmp_path / f"{EVIL}-out")]
    code, text = said(monkeypatch, line[0], str(folder), *line[1:], *more)
    assert acting(text) == [], text
    assert "Traceback" not in text
    assert code in (0, 1, 2, 3, 4, 7), text
    if line[0] in ("show", "eval", "bench"):
        assert code == 0, text
        assert "evil" in text


def test_nothing_acts_at_a_terminal(tmp_path):
    """There verbs draw bars, and page: the sequences of localq itself get through, those of names do not."""
    folder = write_sound(tmp_path / "sound").rename(tmp_path / EVIL)
    for line in (["show"], ["verify"], ["bench", *BENCH]):
        text = at_a_terminal([*line, str(folder)])
        assert "evil" in text or line == ["verify"]
        assert not [
            each for each in ("\x1b]0;", "\x07", "\x1b[2J", "\x9b", "\x85", "\u202e", "\u2066") if each in text
        ], line


def at_a_terminal(arguments: list[str]) -> str:
    """All that localq writes to a terminal of 100 x 30."""
    controller, terminal = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "PAGER": "cat", "PYTHONPATH": str(ROOT)}
    written = bytearray()

    def read() -> None:
        while True:
            try:
                written.extend(os.read(controller, 65536))
            except OSError:  # the terminal has no user any more
                return

    reader = threading.Thread(target=read)
    process = subprocess.Popen(
        [sys.executable, "-m", "localq", *arguments], stdin=terminal, stdout=terminal, stderr=terminal, env=environment
    )
    os.close(terminal)
    reader.start()
    process.wait(120)
    reader.join(20)
    os.close(controller)
    return written.decode("utf-8", "replace")
