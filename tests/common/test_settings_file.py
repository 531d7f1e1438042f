"""Writing config.toml: writers take turns, and links, rights, comments, line endings and foreign changes are kept."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import resource
import stat
import threading
import time

import pytest

from localq import settings, settings_file, toml_files
from localq.cli import execute
from localq.errors import ExitCode, LocalqError
from localq.tui.dialogs import settings_form
from localq.tui.dialogs.settings_form import NAMES

TWELVE = {
    "temperature": "0.5", "top_k": "5", "top_p": "0.9", "min_p": "0.1", "repeat_penalty": "1.1", "seed": "7",
    "max_tokens": "100", "theme": "nord", "kv": "8", "ctx": "4096", "system": "be brief", "model": "phi-4",
}  # fmt: skip
WRITERS = {
    "config set": lambda name, text: execute(["config", "set", name, text]),
    "theme": lambda name, text: settings_file.write(name, text),
    "F6": lambda name, text: settings_form.save_as_default({**dict.fromkeys(NAMES, ""), **current(), name: text}),
    "config edit": lambda name, text: settings_file.write_file(f"{name} = {text!r}\n", ""),
}


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    monkeypatch.setenv("LOCALQ_CONFIG", str(path))
    return path


def current() -> dict[str, str]:
    """The fields of F6 as they are after it was opened."""
    return {name: str(value) for name, value in settings.read_config().items() if name in NAMES}


def run_together(works):
    """Run each in a process of its own, all at the same moment; return their exit codes."""
    context = multiprocessing.get_context("fork")
    gate = context.Barrier(len(works))

    def run(work):
        gate.wait()
        work()

    running = [context.Process(target=run, args=(work,)) for work in works]
    for each in running:
        each.start()
    for each in running:
        each.join()
    return [each.exitcode for each in running]


def test_twelve_at_once_lose_nothing(config_file):
    for _ in range(3):
        config_file.write_text("# mine\n")
        works = [lambda name=name, text=text: settings_file.write(name, text) for name, text in TWELVE.items()]
        assert run_together(works) == [0] * 12
        assert set(settings.read_config()) == set(TWELVE)
        assert config_file.read_text().startswith("# mine\n")
        assert os.listdir(config_file.parent) == ["config.toml"]
        works = [lambda name=name: settings_file.write(name, None) for name in TWELVE if name != "seed"]
        assert run_together(works) == [0] * 11
        assert settings.read_config() == {"seed": 7}


def test_twelve_threads_lose_nothing(config_file):
    running = [threading.Thread(target=settings_file.write, args=each) for each in TWELVE.items()]
    for each in running:
        each.start()
    for each in running:
        each.join()
    assert set(settings.read_config()) == set(TWELVE)


def test_without_locks_a_file_that_changes_meanwhile_is_read_again(config_file, monkeypatch):
    def no_locks(descriptor, kind):
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    sync, others = os.fsync, ["theme = 'nord'\n"]

    def sync_late(descriptor):
        sync(descriptor)
        if others:  # another program writes between reading and renaming
            config_file.write_text(others.pop())

    monkeypatch.setattr(os, "fsync", sync_late)
    settings_file.write("top_k", "4")
    assert settings.read_config() == {"theme": "nord", "top_k": 4}


def test_a_lock_that_stays_is_not_waited_for_without_end(config_file, monkeypatch):
    monkeypatch.setattr(settings_file, "WAIT_S", 0.2)
    held = os.open(config_file.parent, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        with pytest.raises(LocalqError, match="another program has held the lock on the folder") as caught:
            settings_file.write("top_k", "4")
    finally:
        os.close(held)
    assert caught.value.exit_code == ExitCode.DISK
    settings_file.write("top_k", "4")


@pytest.mark.parametrize("writer", WRITERS)
def test_every_writer_keeps_links_rights_and_what_a_killed_one_left(config_file, writer, capsys):
    folder = config_file.parent / "dotfiles"
    folder.mkdir()
    (folder / "real.toml").write_text("")
    (folder / "real.toml").chmod(0o640)
    (folder / ".real.toml.new").write_text("half of")  # of a killed process
    (folder / "via.toml").symlink_to("real.toml")
    config_file.symlink_to("dotfiles/via.toml")
    WRITERS[writer]("theme", "nord")
    assert config_file.is_symlink()
    assert (folder / "via.toml").is_symlink()
    assert settings.read_config() == {"theme": "nord"}
    assert stat.S_IMODE((folder / "real.toml").stat().st_mode) == 0o640
    assert sorted(os.listdir(folder)) == ["real.toml", "via.toml"]


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_every_writer_makes_a_new_file_by_the_umask_where_a_link_leads(config_file, writer, umask, capsys):
    config_file.symlink_to("there/real.toml")
    before = os.umask(umask)
    try:
        WRITERS[writer]("theme", "nord")
    finally:
        os.umask(before)
    real = config_file.parent / "there" / "real.toml"
    assert config_file.is_symlink()
    assert stat.S_IMODE(real.stat().st_mode) == 0o666 & ~umask


def test_two_names_of_one_file_stay_two_names(config_file):
    config_file.write_text("top_k = 1\n# a long comment that is removed\n")
    os.link(config_file, config_file.parent / "other.toml")
    settings_file.write("top_k", "40")
    settings_file.write("theme", "nord")
    assert config_file.stat().st_nlink == 2
    assert (config_file.parent / "other.toml").read_text() == config_file.read_text()
    assert settings.read_config() == {"top_k": 40, "theme": "nord"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"# mine\r\nseed = 7\r\n", b"# mine\r\nseed = 7\r\ntop_k = 4\r\n"),
        (b"\xef\xbb\xbfseed = 7\n", b"\xef\xbb\xbfseed = 7\ntop_k = 4\n"),
        (b"seed = 7", b"seed = 7\ntop_k = 4\n"),
        (b"seed = 7\n\n[keys] # own\nsend = 'ctrl+x'\n", b"seed = 7\ntop_k = 4\n\n[keys] # own\nsend = 'ctrl+x'\n"),
        (b"  top_k = 3 # three\n\n# end", b"  top_k = 4 # three\n\n# end"),
        (b"keys.send = 'ctrl+x'\n", b"keys.send = 'ctrl+x'\ntop_k = 4\n"),
    ],
)
def test_line_endings_marks_and_comments_stay(config_file, before, after):
    config_file.write_bytes(before)
    settings_file.write("top_k", "4")
    assert config_file.read_bytes() == after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("[keys] # own\n# one\nsend = 'ctrl+x' # two\nhelp = 'f9'\n",
         "[keys] # own\n# one\nsend = 'ctrl+x' # two\nnewline = \"enter\"\n"),
        ("keys = {send = 'f7'} # own\n", "keys = {send = \"ctrl+x\",newline = \"enter\"} # own\n"),
        ("keys.help = 'f9'\nkeys.send = 'ctrl+x' # two\n", "keys.send = 'ctrl+x' # two\nkeys.newline = \"enter\"\n"),
        ("# none\n", "# none\n\n[keys]\nsend = \"ctrl+x\"\nnewline = \"enter\"\n"),
    ],
)  # fmt: skip
def test_comments_of_a_table_stay(config_file, before, after):
    config_file.write_text(before)
    settings_file.write("keys", "send=ctrl+x; newline=enter")
    assert settings.read_config() == {"keys": {"send": "ctrl+x", "newline": "enter"}}
    assert config_file.read_text() == after


def test_attributes_of_the_file_stay(config_file):
    config_file.write_text("")
    try:
        os.setxattr(config_file, "user.mine", b"yes")
    except OSError:
        pytest.skip("this file system has no attributes")
    settings_file.write("top_k", "4")
    assert os.getxattr(config_file, "user.mine") == b"yes"


def test_the_copy_is_synced_before_it_is_renamed_and_the_folder_after(config_file, monkeypatch):
    config_file.write_text("")
    calls = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda each: (calls.append(os.path.isdir(f"/proc/self/fd/{each}")), sync(each)))
    monkeypatch.setattr(os, "replace", lambda old, new: (calls.append("rename"), replace(old, new)))
    settings_file.write("top_k", "4")
    assert calls == [False, "rename", True]


def fill_disk():
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_ends_with_exit_code_9_and_changes_nothing(config_file, writer, capsys):
    config_file.write_text("" if writer == "config edit" else "top_k = 4\n")
    before = config_file.read_text()

    def write():
        fill_disk()
        try:
            code = WRITERS[writer]("theme", "nord")
        except LocalqError as error:
            code = error.exit_code if "the disk is full" in error.why else ExitCode.FAILURE
        os._exit(code)

    assert run_together([write]) == [ExitCode.DISK]
    assert config_file.read_text() == before
    assert os.listdir(config_file.parent) == ["config.toml"]


@pytest.mark.parametrize("kind", ["a file in the way", "a folder", "a pipe", "a loop"])
def test_what_cannot_be_written_ends_in_one_line(config_file, kind, capsys, monkeypatch):
    if kind == "a file in the way":
        (config_file.parent / "file").write_text("")
        monkeypatch.setenv("LOCALQ_CONFIG", str(config_file.parent / "file" / "config.toml"))
    elif kind == "a folder":
        config_file.mkdir()
    elif kind == "a pipe":
        os.mkfifo(config_file)
    else:
        config_file.symlink_to("config.toml")
    assert execute(["config", "set", "top_k", "4"]) in (ExitCode.DISK, ExitCode.BAD_FILE)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_file_that_could_not_be_read_again_is_not_written(config_file, capsys):
    config_file.write_text("top_k = 4\n")
    for text in ("x" * toml_files.MOST_BYTES, "\udcff"):
        assert execute(["config", "set", "system", text]) == ExitCode.USAGE
        assert len(capsys.readouterr().err.splitlines()) == 1
    assert config_file.read_text() == "top_k = 4\n"


def test_an_edit_takes_what_others_have_set_meanwhile(config_file):
    before = "# mine\ntop_k = 4\nseed = 1\n"
    config_file.write_text(before)
    settings_file.write("theme", "nord")
    settings_file.write("seed", None)
    assert settings_file.write_file("# ours\ntop_k = 5\nseed = 1\n", before) == 2
    assert config_file.read_text() == '# ours\ntop_k = 5\ntheme = "nord"\n'


@pytest.mark.parametrize("now", ["top_k = 6\n", "# another comment\ntop_k = 4\n", "top_k = 'broken"])
def test_an_edit_that_others_have_crossed_is_kept_beside(config_file, now):
    config_file.write_text(now)
    with pytest.raises(LocalqError, match=r"The edited text was saved in .*config\.toml\.edited\.") as caught:
        settings_file.write_file("top_k = 5", "top_k = 4\n")
    assert caught.value.exit_code in (ExitCode.FAILURE, ExitCode.BAD_FILE)
    assert config_file.read_text() == now
    kept = config_file.with_name("config.toml.edited")
    assert kept.read_text() == "top_k = 5\n"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_a_second_rejected_edit_is_kept_beside_the_first(config_file):
    names = ["config.toml.edited", "config.toml.edited.2", "config.toml.edited.3"]
    for number, name in enumerate(names):
        with pytest.raises(LocalqError, match=rf"The edited text was saved in .*{re.escape(name)}\.$"):
            settings_file.write_file(f"top_k = 'edit {number}'\n", "")
    assert [config_file.with_name(name).read_text() for name in names] == [f"top_k = 'edit {n}'\n" for n in range(3)]


def test_writers_do_not_wait_for_each_other_for_long(config_file):
    begun = time.monotonic()
    for text in map(str, range(1, 21)):
        settings_file.write("top_k", text)
    assert time.monotonic() - begun < 10
