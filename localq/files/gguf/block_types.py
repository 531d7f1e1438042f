"""The types of tensors in a .gguf file: ggml's number and name, and the values and bytes of a block.

A row of a tensor is a sequence of blocks; one of a plain type (F32, F16, BF16, I8 to I64, F64) holds one value. A copy
of the `gguf` package's table, which needs numpy to import. Torch-free and numpy-free.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockType:
    """One type: ggml's number, its name in `gguf.GGMLQuantizationType`, values and bytes of a block."""

    number: int
    name: str
    values: int
    bytes: int

    @property
    def is_quantized(self) -> bool:
        """True for blocks of several values."""
        return self.values > 1


BLOCK_TYPES: dict[int, BlockType] = {
    each.number: each
    for each in (
        BlockType(0, "F32", 1, 4),
        BlockType(1, "F16", 1, 2),
        BlockType(2, "Q4_0", 32, 18),
        BlockType(3, "Q4_1", 32, 20),
        BlockType(6, "Q5_0", 32, 22),
        BlockType(7, "Q5_1", 32, 24),
        BlockType(8, "Q8_0", 32, 34),
        BlockType(9, "Q8_1", 32, 40),
        BlockType(10, "Q2_K", 256, 84),
        BlockType(11, "Q3_K", 256, 110),
        BlockType(12, "Q4_K", 256, 144),
        BlockType(13, "Q5_K", 256, 176),
        BlockType(14, "Q6_K", 256, 210),
        BlockType(15, "Q8_K", 256, 292),
        BlockType(16, "IQ2_XXS", 256, 66),
        BlockType(17, "IQ2_XS", 256, 74),
        BlockType(18, "IQ3_XXS", 256, 98),
        BlockType(19, "IQ1_S", 256, 50),
        BlockType(20, "IQ4_NL", 32, 18),
        BlockType(21, "IQ3_S", 256, 110),
        BlockType(22, "IQ2_S", 256, 82),
        BlockType(23, "IQ4_XS", 256, 136),
        BlockType(24, "I8", 1, 1),
        BlockType(25, "I16", 1, 2),
        BlockType(26, "I32", 1, 4),
        BlockType(27, "I64", 1, 8),
        BlockType(28, "F64", 1, 8),
        BlockType(29, "IQ1_M", 256, 56),
        BlockType(30, "BF16", 1, 2),
        BlockType(34, "TQ1_0", 256, 54),
        BlockType(35, "TQ2_0", 256, 66),
        BlockType(39, "MXFP4", 32, 17),
        BlockType(40, "NVFP4", 64, 36),
        BlockType(41, "Q1_0", 128, 18),
    )
}
_BY_NAME = {each.name: each for each in BLOCK_TYPES.values()}


def by_name(name: str) -> BlockType:
    """The type `name`. Raises ValueError for an unknown one."""
    if name not in _BY_NAME:
        raise ValueError(f"{name!r} is not a block type of GGUF")
    return _BY_NAME[name]


# Types that kernels multiply from their blocks (`formats.gguf.tiles`); torch dequantizes the others for every product.
KERNEL_TYPES = frozenset(
    {
        "Q4_0",
        "Q4_1",
        "Q5_0",
        "Q5_1",
        "Q8_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ4_NL",
        "IQ4_XS",
        "NVFP4",
        "IQ2_XXS",
        "IQ2_XS",
        "IQ2_S",
        "IQ3_XXS",
        "IQ3_S",
        "IQ1_S",
        "IQ1_M",
        "TQ1_0",
        "TQ2_0",
    }
)
WITH_FACTORS = "NVFP4"  # the type whose matrices may have a factor beside their blocks
FAST_TYPES = KERNEL_TYPES | {"MXFP4"}  # that one runs in the kernels of `formats.mxfp4`
TILE_ROWS = 16  # kernels read matrices of a multiple of so many rows


def has_kernel(name: str, rows: int) -> bool:
    """Return whether kernels read a matrix of `rows` rows in blocks of the type `name`."""
    return name in KERNEL_TYPES and rows % TILE_ROWS == 0


# The type of most matrices of a model with such a tag, where it is not the one that the tag names (llama.cpp,
# src/llama-quant.cpp).
_MOSTLY = {"IQ2_S": "IQ2_XS", "IQ2_M": "IQ2_S", "IQ3_XS": "IQ3_S", "IQ3_M": "IQ3_S"}


def tag_has_kernel(tag: str) -> bool:
    """Return whether kernels read most matrices of a model with this tag.

    UD-IQ2_M is mostly IQ2_S. A tag that names no type and no mixture of _MOSTLY is judged by the types
    that begin like it: Q4_K_M by Q4_0, Q4_1 and Q4_K. True for tags of no block type, such as F16.
    """
    name = tag.removeprefix("UD-")
    name = _MOSTLY.get(name, name)
    if name in _BY_NAME and _BY_NAME[name].is_quantized:
        return name in FAST_TYPES
    types = {each.name for each in BLOCK_TYPES.values() if each.is_quantized and _family(each.name) == _family(name)}
    return not types or bool(types & FAST_TYPES)


def _family(name: str) -> str:
    return name.partition("_")[0]
