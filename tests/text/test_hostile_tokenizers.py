"""Tokenizer files that make the library panic, search for ever, or cut, fill up or blow up texts: named errors."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import threading
import time

import pytest

import localq.text.tokenizer
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import ModelFiles
from localq.text import tokenizer_files
from localq.text.tokenizer import Tokenizer
from tests.support.text import tiny_tokenizers

TEXT = "a" * 40 + " héllo x <s>"
CHARSMAP = base64.b64encode((8).to_bytes(4, "little") + b"\xff" * 8 + b"abcd").decode()
PARTS = {  # each replaces a part of a sound file
    "charsmap-cut": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": ""}},
    "charsmap-points-outside": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}},
    "replaces-nothing": {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    "backtracks": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a*)*(a*)*(a*)*b|x"},
                                     "behavior": "Isolated", "invert": False}},
    "no-expression": {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated",
                                        "invert": False}},
    "unknown-end": {"post_processor": {"type": "TemplateProcessing", "pair": [], "special_tokens": {},
                                       "single": [{"SpecialToken": {"id": "q", "type_id": 0}}]}},
}  # fmt: skip


def replaces(content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": "a"}, "content": content}


def charsmap(longest: int) -> str:
    """SentencePiece's table with an empty index of one unit and one replacement."""
    return base64.b64encode((4).to_bytes(4, "little") + bytes(4) + b"x" * longest + b"\0").decode()


GROWING = {
    "normalizer": {"normalizer": replaces("a" * 33)},
    "steps": {"normalizer": {"type": "Sequence", "normalizers": [replaces("aa")] * 6}},
    "nested-steps": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Sequence", "normalizers": [replaces("aaa")] * 2}, {"type": "Prepend", "prepend": "aaaa"}]}},
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap(33)}},
    "decoder": {"decoder": {"type": "Sequence", "decoders": [replaces("aa")] * 6}},
}  # fmt: skip
LEFT_OVER = {
    "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
    "padding": {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                "pad_type_id": 0, "pad_token": "x"},
}  # fmt: skip


def load(folder, **parts) -> Tokenizer:
    body = {**json.loads(tiny_tokenizers.byte_level().to_str()), **parts}
    (folder / "tokenizer.json").write_text(json.dumps(body))
    return Tokenizer.load(ModelFiles(folder, "safetensors", {"eos_token_id": 2}))


@pytest.mark.parametrize("name", PARTS)
def test_what_the_library_panics_over_is_a_named_error(tmp_path, name):
    with pytest.raises(LocalqError, match="tokenizer") as caught:
        load(tmp_path, **PARTS[name]).encode(TEXT, special=True)
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("name", LEFT_OVER)
def test_no_prompt_is_cut_or_filled_up(tmp_path, name):
    wanted = load(tmp_path).encode(TEXT)
    assert load(tmp_path, **{name: LEFT_OVER[name]}).encode(TEXT) == wanted
    assert len(wanted) > 4


@pytest.mark.parametrize("name", GROWING)
def test_a_file_that_makes_texts_grow_is_refused(tmp_path, name):
    with pytest.raises(LocalqError, match=r"can expand text to \d+ times its length") as caught:
        load(tmp_path, **GROWING[name])
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_growth_within_the_limit_is_accepted(tmp_path):
    steps = {"type": "Sequence", "normalizers": [replaces("aa")] * 5}
    assert len(load(tmp_path, normalizer=steps).encode("a")) == tokenizer_files.MAX_GROWTH
    assert load(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": charsmap(32)})


def test_a_splitting_rule_that_searches_for_ever_is_given_up_and_ctrl_c_comes_through(tmp_path, monkeypatch):
    # Each of the 400 starts fails after half a million steps: below the library's limit, and seconds together.
    rule = {"type": "Split", "pattern": {"Regex": "(a|a){1,18}(?:b|c)x"}, "behavior": "Isolated", "invert": False}
    slow = load(tmp_path, pre_tokenizer=rule)
    monkeypatch.setattr(localq.text.tokenizer, "MAX_SECONDS", 0.3)
    start, used = time.monotonic(), time.process_time()
    with pytest.raises(LocalqError, match="took more than") as caught:
        slow.encode("a" * 400)
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert time.monotonic() - start >= 0.3
    assert time.process_time() - used < 2.0
    monkeypatch.setattr(localq.text.tokenizer, "MAX_SECONDS", 20.0)
    main = threading.main_thread().ident
    threading.Timer(0.3, signal.pthread_kill, [main, signal.SIGINT]).start()
    used = time.process_time()
    with pytest.raises(KeyboardInterrupt):
        slow.encode("a" * 400)
    assert time.process_time() - used < 10.0  # of two threads: the one that was given up goes on


@pytest.mark.parametrize("name", ["tokenizer.json", "special_tokens_map.json"])
def test_a_file_that_is_no_file_of_the_folder_is_not_opened(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    sound = load(folder)
    assert sound.vocab_size
    files = ModelFiles(folder, "safetensors", {"eos_token_id": 2})
    (tmp_path / "secret.json").write_text((folder / "tokenizer.json").read_text())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret.json")
    (folder / ".git").mkdir()  # a clone: its links come with the repository
    with pytest.raises(LocalqError, match="points outside the model folder"):
        Tokenizer.load(files)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(LocalqError, match="not a regular file"):
        Tokenizer.load(files)


@pytest.mark.parametrize("content", ["[1]", "[" * 100_000, '{"bos_token": NaN}', "\xff", '{"a": 1, "a": 2}'])
def test_a_damaged_map_of_special_tokens_is_named(tmp_path, content):
    load(tmp_path)
    (tmp_path / "special_tokens_map.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(LocalqError, match="special_tokens_map") as caught:
        Tokenizer.load(ModelFiles(tmp_path, "safetensors", {}))
    assert caught.value.exit_code == ExitCode.BAD_FILE


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "unigram", "merges of a and a"])
def test_a_mebibyte_of_one_letter_is_encoded_in_time(tmp_path, kind):
    """No splitting rule divides it: it is one word of a million letters, which all merge."""
    body = json.loads(getattr(tiny_tokenizers, kind, tiny_tokenizers.byte_level)().to_str())
    if kind == "merges of a and a":
        body["model"]["merges"] = [["a" * 2**i, "a" * 2**i] for i in range(12)]
        body["model"]["vocab"] |= {"a" * 2**i: 400 + i for i in range(1, 13)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(body))
    tokenizer = Tokenizer.load(ModelFiles(tmp_path, "safetensors", {}))
    used = time.process_time()
    with contextlib.suppress(LocalqError):  # a slow machine gives it up, which is the other way that is allowed
        assert len(tokenizer.encode("a" * 2**20)) >= 2**20 / 4096
    assert time.process_time() - used < 5.5


def test_an_interrupt_passes_through():
    class Interrupted:
        def encode_batch(self, *_arguments, **_keywords):
            raise KeyboardInterrupt

    tokenizer = Tokenizer(Interrupted(), {}, None, frozenset())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
