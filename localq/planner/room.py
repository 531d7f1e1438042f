"""The memory to plan for: of this machine's GPU or CPU, or of a card that is not here (`--vram`). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from localq import gpus, wording
from localq.gpus import Gpu
from localq.planner import budget as memory_budget
from localq.planner import ram
from localq.planner.plan import Budget
from localq.planner.ram import Ram
from localq.settings import Settings

MIB = 2**20
# What a desktop with a browser holds on a card with a monitor, which is the normal case. Assumed where nothing is
# measured.
DESKTOP_BYTES = 700_000_000


@dataclass(frozen=True)
class Room:
    """Memory to plan for, in bytes.

    budget      for localq; None: unknown, because the driver of a GPU does not report it
    no_desktop  the same after other programs are closed
    desktop     what other programs hold; `is_assumed` where it is not measured
    gpu         the GPU of this machine that is planned for; None for a card that is not here, and on the CPU
    """

    budget: Budget
    no_desktop: Budget
    desktop: int = 0
    is_assumed: bool = False
    gpu: Gpu | None = None

    def text(self, settings: Settings) -> str:
        """This memory for people, such as "24,564 MiB (--vram 24), less 668 MiB for the desktop (assumed; ...)"."""
        if isinstance(self.budget, Ram):
            why = "--device cpu" if settings.device == "cpu" else "no GPU"
            return f"{wording.human_bytes(self.budget.bytes)} of RAM free ({why}; on the CPU in {self.budget.dtype})"
        if self.budget is None:
            return "unknown"
        limit = f" (--vram {settings.vram})" if settings.vram else ""
        if self.gpu is not None:
            return f"{self.budget / MIB:,.0f} MiB free on {self.gpu.name}{limit}"
        total = f"{(memory_budget.vram_limit(settings) or 0) / MIB:,.0f} MiB{limit}"
        return f"{total}{desktop_text(self.desktop, self.is_assumed)}"


def desktop_text(desktop: int, is_assumed: bool) -> str:
    """Return the memory subtracted for the desktop, in words; empty if none is."""
    size = f"{desktop / MIB:,.0f} MiB"
    held = f"{size} for the desktop (assumed; use --desktop 0 if no monitor is attached)"
    return f", less {held if is_assumed else f'{size} used by other programs'}" if desktop else ""


def desktop_bytes(size: str | None) -> tuple[int, bool]:
    """Bytes of `--desktop SIZE` for a card that is not here, and whether they are assumed."""
    return (DESKTOP_BYTES, True) if size is None else (wording.parse_bytes(size), False)


def here(settings: Settings) -> Room:
    """The memory for a load on this machine: of its GPU less --reserve, at most --vram; the RAM without a GPU.

    Raises LocalqError (exit 2) for invalid sizes.
    """
    allowed, reserve = memory_budget.vram_limit(settings), memory_budget.reserve_bytes(settings)
    gpu = None if settings.device == "cpu" else gpus.first_visible(gpus.probe().gpus)
    if gpu is None and settings.device != "cuda":
        free = ram.free_ram(settings.dtype)
        return Room(free, free)
    if gpu is None or gpu.total is None or gpu.free is None:
        return Room(None, None, gpu=gpu)
    now, alone = (max(0, size - reserve) for size in (gpu.free, gpu.total))  # the same rule as in `engine.load`
    if allowed is not None:
        now, alone = min(now, allowed), min(alone, allowed)
    return Room(now, alone, gpu.total - gpu.free, gpu=gpu)


def planned(settings: Settings) -> Room:
    """As `here`; with a --vram that this machine does not have, the memory of such a card less --desktop.

    Raises LocalqError (exit 2) for invalid sizes.
    """
    size, reserve = memory_budget.vram_limit(settings), memory_budget.reserve_bytes(settings)
    desktop, is_assumed = desktop_bytes(settings.desktop)
    gpu = gpus.first_visible(gpus.probe().gpus) if size is not None else None
    if size is None or settings.device == "cpu" or (gpu is not None and gpu.total is not None and gpu.total >= size):
        return here(settings)
    return Room(max(0, size - desktop - reserve), max(0, size - reserve), desktop, is_assumed)
