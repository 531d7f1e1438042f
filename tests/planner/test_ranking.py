"""What an offer is worth: the score of its model, less its bits, a short context, and slow or unfinished weights."""

from __future__ import annotations

import math

import pytest

from localq.files import catalog, format_facts
from localq.files.gguf import packing, reader
from localq.planner import offers, ranking, uncatalogued
from localq.planner.offers import Offer
from localq.planner.placement import Placement
from tests.support.files import tiny_gguf_models, uncatalogued_models


@pytest.fixture(autouse=True)
def shipped_catalogue(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))


def offer(name: str) -> Offer:
    target = catalog.resolve(name)
    assert target.entry is not None
    (found,) = offers.of_entry(target.entry, target.format)
    return found


def test_full_precision_has_the_score_of_the_model_and_fewer_bits_less():
    assert ranking.quality(offer("llama-3.1-8b@bf16")) == 1212
    found = [ranking.quality(offer(f"llama-3.1-8b@{format}")) for format in ("bf16", "nf4", "bcq", "vq2")]
    assert found == sorted(found, reverse=True)
    assert len(set(found)) == len(found)


def test_two_bits_cost_what_the_published_perplexities_say():
    """Llama 2: 70B at 2.07 bits 3.93, in 16 bits 3.12, 13B 4.57: as much as 18 points a halving from 70B to 25B."""
    share = (math.log(4.57) - math.log(3.93)) / (math.log(4.57) - math.log(3.12))
    equal = 13 * (70 / 13) ** share
    assert ranking.loss(offer("llama-3.3-70b@vq2")) == pytest.approx(18 * math.log2(70 / equal), rel=0.05)
    assert ranking.loss(offer("qwen3-1.7b@vq2")) > 1.5 * ranking.loss(
        offer("llama-3.3-70b@vq2")
    )  # small ones lose more


def test_what_is_quantized_twice_loses_twice():
    twice, once = offer("smollm2-135m@nf4"), offer("qwen3-0.6b@nf4")
    assert (twice.quantized_before, once.quantized_before) == ("gguf", "")
    assert ranking.loss(twice) == pytest.approx(2 * ranking.loss(once), rel=0.01)
    assert offer("gpt-oss-20b@nf4").quantized_before == ""  # its experts keep their published format


def test_context_speed_reductions_and_making_count():
    plain, placement = offer("gemma-3-12b"), Placement()
    best = ranking.value(plain, placement, 32_768, 100.0)
    assert ranking.value(plain, placement, 16_384, 60.0) == best
    assert ranking.value(plain, placement, 8192, 100.0) == best - ranking.CONTEXT_POINTS
    assert ranking.value(plain, placement, 32_768, 30.0) == best - ranking.SPEED_POINTS
    assert ranking.value(plain, Placement(4, "host", "nf4"), 32_768, 100.0) < best
    made = offer("gemma-3-12b@vq2")
    for each in (made, offer("qwen3-30b-a3b-2507@nf4")):  # by search, and matrix by matrix
        assert each.is_made_here
        assert ranking.value(each, placement, 32_768, 100.0) == ranking.quality(each) - 20
        assert ranking.value(each, placement, 32_768, 100.0, is_made=True) == ranking.quality(each)


def test_a_model_without_a_score_counts_as_a_usual_one_of_its_size():
    entry = catalog.find("llama-3.1-8b")
    unknown = Offer("maker/some-8b", entry.arch, "bf16")
    assert ranking.is_estimated(unknown)
    assert ranking.quality(unknown) == pytest.approx(1212, abs=0.1)
    assert not ranking.is_estimated(offer("llama-3.1-8b"))
    assert ranking.is_estimated(offer("qwen3-8b"))
    assert not ranking.chats(offer("llama-2-7b"))
    assert ranking.chats(offer("llama-2-7b-chat"))


def test_the_bits_of_a_gguf_file_are_those_of_the_file(tmp_path):
    path = tmp_path / "mine.gguf"
    path.write_bytes(uncatalogued_models.gguf(1000, 2**16))
    found = uncatalogued.offer(catalog.resolve(str(path)), offline=True)
    assert found.bits == 16.0
    assert found.stored_bits == pytest.approx(8 * path.stat().st_size / found.arch.parameters)
    assert found.remark == ""


def test_a_gguf_file_of_one_type_takes_its_bytes_on_a_gpu(tmp_path):
    path = tiny_gguf_models.write_with_tokenizer(tmp_path / "mine.gguf", "Q8_0")
    found, header = uncatalogued.offer(catalog.resolve(str(path)), offline=True), reader.read_header(path)
    assert (found.scheme, found.bits, found.remark) == ("Q8_0", 8.5, "Q8_0")
    assert found.block_bytes == packing.device_bytes(header)
    assert found.arch.stored_head == packing.head_bytes(header)


def test_types_that_no_kernel_reads_are_offered_last():
    arch = catalog.find("llama-3.1-8b").arch
    for scheme, why in (("Q1_0", "Q1_0"), ("mix2.31, Q1_0", "Q1_0")):
        found = Offer("m.gguf", arch, "gguf", scheme)
        assert found.last
        assert found.remark == f"slow: no kernel for {why}"
        assert format_facts.of("gguf").speed_key(scheme) is None
    for scheme in ("Q4_K", "mix4.85"):
        assert not Offer("m.gguf", arch, "gguf", scheme).last
    assert offer("smollm2-135m").stored_bits == 5.0  # Q4_1
