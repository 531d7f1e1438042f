"""The decode step as captured CUDA graphs: one for every live bucket, greedy and sampled.

A replay launches the whole step at once and allocates nothing. The graphs share one memory pool, which is safe because
only one runs at a time and nothing of a step outlives it but the step's own buffers. A graph is replayed only under
the key it was captured for.
"""

from __future__ import annotations

import functools

import torch

from localq.engine.decode import DecodeStep


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream that captures run on: cuBLAS keeps a workspace of 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's gap


class StepGraphs:
    """Captured at construction; `replay` is the decode step afterwards."""

    def __init__(self, step: DecodeStep, live_lengths: list[int]) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        keys = [(live, greedy) for live in reversed(live_lengths) for greedy in (True, False)]  # the largest first
        side = capture_stream(step.token.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for live, greedy in keys:  # a warm-up outside: kernels load and choose their workspaces
                step.rewind()
                step.run(live, greedy)
        torch.cuda.current_stream().wait_stream(side)
        for key in keys:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, stream=side):
                step.run(*key)
            self._graphs[key] = graph
        step.rewind()
        torch.cuda.synchronize()

    def replay(self, live: int, greedy: bool) -> None:
        """One decode step; `live` is one of the captured lengths."""
        self._graphs[live, greedy].replay()
