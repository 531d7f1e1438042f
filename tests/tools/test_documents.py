"""The documents: generated blocks are current, links and paths lead somewhere, quotes are what the program prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.tools import readme_blocks

ROOT = Path(__file__).parents[2]
README_BYTES = 25_000
CODE = r"```.*?```|`[^`\n]*`"


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
    files = [*(ROOT / "localq").rglob("*.py"), ROOT / "csrc/CMakeLists.txt"]
    sources = "".join(each.read_text() for each in files)
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
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(CODE, "", page.read_text(), flags=re.DOTALL))
        if "://" not in link and not (page.parent / link).exists()
    ]
    assert broken == []
