"""Lists the strings of localq that users can read, one file a package or verb, so that a review sees each change.

Run `python -m tests.tools.user_strings` to write tests/data/strings/. Expressions in f-strings are written as {}.
A string counts as readable if it has two words. Single words count in labels, help texts and keys. Not listed:
docstrings (but those of verbs, which are their help), styles, patterns, SQL, names of columns and messages of internal
errors.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE, GOLDEN = ROOT / "localq", ROOT / "tests" / "data" / "strings"
FLAT = "flat-modules"  # file of the modules that are in no package
LABELS = {"Button", "Key", "Label", "Option", "Argument", "Static"}  # calls whose single words are shown
SHOWN_KEYWORDS = {"help", "label", "metavar", "placeholder", "title", "description"}
INTERNAL = {"ValueError", "TypeError", "RuntimeError", "AssertionError", "NotImplementedError", "KeyError", "compile"}
INTERNAL_CALLS = {"execute", "executescript", "import_module", "query", "query_one", "TypeVar", "namedtuple", "split"}
_WORDS = re.compile(r"[A-Za-z][a-z']+[,;:.)]? +(?:[\w`(/{'-])")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_TECHNICAL = re.compile(
    r"^\s*(SELECT|INSERT|DELETE|UPDATE|CREATE|PRAGMA|DROP|WITH|import |from )"
    r"|[{;]\s*\n|\\[dwsb]|\(\?|^[a-z_]+(, [a-z_]+){3,}$"
)


def destination(path: Path) -> str:
    """Name of the golden file for the module at `path`, without suffix."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    if len(parts) == 1:
        return FLAT
    if parts[:2] == ("cli", "verbs") and parts[2] != "__init__":
        return f"verbs/{parts[2].split('_')[0]}"
    return parts[0]


def text_of(node: ast.AST) -> str | None:
    """The text of a string literal or f-string, with {} for expressions; None for any other node."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return None


def strings(tree: ast.Module, verb: str) -> Iterator[str]:
    """Readable strings of a module in source order. verb: the function whose docstring is help, if any."""
    skipped = set[int]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                skipped.add(id(first.value))
            if isinstance(node, ast.FunctionDef) and is_verb(node, verb) and (text := ast.get_docstring(node)):
                yield text
    yield from _visit(tree, skipped)


def is_verb(node: ast.FunctionDef, verb: str) -> bool:
    """The function is a verb: it has the name of its file, or is a command of a group."""
    return node.name == verb or any("command" in ast.unparse(each) for each in node.decorator_list)


def _visit(node: ast.AST, skipped: set[int], shown: bool = False) -> Iterator[str]:
    if id(node) in skipped or _is_internal(node):
        return
    text = text_of(node)
    if text is not None:
        if not _TECHNICAL.search(text) and (_WORDS.search(text) or (shown and re.search("[A-Za-z]{2}", text))):
            yield text
        if isinstance(node, ast.JoinedStr):  # strings in its expressions
            for part in node.values:
                if isinstance(part, ast.FormattedValue):
                    yield from _visit(part.value, skipped)
        return
    for child in ast.iter_child_nodes(node):
        is_label = isinstance(node, ast.Call) and child is not node.func and _called(node) in LABELS
        is_keyword = isinstance(child, ast.keyword) and child.arg in SHOWN_KEYWORDS
        is_value = isinstance(node, ast.keyword) and node.arg in SHOWN_KEYWORDS
        plain = is_label and not isinstance(child, ast.keyword)
        yield from _visit(child, skipped, plain or is_keyword or is_value)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _is_internal(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return _called(node) in INTERNAL | INTERNAL_CALLS
    if isinstance(node, ast.Assert):
        return True
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any("CSS" in ast.unparse(each) or "annotation" in ast.unparse(each) for each in targets)


def on_one_line(text: str) -> str:
    """`text` with its control characters escaped: git shows no difference of a file with NUL."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


def listing() -> dict[str, str]:
    """Name of the golden file -> its text."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        verb = path.stem if path.parent.name == "verbs" else ""
        texts = dict.fromkeys(strings(ast.parse(path.read_text(encoding="utf-8")), verb))
        if texts:
            lines = found.setdefault(destination(path), [])
            lines += ["", f"## {path.relative_to(ROOT)}", *map(on_one_line, texts)]
    return {name: "\n".join(lines[1:]) + "\n" for name, lines in found.items()}


def differences() -> list[str]:
    """Lines that differ between the program and the golden files, as "file: -old" and "file: +new"."""
    old = {str(path.relative_to(GOLDEN).with_suffix("")): path for path in GOLDEN.rglob("*.txt")}
    new, found = listing(), list[str]()
    for name in sorted(old.keys() | new.keys()):
        before = old[name].read_text(encoding="utf-8").splitlines() if name in old else []
        after = new.get(name, "").splitlines()
        found += [f"{name}: -{line}" for line in before if line not in set(after)]
        found += [f"{name}: +{line}" for line in after if line not in set(before)]
    return found


def main() -> None:
    """Write the golden files, and remove those of packages that are gone."""
    texts = listing()
    for path in GOLDEN.rglob("*.txt"):
        if str(path.relative_to(GOLDEN).with_suffix("")) not in texts:
            path.unlink()
    for name, text in texts.items():
        path = GOLDEN / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{len(texts)} files in {GOLDEN.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
