"""What a bare `localq bench` measures: decided from the disk, the catalogue and the card, before torch is loaded.

The largest model on this machine that is quantized and whose 16-bit form fits the card too, so that the speedup over
fp16 is measured and not extrapolated. (A model that is stored in 16 bit has no speedup to show.) Else random weights of
the largest catalogued model of which that holds. Without a GPU the embedded model, on the CPU.
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
from localq.planner import plan as planner
from localq.planner.placement import Wishes

CPU_MODEL = "smollm2-135m"


@dataclass(frozen=True)
class BenchChoice:
    """path: of a model on the disk; name: of a catalogue entry where `path` is "". note: what the user must be told."""

    name: str
    path: str = ""
    synthetic: bool = False
    note: str = ""


def choose(
    ctx: int, device: str = "auto", vram_bytes: int | None = None, synthetic: bool = False, reserve_bytes: int = 0
) -> BenchChoice:
    """The choice for this machine. `ctx`: what the tests need; `synthetic`: random weights are asked for."""
    if device == "cpu":
        return BenchChoice(CPU_MODEL, synthetic=synthetic, note=f"no model named: measuring {CPU_MODEL} on the CPU")
    if not driver.probe_driver().present:
        note = f"no NVIDIA driver found: measuring {CPU_MODEL} on the CPU"
        return BenchChoice(CPU_MODEL, synthetic=synthetic, note=note)
    free = max(0, card_bytes() - reserve_bytes)
    budget = free if vram_bytes is None else min(free, vram_bytes)
    local = [] if synthetic else local_models.list_local()
    return from_facts(budget, ctx, local, catalog.load_catalogue(), architecture_of)


def card_bytes() -> int:
    """Memory of the card that is free now. Raises LocalqError (exit 2) where NVML does not tell."""
    found = gpus.probe()
    gpu = gpus.first_visible(found.gpus)
    if gpu is None or gpu.free is None:
        why = f"how much memory the GPU has is not told ({'; '.join(found.unavailable) or 'none is visible'})"
        raise usage_error("bench", why, "Name a model: `localq bench MODEL`.")
    return gpu.free


def architecture_of(model: LocalModel) -> Architecture | None:
    """The shape of a model on the disk; None where its files cannot be read, or are in a layout that is not."""
    try:
        files = open_model(model.path)
        return None if stored_format.unreadable(files.quantization) else Architecture.from_config(files.config)
    except LocalqError:  # damaged or of another kind: `localq ls` and `localq show` tell about it
        return None


def from_facts(
    budget: int,
    ctx: int,
    local: Iterable[LocalModel],
    entries: Iterable[ModelEntry],
    shape: Callable[[LocalModel], Architecture | None],
) -> BenchChoice:
    """As the module says, for a card with `budget` bytes. Raises LocalqError (exit 2) where nothing fits."""
    on_disk, order = [], quantized()
    for model in local:
        arch = shape(model) if model.complete and model.format in order else None
        if arch is None or format_facts.unsupported(arch, model.format) or format_facts.one_by_one(arch, model.format):
            continue
        if _fits(arch, budget, ctx):
            on_disk.append((arch.parameters, -order.index(model.format), model.name, model))
    if on_disk:
        chosen = max(on_disk, key=lambda each: each[:3])[3]
        return BenchChoice(chosen.name, path=str(chosen.path))
    in_nf4 = (each for each in entries if not format_facts.unsupported(each.arch, "nf4"))
    catalogued = [each for each in in_nf4 if _fits(each.arch, budget, ctx)]
    if not catalogued:
        raise usage_error("bench", "no catalogued model fits this card in fp16", "Name a model: `localq bench MODEL`.")
    entry = max(catalogued, key=lambda each: planner.size_class(each.arch))  # the first of equals
    note = f"no quantized model found that fits in fp16 too: random weights of the shape of {entry.name}"
    return BenchChoice(entry.name, synthetic=True, note=note)


def quantized() -> list[str]:
    """The formats that are measured; of one model in several, the first. Those in 16 bit have no speedup to show.

    Formats that are offered last come last; before others come those that localq makes for a name.
    """
    formats = [each for each in format_facts.FORMATS.values() if each.is_quantized]
    return [each.name for each in sorted(formats, key=lambda each: (bool(each.offered_last), not each.made_by_name))]


def _fits(arch: Architecture, budget: int, ctx: int) -> bool:
    if ctx > arch.max_context:
        return False
    wishes = Wishes(ctx=ctx, kv_bits=16, embed="device", head="16")  # the baseline saves nothing
    return planner.assess(arch, "fp16", budget, wishes=wishes).fits
