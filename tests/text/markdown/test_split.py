"""Blocks of a reply as they end: the same that a parser of the whole finds, each known as soon as it can be."""

from __future__ import annotations

import random

import pytest

from localq.text.markdown.parser import markdown_parser
from localq.text.markdown.split import BlockSplitter, CodeLine, FenceEnd, FenceStart, FlatBlock, open_code
from tests.support.cli.markdown_pages import DOCUMENT

FLAT = ("bullet_list", "ordered_list", "list_item")


def events(text: str) -> list[object]:
    splitter = BlockSplitter()
    return [*(event for line in text.split("\n") for event in splitter.line(line)), *splitter.end()]


def leaves(text: str) -> list[tuple[str, str]]:
    """What a document consists of, without its lists and without blanks around texts."""
    found = []
    for token in markdown_parser(references=False).parse(text):
        if token.type.removesuffix("_open").removesuffix("_close") in FLAT:
            continue
        if token.type.startswith("paragraph"):  # hidden in tight lists
            continue
        found.append((token.type, token.content))
    return found


def by_lines(found: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Line by line, because lines of indented code with empty ones between are one block to a parser of the whole."""
    return [(kind, line.strip()) for kind, content in found for line in content.split("\n") if line or not content]


def leaves_of_blocks(text: str) -> list[tuple[str, str]]:
    found, code = [], list[str]()
    for event in events(text):
        if isinstance(event, FlatBlock):
            found += leaves(event.source)
        elif isinstance(event, CodeLine):
            code.append(event.text)
        elif isinstance(event, FenceEnd):
            found.append(("fence", "".join(f"{line}\n" for line in code)))
            code = []
    return found


@pytest.mark.parametrize(
    "text",
    [
        DOCUMENT,
        "a\nb\n\nc",
        "a\n# b\nc\n---\nd\n***\ne",
        "- a\n- b\n\n- c\nlazy\n\nnot lazy",
        "1. a\n2. b\n\n   more\n   ```x\n   code\n     deep\n   ```\n3. c",
        "a\n2. no list\n1. a list",
        "- a\n\n      code of a\n- - - b\n  # c\n+ d",
        "> a\nlazy\n\n> b\n# c\n> - d\n>   - e\n\n```\n> no quote\n```",
        "text\n| a | b |\n|---|---|\n| c | d |\n- e\n\n| f |\n|---|",
        "~~~\n```\n~~~\n````a b\n```\n````\n``` `no` ```\n`` ` ``",
        "a\n\n    code\n    more\nb\n    no code",
        "-\n  a\n-\n\n  b\n1)\n2) c",
        "* a\n  * b\n    * c\n  * d\n* e\n\ttab\n\n\tmore of e",
    ],
)
def test_blocks_are_those_of_a_parser_that_sees_all(text):
    assert by_lines(leaves_of_blocks(text)) == by_lines(leaves(text))


def test_random_lists_headings_and_paragraphs_are_those_of_a_parser_that_sees_all():
    rng = random.Random(11)
    starts = ("", "", "- ", "1. ", "  ", "  - ", "   ", "    - ", "# ", "> ")
    for _ in range(400):
        text = "\n".join(
            rng.choice(("", rng.choice(starts) + f"w{number}")) if number % 3 else f"{rng.choice(starts)}w{number}"
            for number in range(rng.randint(1, 14))
        )
        assert by_lines(leaves_of_blocks(text)) == by_lines(leaves(text)), text


def test_items_have_their_marks_and_numbers_go_on():
    found = [(each.first, each.rest, each.source) for each in events("- a\n  b\n\n  7) c\n  7) d\n\n  e\n- f")]
    assert found == [
        ("• ", "  ", "a\nb"), ("  7) ", "     ", "c"), ("  8) ", "     ", "d"), ("  ", "  ", "e"), ("• ", "  ", "f")
    ]  # fmt: skip


def test_a_block_ends_with_the_line_that_ends_it_and_not_later():
    splitter = BlockSplitter()
    assert splitter.line("a") == []
    assert splitter.raw == ["a"]
    assert [each.source for each in splitter.line("")] == ["a"]
    assert [each.source for each in splitter.line("# b")] == ["# b"]
    assert splitter.line("- c") == splitter.line("lazy") == []
    assert [each.source for each in splitter.line("- d")] == ["c\nlazy"]
    assert splitter.raw == ["- d"]
    assert [type(each) for each in splitter.line("```py x")] == [FlatBlock, FenceStart]
    assert splitter.line("  e") == [CodeLine("  e")]
    assert splitter.line("```") == [FenceEnd()]


def test_code_within_a_list_is_without_its_indentation_and_keeps_its_own():
    found = events("1. a\n   ```sh\n   b\n     c\nd\n\n\te\n   ```\n\n```\n\tf\n```")
    assert [each.text for each in found if isinstance(each, CodeLine)] == ["b", "  c", "d", "", " e", "\tf"]
    assert [each.language for each in found if isinstance(each, FenceStart)] == ["sh", ""]


def test_what_goes_on_behind_code_that_was_cut_is_code():
    splitter, language = open_code("a\n\n```py\nb\nc")
    assert (splitter.in_code, language) == (True, "py")
    assert splitter.line("# d") == [CodeLine("# d")]
    assert not open_code("a\n```\nb\n```\nc")[0].in_code
    assert open_code("- a\n- b")[0].line("c") == []
