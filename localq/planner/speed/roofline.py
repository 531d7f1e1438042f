"""The decoding speed that a card's bandwidth allows; it falls as the context fills.

A step reads every weight once (without experts that were not chosen, and without the embedding table, of which it
needs one row, unless the table is the head), and the keys and values of every position in use, of windowed layers
those in the window. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from localq.files.architecture import Architecture
from localq.kv_bits import KvBits
from localq.planner.speed import cards, local_measurements
from localq.stats import Stats

MEASURED, RATED = "measured", "rated"  # on this machine; by its maker


class Held(Protocol):
    """What is needed of `worker.messages.Loaded`."""

    @property
    def gpu_uuid(self) -> str: ...
    @property
    def device_name(self) -> str: ...
    @property
    def reads(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Reads:
    """Bytes that a decode step reads: `weights` always, `slot` for each position in use, and in windowed layers
    `windowed_slot` for each of the last `window` positions."""

    weights: int
    slot: int
    windowed_slot: int = 0
    window: int = 0

    def at(self, used: int) -> int:
        """With `used` positions in use."""
        return self.weights + used * self.slot + min(used, self.window) * self.windowed_slot


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of device memory, and who says so: `MEASURED` or `RATED`."""

    bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Roof:
    """What bounds decoding on a card."""

    reads: Reads
    bandwidth: Bandwidth

    def tokens_per_s(self, used: int) -> float:
        """With `used` positions in use."""
        return self.bandwidth.bytes_per_s / self.reads.at(used)

    def share(self, stats: Stats) -> float:
        """What a reply reached of it, at the middle of its tokens; 0 where its speed is not known."""
        return stats.tokens_per_s / self.tokens_per_s(stats.context_used - stats.generated_tokens // 2)

    def text(self, stats: Stats) -> str:
        """ "81 % of what 936 GB/s allow": what a reply reached. Empty where its speed is not known."""
        if not stats.tokens_per_s:
            return ""
        rated = " (rated)" if self.bandwidth.source == RATED else ""
        return f"{self.share(stats):.0%} of what {self.bandwidth.bytes_per_s / 1e9:,.0f} GB/s{rated} allow"


def reads(arch: Architecture | None, ledger: dict[str, int], kv_bits: KvBits, idle: int = 0) -> Reads | None:
    """Of a loaded model, from the bytes that it was allocated; None for an unknown shape.

    idle   bytes of the weights that one token does not go through (experts)
    """
    if arch is None:
        return None
    head = ledger["head"] or ledger["embedding"]
    row = 2 * arch.hidden
    layer = arch.kv_bytes_per_token(kv_bits) // arch.layers
    windowed = arch.window_layers if arch.window else 0
    return Reads(ledger["weights"] - idle + head + row, layer * (arch.layers - windowed), layer * windowed, arch.window)


def of_loaded(loaded: Held) -> Roof | None:
    """Of a loaded model; None on the CPU, and where the model or the card is not known."""
    found = bandwidth(loaded.gpu_uuid, loaded.device_name) if loaded.reads else None
    return Roof(Reads(**loaded.reads), found) if found else None


def bandwidth(uuid: str, name: str) -> Bandwidth | None:
    """Of the GPU with that UUID and name: what `localq fit` has measured on this machine, else what its maker says."""
    found = local_measurements.bandwidth(uuid or name)
    if found is not None:
        return Bandwidth(found, MEASURED)
    card = cards.known(name)
    return Bandwidth(card.published_gb_per_s * 1e9, RATED) if card else None
