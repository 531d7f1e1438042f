"""Files are opened for writing in one module, `disk`, which empties nothing that exists and follows no link."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "localq"
OPENERS = {
    "disk.py",
    "files/own_files.py",  # the same for files that may be another user's: their owner is checked
}
EXEMPT = {"kernels/setup"}  # builds localq from a clone, before any of it can be imported
SOURCES = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if (name := path.relative_to(PACKAGE).as_posix()) not in OPENERS and not name.startswith(tuple(EXEMPT))
)
WRITERS = {
    "write_text", "write_bytes", "touch", "mkstemp", "mktemp", "NamedTemporaryFile", "TemporaryFile",
    "SpooledTemporaryFile", "save_file", "FileLock", "SoftFileLock", "copyfile", "copy2", "copytree", "FileHandler",
    "RotatingFileHandler", "extractall", "creat", "tofile", "memmap", "FileIO", "mkfifo", "mknod",
}  # fmt: skip


def _mode(call: ast.Call, at: int) -> str:
    """The mode of a call of `open`: a text; "" without one, "?" for one that is computed."""
    values = [each.value for each in call.keywords if each.arg == "mode"] + call.args[at : at + 1]
    if not values:
        return ""
    if isinstance(values[0], ast.Constant):
        return str(values[0].value)
    return "?" if at or (isinstance(values[0], ast.Name) and "mode" in values[0].id) else ""


def _names(node: ast.AST) -> tuple[str, str]:
    """The name of a called function, and of the module or object before it."""
    function = node.func if isinstance(node, ast.Call) else None
    if isinstance(function, ast.Attribute):
        return function.attr, function.value.id if isinstance(function.value, ast.Name) else ""
    return (function.id, "") if isinstance(function, ast.Name) else ("", "")


def _writes(node: ast.AST) -> Iterator[str]:
    """How a node may open a file for writing."""
    if isinstance(node, ast.Attribute) and node.attr in ("O_TRUNC", "O_TMPFILE"):
        yield node.attr
    name, module = _names(node)
    if not isinstance(node, ast.Call) or (node.args and ast.unparse(node.args[0]) == "os.devnull"):
        return
    at = 1 if isinstance(node.func, ast.Name) or module == "io" else 0
    if name == "open" and module == "os":
        flags = ast.unparse(node.args[1]) if len(node.args) > 1 else ""
        if "O_CREAT" in flags or not flags.startswith("os.O_"):
            yield "os.open that may create"
    elif name == "open" and set(_mode(node, at)) & set("wax+?"):
        yield "open for writing"
    elif (
        name in WRITERS
        or (name, module) == ("truncate", "os")
        or (name == "savefig" and "content" not in map(ast.unparse, node.args))
    ):
        yield name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_no_other_module_opens_a_file_for_writing(path: Path) -> None:
    found = [
        f"line {getattr(node, 'lineno', '?')}: {how}"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for how in _writes(node)
    ]
    assert not found, "open it with a function of localq.disk"


@pytest.mark.parametrize(
    "line",
    [
        "open(path, 'w')", "open(path, mode='ab')", "path.open('r+b')", "path.open(mode)", "path.write_text('')",
        "os.open(path, os.O_WRONLY | os.O_CREAT)", "os.open(path, _FLAGS)", "path.touch()", "tempfile.mkstemp()",
        "figure.savefig(target)", "save_file(tensors, path)", "io.open(path, 'x')", "os.truncate(path, 0)",
        "filelock.FileLock(path)", "shutil.copyfile(a, b)", "os.open(path, os.O_RDWR | os.O_TRUNC)",
    ],
)  # fmt: skip
def test_each_way_to_write_is_found(line: str) -> None:
    assert [how for node in ast.walk(ast.parse(line)) for how in _writes(node)]


@pytest.mark.parametrize(
    "line", ["open(path)", "path.open('rb')", "os.open(path, os.O_RDONLY)", "os.fdopen(file, 'wb')"]
)
def test_reading_is_allowed(line: str) -> None:
    assert not [how for node in ast.walk(ast.parse(line)) for how in _writes(node)]
