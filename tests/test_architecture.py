"""The house rules that a machine can check: imports, budgets, start-up, and facts that must not be stated twice."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.common import pace

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "localq").rglob("*.py"))
FILE_LINES, FUNCTION_LINES, KERNEL_FILE_LINES = 400, 60, 400
KERNEL_FOLDERS = {  # of csrc, and what each includes besides its own files
    "common": (),
    "rows": ("common",),
    "nf4": ("common",),
    "int4": ("common",),
    "gguf": ("common",),
    "scaled": ("common", "gguf"),
    "rowlut": ("common", "rows"),
    "lookup": ("common",),
    "gather": ("common", "rows"),
    "bcq": ("common", "lookup"),
    "experts": ("common", "nf4"),
    "search": ("common",),
    "attention": ("common",),
    "delta": ("common",),
    "step": ("common",),
}


def python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120, **options
    )


def test_imports_point_down():
    result = python("-c", "from importlinter.cli import lint_imports_command as c; c()")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "module",
    [
        "cli",
        "chat.session",
        "planner.prepare",
        "files.hub.fetch",
        "files.catalog",
        "planner.plan",
        "files.model_folder",
        "text.tokenizer",
        "text.template",
        "worker.client",
    ],
)
def test_the_front_end_never_loads_torch(module):
    code = f"import sys, localq.{module}; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    result = python("-c", code)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_small(path):
    text = path.read_text()
    assert text.count("\n") <= FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            is_verb = path.parent.name == "verbs" and node.name == path.stem  # its parameters are the command line
            first = node.body[0].lineno if is_verb else node.lineno
            assert node.end_lineno - first + 1 <= FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_say_what_they_are(path):
    if path.read_text().strip():
        assert ast.get_docstring(ast.parse(path.read_text())), "no module docstring"


def operations() -> list[str]:
    """Bindings that launch kernels: those that take a stream."""
    found = []
    for path in sorted((ROOT / "csrc").rglob("bind.cpp")):
        for definition in path.read_text().split("m.def(")[1:]:
            if 'py::arg("stream")' in definition:
                found += re.findall(r'^\s*"(\w+)"', definition)
    return found


def texts(*patterns: str) -> str:
    return "".join(path.read_text() for pattern in patterns for path in sorted(ROOT.glob(pattern)))


def test_every_binding_has_a_wrapper_a_test_a_bench_row_a_self_test_and_an_entry_in_the_index():
    names = operations()
    assert len(names) >= 8
    places = {
        "wrapper": ("def {}(", texts("localq/kernels/*.py", "localq/formats/*/*.py")),
        "test": ("{}", texts("tests/kernels/test_*.py", "tests/engine/**/test_*.py", "tests/formats/**/test_*.py")),
        "bench row": ('"{}"', texts("localq/bench/kernels/*.py", "localq/formats/cases.py")),
        "self-test": ("{}", texts("localq/engine/selftest/checks.py", "localq/formats/cases.py")),
        "index": ("`{}`", texts("csrc/README.md")),
    }
    missing = [
        (name, place) for name in names for place, (form, text) in places.items() if form.format(name) not in text
    ]
    assert missing == []


def test_every_kernel_source_is_built():
    """In the list of its folder, by the name without the folder."""
    csrc = ROOT / "csrc"
    listed = {path.parent: re.findall(r"[\w.]+", path.read_text()) for path in csrc.glob("*/sources.cmake")}
    sources = [path for suffix in ("cu", "cpp") for path in csrc.rglob(f"*.{suffix}")]
    assert [str(path.relative_to(csrc)) for path in sources if path.name not in listed[path.parent]] == []


def test_a_folder_of_kernels_includes_only_those_it_may():
    csrc, found = ROOT / "csrc", []
    for path in sorted(csrc.glob("*/*.*")):
        folder = path.parent.name
        for included in re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE):
            if included.split("/")[0] not in (folder, *KERNEL_FOLDERS[folder]) or not (csrc / included).is_file():
                found.append((str(path.relative_to(csrc)), included))
    assert found == []
    assert sorted(KERNEL_FOLDERS) == sorted(path.name for path in csrc.iterdir() if path.is_dir())


def test_the_sanitizer_runs_every_list_of_cases():
    """Of tests/tools/every_kernel.py, which needs a GPU: a list that `main` leaves out is missed by nothing else."""
    functions = [each for each in ast.parse(texts("tests/tools/every_kernel.py")).body
                 if isinstance(each, ast.FunctionDef)]  # fmt: skip
    (main,) = (each for each in functions if each.name == "main")
    called = {node.func.id for node in ast.walk(main) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    lists = {each.name for each in functions if each.name.endswith("_cases")}
    assert len(lists) >= 9
    assert lists - called == {"weights_cases"}  # which `kernel_cases` calls, for every kernel of matrices


def test_help_is_quick(bytecode):
    assert pace.within(0.3, starting(["--help"], bytecode))


@pytest.mark.parametrize("verb", ["run", "chat", "pull", "show"])
def test_a_misspelt_name_is_answered_quickly(verb, bytecode):
    words = ["hi"] if verb == "run" else []
    assert pace.within(0.3, starting([verb, "lama-3.1-8b", *words], bytecode, code=4))


@pytest.mark.parametrize("arguments", [["run", "lama-3.1-8b", "hi"], ["chat", "lama-3.1-8b"], ["pull", "lama-3.1-8b"]])
def test_a_misspelt_name_loads_no_more_than_the_catalogue(arguments):
    code = f"""
import sys
from localq.cli import execute
assert execute({arguments}) == 4
late = [f"localq.{{each}}" for each in (
    "files.hub.fetch", "files.hub.client", "planner.plan", "chat.session", "worker", "files.local_models",
    "text.tokenizer")]
print([each for each in (*late, "pynvml", "rich", "pydantic") if each in sys.modules])
"""
    result = python("-c", code, stdin=subprocess.DEVNULL)
    assert result.stdout.strip() == "[]", result.stdout + result.stderr


def test_ls_is_quick(tmp_path, monkeypatch, bytecode):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert pace.within(0.5, starting(["ls"], bytecode))


def test_fit_is_quick(bytecode):
    assert pace.within(0.5, starting(["fit", "--vram", "24"], bytecode))


@pytest.fixture(scope="module")
def bytecode(tmp_path_factory):
    """A folder for it: an installed package has it, and a tree that is worked on need not be allowed to keep it."""
    return tmp_path_factory.mktemp("bytecode")


def starting(arguments: list[str], bytecode: Path, code: int = 0) -> Callable[[], float]:
    """What runs localq and returns its CPU time."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(bytecode)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def run() -> None:
        result = python("-m", "localq", *arguments, stdin=subprocess.DEVNULL, env=environment)
        assert result.returncode == code, result.stderr

    return lambda: pace.children_s(run)
