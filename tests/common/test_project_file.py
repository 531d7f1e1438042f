"""A project's `localq.toml`: where it is looked for, what it may set, and who wins."""

from __future__ import annotations

import io
import json
import os
import types
from pathlib import Path

import pytest

from localq import places, settings
from localq.cli import execute
from localq.errors import ExitCode, LocalqError


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A checkout; the test stands in a folder of it, with settings of its own elsewhere."""
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
    top = tmp_path / "checkout"
    (top / "src" / "part").mkdir(parents=True)
    (top / ".git").mkdir()
    monkeypatch.chdir(top / "src" / "part")
    return top


def write(folder: Path, text: str) -> Path:
    path = folder / places.PROJECT_FILE
    path.write_text(text)
    return path


def test_the_nearest_file_up_to_the_top_of_the_checkout_counts(project):
    assert places.project_file({}) is None
    write(project.parent, "top_k = 1")  # outside of the checkout
    assert places.project_file({}) is None
    top = write(project, "top_k = 2")
    assert places.project_file({}) == top
    near = write(project / "src", "top_k = 3")
    assert (places.project_file({}), settings.load({}).top_k) == (near, 3)
    assert places.project_file({"LOCALQ_NOPROJECT": "1"}) is None
    assert places.project_file({"LOCALQ_NOPROJECT": "0"}) == near


def test_outside_of_a_checkout_only_this_folder_counts(project, monkeypatch):
    (project / ".git").rmdir()
    write(project, "top_k = 2")
    assert places.project_file({}) is None
    monkeypatch.chdir(project)
    assert settings.load({}).top_k == 2


def test_a_file_of_another_user_is_not_read(project, monkeypatch):
    write(project, "top_k = 2")
    told = Path.stat
    other = types.SimpleNamespace(st_uid=os.getuid() + 1, st_mode=0o100644)
    monkeypatch.setattr(
        Path, "stat", lambda self, **how: other if self.name == places.PROJECT_FILE else told(self, **how)
    )
    assert places.project_file({}) is None


def test_it_lies_between_the_users_file_and_the_environment(project, tmp_path):
    (tmp_path / "config.toml").write_text("temperature = 0.1\ntop_k = 10\nmin_p = 0.5\n")
    path = write(project, 'temperature = 0.2\ntop_k = 20\nmodel = "phi-4@nf4"\n')
    found = settings.origins({"LOCALQ_TEMPERATURE": "0.3"})
    assert (found["temperature"].value, found["temperature"].source) == (0.3, "LOCALQ_TEMPERATURE")
    assert (found["top_k"].value, found["top_k"].source) == (20, str(path))
    assert (found["min_p"].value, found["min_p"].source) == (0.5, "config.toml")
    assert settings.load({}).replace(top_k=5).top_k == 5
    assert settings.read_config() == {"temperature": 0.1, "top_k": 10, "min_p": 0.5}


@pytest.mark.parametrize("name", sorted(set(settings.DESCRIPTIONS) - {*settings.PROJECT_MAY_SET, *settings.SAMPLING}))
def test_what_is_about_machine_data_or_screen_is_refused(project, name):
    write(project, f"{name} = true")
    with pytest.raises(LocalqError, match=f"{name} in .*a project file cannot change this setting because") as caught:
        settings.load({})
    assert caught.value.exit_code == ExitCode.USAGE
    assert settings.load({"LOCALQ_NOPROJECT": "1"}) == settings.Settings()


def test_what_it_may_set_has_no_path_program_address_or_secret():
    assert (
        *("model", "system", "ctx", "kv", "head", "think", "think_budget", "max_tokens"),
        *("draft", "draft_max"),
    ) == settings.PROJECT_MAY_SET


@pytest.mark.parametrize(
    "model",
    ["./weights", "/etc", "~", "~root", "..", "org/repo", "hf.co/org/repo", "evil.gguf", "EVIL.GGUF", "here", ""],
)
def test_a_model_is_a_name_of_the_catalogue(project, monkeypatch, model):
    monkeypatch.chdir(project)
    (project / "here").mkdir()
    write(project, f'model = "{model}"')
    with pytest.raises(LocalqError, match="a project file can select only catalogue models"):
        settings.load({})


@pytest.mark.parametrize("draft", ["./weights", "org/repo", "evil.gguf", "here"])
def test_so_is_a_draft_model(project, monkeypatch, draft):
    monkeypatch.chdir(project)
    (project / "here").mkdir()
    write(project, f'draft = "{draft}"')
    with pytest.raises(LocalqError, match="a project file can select only catalogue models"):
        settings.load({})
    write(project, 'draft = "llama-3.2-1b@nf4"')
    assert settings.load({}).draft_model == "llama-3.2-1b@nf4"
    write(project, 'draft = "lookup"')
    assert settings.load({}).draft == "lookup"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("[" * 50_000, ExitCode.BAD_FILE),
        ("top_k = " + "9" * 5_000, ExitCode.BAD_FILE),
        ("temperature = 1" + "0" * 400, ExitCode.USAGE),
        ("x" * 100_000 + " = 1", ExitCode.USAGE),
        ('kv = "' + "y" * 100_000 + '"', ExitCode.USAGE),
        ("top_k = 1 # " + "z" * 2_000_000, ExitCode.USAGE),
        ("top_k = 1 # " + "z" * settings.MOST_PROJECT_BYTES, ExitCode.USAGE),
        ("top_k = \0", ExitCode.USAGE),
    ],
)
def test_a_hostile_file_is_refused_in_few_words(project, text, code):
    write(project, text)
    with pytest.raises(LocalqError) as caught:
        settings.load({})
    assert caught.value.exit_code == code
    assert len(str(caught.value)) < 600


def test_a_pipe_in_its_place_is_no_file(project):
    os.mkfifo(project / places.PROJECT_FILE)
    assert places.project_file({}) is None


def test_show_names_the_winner_and_escapes_stay_off_the_terminal(project, capsys):
    path = write(project, 'system = "Be \\u001b[31m red"\n')
    assert execute(["config", "show", "--origin"]) == 0
    (line,) = [each for each in capsys.readouterr().out.splitlines() if each.startswith("system ")]
    assert str(path) in line
    assert "Be [31m red" in line
    assert execute(["config", "get", "system"]) == 0
    assert capsys.readouterr().out == "Be [31m red\n"
    assert execute(["config", "show", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["project"], body["settings"]["system"]["origin"]) == (str(path), str(path))


def test_what_it_decides_is_said_unless_a_flag_wins(project, capsys):
    path = write(project, "top_k = 7\nseed = 3\n")
    execute(["chat", "no-such-model"])
    assert f"(top_k, seed: set by {path})\n" in capsys.readouterr().err
    execute(["chat", "no-such-model", "--seed", "4"])
    assert f"(top_k: set by {path})\n" in capsys.readouterr().err
    execute(["chat", "no-such-model", "--seed", "4", "--top-k", "8"])
    assert "set by" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        ["run", "no-such-model", "hello"], ["run", "no-such-model", "hello", "-q"],
        ["run", "no-such-model", "hello", "--json"], ["run", "no-such-model", "hello", "-q", "-x"],
        ["run", "no-such-model", "--dry-run"], ["chat", "no-such-model", "-q"], ["chat", "no-such-model", "--plain"],
        ["chat", "no-such-model", "--dry-run"], ["show", "smollm2-135m"], ["fit", "smollm2-135m", "--vram", "8"],
        ["fit", "smollm2-135m", "--vram", "8", "--json"], ["pull", "smollm2-135m", "--dry-run", "--offline"],
        ["eval", "no-such-model", "--text", "none"], ["bench", "no-such-model"], ["config", "show"],
        ["config", "get", "kv"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_every_verb_that_it_steers_says_so_quiet_or_not(project, command, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    path = write(project, 'kv = "8"\n')
    execute(command)
    taken = capsys.readouterr()
    assert taken.err.count(f"(kv: set by {path})\n") == 1
    assert "set by" not in taken.out
    monkeypatch.setenv("LOCALQ_NOPROJECT", "1")
    execute(command)
    assert "set by" not in capsys.readouterr().err


def test_verbs_that_it_does_not_steer_say_nothing(project, capsys):
    write(project, 'system = "PLANTED"\nkv = "8"\n')
    for command in (["ls"], ["doctor"], ["help", "keys"], ["config", "get", "top_k"], ["prune", "--dry-run"]):
        execute(command)
        assert "set by" not in capsys.readouterr().err


def test_a_link_of_another_user_is_not_followed(project, monkeypatch):
    real = write(project.parent, "top_k = 2")
    (project / places.PROJECT_FILE).symlink_to(real)
    assert places.project_file({}) == project / places.PROJECT_FILE
    told = Path.lstat
    other = types.SimpleNamespace(st_uid=os.getuid() + 1, st_mode=0o120777)
    monkeypatch.setattr(Path, "lstat", lambda self: other if self.name == places.PROJECT_FILE else told(self))
    assert places.project_file({}) is None
