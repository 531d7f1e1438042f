"""The table of two bits: its ways that patch the encoder do what they say, and its lines are as they are read."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from localq import kernels
from localq.files.model_folder import open_model
from localq.formats.open_checkpoint import open_checkpoint
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.quantize.vq2_conversions import converted, loaded, logits, windows
from tests.tools import rival_quantizers, two_bits_table


@pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")
def test_without_rotation_nothing_is_turned(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    source = make_checkpoint(tmp_path / "m", "llama", dtype=torch.float32, initializer_range=0.08)
    with two_bits_table.unturned():
        out = converted(source, tmp_path / "out")
    with open_checkpoint(open_model(source)) as before, open_checkpoint(open_model(out)) as after:
        assert not any(name.endswith(".signs") for name in after.tensors)
        name = "model.embed_tokens.weight"
        assert torch.equal(before.read(name), after.read(name))
    exact, got = (logits(loaded(each), windows()[0]) for each in (source, out))
    assert (got - exact).norm() < exact.norm()
    with open_checkpoint(open_model(converted(source, tmp_path / "again"))) as after:
        assert any(name.endswith(".signs") for name in after.tensors)  # only within


def test_residual_kmeans_by_its_size_and_error() -> None:
    torch.set_num_threads(1)
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)) * 3
    made, size = rival_quantizers.residual_kmeans(weight)
    assert size == 96 * 64 + 2 * 256 * 8 * 2 + 96 * 2
    # 3072 vectors and 256 means, twice: no more than a twelfth of the energy is left, as of trained codebooks
    assert (made - weight).square().sum() < weight.square().sum() / 12


def test_lines_are_in_order_and_say_why() -> None:
    results = {
        "vq2 --quick": {"perplexity": 30.0, "bits": 2.12345, "seconds": 61.4},
        "reference": {"perplexity": 20.0, "bits": 16.0, "seconds": 1.0},
        "glq 2 bit, trellis": {"why": "glq is not installed"},
    }
    assert two_bits_table.table(results)[2:] == [
        "| reference | 16.000 | 20.000 | 1.000 | 1 |",
        "| glq 2 bit, trellis | - | glq is not installed | - | - |",
        "| vq2 --quick | 2.123 | 30.000 | 1.500 | 61 |",
    ]


def test_what_one_process_has_begun_another_leaves_to_it(tmp_path: Path) -> None:
    """A way is made once; one that failed is tried again."""
    made: list[str] = []

    def attempt(name: str) -> dict[str, object]:
        made.append(name)
        if name == "nf4" and made.count("nf4") == 1:
            two_bits_table.take("nf4", tmp_path, attempt)  # as another process would: it is at it
            two_bits_table.take("hqq 2 bit, groups of 64", tmp_path, attempt)
            return {"perplexity": 20.8}
        return {"why": "hqq is not installed"}

    for _ in range(2):
        two_bits_table.take("nf4", tmp_path, attempt)
        assert two_bits_table.results_of(tmp_path)["nf4"] == {"perplexity": 20.8}
    two_bits_table.take("hqq 2 bit, groups of 64", tmp_path, attempt)
    assert made == ["nf4", *["hqq 2 bit, groups of 64"] * 2]
    assert two_bits_table.results_of(tmp_path).keys() == {"nf4", "hqq 2 bit, groups of 64"}


GLQ = """
import torch
from pathlib import Path
from types import SimpleNamespace
from safetensors.torch import load_file
from datasets import load_dataset

def quantize_layer_e8_shell_rht(weight, hessian, codebook, bpw=2):
    codes = torch.zeros(weight.shape[0], weight.shape[1] // 4, dtype=torch.uint8)
    return weight.float() * 0.75, {"codes": codes, "SU": torch.ones(len(weight)).half(), "tlut": codes}, {}

def quantize(source, out, bpw, device, codebook_type, workers):
    assert (bpw, device, codebook_type) == (2, "cpu", "trellis") and load_dataset("wikitext")["text"]
    Path(out).mkdir()
    for name, tensor in load_file(Path(source) / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            quantize_layer_e8_shell_rht(tensor.bfloat16(), None, None)
"""


def test_glq_is_judged_by_the_weights_that_its_encoder_returns(tmp_path: Path, monkeypatch) -> None:
    """Beside a package that does nothing but call its encoder, as the real one does: every matrix under its name."""
    (tmp_path / "glq").mkdir()
    (tmp_path / "glq" / "__init__.py").touch()
    (tmp_path / "glq" / "quantize_model.py").write_text(GLQ)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    files = open_model(make_checkpoint(tmp_path / "m", "llama", dtype=torch.bfloat16))
    judged: list[Path] = []

    def judge(folder: Path) -> dict[str, float]:
        judged.append(folder)
        return {"perplexity": 30.0, "bits": 16.0}

    work = SimpleNamespace(files=files, device=torch.device("cpu"), judged=judge)
    found = rival_quantizers.glq("trellis")(work, tmp_path / "out")  # type: ignore[arg-type]
    assert judged == [tmp_path / "out"]
    with open_checkpoint(files) as before, open_checkpoint(open_model(tmp_path / "out")) as after:
        assert before.tensors.keys() == after.tensors.keys()
        rows = weights = 0
        for name in before.tensors:
            made = name.endswith("_proj.weight")
            assert torch.equal(after.read(name), before.read(name).float() * (0.75 if made else 1.0))
            rows += made * before.tensors[name].shape[0]
            weights += made * before.read(name).numel()
    assert found == {"perplexity": 30.0, "bits": pytest.approx(2 + 16 * rows / weights)}
