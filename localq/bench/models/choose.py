"""The model that `localq bench` without arguments measures, chosen from disk, catalogue and card, before torch loads.

It is the largest quantized model on this machine that also fits the card in 16 bit, so that the speedup over fp16 is
measured and not extrapolated. Otherwise random weights of the largest such catalogued model; without a GPU the packaged
model, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from localq import driver, gpus
from localq.errors import LocalqError, usage_error
from localq.files import catalog, format_facts, local_models, stored_format
from localq.files.architecture import Architecture
from localq.files.catalog import ModelEntry
from localq.files.local_models import LocalModel
from localq.files.model_folder import open_model
from localq.planner import plan as memory_plan
from localq.planner.placement import Wishes

CPU_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class BenchChoice:
    """The chosen model: `path` on disk, or the catalogue's `name` where that is ""; note: for the user."""

    name: str
    path: str = ""
    synthetic: bool = False
    note: str = ""


def choose(
    ctx: int, device: str = "auto", vram_bytes: int | None = None, synthetic: bool = False, reserve_bytes: int = 0
) -> BenchChoice:
    """Choose a model for this machine; ctx: what the tests need; synthetic: use random weights."""
    if device == "cpu":
        return BenchChoice(CPU_MODEL, synthetic=synthetic, note=f"no model given; benchmarking {CPU_MODEL} on the CPU")
    if not driver.probe_driver().present:
        note = f"no NVIDIA driver found; benchmarking {CPU_MODEL} on the CPU"
        return BenchChoice(CPU_MODEL, synthetic=synthetic, note=note)
    free = max(0, card_bytes() - reserve_bytes)
    budget = free if vram_bytes is None else min(free, vram_bytes)
    local = [] if synthetic else local_models.list_local()
    return from_facts(budget, ctx, local, catalog.load_catalogue(), architecture_of)


def card_bytes() -> int:
    """Return the free memory of the card. Raises LocalqError (exit 2) where NVML does not report it."""
    found = gpus.probe()
    gpu = gpus.first_visible(found.gpus)
    if gpu is None or gpu.free is None:
        why = f"the amount of GPU memory is unknown ({'; '.join(found.unavailable) or 'no GPU is visible'})"
        raise usage_error("bench", why, "Specify a model: `localq bench MODEL`.")
    return gpu.free


def architecture_of(model: LocalModel) -> Architecture | None:
    """Return the architecture of a model on disk; None where its files or its layout cannot be read."""
    try:
        files = open_model(model.path)
        return None if stored_format.unreadable(files.quantization) else Architecture.from_config(files.config)
    except LocalqError:  # damaged or unsupported: `localq ls` and `localq show` report it
        return None


def from_facts(
    budget: int,
    ctx: int,
    local: Iterable[LocalModel],
    entries: Iterable[ModelEntry],
    shape: Callable[[LocalModel], Architecture | None],
) -> BenchChoice:
    """Choose for a card with `budget` bytes. Raises LocalqError (exit 2) where nothing fits."""
    on_disk, order = [], quantized_formats()
    for model in local:
        arch = shape(model) if model.complete and model.format in order else None
        if (
            arch is None
            or format_facts.why_unsupported(arch, model.format)
            or format_facts.one_by_one(arch, model.format)
        ):
            continue
        if _fits(arch, budget, ctx):
            on_disk.append((arch.parameters, -order.index(model.format), model.name, model))
    if on_disk:
        chosen = max(on_disk, key=lambda each: each[:3])[3]
        return BenchChoice(chosen.name, path=str(chosen.path))
    in_nf4 = (each for each in entries if not format_facts.why_unsupported(each.arch, "nf4"))
    catalogued = [each for each in in_nf4 if _fits(each.arch, budget, ctx)]
    if not catalogued:
        raise usage_error(
            "bench", "no catalogue model fits on this card in fp16", "Specify a model: `localq bench MODEL`."
        )
    entry = max(catalogued, key=lambda each: memory_plan.size_class(each.arch))  # the first of equals
    none = "no model on this machine fits in memory in both quantized and fp16 form"
    note = f"{none}; using random weights with the shapes of {entry.name}"
    return BenchChoice(entry.name, synthetic=True, note=note)


def quantized_formats() -> list[str]:
    """Return the quantized formats by preference: those that localq makes by name first, `offered_last` last."""
    formats = [each for each in format_facts.FORMATS.values() if each.is_quantized]
    return [each.name for each in sorted(formats, key=lambda each: (bool(each.offered_last), not each.made_by_name))]


def _fits(arch: Architecture, budget: int, ctx: int) -> bool:
    if ctx > arch.max_context:
        return False
    wishes = Wishes(ctx=ctx, kv_bits=16, embed="device", head="16")  # the baseline saves nothing
    return memory_plan.assess(arch, "fp16", budget, wishes=wishes).fits
