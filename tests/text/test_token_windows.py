"""Windows of a text, in both conventions, worked by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from localq.errors import ExitCode, LocalqError
from localq.text import token_windows

BOS = 7


@dataclass
class Letters:
    """A tokenizer whose tokens are characters; it puts BOS in front where `adds_bos`."""

    adds_bos: bool

    def encode(self, text: str, special: bool = False) -> list[int]:
        return [BOS] * (special and self.adds_bos) + [ord(letter) for letter in text]


def text_of(ids: list[int]) -> str:
    return "".join("^" if id == BOS else chr(id) for id in ids)


def test_rows_keep_their_newline_and_blank_ones_are_nothing():
    assert list(token_windows.rows(" = A = \n \nb\u2028c\r\n\nlast")) == [" = A = \n", "", "b\u2028c\r\n", "", "last"]


def test_gptq_joins_rows_and_tokenizes_once():
    found = token_windows.gptq(Letters(adds_bos=True), "ab\n\nc\n", 4, None, "text")
    # rows "ab\n", "", "c\n" -> "ab\n" + "\n\n" + "" + "\n\n" + "c\n"
    assert [text_of(ids) for ids in found.ids] == ["^ab\n", "\n\n\n\n"]  # and the tail "c\n" is dropped
    assert found.first == 0
    plain = token_windows.gptq(Letters(adds_bos=False), "ab\n\nc\n", 4, 1, "text")
    assert [text_of(ids) for ids in plain.ids] == ["ab\n\n"]


def test_llamacpp_takes_the_text_as_it_is_and_starts_every_window_with_bos():
    found = token_windows.llamacpp(Letters(adds_bos=True), "ab\n\ncdefghijk", 5, None, "text")
    assert [text_of(ids) for ids in found.ids] == ["^ab\n\n", "^defg"]  # BOS stands in place of "c"
    assert found.first == 2
    plain = token_windows.llamacpp(Letters(adds_bos=False), "ab\n\ncdefghijk", 5, None, "text")
    assert [text_of(ids) for ids in plain.ids] == ["ab\n\nc", "defgh"]
    assert len(token_windows.llamacpp(Letters(adds_bos=False), "ab\n\ncdefghijk", 5, 1, "text").ids) == 1


@pytest.mark.parametrize("cut", [token_windows.gptq, token_windows.llamacpp])
def test_a_text_shorter_than_a_window_is_refused_with_both_numbers(cut):
    with pytest.raises(
        LocalqError, match=r"notes\.txt: the text has only 3 tokens, fewer than one window of 4"
    ) as caught:
        cut(Letters(adds_bos=False), "abc", 4, None, "notes.txt")
    assert caught.value.exit_code == ExitCode.USAGE
