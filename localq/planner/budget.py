"""GPU memory that the settings allow (`vram` and `reserve` in bytes), and the options of a load."""

from __future__ import annotations

from localq import wording
from localq.errors import usage_error
from localq.planner.load_options import LoadOptions
from localq.settings import Settings

MIB = 2**20


def card_bytes(size: str) -> int:
    """Bytes of GPU memory in `--vram SIZE`. Raises LocalqError (exit 2) for less than CUDA alone takes."""
    from localq.planner import footprint  # start-up cost: most runs have no --vram
    from localq.planner import plan as memory_plan

    total = memory_plan.parse_card(size)
    if total < footprint.CUDA_CONTEXT_BYTES:
        least = f"a CUDA context alone needs {footprint.CUDA_CONTEXT_BYTES // MIB} MiB"
        raise usage_error("--vram", f"{total // MIB} MiB is too little: {least}", "A bare number means GiB.")
    return total


def vram_limit(settings: Settings) -> int | None:
    """Bytes of the setting `vram`, None if unset."""
    return None if settings.vram is None else card_bytes(settings.vram)


def reserve_bytes(settings: Settings) -> int:
    """Bytes of the setting `reserve`, 0 if unset."""
    return 0 if settings.reserve is None else wording.parse_bytes(settings.reserve)


def checkpoint_bytes(settings: Settings) -> int | None:
    """Bytes of the setting `checkpoints`: None = auto, 0 = off. Raises LocalqError (exit 2) for no size."""
    if settings.checkpoints == "auto":
        return None
    return 0 if settings.checkpoints in ("off", "0") else wording.parse_bytes(settings.checkpoints)


def load_options(
    settings: Settings, name: str, *, force: bool = False, thinks: bool = False, drafts: bool = False
) -> LoadOptions:
    """The options of a load from the settings; `thinks` as in `LoadOptions`. drafts: replies may have some.

    Raises LocalqError (exit 2) for invalid sizes.
    """
    return LoadOptions(
        name,
        settings.device,
        settings.dtype,
        settings.ctx,
        settings.kv_bits,
        vram_bytes=vram_limit(settings),
        embed=settings.embed,
        head=settings.head,
        reserve_bytes=reserve_bytes(settings),
        force=force,
        thinks=thinks,
        checkpoint_bytes=checkpoint_bytes(settings),
        draft_tokens=settings.draft_tokens if drafts else 0,
        mtp=settings.draft if drafts and settings.takes_mtp else "",
    )
