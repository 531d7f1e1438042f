"""The tiled order of NF4: the bytes of a matrix as the kernels read them (csrc/nf4/layout.cuh).

Only codes and absmax are reordered, and only within 16 whole rows at a time, so `untile` undoes `tile` bit for bit and
both take as much memory as before. Works on any device; a matrix needs one copy of its codes while it is reordered.
"""

from __future__ import annotations

from torch import Tensor

ROWS, CHUNK = 16, 8  # rows of a tile, blocks of 64 columns of a chunk
BLOCK = 64


def tile(codes: Tensor, absmax: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Row-wise codes u8 [out, in/2] and absmax [out*in/64] of a matrix of `shape` [out, in] -> the same, tiled."""
    return _codes(codes, shape, _tile_codes), _absmax(absmax, shape, True)


def untile(codes: Tensor, absmax: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The inverse of `tile`."""
    return _codes(codes, shape, _untile_codes), _absmax(absmax, shape, False)


def _tile_codes(rows: Tensor, blocks: int) -> Tensor:
    """[tiles, half, g, block, t, byte] -> [tiles, block, g, t, half, byte]."""
    return rows.view(-1, 2, 8, blocks, 4, 8).permute(0, 3, 2, 4, 1, 5)


def _untile_codes(tiles: Tensor, blocks: int) -> Tensor:
    return tiles.view(-1, blocks, 8, 4, 2, 8).permute(0, 4, 2, 1, 3, 5)


def _codes(codes: Tensor, shape: tuple[int, int], order: object) -> Tensor:
    out, columns = shape
    full = out // ROWS * ROWS
    flat = codes.reshape(out, columns // 2)
    result = flat.clone()
    if full:
        assert callable(order)
        result[:full] = order(flat[:full].contiguous(), columns // BLOCK).reshape(full, columns // 2)
    return result.view_as(codes)


def _absmax(absmax: Tensor, shape: tuple[int, int], to_tiles: bool) -> Tensor:
    out, blocks = shape[0], shape[1] // BLOCK
    full, whole = out // ROWS, blocks // CHUNK  # tiles, and chunks of a row that have all their blocks
    result = absmax.reshape(-1).clone()
    if not full:
        return result.view_as(absmax)
    of_tiles = result[: full * ROWS * blocks].view(full, ROWS * blocks)
    border = whole * CHUNK * ROWS  # in a tile, what lies before it belongs to whole chunks
    if to_tiles:
        rows = of_tiles.view(full, ROWS, blocks).clone()
        chunks = rows[..., : whole * CHUNK].reshape(full, 2, 8, whole, 4, 2)  # half, g, chunk, t, i
        of_tiles[:, :border] = chunks.permute(0, 3, 2, 4, 1, 5).reshape(full, border)
        of_tiles[:, border:] = rows[..., whole * CHUNK :].reshape(full, -1)
    else:
        tiles = of_tiles.clone()
        rows = of_tiles.view(full, ROWS, blocks)
        chunks = tiles[:, :border].reshape(full, whole, 8, 4, 2, 2)  # chunk, g, t, half, i
        rows[..., : whole * CHUNK] = chunks.permute(0, 4, 2, 1, 3, 5).reshape(full, ROWS, whole * CHUNK)
        rows[..., whole * CHUNK :] = tiles[:, border:].reshape(full, ROWS, -1)
    return result.view_as(absmax)
