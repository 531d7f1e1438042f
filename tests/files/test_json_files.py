"""JSON files of a model: read strictly, and with advice for what an editor leaves in them."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from localq import places
from localq.errors import ExitCode, LocalqError
from localq.files import json_files
from localq.files.json_files import parse_object, read_object, read_text
from localq.worker import messages

EDITS = {
    '{"a": null, "b": {"x": 1, "x": 2}}': "duplicate key 'x' in one object. Remove one of the duplicates",
    '{"a": [0.0, Infinity]}': "Infinity is not valid in JSON. Replace it with a number",
    '{"a": -Infinity}': "-Infinity is not valid in JSON",
    '{"a": NaN}': "NaN is not valid in JSON",
    '{"a": 1,}': "If you edited the file, fix it; otherwise, download it again",
    '{"a": 1': "If you edited the file, fix it",
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


def test_no_other_module_parses_json_without_a_reason():
    """Others read what localq has written for itself: pipes of its processes, records of its jobs, its database."""
    found = {
        str(path.relative_to(places.PACKAGE_PARENT / "localq"))
        for path in (places.PACKAGE_PARENT / "localq").rglob("*.py")
        if re.search(r"\bjson\.loads?\(|\.json\(\)", path.read_text(encoding="utf-8"))
    }
    assert found - {"files/json_files.py"} <= {
        "chat/history/record.py",  # the database; the store names damage
        "chat/tools/arguments.py", "chat/tools/permissions.py", "chat/tools/toolbox.py",  # what a call was read as
        "server/json_body.py",  # bodies of requests, with limits of their own
        "server/api/common.py", "server/api/messages.py",  # arguments of calls, in such a body
        "text/tools/conversation.py", "text/tools/declaration.py",  # the same, of a size that callers limit
        "cli/verbs/doctor_install.py",  # of this environment, by pip
        "files/hub/parts.py",  # the state of a download, to a size
        "kernels/setup/steps.py",  # a build's own record
        "planner/card.py", "text/template.py", "text/template_child.py", "worker/messages.py", "worker/probe.py",
        "bench/quality/code_child.py",
        "files/publish/upload.py",  # whether an answer is JSON at all, before the library reads it
        "quantize/output/resume_files.py",  # the state of a job, by its hash
        "text/grammar.py", "text/json_keys.py",  # the user's own schema, to a size; keys of a reply
        "text/tokenizer_files.py",  # what the tokenizer library writes
    }, "read it with files.json_files, or say here why not"  # fmt: skip


def test_a_message_that_no_process_of_localq_sends_is_an_error_of_one_line():
    for line in (b"[" * 100_000, b'{"type": ' * 100_000, b"9" * 5_000, b"{}", b"\xff"):
        with pytest.raises(LocalqError) as caught:
            messages.decode(line)
        assert len(str(caught.value).splitlines()) == 1
