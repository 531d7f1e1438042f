"""Names, paths and prompts that are hardly text (reliability M9): shown clean, never a crash.

Bidi overrides, NUL, escape sequences, lone surrogates (what Python makes of bytes that are no UTF-8), emoji, too long.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from localq.chat.reply import ReplyPiece
from localq.chat.session import ChatSession
from localq.cli import execute
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.sanitize import replace_unsafe, sanitize
from localq.text import template
from localq.text.tokenizer import Tokenizer
from localq.worker.messages import Generate, Load, decode, encode
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.files.hostile_models import write_sound
from tests.support.text import tiny_tokenizers

SEED = 9
PIECES = (
    "\0", "\x07", "\x1b[2J", "\x1b]52;c;ZWNobw==\x07", "\x1bP1$r\x1b\\", "\x7f", "\x85", "\x9b31m", "\r", "\t",
    "\u202e", "\u2066", "\u2028", "\u200d", "\ufeff", "\ufffd", "\ud800", "\udcff", "\udfff\ud83e", "\U0010ffff",
    "🦙", "\U0001f469\u200d\U0001f467", "é", "e\u0301", "نص", "語", "a", " ", "/", "..", "~", "@", ":", "%", "{{ 1 }}",
    "<|im_end|>", "\uffff",
)  # fmt: skip
NAMES = (
    "a\0b", "./a\0b", "~\0", "~nobody-of-this-name", "x" * 5000, "./" + "x" * 5000, "x/" + "y" * 5000,
    "org/repo@" + "r" * 5000, "\udcff", "./\udcff", "org/\udcff", "\u202ellama", "llama-3.1-8b@\u202e", "🦙/🦙",
    "\x1b]52;c;x\x07", "hf.co/\udcff/x", "/dev/zero", "/proc/self/mem", ".gguf", "/dev/null.gguf", "a\nb/c", "-",
)  # fmt: skip
VERBS = (("show",), ("show", "--json"), ("fit", "--vram", "24"), ("run", "--offline"), ("rm", "--yes"))
ROOT = Path(__file__).parents[2]


def texts(count: int, longest: int = 12) -> list[str]:
    """Random texts of the pieces, always the same."""
    rng = random.Random(SEED)
    return ["".join(rng.choices(PIECES, k=rng.randint(1, longest))) for _ in range(count)]


def is_clean(text: str) -> bool:
    """No character that acts on a terminal or cannot be written."""
    kinds = {unicodedata.category(letter) for letter in text if letter not in "\t\n"}
    return not kinds & {"Cc", "Cs", "Zl", "Zp"} and not set(text) & set(
        "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2069"
    )


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    for name in ("CONFIG", "DATA", "CACHE"):
        monkeypatch.setenv(f"LOCALQ_{name}", str(tmp_path / name))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("sys.stdin", None)


def test_nothing_that_acts_gets_through_and_everything_else_does():
    for text in texts(2000):
        clean = sanitize(text)
        assert is_clean(clean)
        assert clean == "".join(letter for letter in text if is_clean(letter))
        half = len(text) // 2
        assert sanitize(text[:half]) + sanitize(text[half:]) == clean
        assert is_clean(replace_unsafe(text))
        assert [a if a == b else "" for a, b in zip(text, replace_unsafe(text), strict=True)] == [
            letter if is_clean(letter) else "" for letter in text
        ]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_a_name_of_any_kind_is_answered_in_a_clean_line(verb, capsys):
    for name in (*NAMES, *texts(60)):
        prompt = ["hi"] if verb[0] == "run" else []
        code = execute([verb[0], *verb[1:], "--", name, *prompt])
        said = capsys.readouterr()
        assert code in (1, 2, 4, 6, 8), (name, code, said.err)
        assert is_clean(said.out + said.err), name
        assert len(said.err) < 12_000


@pytest.mark.parametrize("name", ["\udcff\udc80", "\u202emodel", "🦙 \x1b[31m", "a\nb", "model' OR 1", "-x"])
def test_a_folder_of_any_name_is_shown_and_opened(tmp_path, capsys, name):
    folder = write_sound(tmp_path / "sound")
    folder = shutil.move(folder, tmp_path / name)
    assert execute(["show", str(folder)]) == 0
    assert is_clean(capsys.readouterr().out)
    assert execute(["show", "--json", str(folder)]) == 0
    said = capsys.readouterr().out
    assert is_clean(said)
    assert json.loads(said)["path"] == str(folder)
    files = open_model(Path(folder))
    assert Tokenizer.load(files).encode("hello")


def test_paths_and_prompts_cross_the_pipe_as_they_are():
    for text in texts(300):
        assert decode(encode(Load(text, LoadOptions(text)))) == Load(text, LoadOptions(text))
    assert decode(encode(Generate(1, [1, 2]))) == Generate(1, [1, 2])


def test_a_prompt_of_any_kind_becomes_ids_and_text_again():
    backend = Tokenizer(tiny_tokenizers.byte_level(), {}, None, frozenset())
    for text in texts(300):
        ids = backend.encode(text)
        stream = backend.stream()
        assert stream.push(ids) + stream.finish() == backend.decode(ids)
        assert is_clean(sanitize(backend.decode(ids)))


def test_a_conversation_of_any_kind_is_rendered():
    source = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\\n' }}{% endfor %}"
    for text in texts(40):
        rendered = template.render(source, [{"role": "user", "content": text}])
        assert rendered == f"user: {text}\n"


def test_a_reply_of_any_kind_is_clean_and_kept():
    replies = texts(100)
    session = ChatSession(
        ScriptedClient(*[[text] for text in replies]), Load("path", LoadOptions("model")), CharTokenizer()
    )
    for text in replies:
        parts = list(session.ask(text))
        assert is_clean("".join(part.text for part in parts if isinstance(part, ReplyPiece)))
        assert session.messages[-1].content == sanitize(text)
        assert session.messages[-2].content == text


@pytest.mark.parametrize("arguments", [[b"show", b"\xff\xfe"], [b"run", b"--\xff"], [b"run", b"no-such-model"]])
@pytest.mark.parametrize("encoding", ["utf-8:strict", "ascii:strict"])
def test_bytes_that_are_no_text(tmp_path, arguments, encoding):
    """On the command line, on stdin, and a terminal that takes ASCII only."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding, "HOME": str(tmp_path)}
    command = [sys.executable.encode(), b"-m", b"localq", *arguments]
    done = subprocess.run(command, input=b"\xff\xfe\0hello", capture_output=True, env=environment, timeout=60)
    assert done.returncode in (2, 4)
    assert b"Traceback" not in done.stderr
    assert b"\xff" not in done.stderr
