"""The fused decode step as three captured CUDA graphs: greedy, sampled, and all but the choice.

One graph serves all lengths, because its kernels read the position from device memory. A replay launches the whole
step at once and allocates nothing. The third is for choices with DRY, XTC or a mask, whose kernels are launched behind
it: so the two others know nothing of them. Steps of several rows have one graph each, without their choices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from localq.engine.load.device import capture_stream
from localq.engine.step.fused import FusedStep
from localq.kernels.workspace import captured_for


class StepGraphs:
    """Captured at construction; `replay` is the decode step afterwards. All were replayed once at position 0."""

    def __init__(self, step: FusedStep) -> None:
        state = step.state

        def warm_up() -> None:
            for greedy in (True, False):
                state.rewind()
                step.run(greedy)

        runs = (partial(step.run, False), partial(step.run, True), step.forward)
        self._graphs = _capture(step, warm_up, runs)

    def replay(self, greedy: bool) -> None:
        """One decode step."""
        self._graphs[greedy].replay()

    def forward(self) -> None:
        """One decode step without its choice."""
        self._graphs[-1].replay()


class CapturedPass:
    """A step of several rows without its choices, as one graph."""

    def __init__(self, step: FusedStep) -> None:
        def warm_up() -> None:
            step.state.rewind()
            step.run(greedy=True)

        self._graph = _capture(step, warm_up, (step.forward,))[0]

    def forward(self) -> None:
        """The pass."""
        self._graph.replay()


def _capture(
    step: FusedStep, warm_up: Callable[[], object], runs: Sequence[Callable[[], object]]
) -> list[torch.cuda.CUDAGraph]:
    """Capture each of `runs`, on a stream of their own."""
    with captured_for(torch.cuda.current_stream()):
        state, side = step.state, capture_stream(step.state.token.device)
        pool = torch.cuda.graph_pool_handle()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            warm_up()  # outside of a graph: kernels load
        torch.cuda.current_stream().wait_stream(side)
        graphs: list[torch.cuda.CUDAGraph] = []
        for run in runs:
            graph = torch.cuda.CUDAGraph()
            graphs.append(graph)
            with torch.cuda.graph(graph, pool=pool, stream=side):
                run()
            state.rewind()
            graph.replay()  # the first one sends the graph to the device and takes the memory for it
        state.rewind()
        torch.cuda.synchronize()
        return graphs
