"""Weights of a layer that wait on the host and are on the device only while something computes with them.

Resident layers stay on the device: nothing is copied, and the results are the same.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from localq.models.decoder import Block
from localq.models.layers import PlainLinear


@contextmanager
def on_device(block: Block, linears: Collection[str], device: torch.device) -> Iterator[None]:
    """Hold the parameters of `block` on `device`, except those of linears that are not named; routers always count."""
    held = []
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and name not in linears and not isinstance(module, PlainLinear):
            continue
        held += [(parameter, parameter.data) for parameter in module.parameters(recurse=False)]
    try:
        for parameter, data in held:
            parameter.data = data.to(device)
        yield
    finally:
        for parameter, data in held:
            parameter.data = data
