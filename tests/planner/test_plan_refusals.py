"""What the planner refuses: it says by how much and whose memory it is, and every way out that it names is one."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import psutil
import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog
from localq.planner import plan as memory_plan
from localq.planner import ram
from localq.planner.placement import Wishes
from localq.planner.ram import Ram
from tests.support.planner.catalogue_models import arch

pytestmark = pytest.mark.usefixtures("no_own_models")

MIB = 2**20


def refusal(name: str, format: str, budget: int, ctx: int | None = None) -> str:
    with pytest.raises(LocalqError) as raised:
        memory_plan.plan(arch(name), format, budget, wishes=Wishes(ctx), name=name)
    assert raised.value.exit_code == ExitCode.DOES_NOT_FIT
    text = str(raised.value)
    assert text.startswith(f"{name}: needs ")
    assert str(budget) in text
    assert all(f"({number})" in text for number in (1, 2, 3))
    return text


def test_a_refusal_names_the_bytes_and_a_shorter_context_that_fits():
    budget = 18 * 2**30
    text = refusal("qwen3-32b", "nf4", budget, ctx=40_000)
    needed = memory_plan.assess(arch("qwen3-32b"), "nf4", budget, wishes=Wishes(40_000)).ledger.total
    assert str(needed) in text
    shorter = int(re.search(r"--ctx (\d+)", text)[1])
    assert memory_plan.plan(arch("qwen3-32b"), "nf4", budget, wishes=Wishes(shorter)).fits
    assert not memory_plan.assess(arch("qwen3-32b"), "nf4", budget, wishes=Wishes(shorter + 1)).fits
    assert f"free {-(-(needed - budget) // MIB):,} MiB" in text
    other = catalog.resolve(re.search(r"use (\S+), which fits", text)[1])
    assert memory_plan.plan(other.entry.arch, other.format, budget, wishes=Wishes(40_000)).fits


def test_a_refusal_says_who_could_make_room_and_force_goes_on_all_the_same():
    shape, budget = arch("qwen3-32b"), 12 * 2**30
    with pytest.raises(LocalqError, match=r"\(3\) free [\d,]+ MiB more by closing firefox \(pid 7, 812 MiB\)\."):
        memory_plan.plan(shape, "nf4", budget, freeing="by closing firefox (pid 7, 812 MiB)")
    forced = memory_plan.plan(shape, "nf4", budget, wishes=Wishes(5000), force=True)
    assert (forced.fits, forced.ctx) == (False, 5000)
    assert forced.ledger.total > budget


def test_a_refusal_offers_the_same_model_smaller_before_another_model():
    assert "use llama-3.1-8b, which fits;" in refusal("llama-3.1-8b", "bf16", 12 * 2**30)
    text = refusal("llama-3.3-70b", "nf4", 24_564 * MIB)
    assert "use llama-3.3-70b@vq2, which fits (after quantizing it here);" in text


@pytest.mark.parametrize(("gib", "is_offered"), [(20, False), (400, True)])
def test_the_cpu_is_a_way_out_only_where_the_ram_is_enough(monkeypatch, tmp_path, gib, is_offered):
    monkeypatch.setattr(ram, "CGROUP", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=gib * 2**30))
    assert ("--device cpu" in refusal("llama-3.3-70b", "nf4", 24_564 * MIB)) is is_offered


def test_the_ram_of_a_load_on_the_cpu_counts_every_weight_in_its_type():
    shape, budget = arch("qwen3-32b"), Ram(23 * 2**30, "float32")
    made = memory_plan.assess(shape, "nf4", budget)
    assert (made.fits, made.format, made.ctx) == (False, "nf4", memory_plan.MIN_CONTEXT)
    assert made.ledger.components["weights"] == 4 * (shape.linear_parameters + shape.other_parameters)
    assert made.ledger.components["embedding"] == made.ledger.components["head"] == 4 * shape.embedding_parameters
    assert made.ledger.total > 131e9
    halved = memory_plan.assess(shape, "nf4", Ram(23 * 2**30, "bfloat16")).ledger.components
    assert 2 * halved["weights"] == made.ledger.components["weights"]
    with pytest.raises(LocalqError, match=r"needs 131\.\d GB of RAM") as raised:
        memory_plan.plan(shape, "nf4", budget, name="qwen3-32b")
    text = str(raised.value)
    assert raised.value.exit_code == ExitCode.DOES_NOT_FIT
    assert all(f"({number})" in text for number in (1, 2, 3))
    assert "closing other programs" in text
    other = catalog.resolve(re.search(r"use (\S+), which fits", text)[1])
    assert memory_plan.assess(other.entry.arch, other.format, budget).fits


@pytest.mark.parametrize(("limit", "free"), [("max", 20), ("17179869184", 12), ("1000", 0), (None, 20)])
def test_the_limit_of_a_container_counts_and_cached_files_do_not(monkeypatch, tmp_path, limit, free):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=20 * 2**30))
    monkeypatch.setattr(ram, "CGROUP", tmp_path)
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text(f"{7 * 2**30}\n")
        (tmp_path / "memory.stat").write_text(f"anon 5\nactive_file {2**30}\ninactive_file {2 * 2**30}\n")
    assert ram.free_ram().bytes == free * 2**30


@pytest.mark.parametrize(("gib", "is_offered"), [(20, True), (10, False)])
def test_half_the_bytes_are_a_way_out_only_where_they_fit(gib, is_offered):
    with pytest.raises(LocalqError) as raised:
        memory_plan.plan(arch("llama-3.1-8b"), "nf4", Ram(gib * 2**30, "float32"))
    assert ("--dtype bfloat16" in str(raised.value)) is is_offered
    with pytest.raises(LocalqError) as raised:
        memory_plan.plan(arch("llama-3.1-8b"), "nf4", Ram(10 * 2**30, "bfloat16"))
    assert "--dtype bfloat16" not in str(raised.value)


def test_ram_that_is_short_gives_a_shorter_context_and_more_never_less():
    shape, found = arch("llama-3.1-8b"), []
    for mib in range(30 * 1024, 40 * 1024, 64):
        made = memory_plan.assess(shape, "nf4", Ram(mib * MIB, "float32"))
        assert made.fits == (made.ledger.total <= mib * MIB)
        found.append(made.ctx if made.fits else 0)
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, memory_plan.CPU_CONTEXT)
    assert len(set(found)) > 5


@pytest.mark.parametrize("given", [
    {"wishes": Wishes(kv_bits=16, embed="device", head="16")}, {"context_bytes": 1500 * MIB}, {"itemsize": 4},
    {"wishes": Wishes(embed="host", head="16")},  # which models with tied embeddings cannot be asked for
])  # fmt: skip
def test_what_a_refusal_offers_fits_with_all_that_was_asked_for(given):
    shape, offered = arch("llama-3.1-8b"), 0
    asked = given.get("wishes", Wishes())
    for budget in range(4000 * MIB, 7000 * MIB, 100 * MIB):
        with pytest.raises(LocalqError) as raised:
            memory_plan.plan(shape, "bf16", budget, name="llama-3.1-8b", **given)
        assert raised.value.exit_code == ExitCode.DOES_NOT_FIT
        if found := re.search(r"use (\S+), which fits", str(raised.value)):
            other, offered = catalog.resolve(found[1]), offered + 1
            wishes = replace(asked, ctx=min(memory_plan.USABLE_CONTEXT, other.entry.arch.max_context))
            scheme = other.source.scheme if other.source else ""
            assert memory_plan.assess(
                other.entry.arch, other.format, budget, scheme=scheme, **{**given, "wishes": wishes}
            ).fits
    assert offered


def test_a_budget_in_which_nothing_fits():
    assert "use a GPU with more memory" in refusal("qwen3-8b", "nf4", 500 * MIB)
    plan = memory_plan.assess(arch("qwen3-8b"), "nf4", 500 * MIB)
    assert (plan.fits, plan.ctx) == (False, memory_plan.MIN_CONTEXT)
    assert "500 MiB is available" in plan.reason
