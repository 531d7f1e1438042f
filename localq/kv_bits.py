"""Bit widths of the KV cache and sizes of its vectors: 16, 8, 4, or "k8v4" (keys 8 bit, values 4 bit)."""

from __future__ import annotations

K8V4 = "k8v4"
KvBits = int | str  # 16 (the model's type), 8, 4 or K8V4; in sizes also 32
MOST_CODED_COLUMNS = 256  # of a head, in caches of fewer than 16 bits
KV_BITS: tuple[KvBits, ...] = (16, 8, K8V4, 4)  # largest first


def split(bits: KvBits) -> tuple[int, int]:
    """Bits of keys and of values. Raises ValueError for an unknown text."""
    if isinstance(bits, int):
        return bits, bits
    if bits != K8V4:
        raise ValueError(f"unknown KV cache format {bits}")
    return 8, 4


def text(bits: KvBits) -> str:
    """Text for users: "8-bit"."""
    keys, values = split(bits)
    return f"{keys}-bit" if keys == values else f"{keys}-bit keys, {values}-bit values"


def parse(text: str) -> KvBits:
    """Value of a setting: "8" -> 8, "k8v4" -> "k8v4". Raises ValueError for anything else."""
    return text if text == K8V4 else int(text)


def pair_bytes(head_dim: int, bits: KvBits) -> int:
    """Bytes of one key and one value of one head."""
    return sum(vector_bytes(head_dim, part) for part in split(bits))


def vector_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one key (or value) of one head.

    32 and 16 bit: plain. 8 and 4 bit: codes and `scale_count` scales of 2 bytes.
    """
    if bits in (32, 16):
        return head_dim * bits // 8
    if bits in (8, 4):
        return -(-head_dim * bits // 8) + 2 * scale_count(head_dim)
    raise ValueError(f"a KV cache of {bits} bits is not supported")


def plain_bytes(columns: int, bits: KvBits) -> int:
    """Bytes of a vector that is not quantized: 32 or 16 bit."""
    if bits not in (32, 16):
        raise ValueError(f"a cache of vectors that stay plain has 16 or 32 bits, not {bits}")
    return columns * int(bits) // 8


def scale_count(head_dim: int) -> int:
    """Scales of one quantized key or value: one per 32 elements, loaded by one instruction."""
    return 2 if head_dim <= 64 else 4 if head_dim <= 128 else 8
