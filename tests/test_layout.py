"""The floor plan of the tree: how many modules and packages, which layers, how long the documents may be."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "bench", "chat", "cli", "engine", "files", "formats", "kernels", "models", "planner", "quantize", "server", "text",
    "tui", "worker",
}  # fmt: skip
FAMILIES = {
    "attention", "bcq", "common", "delta", "experts", "gather", "gguf", "int4", "lookup", "nf4", "rowlut", "rows",
    "scaled", "search", "step",
}  # fmt: skip
# Class names of a contract: four of a format or architecture, and a message of two Textual widgets with one meaning
CONTRACT_CLASSES = {"Chosen", "Config", "Linear", "Model", "Packed"}
MODULES, LAYERS, DOCSTRING_LINES = 17, 12, 15
SIZES = {"README.md": 25_000, "csrc/README.md": 30_000}
LINES = {"localq/README.md": 60}


def folders(parent: Path) -> set[str]:
    return {each.name for each in parent.iterdir() if each.is_dir() and each.name not in ("__pycache__", "data")}


def test_modules_and_packages_of_localq():
    modules = {path.stem for path in (ROOT / "localq").glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= MODULES, sorted(modules)
    assert folders(ROOT / "localq") == PACKAGES


def test_kernel_sources_are_in_the_folders_of_their_families():
    assert folders(ROOT / "csrc") == FAMILIES
    assert {each.name for each in (ROOT / "csrc").iterdir() if each.is_file()} == {"CMakeLists.txt", "README.md"}
    assert [name for name in FAMILIES if not (ROOT / "csrc" / name / "README.md").is_file()] == []


def test_layers_of_the_import_contract():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    kinds = {each["type"]: each for each in settings["contracts"]}
    assert len(kinds["layers"]["layers"]) <= LAYERS
    assert kinds["acyclic_siblings"]["ancestors"] == ["localq"]


def test_tests_are_in_the_folders_of_what_they_test():
    assert {path.name for path in (ROOT / "tests").glob("*.py")} == {
        "__init__.py", "conftest.py", "test_architecture.py", "test_build.py", "test_layout.py",
    }  # fmt: skip
    assert folders(ROOT / "tests") <= PACKAGES | {"common", "support", "tools"}


def test_two_classes_never_share_a_name():
    """A leading underscore makes no second name."""
    modules: dict[str, list[str]] = {}
    for path in sorted((ROOT / "localq").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name.lstrip("_"), []).append(str(path.relative_to(ROOT)))
    shared = {name: paths for name, paths in modules.items() if len(paths) > 1}
    assert {name: paths for name, paths in shared.items() if name not in CONTRACT_CLASSES} == {}
    assert shared.keys() >= CONTRACT_CLASSES, "the table names a class that no longer shares its name"


@pytest.mark.parametrize("document", SIZES)
def test_documents_keep_their_size(document):
    assert len((ROOT / document).read_bytes()) <= SIZES[document]


@pytest.mark.parametrize("document", LINES)
def test_documents_keep_their_number_of_lines(document):
    assert len((ROOT / document).read_text().splitlines()) <= LINES[document]


@pytest.mark.parametrize(
    "path", sorted((ROOT / "localq").rglob("__init__.py")), ids=lambda path: str(path.parent.relative_to(ROOT))
)
def test_packages_describe_themselves(path):
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring
    if path.parent.name not in ("formats",) and path.parent.parent.name != "formats":  # specifications of formats
        assert len(docstring.splitlines()) <= DOCSTRING_LINES
