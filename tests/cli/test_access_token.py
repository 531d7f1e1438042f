"""`--token`: from a file, stdin or the command line to the hub, and nowhere else."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from localq import cli
from localq.cli import access_token
from localq.errors import ExitCode, LocalqError
from tests.support.files import fake_hub

ROOT, REPO = Path(__file__).parents[2], "maker/tiny-model"
SECRET = "hf_" + "s3cret" * 5


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "of the environment")
    monkeypatch.delenv("LOCALQ_TOKEN", raising=False)


def test_a_file_a_line_of_stdin_and_the_word_itself(tmp_path, monkeypatch, capsys):
    (tmp_path / "token").write_text(f"{SECRET}\n")
    access_token.use(f"@{tmp_path / 'token'}")
    assert os.environ["HF_TOKEN"] == SECRET
    monkeypatch.setattr(sys, "stdin", io.StringIO("hf_other\nthe prompt\n"))
    access_token.use("-")
    assert os.environ["HF_TOKEN"] == "hf_other"
    assert sys.stdin.read() == "the prompt\n"
    assert capsys.readouterr() == ("", "")
    access_token.use(SECRET)
    assert os.environ["HF_TOKEN"] == SECRET
    out, err = capsys.readouterr()
    assert "process list" in err
    assert SECRET not in out + err
    monkeypatch.setenv("LOCALQ_TOKEN", "hf_quiet")  # the environment is nobody else's to read
    access_token.use("hf_quiet")
    assert capsys.readouterr().err == ""
    access_token.use(None)
    assert os.environ["HF_TOKEN"] == "hf_quiet"


@pytest.mark.parametrize("value", ["", "  ", "two words", "schl\u00fcssel", "x" * 1001, "a\x1b[31m"])
def test_what_is_no_token_is_refused_and_not_repeated(value, capsys):
    with pytest.raises(LocalqError) as caught:
        access_token.use(value)
    assert caught.value.exit_code == ExitCode.GATED
    assert not value.strip() or value not in str(caught.value) + capsys.readouterr().err
    assert os.environ["HF_TOKEN"] == "of the environment"


def test_the_word_itself_is_overwritten_where_ps_finds_it(tmp_path):
    code = (
        "import sys; from localq.cli import access_token; access_token.use(sys.argv[2]);"
        "print(open('/proc/self/cmdline').read().split(chr(0))[3:], sys.argv)"
    )
    for given in (SECRET, "hf_short"):
        command = [sys.executable, "-c", code, "--token", given, f"--token={given}", "more"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
        assert given not in done.stdout + done.stderr
        assert "'--token', '***" in done.stdout
        assert "'more'" in done.stdout


def test_a_file_that_is_none_is_wrong_usage(tmp_path):
    with pytest.raises(LocalqError) as caught:
        access_token.use(f"@{tmp_path / 'nothing'}")
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize("verb", ["bench", "chat", "eval", "fit", "pull", "quantize", "run"])
def test_every_verb_that_fetches_takes_it(verb, capsys):
    assert cli.execute([verb, "--token", ""]) == ExitCode.GATED
    assert "--token: the token is empty" in capsys.readouterr().err


def test_a_gated_model_is_fetched_with_it_and_the_token_is_in_no_list_of_processes(tmp_path):
    with fake_hub.FakeHub() as server:
        server.add(REPO, fake_hub.model_files(), gated="auto", allowed_tokens=frozenset({SECRET}))
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "LOCALQ_"))}
        homes = {f"LOCALQ_{name}": str(tmp_path / name) for name in ("DATA", "CACHE", "CONFIG")}
        hub = {"HF_ENDPOINT": server.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HOME": str(tmp_path / "home")}
        for token, stdin, code in (("-", "wrong\n", ExitCode.GATED), ("-", f"{SECRET}\n", ExitCode.OK)):
            command = [sys.executable, "-m", "localq", "pull", REPO, "--token", token]
            done = subprocess.run(
                command, cwd=ROOT, env={**kept, **homes, **hub},
                input=stdin, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            assert done.returncode == code, done.stderr
            assert SECRET not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file() and not path.is_symlink()]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


def test_bytes_that_are_no_text_are_no_token(monkeypatch):
    """Typed at the prompt, which reads the terminal by itself."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    def typed(*_: object, **__: object) -> str:
        return b"hf_\xf1".decode()

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("getpass.getpass", typed)
    with pytest.raises(LocalqError, match="not a valid access token") as caught:
        access_token.use("-")
    assert caught.value.exit_code == ExitCode.GATED
