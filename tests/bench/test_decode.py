"""The decode benchmark: it compares like with like, and counts bytes as they are."""

from __future__ import annotations

import io
import json

import pytest
import torch
from tiny_checkpoints import make_checkpoint

from localq.bench.decode import bytes_per_token, read_bytes_per_s, run
from localq.engine.load import Options, load
from localq.modelfiles import open_model


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and lose much where the machine is busy."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_same_tokens_as_transformers_and_one_json_line(tmp_path, model_type):
    folder = make_checkpoint(tmp_path, model_type, initializer_range=0.15, tie_word_embeddings=model_type == "qwen3")
    out = io.StringIO()
    result = run(folder, out, device="cpu", tokens=12, repeat=2)
    assert json.loads(out.getvalue().splitlines()[-1]) == result
    assert result["same_tokens"] == {"localq": 12, "transformers": 12}
    assert result["ratio_to_transformers"] == pytest.approx(
        result["localq_tok_per_s"] / result["transformers_tok_per_s"], rel=0.05
    )
    assert 0 < result["share_of_roof"] < 1


def test_bytes_are_those_of_the_tensors(tmp_path):
    hidden, vocab, ctx, length = 128, 320, 100, 50
    untied = load(open_model(make_checkpoint(tmp_path / "untied")), Options(device="cpu", ctx=ctx))
    tied = load(
        open_model(make_checkpoint(tmp_path / "tied", tie_word_embeddings=True)), Options(device="cpu", ctx=ctx)
    )
    kv = 3 * 2 * 2 * 32 * 4 * length  # layers, k and v, heads, head_dim, bytes
    layer = hidden * (128 + 64 + 64 + 128) + 3 * hidden * 192 + 2 * hidden
    blocks = 3 * layer + hidden
    assert bytes_per_token(untied, length) == 4 * (blocks + vocab * hidden + hidden) + kv
    assert bytes_per_token(tied, length) == 4 * (blocks + vocab * hidden) + kv


def test_roof_is_plausible():
    assert 1e8 < read_bytes_per_s(torch.device("cpu")) < 1e13
