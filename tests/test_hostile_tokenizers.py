"""tokenizer.json files that make the library panic, cut or fill up texts: named errors, and whole prompts."""

from __future__ import annotations

import base64
import json

import pytest
import tiny_tokenizers

from localq.errors import ExitCode, LocalqError
from localq.modelfiles import ModelFiles
from localq.tokenizer import Tokenizer

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


def test_an_interrupt_passes_through():
    class Interrupted:
        def encode_batch(self, *_arguments, **_keywords):
            raise KeyboardInterrupt

    tokenizer = Tokenizer(Interrupted(), {}, None, frozenset())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
