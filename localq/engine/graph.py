"""The fused decode step as two captured CUDA graphs: greedy and sampled.

One graph serves all lengths, because its kernels read the position from device memory. A replay launches the whole
step at once and allocates nothing.
"""

from __future__ import annotations

import functools

import torch

from localq.engine.fused import FusedStep


@functools.cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The one stream that captures run on: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's gap


class StepGraphs:
    """Captured at construction; `replay` is the decode step afterwards. Both were replayed once at position 0."""

    def __init__(self, step: FusedStep) -> None:
        state, side = step.state, capture_stream(step.state.token.device)
        pool = torch.cuda.graph_pool_handle()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for greedy in (True, False):  # a warm-up outside: kernels load
                state.rewind()
                step.run(greedy)
        torch.cuda.current_stream().wait_stream(side)
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        for greedy in (True, False):
            self._graphs[greedy] = graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=side):
                step.run(greedy)
            state.rewind()
            graph.replay()  # the first one sends the graph to the device and takes the memory for it
        state.rewind()
        torch.cuda.synchronize()

    def replay(self, greedy: bool) -> None:
        """One decode step."""
        self._graphs[greedy].replay()
