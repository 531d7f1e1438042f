"""The decoding speed that a card's bandwidth allows; it falls as the context fills.

A step reads all weights once, except experts that are not chosen and the embedding table, of which it reads one row
(unless the table is the head). It reads the keys and values of all positions in use; in windowed layers of those in the
window. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from localq.files import layer_caches
from localq.files.architecture import Architecture
from localq.kv_bits import KvBits
from localq.planner.speed import cards, local_measurements
from localq.stats import Stats

MEASURED, RATED = "measured", "rated"  # on this machine; published


class LoadedFacts(Protocol):
    """The part of `worker.messages.Loaded` that is used here."""

    @property
    def gpu_uuid(self) -> str: ...
    @property
    def device_name(self) -> str: ...
    @property
    def reads(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class Reads:
    """Bytes that a decode step reads.

    weights         always
    slot            per position in use
    windowed_slot   in windowed layers, per position of the last `window`
    """

    weights: int
    slot: int
    windowed_slot: int = 0
    window: int = 0

    def at(self, used: int) -> int:
        """With `used` positions in use."""
        return self.weights + used * self.slot + min(used, self.window) * self.windowed_slot


@dataclass(frozen=True)
class Bandwidth:
    """Bytes per second of device memory, and the source of the figure: `MEASURED` or `RATED`."""

    bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Roof:
    """The limit of decoding speed on a card."""

    reads: Reads
    bandwidth: Bandwidth

    def tokens_per_s(self, used: int) -> float:
        """With `used` positions in use."""
        return self.bandwidth.bytes_per_s / self.reads.at(used)

    def share(self, stats: Stats) -> float:
        """The share of the limit that a reply reached, at the middle of its tokens; 0 if its speed is unknown.

        With drafts a step gives several tokens: the limit is that of steps.
        """
        return stats.steps_per_s / self.tokens_per_s(stats.context_used - stats.generated_tokens // 2)

    def text(self, stats: Stats) -> str:
        """Such as "81% of the bandwidth limit (936 GB/s)"; empty if the reply's speed is unknown."""
        if not stats.tokens_per_s:
            return ""
        rated = ", rated" if self.bandwidth.source == RATED else ""
        gb_per_s = self.bandwidth.bytes_per_s / 1e9
        return f"{self.share(stats):.0%} of the bandwidth limit ({gb_per_s:,.0f} GB/s{rated})"


def reads(arch: Architecture | None, ledger: dict[str, int], kv_bits: KvBits, idle: int = 0) -> Reads | None:
    """The reads of a loaded model, from its allocated bytes; None for an unknown shape.

    idle   bytes of the weights that one token does not use (experts)
    """
    if arch is None:
        return None
    head = ledger["head"] or min(ledger["embedding"], 2 * arch.embedding_parameters)
    row = 2 * (arch.hidden + arch.layers * arch.input_width)
    caches = layer_caches.read(arch.layer_caches)
    windows = layer_caches.windowed_bytes(caches, kv_bits)
    states = 2 * layer_caches.state_bytes(caches, 2)  # read and written
    fixed = ledger["weights"] - idle + head + row + states
    return Reads(fixed, layer_caches.growing_bytes(caches, kv_bits), sum(windows.values()), arch.window)


def model_roof(loaded: LoadedFacts) -> Roof | None:
    """The roof of a loaded model; None on the CPU, and if the model or the card is unknown."""
    found = bandwidth(loaded.gpu_uuid, loaded.device_name) if loaded.reads else None
    return Roof(Reads(**loaded.reads), found) if found else None


def bandwidth(uuid: str, name: str) -> Bandwidth | None:
    """The bandwidth of a GPU: measured by `localq fit` on this machine, else published; None if unknown."""
    found = local_measurements.bandwidth(uuid or name)
    if found is not None:
        return Bandwidth(found, MEASURED)
    card = cards.match_card(name)
    return Bandwidth(card.published_gb_per_s * 1e9, RATED) if card else None
