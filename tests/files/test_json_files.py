"""JSON files of a model: read strictly, and with advice for what an editor leaves in them."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import json_files
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


def nested(depth: int) -> str:
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


HOSTILE = {
    "lists in lists": '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "objects in objects": '{"a": ' * 50_000 + "1" + "}" * 50_000,
    "a little too deep": nested(json_files.MAX_DEPTH + 1),
    "brackets in strings hide none": '{"a": ' + '["]", ' * 100 + "1" + "]" * 100 + "}",
    "brackets that stay open": '{"a": ' + "[" * 100_000,
    "a number of many digits": '{"a": ' + "9" * 5_000 + "}",
    "one that Python would read": '{"a": -' + "9" * (json_files.MAX_DIGITS) + "}",
    "many decimals": '{"a": 0.' + "1" * 100_000 + "}",
    "beyond a float": '{"a": [1e999]}',
    "below a float": '{"a": -1e400}',
    "many objects": '{"a": [' + "{}," * 100_000 + "{}]}",
    "strings that stay open": '{"a": "' + '\\"' * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_refused_before_it_is_parsed(tmp_path, name):
    path = tmp_path / "config.json"
    path.write_text(HOSTILE[name])
    begun = time.process_time()
    with pytest.raises(LocalqError) as caught:
        read_object(path, 2**20)
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)
    assert time.process_time() - begun < 2


def test_brackets_and_digits_in_strings_are_text():
    body = "[{" * 1000 + "9" * 1000 + "1e999"
    assert parse_object(f'{{"{body}": "{body}\\\\"}}', "f") == {body: body + "\\"}
    assert parse_object(nested(json_files.MAX_DEPTH), "f")
    assert parse_object('{"a": -' + "9" * (json_files.MAX_DIGITS - 1) + "}", "f")


def test_a_pipe_and_a_device_are_neither_read_nor_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    for path in (tmp_path / "pipe.json", Path("/dev/zero"), tmp_path):
        with pytest.raises(LocalqError, match="not a regular file") as caught:
            read_object(path, 1000)
        assert caught.value.exit_code == ExitCode.BAD_FILE
