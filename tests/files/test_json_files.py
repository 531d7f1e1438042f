"""JSON files of a model: read strictly, and with advice for what an editor leaves in them."""

from __future__ import annotations

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.json_files import parse_object, read_object, read_text

EDITS = {
    '{"a": null, "b": {"x": 1, "x": 2}}': "the key 'x' occurs twice in one object. Remove one of the two from the file",
    '{"a": [0.0, Infinity]}': "it contains Infinity, which is not valid JSON. Replace it in the file with a number",
    '{"a": -Infinity}': "it contains -Infinity",
    '{"a": NaN}': "it contains NaN",
    '{"a": 1,}': "If you edited the file, fix the edit; otherwise download the file again",
    '{"a": 1': "If you edited the file, fix the edit",
}


@pytest.mark.parametrize("text", EDITS)
def test_the_advice_for_an_edited_file_says_what_to_change(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(LocalqError) as caught:
        read_object(path, 1000)
    assert EDITS[text] in str(caught.value)
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("text", EDITS)
def test_the_advice_for_what_nobody_edits_is_to_fetch_it_again(text):
    with pytest.raises(LocalqError, match="Download the file again"):
        parse_object(text, "model.safetensors (header)")


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "config.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xef\xbb\xbf"}')
    assert read_object(path, 1000) == {"a": "\ufeff"}
    assert read_text(path, 1000) == '{"a": "\ufeff"}'
