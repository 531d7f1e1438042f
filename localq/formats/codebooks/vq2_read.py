"""Reading vq2 from a checkpoint: where codebooks are, how many columns there are, and that all fits.

Codes need no check: every u8 is a codeword. Types, shapes and finite values do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from localq.errors import LocalqError, bad_file
from localq.files.architecture import Architecture
from localq.files.json_files import DAMAGED
from localq.files.schemes import codebook_name, columns_of
from localq.formats.checkpoint import Checkpoint
from localq.formats.codebooks.vq2_codec import Packed

BOOKS = ((".codes", ".codebook"), (".codes_2", ".codebook_2"))
SUFFIXES = (*BOOKS[0], *BOOKS[1], ".scales", ".signs")


def stored_shape(checkpoint: Checkpoint, prefix: str) -> tuple[int, int]:
    """[out, in] of the Linear `prefix`, whose columns config.json tells; LocalqError (exit 8) where it does not."""
    codes = checkpoint.tensors[f"{prefix}.codes"].shape
    signs = checkpoint.read(f"{prefix}.signs") if f"{prefix}.signs" in checkpoint.tensors else None
    return codes[0] if codes else 0, _columns(checkpoint, prefix, signs)


def from_checkpoint(checkpoint: Checkpoint, prefix: str) -> Packed:
    """The matrix of the Linear `prefix`, on the CPU; raises LocalqError (exit 8) unless every part is sound.

    A codebook is the tensor that `checkpoint.read` gives, not a copy.
    """
    tensors = checkpoint.tensors
    books = [_book(checkpoint, prefix, *suffixes) for suffixes in BOOKS[: 2 if f"{prefix}.codes_2" in tensors else 1]]
    if len(books) == 1 and f"{prefix}.codebook_2" in tensors:
        why = f"the checkpoint has a codebook for {prefix}.codes_2, but not {prefix}.codes_2 itself"
        raise bad_file(prefix, why, DAMAGED)
    scales = _part(checkpoint, prefix, ".scales")
    signs = checkpoint.read(f"{prefix}.signs") if f"{prefix}.signs" in tensors else None
    codes = books[0][0]
    rows = codes.shape[0] if codes.dim() else 0
    try:
        packed = Packed(tuple(books), scales, signs, (rows, _columns(checkpoint, prefix, signs)))
    except ValueError as error:
        raise bad_file(prefix, f"damaged vq2 weights: {error}", DAMAGED) from error
    values = {"scales": packed.scales, **{name[1:]: book[1] for (_, name), book in zip(BOOKS, books, strict=False)}}
    for name, held in values.items():
        if not bool(torch.isfinite(held).all()):
            raise bad_file(prefix, f"damaged vq2 weights: {name} contains NaN or infinity", DAMAGED)
    return packed


def _book(checkpoint: Checkpoint, prefix: str, codes: str, codebook: str) -> tuple[Tensor, Tensor]:
    name = codebook_name(checkpoint.tensors, prefix, codebook)
    if name is None:
        raise bad_file(
            prefix, f"the checkpoint lacks {prefix}{codebook}, and no enclosing module provides one", DAMAGED
        )
    return _part(checkpoint, prefix, codes), checkpoint.read(name)


def _part(checkpoint: Checkpoint, prefix: str, suffix: str) -> Tensor:
    if prefix + suffix not in checkpoint.tensors:
        raise bad_file(prefix, f"the checkpoint lacks {prefix}{suffix}", DAMAGED)
    return checkpoint.read(prefix + suffix)


def _columns(checkpoint: Checkpoint, prefix: str, signs: Tensor | None) -> int:
    """Of the Linear: by config.json, or by the signs where there is none, as of tensors in memory."""
    if not checkpoint.config:
        columns = None if signs is None else 8 * signs.numel()
    else:
        try:
            columns = columns_of(Architecture.from_config(checkpoint.config), prefix)
        except LocalqError as error:
            raise bad_file(
                prefix, f"the number of columns is unknown ({error.what}: {error.why})", error.next_step
            ) from error
    if columns is None:
        raise bad_file(prefix, "config.json does not specify the number of columns", DAMAGED)
    return columns
