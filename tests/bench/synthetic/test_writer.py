"""Random weights written as a folder: a model like any other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from localq import cli
from localq.bench.synthetic import checkpoint as synthetic_checkpoint
from localq.bench.synthetic import writer
from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import ModelFiles, open_model
from localq.formats.open_checkpoint import open_checkpoint
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from localq.text.tokenizer import Tokenizer
from tests.support.files.real_model import smollm2

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def text() -> ModelFiles:
    return open_model(smollm2())


def small(format: str, vocab: int) -> ModelFiles:
    """A model with the vocabulary of `text` and two narrow layers."""
    described, _ = synthetic_checkpoint.files_of("smollm2-135m@fp16")
    shape = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "vocab_size": vocab}  # fmt: skip
    config = synthetic_checkpoint.in_format({**described.config, **shape}, format)
    return ModelFiles(path=Path(), kind="safetensors", config=config, name="small (random weights)")


@pytest.mark.parametrize("format", ["fp16", "nf4", "vq2"])
def test_a_written_folder_is_the_checkpoint_and_chats(tmp_path, text, format):
    files, out = small(format, 49_152), tmp_path / "out"
    size = writer.write(files, format, out, text, CPU, seed=3)
    found = open_model(out)
    with synthetic_checkpoint.checkpoint(files, format, CPU, 3) as made, open_checkpoint(found) as written:
        assert made.tensors == written.tensors
        assert size == sum(each.nbytes for each in made.tensors.values())
        for name in made.tensors:
            assert torch.equal(made.read(name).view(torch.uint8), written.read(name).view(torch.uint8)), name
    tokenizer = Tokenizer.load(found)
    assert tokenizer.encode("a ship") == Tokenizer.load(text).encode("a ship")
    assert found.chat_template == text.chat_template
    assert found.config["eos_token_id"] == text.config["eos_token_id"]
    engine = Engine(load(found, LoadOptions(device="cpu", dtype="float32")))
    steps = list(engine.generate([1, 2, 3], Sampling(temperature=0), frozenset(), 4, lambda: False))
    assert sum(len(step.ids) for step in steps) == 4


def test_an_interrupted_write_continues_and_another_is_refused(tmp_path, text):
    files = small("fp16", 49_152)
    writer.write(files, "fp16", tmp_path / "whole", text, CPU)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        writer.write(files, "fp16", tmp_path / "cut", text, CPU, on_progress=stop)
    writer.write(files, "fp16", tmp_path / "cut", text, CPU)
    for path in (tmp_path / "whole").iterdir():
        assert path.read_bytes() == (tmp_path / "cut" / path.name).read_bytes()
    with pytest.raises(LocalqError, match="the folder is not empty") as caught:
        writer.write(files, "fp16", tmp_path / "cut", text, CPU, seed=1)
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_larger_vocabulary_is_refused_before_anything_is_written(tmp_path, text):
    with pytest.raises(LocalqError, match=r"has 49,152 tokens, but the vocabulary of small .* only 320"):
        writer.write(small("fp16", 320), "fp16", tmp_path / "out", text, CPU)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["llama-3.1-8b", "--write", "x"], "only random weights can be written"),
        (["--synthetic", "--write", "x"], "no model given"),
        (["llama-3.1-8b", "--synthetic", "--write", "x", "-p", "64"], "-p has no effect with --write"),
        (["llama-3.1-8b", "--synthetic", "--write", "x", "--profile"], "separate benchmarks"),
    ],
)
def test_options_that_clash_are_named(arguments, why, capsys):
    assert cli.execute(["bench", *arguments]) == ExitCode.USAGE
    assert why in capsys.readouterr().err
