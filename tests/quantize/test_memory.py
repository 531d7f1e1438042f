"""The count of what quantizing takes, held against the tensors that it holds; and that its place changes no result."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from localq import kernels
from localq.errors import ExitCode, LocalqError
from localq.models import ARCHITECTURES
from localq.models.decoder import Decoder
from localq.quantize import memory
from localq.quantize.codebooks import encode, joint_training
from localq.quantize.codebooks import layer as codebook_layer
from localq.quantize.codebooks.initial_codebooks import load_initial
from localq.quantize.codebooks.layer import quantize_layer
from localq.quantize.model import linear_algebra, statistics
from localq.quantize.model.calibration_stream import Streams
from localq.quantize.model.fold import plain_linear
from localq.quantize.model.matrix_groups import groups_of
from localq.quantize.model.sensitivity import make_ending
from localq.quantize.output.resume_files import ResumeFiles
from localq.quantize.settings import ConversionSettings, Effort, QuantizedLayer, Tuning
from tests.support.engine.live_memory import LiveMemory
from tests.support.quantize.tiny_layers import packed_block

pytestmark = pytest.mark.skipif(not kernels.host_available(), reason=f"no search: {kernels.host_why_not()}")

HIDDEN, WINDOWS = 256, 3
WITHIN = 0.1  # of the measured peak


def decoder(intermediate: int, tokens: int, hidden: int = HIDDEN) -> Decoder:
    """One layer of random weights, tables for its windows."""
    config = {
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": hidden,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": hidden // 64,
        "head_dim": 32,
        "intermediate_size": intermediate,
        "vocab_size": 64,
        "tie_word_embeddings": False,
        "max_position_embeddings": tokens,
    }
    llama = ARCHITECTURES["llama"]
    model: Decoder = llama.Model(llama.Config.from_dict(config)).requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5
        parameter.data = noise if parameter.dim() == 2 else torch.ones_like(parameter)
    return model


def text(model: Decoder, tokens: int, device: torch.device) -> Streams:
    """In 16 bits, as long texts are kept: on their way to the device they are copied."""
    model.make_tables(tokens, device)
    generator = torch.Generator().manual_seed(4)
    rows = [torch.randn(tokens, model.config.hidden, generator=generator).bfloat16() for _ in range(WINDOWS)]
    return Streams(model, rows, device)


def settings(device: str = "cpu", **changes: Any) -> ConversionSettings:
    books = (load_initial("s4l16", torch.device(device)),) * 4
    return ConversionSettings(Effort(beam=4, columns=64, steps=2), books, **changes)


class Stages(LiveMemory):
    """Peaks by what was begun last."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.peaks: dict[str, int] = {}
        self.group, self._stage = "", "before"
        patch.setattr(codebook_layer, "_quantize", self._group(codebook_layer._quantize))
        marks = [(statistics.Statistics, "finish", "target"), (codebook_layer, "encode", "codes")]
        marks += [(encode, "fit_codebooks", "codebooks"), (codebook_layer, "set_weights", "weights")]
        for owner, name, stage in marks:
            patch.setattr(owner, name, self._marked(getattr(owner, name), stage))
        passes = dict.fromkeys(("_through_attention", "_through_mlp"), "a forward pass")
        for name, stage in {**passes, "tune": "fine-tuning"}.items():
            patch.setattr(codebook_layer, name, self._marked(getattr(codebook_layer, name), stage, whole=True))

    def mark(self, stage: str) -> None:
        """What follows belongs to `stage`."""
        self.peaks[self._stage] = max(self.peaks.get(self._stage, 0), self.peak)
        self._stage, self.peak = stage, self.now

    def _marked(self, call: Any, stage: str, whole: bool = False) -> Any:
        def marked(*arguments: Any, **options: Any) -> Any:
            self.mark(stage if whole else f"{stage} of {self.group}")
            return call(*arguments, **options)

        return marked

    def _group(self, call: Any) -> Any:
        def quantized(group: Any, *arguments: Any) -> Any:
            self.group = group.names[0]
            self.mark(f"statistics of {self.group}")
            return call(group, *arguments)

        return quantized


