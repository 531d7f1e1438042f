"""A layer whose weights wait on the host, and are on the device only while something computes with them.

What lies on the device already stays there: nothing is copied, and nothing else is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from localq.models.decoder import Block
from localq.models.experts import Router


@contextmanager
def on_device(block: Block, linears: Collection[str], device: torch.device) -> Iterator[None]:
    """While it is entered all parameters of `block` are on `device`, but for those of linears that are not named. A
    router is no such linear."""
    held = []
    for name, module in block.named_modules():
        if isinstance(module, nn.Linear) and name not in linears and not isinstance(module, Router):
            continue
        held += [(parameter, parameter.data) for parameter in module.parameters(recurse=False)]
    try:
        for parameter, data in held:
            parameter.data = data.to(device)
        yield
    finally:
        for parameter, data in held:
            parameter.data = data
