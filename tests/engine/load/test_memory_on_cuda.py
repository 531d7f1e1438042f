"""Memory on a GPU: a budget holds for everything, every byte is in the ledger, what is reduced gives nearly the same.

`exact` is the model as it is stored; tolerances are shares of the size of its logits.
"""

from __future__ import annotations

import pytest
import torch

from localq.bench.synthetic import sources
from localq.engine.generate import Engine
from localq.engine.load import vram
from localq.engine.load.device import DeviceChoice
from localq.engine.load.load import LoadedModel, free_memory, load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.planner.footprint import MIB
from localq.planner.load_options import LoadOptions
from localq.quantize.by_tensor import convert
from localq.quantize.request import TensorwiseRequest
from tests.support.engine.engine_runs import bare_device, ids_of, prompt_of
from tests.support.models.tiny_checkpoints import make_checkpoint

pytestmark = pytest.mark.cuda
CONTEXT = 320


@pytest.fixture(scope="module")
def nf4_folder(tmp_path_factory):
    """An untied llama in NF4 whose logits differ, 16-bit head and table."""
    folder = tmp_path_factory.mktemp("memory")
    source = make_checkpoint(folder / "source", initializer_range=0.08, max_position_embeddings=CONTEXT)
    convert(TensorwiseRequest(open_model(source), "nf4", folder / "nf4", force=True))
    return folder / "nf4"


def on_gpu(folder, **options) -> LoadedModel:
    gpu = DeviceChoice(torch.device("cuda", 0))
    return load(open_model(folder), LoadOptions(device="cuda", **options), pick=lambda word: gpu)


def logits_of(loaded: LoadedModel, ids: list[int]) -> torch.Tensor:
    """f32 [T, vocab] on the CPU, through the modules."""
    loaded.cache.clear()
    with torch.inference_mode():
        positions = torch.arange(len(ids), device="cuda")
        tokens = torch.tensor(ids, device="cuda")
        return loaded.model(tokens, positions, loaded.cache, len(ids), last_only=False).cpu()


PLAIN = {"kv_bits": 16, "embed": "device", "head": "16"}
REDUCED = [
    ({"embed": "host"}, 1e-6),  # the same rows from another place
    ({"kv_bits": 8}, 0.05),
    ({"kv_bits": "k8v4"}, 0.6),
    ({"kv_bits": 4}, 0.6),
    ({"head": "8"}, 0.03),
    ({"head": "nf4"}, 0.2),
    ({"embed": "host", "kv_bits": 8, "head": "8"}, 0.08),
]


@pytest.mark.parametrize(("reduced", "relative"), REDUCED, ids=[str(reduced) for reduced, _ in REDUCED])
def test_what_is_reduced_gives_nearly_the_same_logits(nf4_folder, reduced, relative):
    ids = prompt_of(60)
    exact = logits_of(on_gpu(nf4_folder, **PLAIN), ids)
    loaded = on_gpu(nf4_folder, **{**PLAIN, **reduced})
    assert {"kv_bits": loaded.kv_bits, "embed": loaded.embed, "head": loaded.head_bits} == {**PLAIN, **reduced}
    error = (logits_of(loaded, ids) - exact).norm() / exact.norm()
    assert error <= relative
    assert len(ids_of(Engine(loaded), ids, max_tokens=20)) == 20


@pytest.mark.parametrize("reduced", [{}, {"embed": "host", "kv_bits": 8, "head": "nf4"}], ids=["plain", "reduced"])
def test_every_byte_is_in_the_ledger(nf4_folder, reduced):
    bare_device()
    allocated = torch.cuda.memory_allocated()
    loaded = on_gpu(nf4_folder, **{**PLAIN, **reduced})
    predicted = loaded.plan.ledger.components
    for part in ("weights", "embedding", "head", "kv_cache", "tables"):
        # A small table that every quantized matrix brings along is left out of the prediction.
        assert abs(loaded.ledger[part] - predicted[part]) <= 64 * 1024, part
    engine = Engine(loaded)
    ledger = engine.ledger()
    assert ledger["step_buffers"] <= predicted["step_buffers"] + 4096
    assert ledger["attention_workspace"] <= predicted["attention_workspace"]
    tensors = sum(size for part, size in ledger.items() if part not in ("scratch", "graphs", "cuda_context"))
    grown = torch.cuda.memory_allocated() - allocated
    # The allocator rounds every tensor up to 512 bytes, and these are small: some hundred of them.
    assert tensors - 2 * MIB <= grown <= tensors + 2 * MIB
    assert 32 * MIB <= ledger["cuda_context"] <= 2048 * MIB


