"""The house rules that a machine can check: imports, budgets, start-up, and facts that must not be stated twice."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pace
import pytest
import readme_blocks

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "localq").rglob("*.py"))
FILE_LINES, FUNCTION_LINES, KERNEL_FILE_LINES = 400, 60, 400
README_BYTES = 25_000


def python(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, check=False, timeout=120, **options
    )


def test_imports_point_down():
    result = python("-c", "from importlinter.cli import lint_imports_command as c; c()")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    "module",
    ["cli", "chat", "prepare", "hub", "catalog", "planner", "modelfiles", "tokenizer", "template", "worker.client"],
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
            assert node.end_lineno - node.lineno + 1 <= FUNCTION_LINES, node.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_say_what_they_are(path):
    if path.read_text().strip():
        assert ast.get_docstring(ast.parse(path.read_text())), "no module docstring"


def operations() -> list[str]:
    """Bindings that launch kernels: those that take a stream."""
    found = []
    for path in sorted((ROOT / "csrc").glob("bind_*.cpp")):
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
        "wrapper": ("def {}(", texts("localq/kernels/*.py")),
        "test": ("{}", texts("tests/kernels/test_*.py", "tests/engine/test_*.py")),
        "bench row": ('"{}"', texts("localq/bench/*_rows.py")),
        "self-test": ("{}", texts("localq/engine/selftest_checks.py")),
        "index": ("`{}`", texts("csrc/README.md")),
    }
    missing = [
        (name, place) for name in names for place, (form, text) in places.items() if form.format(name) not in text
    ]
    assert missing == []


def test_every_kernel_source_is_built():
    listed = (ROOT / "csrc/CMakeLists.txt").read_text()
    assert [p.name for p in (ROOT / "csrc").glob("*.cu") if p.name not in listed] == []


def test_the_sanitizer_runs_every_list_of_cases():
    """Of tests/support/every_kernel.py, which needs a GPU: a list that `main` leaves out is missed by nothing else."""
    functions = [each for each in ast.parse(texts("tests/support/every_kernel.py")).body
                 if isinstance(each, ast.FunctionDef)]  # fmt: skip
    (main,) = (each for each in functions if each.name == "main")
    called = {node.func.id for node in ast.walk(main) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    lists = {each.name for each in functions if each.name.endswith("_cases")}
    assert len(lists) >= 10
    assert lists - called == set()


@pytest.mark.parametrize(("page", "name"), readme_blocks.BLOCKS)
def test_blocks_of_documents_are_current(page, name):
    if name in readme_blocks.WITHOUT_GPU and readme_blocks.has_gpu():
        pytest.skip("made on a machine without a GPU")
    assert readme_blocks.current(page, name) == readme_blocks.PAGES[page][name](), "run: make readme"


def test_readme_is_short():
    assert (ROOT / "README.md").stat().st_size <= README_BYTES


def test_readme_quotes_what_the_program_prints():
    """The first column of Troubleshooting: each text in backquotes stands in the sources, its line breaks left out."""
    (rows,) = re.findall(r"## Troubleshooting\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)
    seen = [row.split(" | ")[0] for row in rows.splitlines() if row.startswith("| ")][2:]
    assert len(seen) == 10
    quoted = [text for cell in seen for text in re.findall(r"`([^`]+)`", cell) if text not in ("fit", "NAME")]
    sources = texts("localq/**/*.py", "csrc/CMakeLists.txt")
    assert [text for text in quoted if text not in sources] == []


def test_paths_in_documents_exist():
    """In backquotes, from the top of the tree; in localq/README.md from there too. `x` stands for a new name."""
    missing = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "localq").rglob("README.md"), ROOT / "tests/README.md"]:
        base = page.parent if page == ROOT / "localq/README.md" else ROOT
        for path in re.findall(r"`([\w.-]+/[\w./-]+)`", page.read_text()):
            inside = path.startswith(("localq/", "tests/", "csrc/")) or base != ROOT
            places = (ROOT / path, base / path, base / f"{path}.py")
            if inside and "x" not in re.split(r"[/._]", path) and not any(each.exists() for each in places):
                missing.append(f"{page.relative_to(ROOT)}: {path}")
    assert missing == []


def test_links_of_documents_lead_somewhere():
    pages = [each for each in ROOT.rglob("*.md") if not {".venv", "build", ".git"} & set(each.parts)]
    broken = [
        f"{page.relative_to(ROOT)}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert broken == []


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
late = [f"localq.{{each}}" for each in ("hub", "hub_client", "planner", "chat", "worker", "local_models", "tokenizer")]
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