@contextmanager
def small_parts() -> Iterator[pytest.MonkeyPatch]:
    """Pieces and panels that are small beside small matrices, as the real ones are beside large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linear_algebra, "VALUES", 2**16)
        patch.setattr(linear_algebra, "PANEL", 64)
        patch.setattr(statistics, "F64_COLUMNS", 300)
        yield patch


CASES = {
    "a wide MLP": (896, 64, 0),
    "a narrow MLP": (384, 96, 0),
    "a long text": (512, 640, 0),
    "fine-tuned": (768, 64, 2),
    "fine-tuned on a long text": (512, 512, 2),
}


@pytest.mark.parametrize(("intermediate", "tokens", "steps"), CASES.values(), ids=CASES)
def test_the_count_is_the_measured_peak(intermediate, tokens, steps):
    model = decoder(intermediate, tokens)
    chosen = settings(tuning=Tuning(steps, 2))
    with torch.no_grad(), small_parts() as patch, Stages(patch) as measured:
        block, streams = model.layers[0], text(model, tokens, torch.device("cpu"))
        begun = measured.now
        made = quantize_layer(block, 0, streams, chosen)
        measured.mark("after")
        counted = memory.count(block, HIDDEN, tokens, chosen, device="cpu", rotated=False)
    # On a CPU what is done, and what fine-tuning begins with, lies in the same memory. Both layers are not seen.
    on_host = sum(each.numel() for packed in made.packed.values() for each, _ in packed.books)
    on_host += begun + (2 * WINDOWS * tokens * HIDDEN if steps else 0)
    weights = sum(
        plain_linear(block.get_submodule(name)).weight.numel() for each in groups_of(block) for name in each.names
    )
    peaks = {stage: peak - on_host + 8 * weights for stage, peak in measured.peaks.items()}
    highest = max(peaks.values())
    assert counted.stages[counted.widest] == pytest.approx(highest, rel=WITHIN)
    for stage, peak in peaks.items():
        if stage in counted.stages:
            assert counted.stages[stage] == pytest.approx(peak, abs=WITHIN * highest), stage


def made_of(
    model: Decoder, tokens: int, chosen: ConversionSettings, device: torch.device
) -> tuple[QuantizedLayer, Streams]:
    """A layer that is quantized, and the text behind it."""
    with torch.no_grad():
        block, streams = copy.deepcopy(model.layers[0]).to(device), text(model, tokens, device)
        return quantize_layer(block, 0, streams, chosen), streams


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
@pytest.mark.parametrize("steps", [0, 2])
def test_where_weights_wait_changes_no_bit(device, steps):
    model, place = decoder(384, 96), torch.device(device)
    chosen = settings(device, tuning=Tuning(steps, 2))
    (here, one), (away, other) = (
        made_of(model, 96, replace(chosen, on_host=on_host), place) for on_host in (False, True)
    )
    for name, packed in here.packed.items():
        assert torch.equal(packed.scales, away.packed[name].scales)
        for (codes, book), (same, twin) in zip(packed.books, away.packed[name].books, strict=True):
            assert torch.equal(codes, same)
            assert torch.equal(book, twin)
    assert all(torch.equal(*pair) for pair in zip(one.x + one.full, other.x + other.full, strict=True))


@pytest.mark.cuda
@pytest.mark.parametrize("on_host", [False, True], ids=["resident", "on the host"])
@pytest.mark.parametrize("steps", [0, 2])
def test_the_count_is_what_the_allocator_of_a_gpu_tells(on_host, steps):
    """A quarter of a 70B's layer each way; without the context, and without what the allocator keeps unused.

    Too little would end in the middle of a layer: no more than what is allowed for blocks that are not full. What is
    too much only moves weights to the host early.
    """
    hidden, tokens, device = 2048, 1024, torch.device("cuda", 0)
    model = decoder(7168, tokens, hidden)
    chosen = settings("cuda", tuning=Tuning(steps, 2), on_host=on_host)
    counted = memory.count(model.layers[0], hidden, tokens, chosen, device="cuda", rotated=False)
    torch.ones(16, 16, device=device).mm(torch.ones(16, 16, device=device))  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    made_of(model, tokens, chosen, device)
    measured = torch.cuda.max_memory_allocated(device) - before
    assert measured / memory.SPARE <= counted.stages[counted.widest] <= 1.15 * measured


def test_a_70b_fits_a_card_of_24_gb_and_moved_to_the_host_one_of_16():
    """8192 x 28672, windows of 2048 tokens, as `localq quantize` makes it; counted, on the meta device."""
    llama = ARCHITECTURES["llama"]
    config = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8192, "intermediate_size": 28672}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256}
    with torch.device("meta"):
        block = llama.Model(llama.Config.from_dict({**config, "max_position_embeddings": 2048})).layers[0]
    quick, best = (
        [
            memory.count(block, 8192, 2048, settings(tuning=tuning, on_host=on_host), device="cuda", rotated=True).peak
            for on_host in (False, True)
        ]
        for tuning in (Tuning(), Tuning(200, 4))
    )
    for on_host, resident in ((quick[1], quick[0]), (best[1], best[0])):
        assert on_host < 16e9 < resident < 24e9


def test_weights_go_to_the_host_where_they_do_not_fit_else_and_what_does_not_fit_at_all_is_refused():
    def counted(chosen: ConversionSettings) -> memory.MemoryCount:
        return memory.MemoryCount({"a pass": 50 if chosen.on_host else 100, "the goal": 40}, always=8)

    given = settings()
    assert memory.place("tiny", counted, given, 113) is given
    for budget in (112, 60):
        assert memory.place("tiny", counted, given, budget) == replace(given, on_host=True)
    with pytest.raises(LocalqError, match=r"needs up to .* of GPU memory \(a pass\)") as caught:
        memory.place("tiny", counted, given, 59)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT


@pytest.mark.cuda
def test_the_count_of_training_is_what_the_allocator_of_a_gpu_tells(tmp_path):
    """A layer like a quarter of a 70B's, with a head; without the context and what the allocator keeps unused."""
    hidden, tokens, vocab, device = 2048, 1024, 40960, torch.device("cuda", 0)
    model, tuning = decoder(7168, tokens, hidden), Tuning(2, 2)
    counted = memory.count(
        model.layers[0],
        hidden,
        tokens,
        settings("cuda", joint_tuning=tuning),
        device="cuda",
        rotated=False,
        vocab=vocab,
    )
    streams = text(model, tokens, device)
    layers = [(copy.deepcopy(block).to(device), packed_block(block, 1)) for block in model.layers]
    for block, packed in layers:
        for name in packed:
            plain_linear(block.get_submodule(name)).weight.data = torch.empty(0, device=device)
    ending = make_ending(model, torch.ones(hidden), torch.randn(vocab, hidden), device)

    def rows(number: int) -> Tensor:
        return streams.x[number].to(device).float()

    torch.ones(16, 16, device=device).mm(torch.ones(16, 16, device=device))  # cuBLAS takes its workspace
    before = torch.cuda.memory_allocated(device) - 4 * vocab * hidden
    torch.cuda.reset_peak_memory_stats(device)
    texts = joint_training.Sequences(len(streams.x), rows, rows, streams.step)
    joint_training.train(layers, texts, ending, tuning, 0, ResumeFiles(tmp_path, {}), lambda done, total: None)
    measured = torch.cuda.max_memory_allocated(device) - before
    assert measured / memory.SPARE <= counted.stages["training all layers"] <= 1.3 * measured
