"""GPU memory that the settings allow: `vram` and `reserve` in bytes; and the options of a load."""

from __future__ import annotations

from localq import wording
from localq.errors import usage_error
from localq.planner.load_options import LoadOptions
from localq.settings import Settings

MIB = 2**20


def card_bytes(size: str) -> int:
    """Bytes of GPU memory that `--vram SIZE` means. Raises LocalqError (exit 2) for less than CUDA itself takes."""
    from localq.planner import footprint  # start-up cost: most runs name no size
    from localq.planner import plan as planner

    total = planner.parse_card(size)
    if total < footprint.CUDA_CONTEXT_BYTES:
        least = f"a CUDA program alone takes {footprint.CUDA_CONTEXT_BYTES // MIB} MiB"
        raise usage_error("--vram", f"{total // MIB} MiB is too little: {least}", "A bare number means GiB.")
    return total


def allowed(settings: Settings) -> int | None:
    """The bytes that the setting `vram` allows, None where it is unset."""
    return None if settings.vram is None else card_bytes(settings.vram)


def reserved(settings: Settings) -> int:
    """The bytes that the setting `reserve` keeps free, 0 where it is unset."""
    return 0 if settings.reserve is None else wording.parse_bytes(settings.reserve)


def load_options(settings: Settings, name: str, *, force: bool = False) -> LoadOptions:
    """Return the options of a load by the settings. Raises LocalqError (exit 2) for sizes that are none."""
    return LoadOptions(
        name,
        settings.device,
        settings.dtype,
        settings.ctx,
        settings.kv_bits,
        vram_bytes=allowed(settings),
        embed=settings.embed,
        head=settings.head,
        reserve_bytes=reserved(settings),
        force=force,
    )