def test_the_peak_is_what_was_predicted(nf4_folder):
    bare_device()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_reserved()
    loaded = on_gpu(nf4_folder)
    engine = Engine(loaded)
    ids_of(engine, prompt_of(CONTEXT - 30), max_tokens=20)
    ledger = engine.ledger()
    peak = torch.cuda.max_memory_reserved() - others + ledger["cuda_context"] + ledger.get("graphs", 0)
    assert abs(peak - loaded.plan.ledger.total) <= max(200 * MIB, 0.03 * peak)


@pytest.mark.parametrize("options", [{}, {"embed": "host", "kv_bits": 8, "head": "nf4"}], ids=["plain", "reduced"])
def test_a_model_of_real_shape_takes_what_was_predicted(options):
    """While it loads as well as afterwards, by the allocator and by the driver."""
    device = torch.device("cuda", 0)
    files, opened = sources.random("llama-3.2-3b", seed=0)
    bare_device()
    torch.cuda.reset_peak_memory_stats()
    others = torch.cuda.memory_reserved()
    loaded = load(files, LoadOptions(device="cuda", ctx=2048, **options), opened=lambda each: opened(each, device))
    planned = loaded.plan.ledger
    outside = planned.components["cuda_context"] + planned.components["graphs"]
    assert torch.cuda.max_memory_reserved() - others <= planned.total - outside
    engine = Engine(loaded)
    for length in (1500, 1019, 2000, 7):
        ids_of(engine, prompt_of(length, seed=length), max_tokens=8)
    ledger = engine.ledger()
    assert abs(ledger["scratch"] - planned.components["scratch"]) <= 32 * MIB
    idle = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    assert abs(idle + loaded.ledger["scratch"] - ledger["scratch"]) <= 4 * MIB  # nothing was added by the replies
    tolerance = max(200 * MIB, 0.03 * planned.total)
    assert abs(sum(ledger.values()) - planned.total) <= tolerance
    told = vram.process_bytes(device)
    assert told is None or abs(told - others - planned.total) <= tolerance


def test_a_budget_below_what_is_needed_is_refused_with_three_ways_out(nf4_folder):
    free_memory()
    with pytest.raises(LocalqError, match=r"\(1\).*\(2\).*\(3\)") as caught:
        on_gpu(nf4_folder, vram_bytes=torch.cuda.memory_allocated() + 200 * MIB)
    assert caught.value.exit_code == ExitCode.DOES_NOT_FIT


def test_the_allocator_holds_the_budget(nf4_folder):
    free_memory()
    budget = torch.cuda.memory_allocated() + 1500 * MIB
    engine = Engine(on_gpu(nf4_folder, vram_bytes=budget))
    ledger = engine.ledger()
    outside = ledger["cuda_context"] + ledger.get("graphs", 0)
    assert torch.cuda.memory_reserved() + outside <= budget
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(budget - torch.cuda.memory_reserved(), dtype=torch.uint8, device="cuda")
    del engine
    on_gpu(nf4_folder)  # the next load lifts the limit


def test_a_tied_table_leaves_the_device_with_a_head_of_its_own(tmp_path):
    folder = make_checkpoint(tmp_path, initializer_range=0.08, tie_word_embeddings=True)
    exact = on_gpu(folder, **PLAIN)
    loaded = on_gpu(folder, embed="host")
    assert (loaded.embed, loaded.head_bits) == ("host", "8")
    assert loaded.model.embed_tokens.weight.is_pinned()
    assert loaded.ledger["embedding"] == 0
    ids = prompt_of(30)
    error = (logits_of(loaded, ids) - logits_of(exact, ids)).norm() / logits_of(exact, ids).norm()
    assert error < 0.03
