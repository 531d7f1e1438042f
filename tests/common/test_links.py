"""Links that lead in a circle, and files that have other names elsewhere: one line, and nothing of others changes."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

import localq
from localq import disk
from localq.chat.history.store import ConversationStore
from localq.chat.terminal import input_history
from localq.errors import ExitCode, LocalqError
from tests.support.cli.cli_processes import environment_of
from tests.support.cli.cli_processes import localq as command
from tests.support.models.tiny_checkpoints import make_checkpoint

PACKAGE = Path(localq.__file__).parent
EXEMPT = {"disk.py", "places.py", "processes.py", "files/json_files.py"}  # json_files refuses loops itself


def resolved_by_pathlib(path: Path) -> list[int]:
    """Lines of calls `path.resolve()`: pathlib raises RuntimeError for a loop."""
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "resolve":
            found += [node.lineno] if not node.args else []
    return found


def test_paths_are_resolved_by_disk_which_raises_an_os_error_for_a_loop():
    modules = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    wrong = {
        name: lines for name, path in modules.items()
        if name not in EXEMPT and not name.startswith("kernels/setup/") and (lines := resolved_by_pathlib(path))
    }  # fmt: skip
    assert wrong == {}


@pytest.fixture
def loop(tmp_path) -> Path:
    path = tmp_path / "loop"
    path.symlink_to(path)
    return path


def test_a_loop_is_an_os_error(loop):
    with pytest.raises(OSError, match="symbolic links"):
        disk.resolve(loop).stat()


def test_private_files_with_another_name_elsewhere_keep_their_mode(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    others = tmp_path / "keep.txt"
    others.write_bytes(b"")
    others.chmod(0o644)
    for path, use in (
        (tmp_path / "state/localq/history", lambda path: input_history.open_file()),
        (tmp_path / "data/sessions.db", lambda path: ConversationStore(path).summaries()),
    ):
        path.parent.mkdir(parents=True)
        os.link(others, path)
        use(path)
        assert others.stat().st_mode & 0o777 == 0o644, path


def test_every_output_and_cache_with_a_loop_ends_in_one_line(tmp_path, loop):
    model = make_checkpoint(tmp_path / "model", "llama")
    environment = environment_of(tmp_path, model)
    cached = tmp_path / "hub/models--maker--tiny"
    (cached / "snapshots/main").mkdir(parents=True)
    (cached / "blobs").mkdir()
    (cached / "snapshots/main/config.json").symlink_to("config.json")
    environment["HF_HUB_CACHE"] = str(tmp_path / "hub")
    for arguments, codes in (
        (("quantize", str(model), "--format", "nf4", "-o", str(loop)), {ExitCode.DISK, ExitCode.USAGE}),
        (("run", str(model), "hello", "--think-out", str(loop)), {ExitCode.DISK, ExitCode.USAGE}),
        (("prune", "--dry-run"), {ExitCode.OK}),
        (("ls",), {ExitCode.OK}),
        (("run", str(loop), "hello"), {ExitCode.USAGE, ExitCode.UNKNOWN_MODEL}),
    ):
        done = command(environment, *arguments)
        assert done.returncode in codes, (arguments, done.stderr)
        assert "unexpected" not in done.stderr, done.stderr


def test_a_link_is_no_output(tmp_path):
    """It may lead to a file that nobody meant; what the shell has opened is written to all the same."""
    kept, link = tmp_path / "keep.txt", tmp_path / "link"
    kept.write_text("kept")
    link.symlink_to(kept)
    with pytest.raises(LocalqError, match=r"is a link to .*keep\.txt\. To replace the target file") as caught:
        disk.LazyOutput(link)
    assert caught.value.exit_code == ExitCode.USAGE
    assert kept.read_text() == "kept"
    disk.LazyOutput(Path("/dev/stderr")).close()
