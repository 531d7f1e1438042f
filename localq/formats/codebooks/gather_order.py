"""Codewords in the order of how often codes name them: what `gather_gemv` keeps in shared memory are the first.

Numbers of codewords mean nothing, so that the matrix stays the same, bit for bit. Codes are all but uniform, but not
quite: with frequencies as a log-normal's whose entropy is 15.91 of 16 bits, the most frequent fifth has three tenths of
the codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

AT_A_TIME = 2**21  # codes; their temporaries take 4 to 12 bytes each


def by_frequency_(codes: Tensor, codebooks: Tensor) -> None:
    """Renumber, in place: codes i16 of any shape, which count modulo the entries; codebooks [1, entries, ...]."""
    flat, entries = codes.view(-1), codebooks.shape[1]
    counts = torch.zeros(entries, dtype=torch.int64, device=codes.device)
    for part in torch.split(flat, AT_A_TIME):
        counts += torch.bincount(part.to(torch.int32) & (entries - 1), minlength=entries)
    order = torch.argsort(counts, descending=True, stable=True)
    codebooks.copy_(codebooks[:, order])
    places = torch.empty_like(order)
    places[order] = torch.arange(entries, device=order.device)
    shorts = (places - (places >= 2**15) * 2**16).to(torch.int16)
    for part in torch.split(flat, AT_A_TIME):
        part.copy_(shorts[part.to(torch.int32) & (entries - 1)])
