"""GBNF becomes Lark of the same language: what a grammar takes, byte by byte."""

from __future__ import annotations

import re

import pytest

from localq.errors import LocalqError
from localq.text import gbnf
from localq.text.grammar import Grammar, check, matcher

ARITHMETIC = r"""
# sums, one a line: the blanks behind a number must not eat the end of the line
root  ::= (expr "=" ws term "\n")+
expr  ::= term ([-+*/] term)*
term  ::= ident | num | "(" ws expr ")" ws
ident ::= [a-z] [a-z0-9_]* ws
num   ::= [0-9]+ ws
ws    ::= [ \t\n]*
"""
NAMES = 'root ::= "a"{2} "b"{ 1 , } [\\]\\-^-]+ x-Y\nx-Y ::=\n  # a comment\n "🙂" |\n "\\x41"'
CASES = [
    (ARITHMETIC, ["a=1\n", "a+b*(c-12) = 3\n", "x_1=7\ny=(2)\n"], ["a=1", "=1\n", "a=\n"]),
    ('root ::= "a" "x" | [a-z] "y"', ["ax", "ay", "by"], ["bx"]),
    ('root ::= "ab" "x" | [a-z] "bc"', ["abx", "abc", "zbc"], ["ab"]),
    ('root ::= "\\u00e9" [^\\u00e9\\n] . | "" | ( | "q") "\\"\\\\"', ["é1\n", "", 'q"\\', '"\\'], ["éé1", "é\n1", "q"]),
    (NAMES, ["aab]-^-🙂", "aabb]A"], ["ab-A", "aab]x"]),
    ('root ::= "\\u200b" "\\U0001F600" "\\t\\x00"', ["\u200b😀\t\0"], ["😀\t\0"]),
    ('root ::= root "a" | "b"', ["b", "baa"], ["", "a"]),
    ("root ::= [-a] [a-] [+--]", ["-a,", "a--"], ["aa.", "b--"]),
    ('root ::= "a" ("b" "c"?){2,3} "d"*', ["abb", "abcbcbcdd"], ["ab", "abbbb"]),
    ("\troot\t::=\t[ \\t]\t\n", [" ", "\t"], ["\n"]),
]  # fmt: skip


def takes(text: str, reply: str) -> bool:
    from llguidance import LLTokenizer

    found = matcher(Grammar("gbnf", text), LLTokenizer("byte"))
    ids = list(reply.encode())
    return bool(found.try_consume_tokens(ids) == len(ids) and found.is_accepting())


@pytest.mark.parametrize(("text", "good", "bad"), CASES)
def test_what_a_grammar_takes_and_what_it_does_not(text, good, bad):
    assert check(Grammar("gbnf", text)) == []
    assert [reply for reply in good if not takes(text, reply)] == []
    assert [reply for reply in bad if takes(text, reply)] == []


FAULTS = {
    'x ::= "a" {5,2}': "invalid repetition {5,2}",
    "x ::= " + "(" * 300 + '"a"' + ")" * 300: "too deeply nested",
    'x ::= "a" | nobody': "unknown rule `nobody`",
    'x ::= "a" [z-b]': "invalid range z-b",
    'x ::= "\\q"': "unknown escape",
    "x ::= ]": "syntax error",
    'x ::= "a")': "unexpected )",
    'x ::= * "a"': "nothing to repeat",
    "x ::= []": "empty character class",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("before", [0, 1, 7])
def test_an_error_names_the_line_of_the_users_text(fault, before):
    """Blank lines, comments and rules of several lines have none in the translation."""
    text = 'root ::= x\n  | "b"\n' + "# a comment: x ::= y\n\n" * before + fault + '\n\nz ::= (\n  "c"\n)\n'
    with pytest.raises(LocalqError, match=re.escape(FAULTS[fault])) as caught:
        check(Grammar("gbnf", text))
    assert f"line {3 + 2 * before}" in caught.value.why


def test_the_column_is_that_of_the_users_text():
    text = "# deep\nroot ::= " + "(" * 300 + '"a"' + ")" * 300
    with pytest.raises(LocalqError) as caught:
        check(Grammar("gbnf", text))
    found = re.match(r"line 2, column (\d+): ", caught.value.why)
    assert found is not None
    assert 10 < int(found[1]) < 310
    for place in [(1, 1), (2, 1), (2, 8), (2, 9_999), (99, 99)]:
        line, column = gbnf.source_place(text, *place)
        assert (line, 1 <= column <= len(text)) == (2, True)
