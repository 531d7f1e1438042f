"""The forms of a KV cache and the bytes of their vectors: 16, 8 or 4 bit, or "k8v4", keys in 8 and values in 4 bit."""

from __future__ import annotations

K8V4 = "k8v4"
KvBits = int | str  # 16, which is the type of the model, 8, 4 or K8V4; in sizes also 32
KV_BITS: tuple[KvBits, ...] = (16, 8, K8V4, 4)  # from the largest to the smallest


def split(bits: KvBits) -> tuple[int, int]:
    """Bits of keys and of values. Raises ValueError for other text than `K8V4`."""
    if isinstance(bits, int):
        return bits, bits
    if bits != K8V4:
        raise ValueError(f"a KV cache of {bits} bits is not defined")
    return 8, 4


def told(bits: KvBits) -> str:
    """For people: "8 bit"."""
    keys, values = split(bits)
    return f"{keys} bit" if keys == values else f"{keys} bit with values in {values}"


def parsed(text: str) -> KvBits:
    """Of a setting: "8" -> 8, "k8v4" -> "k8v4". Raises ValueError for what is neither."""
    return text if text == K8V4 else int(text)


def pair_bytes(head_dim: int, bits: KvBits) -> int:
    """Bytes of one key and one value of one head."""
    return sum(vector_bytes(head_dim, part) for part in split(bits))


def vector_bytes(head_dim: int, bits: int) -> int:
    """Bytes of one key (or value) of one head.

    32 and 16 bit: plain. 8 and 4 bit: codes, and `scale_count` scales of 2 bytes.
    """
    if bits in (32, 16):
        return head_dim * bits // 8
    if bits in (8, 4):
        return -(-head_dim * bits // 8) + 2 * scale_count(head_dim)
    raise ValueError(f"a KV cache of {bits} bits is not defined")


def scale_count(head_dim: int) -> int:
    """Scales of one quantized key or value: one for 32 elements, so many that one load fetches them."""
    return 2 if head_dim <= 64 else 4 if head_dim <= 128 else 8
