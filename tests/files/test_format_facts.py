"""A record in `format_facts.FORMATS` is all that catalogue, planner, `quantize` and benchmarks need of a format."""

from __future__ import annotations

import pytest

from localq.bench.models import choose, format_list
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts, stored_format
from localq.files.format_facts import Format
from localq.files.linears import Linears
from localq.planner import making, offers
from localq.planner import plan as memory_plan


def toy_bytes(linear: Linears, scheme: str) -> int:
    return linear.rows * linear.columns


@pytest.fixture
def toy(monkeypatch) -> Format:
    record = Format("toy", toy_bytes, "localq_toy", made_from="tensors", made_by_name=True, offered_last="a toy")
    monkeypatch.setitem(format_facts.FORMATS, "toy", record)
    return record


def test_one_record_makes_a_format_known(toy):
    assert "toy" in format_facts.writable()
    assert "toy" in format_list.names()
    assert "toy" in format_list.to_make("all")
    assert choose.quantized_formats()[-3:].count("toy") == 1  # with those that are offered last
    assert making.estimate("toy", 10**9).startswith("about")
    assert stored_format.format_of_config({"quantization_config": {"quant_method": "localq_toy"}}) == "toy"


def test_it_is_an_offer_of_every_model_with_its_size(toy):
    entry = catalog.find("llama-3.1-8b")
    (offer,) = offers.of_entry(entry, "toy")
    assert (offer.name, offer.bits, offer.last) == ("llama-3.1-8b@toy", 8.0, True)
    assert offer.remark == "a toy, quantized here from bf16"
    assert catalog.resolve("llama-3.1-8b@toy").base is not None
    plan = memory_plan.assess(entry.arch, "toy", 24 * 2**30)
    assert plan.fits
    assert plan.ledger.components["weights"] == entry.arch.linear_parameters + 2 * entry.arch.other_parameters


def test_a_format_that_nobody_knows_is_a_usage_error():
    with pytest.raises(LocalqError, match="unknown format") as raised:
        memory_plan.assess(catalog.find("llama-3.1-8b").arch, "hqq", None)
    assert raised.value.exit_code == ExitCode.USAGE
