"""The GPU of `planner_report.py`: models on random weights, loaded and used through the engine as a chat does."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

from localq.errors import LocalqError
from localq.files import catalog
from localq.planner import plan as memory_plan
from localq.planner.placement import Wishes
from localq.planner.speed import cards, predict
from localq.planner.speed.predict import Machine

TOKENS = 129  # of a reply: one of prefill, 128 of decode


@dataclass(frozen=True)
class Case:
    """A load: NAME@FORMAT, the card in GiB, and what is asked of the planner (None and "auto": nothing)."""

    name: str
    gib: int
    ctx: int | None = None
    kv_bits: int | None = 16
    embed: str = "auto"
    head: str = "auto"


@dataclass(frozen=True)
class Outcome:
    """What a load showed, in bytes. told: by the driver, None where it does not; allocations: while decoding.

    tok_s, predicted_tok_s   of the reply, and as `localq fit` predicts it for this GPU behind such a prompt
    """

    case: Case
    ctx: int
    predicted: int
    fit: int
    measured: int
    told: int | None
    allocations: int
    seconds: float
    tok_s: float
    predicted_tok_s: float


@dataclass(frozen=True)
class Turn:
    """Seconds to the first token of two turns.

    first_s    of the first, which is computed from its first token
    second_s   of the second, which continues it; computed: the tokens that were not in the cache
    alone_s    of as many tokens in an empty cache
    """

    first_s: float
    second_s: float
    computed: int
    alone_s: float


class GpuLab:
    """Loads through the engine as a chat does, on random weights."""

    def __init__(self) -> None:
        import torch

        self.device = torch.device("cuda", 0)
        self._other: subprocess.Popen[str] | None = None
        self._roof = 0.0

    def facts(self) -> dict[str, Any]:
        """Under which conditions."""
        from localq.bench.conditions.conditions import conditions

        return {"conditions": conditions(self.device, 0)}

    def measure(self, case: Case) -> Outcome:
        """See `planner_report.Lab`. The prompt has one and a half chunks, or what the context has room for.

        Nothing touches CUDA before the first load, which measures what its context takes.
        """
        import torch

        from localq.bench.synthetic import sources
        from localq.engine.load import vram

        started = time.monotonic()
        files, opened = sources.random(case.name, seed=0)
        self._bare()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
            torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_reserved()
        budget = None if self._other else memory_plan.parse_card(str(case.gib))
        engine = self._engine(files, opened, case, budget)
        plan, vocab = engine.model.plan, engine.model.vocab
        prompt = [token % vocab for token in range(min(1500, plan.ctx - TOKENS - 1))]
        allocations, rate = _decoded(engine, prompt)
        ledger = engine.ledger()
        outside = ledger["cuda_context"] + ledger.get("graphs", 0)
        peak = torch.cuda.max_memory_reserved() - others + outside
        told = vram.process_bytes(self.device)
        del engine
        self._bare()
        fit, expected = _fit_bytes(case, plan), _fit_rate(case, plan, self._machine(), len(prompt))
        seconds = round(time.monotonic() - started, 1)
        return Outcome(case, plan.ctx, plan.ledger.total, fit, peak, told, allocations, seconds, rate, expected)

    def turn(self, case: Case, depth: int, added: int) -> Turn:
        """See `planner_report.Lab`. The first reply has 64 tokens, and the second turn holds them."""
        from localq.bench.synthetic import sources

        files, opened = sources.random(case.name, seed=0)
        engine = self._engine(files, opened, case, memory_plan.parse_card(str(case.gib)))
        vocab = engine.model.vocab
        text, more = (
            [(7 * token + start) % vocab for token in range(count)] for start, count in ((1, depth), (5, added))
        )
        first, answer, _ = _first_token(engine, text)
        second, _, computed = _first_token(engine, [*text, *answer, *more])
        others = ([(11 * token + turn) % vocab for token in range(computed)] for turn in range(3))
        alone = min(_first_token(engine, other)[0] for other in others)
        del engine
        self._bare()
        return Turn(first, second, computed, alone)

    def hold(self, free: int) -> int:
        """See `planner_report.Lab`."""
        import torch

        self._bare()
        if self._other is not None:
            self._other.communicate("\n")  # it ends, and all it has goes
            self._other = None
        if free:
            command = [sys.executable, "-c", _BALLAST, str(free)]
            self._other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self._other.stdout is not None
            if not self._other.stdout.readline():
                raise LocalqError("ballast", "the other process could not take its memory", "Is the GPU idle?")
        return int(torch.cuda.mem_get_info(self.device)[0])

    def cycle(self) -> int:
        """See `planner_report.Lab`."""
        import torch

        from localq.bench.synthetic import checkpoint as synthetic_checkpoint

        files, format = synthetic_checkpoint.files_of("smollm2-135m@nf4")
        files = replace(files, config=synthetic_checkpoint.with_layers(files.config, 4))
        case = Case("smollm2-135m@nf4", 8, 2048)
        engine = self._engine(files, lambda each, on: synthetic_checkpoint.checkpoint(each, format, on, 0), case, None)
        _decoded(engine, list(range(600)))
        del engine
        self._bare()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def _engine(self, files: Any, opened: Any, case: Case, budget: int | None) -> Any:
        from localq.engine.generate import Engine
        from localq.engine.load.load import load
        from localq.planner.load_options import LoadOptions

        options = LoadOptions(case.name, "cuda", "auto", case.ctx, case.kv_bits, budget, case.embed, case.head)
        return Engine(load(files, options, opened=lambda each: opened(each, self.device)))

    def _machine(self) -> Machine:
        """How fast this GPU reads, measured once, between two loads."""
        import torch

        from localq.bench.kernels.roofline import read_bytes_per_s

        if not self._roof:
            self._roof = read_bytes_per_s(self.device)
            self._bare()
        return Machine.of(cards.match_card(torch.cuda.get_device_name(self.device)), self._roof)

    def _bare(self) -> None:
        import torch

        from localq.engine.load.load import free_memory

        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's gap
            torch._C._cuda_clearCublasWorkspaces()
            free_memory()


def _decoded(engine: Any, prompt: list[int]) -> tuple[int, float]:
    """A reply behind `prompt`: how often torch asked the device for memory while its tokens were decoded, and tok/s."""
    import torch

    from localq.sampling import Sampling

    list(engine.generate(prompt, Sampling(), max_tokens=2))
    before = torch.cuda.memory_stats(engine.model.device)["num_device_alloc"]
    last = list(engine.generate(prompt, Sampling(), max_tokens=TOKENS))[-1]
    allocations = torch.cuda.memory_stats(engine.model.device)["num_device_alloc"] - before
    return int(allocations), last.stats.tokens_per_s


def _first_token(engine: Any, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token behind `prompt`, the 64 tokens of its reply, and how many of the prompt were new."""
    from localq.sampling import Sampling

    started, at, found = time.monotonic(), 0.0, list[int]()
    for step in engine.generate(prompt, Sampling(), max_tokens=64, marks=(len(prompt),)):
        found += step.ids
        if found and not at:
            at = time.monotonic() - started
        stats = step.stats
    return at, found, len(prompt) - stats.cached_tokens


def _fit_bytes(case: Case, plan: memory_plan.Plan) -> int:
    """What `localq fit` has for the same shape, context and placement, without a GPU."""
    name, _, format = case.name.partition("@")
    placement = plan.placement
    wishes = Wishes(plan.ctx, placement.kv_bits, placement.embed, placement.head)
    return memory_plan.assess(catalog.find(name).arch, format, 2**50, wishes=wishes).ledger.total


def _fit_rate(case: Case, plan: memory_plan.Plan, machine: Machine, depth: int) -> float:
    """tok/s as `localq fit` would have it behind `depth` tokens; 0 where it has none."""
    name, _, format = case.name.partition("@")
    return (
        predict.tokens_per_s(catalog.find(name).arch, format, "", plan.placement, machine, depth + predict.LIVE) or 0.0
    )


_BALLAST = """
import sys, torch
held = []
while (more := torch.cuda.mem_get_info()[0] - int(sys.argv[1])) >= 2**21:
    held.append(torch.empty(more, dtype=torch.uint8, device="cuda"))
print("holding", flush=True)
sys.stdin.readline()
"""
