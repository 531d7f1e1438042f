"""Which format a bare name means on a card, and that what would take hours to make is named and never chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from localq import places
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, format_facts
from localq.files.hub import fetch as hub
from localq.planner import offers
from localq.planner import plan as memory_plan
from localq.planner.placement import Wishes


@pytest.fixture(autouse=True)
def bare_machine(tmp_path, monkeypatch):
    """The shipped catalogue, and nothing on the disk."""
    monkeypatch.setenv("LOCALQ_MODELS", str(tmp_path / "none.toml"))
    monkeypatch.setenv("LOCALQ_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))


def chosen(name: str, card: str, only: str | None = None, **wishes) -> offers.Choice:
    return offers.choose(catalog.find(name), memory_plan.parse_card(card), Wishes(**wishes), only)


def put_here(monkeypatch, *names: str) -> None:
    known = set(names)
    monkeypatch.setattr(hub, "local_path", lambda target: Path("/here") if target.name in known else None)


def test_the_default_counts_where_it_fits():
    choice = chosen("llama-3.3-70b", "48")
    assert (choice.taken.offer.name, choice.target.format) == ("llama-3.3-70b", "nf4")
    assert "which fits" in choice.why


def test_a_70b_on_24_gb_is_vptq_until_its_vq2_is_made(monkeypatch):
    choice = chosen("llama-3.3-70b", "24")
    assert (choice.taken.offer.name, choice.taken.plan.fits) == ("llama-3.3-70b@vptq", True)
    assert "nf4 needs" in choice.why
    assert "downloaded" in choice.why
    put_here(monkeypatch, "llama-3.3-70b@vq2")
    choice = chosen("llama-3.3-70b", "24")
    assert (choice.taken.offer.format, choice.taken.here) == ("vq2", Path("/here"))
    assert "on this machine" in choice.why
    put_here(monkeypatch, "llama-3.3-70b@vq2", "llama-3.3-70b@vptq")
    assert chosen("llama-3.3-70b", "24").taken.offer.format == "vq2"  # the one with kernels that do not gather
    put_here(monkeypatch, "llama-3.3-70b@vq2")
    assert chosen("llama-3.3-70b", "48").taken.offer.format == "nf4"  # it fits there


def test_more_room_is_no_reason_to_quantize_here(monkeypatch):
    """gemma-3-27b in NF4 leaves less than 16k tokens on 14.5 GiB; vq2 would leave them."""
    choice = chosen("gemma-3-27b", "14.5")
    assert choice.taken.offer.format == "nf4"
    assert memory_plan.USABLE_CONTEXT < choice.taken.plan.ctx < memory_plan.COMFORTABLE_CONTEXT
    assert next(each for each in choice.candidates if each.offer.format == "vq2").roomy
    put_here(monkeypatch, "gemma-3-27b@vq2")
    choice = chosen("gemma-3-27b", "14.5")
    assert choice.taken.offer.format == "vq2"
    assert f"nf4 leaves only {choice.candidates[0].plan.ctx:,} tokens" in choice.why


def test_more_room_is_no_reason_for_a_slower_format():
    choice = chosen("llama-3.3-70b", "35.3")
    assert (choice.taken.offer.format, choice.taken.plan.ctx < memory_plan.COMFORTABLE_CONTEXT) == ("nf4", True)
    assert next(each for each in choice.candidates if each.offer.format == "vptq").roomy


def test_what_takes_hours_is_never_begun_by_itself():
    choice = chosen("qwen3-32b", "12")
    assert (choice.taken.offer.format, choice.taken.plan.fits) == ("nf4", False)
    assert [each.offer.format for each in choice.candidates if each.usable] == ["vq2"]


def test_a_format_may_be_asked_for():
    choice = chosen("llama-3.3-70b", "24", "vq2")
    assert (choice.taken.offer.name, choice.why) == ("llama-3.3-70b@vq2", "as requested")
    with pytest.raises(LocalqError, match="Available: nf4, bf16, vptq, vq2") as raised:
        chosen("llama-3.3-70b", "24", "awq")
    assert raised.value.exit_code == ExitCode.USAGE


def test_a_context_that_was_asked_for_counts():
    assert chosen("qwen3-8b", "24", ctx=2000).taken.plan.ctx == 2000
    choice = chosen("llama-3.1-8b", "8", ctx=100_000)
    assert (choice.taken.offer.format, choice.taken.plan.fits) == ("nf4", False)
    assert "shorter context" in choice.why  # 4 bits are not given up for it: the refusal says what could be
    assert chosen("llama-3.3-70b", "24", ctx=30_000).taken.offer.format == "vptq"  # nf4 does not fit anyhow


def test_every_offer_resolves_to_itself():
    for offer in offers.of_catalogue():
        target = catalog.resolve(offer.name)
        assert (target.name, target.source, offer.source or offer.base) == (
            offer.name, offer.source, target.source or target.base,
        ) or offer.format in format_facts.full_precision()  # fmt: skip
        assert offer.is_calibrated == (offer.format == "vq2" and offer.source is None)


def test_the_command_that_makes_it_puts_it_where_its_name_finds_it():
    offer = next(each for each in offers.of_entry(catalog.find("llama-3.3-70b")) if each.format == "vq2")
    command = offers.making_command(offer)
    assert command.startswith("localq quantize llama-3.3-70b@bf16 --format vq2 --out ")
    assert str(places.quantized_dir() / "llama-3.3-70b@vq2") in command
    assert catalog.resolve("llama-3.3-70b@bf16").format == "bf16"


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("nemotron-3-nano", "Mamba-2 layers"), ("granite-4.0-h-tiny", "Mamba-2 layers and multipliers"),
        ("laguna-xs-2.1", "per-head gates"), ("glm-4.7-flash", "latent attention"),
    ],
)  # fmt: skip
def test_families_without_kernels_come_last_and_say_why(name, what):
    found = offers.of_entry(catalog.find(name))
    assert found
    assert all(offer.last and offer.remark == f"slow: no kernel for {what}" for offer in found)


@pytest.mark.parametrize("name", ["gemma-4-31b", "gemma-4-e4b", "gemma-4-26b-a4b"])
def test_a_gemma_4_is_no_slow_one(name):
    found = offers.of_entry(catalog.find(name))
    assert found
    assert not any(offer.remark.startswith("slow: no kernel for attention") for offer in found)
    assert any(not offer.last for offer in found)
