"""`localq run` and `show` on folders of Qwen3.5 as they are published: in the wrapper, with a tower and drafts."""

from __future__ import annotations

import json

import pytest

from tests.support.cli.cli_processes import environment_of, localq
from tests.support.formats import hybrid_checkpoints
from tests.support.formats.hybrid_checkpoints import KINDS, PREFIXES, in_nf4, wrapped


@pytest.mark.parametrize("kind", KINDS)
def test_a_published_folder_answers_and_says_what_it_leaves_out(kind, tmp_path):
    text = hybrid_checkpoints.source(tmp_path / "text", kind)
    packed, _ = in_nf4(tmp_path, text, lambda name: name.endswith(("in_proj_a.weight", "in_proj_b.weight")))
    folder = str(wrapped(tmp_path / kind, packed, PREFIXES[0]))
    environment = environment_of(tmp_path / "home", tmp_path / kind)
    result = localq(environment, "run", folder, "Hello?", "--json", "-n", "7", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    assert "vision and audio towers (2 tensors)" in result.stderr
    body = json.loads(result.stdout)
    assert body["stats"]["generated_tokens"] == 7 or body["reason"] == "stop"
    shown = localq(environment, "show", folder)
    assert shown.returncode == 0, shown.stderr
    assert "2 of 3 layers use a gated delta net instead" in shown.stdout
    assert ("a shared one per token" in shown.stdout) == (kind == "qwen3_5_moe")
