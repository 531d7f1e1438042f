"""The backend of the engine process: the real engine, which is imported when the backend is created."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from localq.errors import ExitCode, LocalqError
from localq.planner import footprint
from localq.planner.speed import roofline
from localq.worker.messages import (
    CacheRestored,
    CacheSaved,
    Generate,
    Load,
    Loaded,
    Profile,
    Profiled,
    RestoreCache,
    SaveCache,
)

if TYPE_CHECKING:
    from localq.engine.generate import Engine
    from localq.engine.load.load import LoadedModel
    from localq.engine.reply import Step
    from localq.files.model_folder import ModelFiles
    from localq.text.tokenizer import Tokenizer
    from localq.worker.thinking_budget import ThinkingBudget
    from localq.worker.token_masks import GrammarConstraint, Vocabulary


class Backend(Protocol):
    """The work of the engine process: `TorchBackend`, or a scripted one in tests."""

    @property
    def can_hang(self) -> bool:
        """True when steps run on a device that can hang."""

    def load(self, request: Load, on_progress: Callable[[str, int, int], None]) -> Loaded:
        """Load a model; an earlier one is freed first."""

    def unload(self) -> None:
        """Free the model, also a partly loaded one."""

    def generate(self, request: Generate, cancelled: Callable[[], bool]) -> Iterator[Step]:
        """Continue a prompt."""

    def profile(self, request: Profile) -> Profiled:
        """Time one decode step."""

    def save_cache(self, request: SaveCache) -> CacheSaved:
        """Write the KV cache to a file."""

    def restore_cache(self, request: RestoreCache) -> CacheRestored:
        """Restore the KV cache from a file."""


class StageClock:
    """Seconds of the stages of a start, in order; each ends where the next begins."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._stage, self._since_s = "", clock()

    def begin(self, stage: str) -> None:
        """Begin a stage; a stage that runs already goes on."""
        if stage != self._stage:
            self._end()
            self._stage = stage

    def stages(self) -> dict[str, float]:
        """End the current stage; return stage -> seconds."""
        self._end()
        self._stage = ""
        return dict(self._seconds)

    def _end(self) -> None:
        now = self._clock()
        if self._stage:
            self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + now - self._since_s
        self._since_s = now


class TorchBackend:
    """The real engine on torch."""

    def __init__(self) -> None:
        clock, age_s = StageClock(), _age_s()
        clock.begin("importing torch")
        import localq.engine.generate  # noqa: F401  # imports torch, after Ready is sent

        self._first_stages = {"starting the engine process": age_s, **clock.stages()}  # of the first load
        self._engine: Engine | None = None
        self._weights = ""  # of the loaded model: `snapshot.weights_id`
        self._files: ModelFiles | None = None  # of the loaded model
        self._vocabulary: Vocabulary | None = None  # of the loaded model, once a reply has had a grammar
        self._tokenizer: Tokenizer | None = None  # of the loaded model, once a reply has had a thinking budget

    @property
    def can_hang(self) -> bool:
        """True on a GPU."""
        return self._engine is not None and self._engine.model.device.type == "cuda"

    def load(self, request: Load, on_progress: Callable[[str, int, int], None]) -> Loaded:
        """Load the model of `request`; an earlier one is freed first."""
        from localq.engine import generate, snapshot
        from localq.engine.load import device, draft_head, load
        from localq.engine.load import draft as load_draft
        from localq.files import model_folder

        started, clock = time.monotonic(), StageClock()
        clock.begin("opening the files")
        self.unload()
        self._files = files = model_folder.open_model(Path(request.path))
        self._weights = snapshot.weights_id(files)

        def report(stage: str, done: int, total: int) -> None:
            clock.begin(stage)
            on_progress(stage, done, total)

        options = request.options
        draft_files = model_folder.open_model(Path(options.draft_path)) if options.draft_path else None
        model = load.load(files, options, report, may_map=True, draft=draft_files)
        if draft_files is None:
            draft = draft_head.load_head(files, model, options, report, may_map=True)
        else:
            draft = load_draft.load_draft(draft_files, model, options, report, may_map=True)
        self._engine = engine = generate.Engine(
            model, on_progress=report, draft_tokens=options.draft_tokens, draft=draft
        )
        loaded = Loaded(
            name=request.options.name or files.name,
            device=model.device.type,
            device_name=device.device_name(model.device),
            dtype=str(model.dtype).removeprefix("torch."),
            format=model.format,
            context_size=model.ctx,
            vocab_size=model.vocab,
            graphs=engine.graphs,
            load_s=time.monotonic() - started,
            ledger=engine.ledger(),
            kv_bits=model.kv_bits,
            embed=model.embed,
            head=model.head_bits,
            predicted=_predicted_ledger(model),
            host=_host(model),
            notes=list(engine.notes),
            gpu_uuid=device.device_uuid(model.device),
            reads=_reads(model, engine.ledger()),
            draft_tokens=engine.draft_tokens,
            no_drafts=engine.no_drafts if request.options.draft_tokens else "",
            draft_model=engine.draft_model,
            no_mtp=model.no_mtp,
            stages={**self._first_stages, **clock.stages()},
        )
        self._first_stages = {}
        return loaded

    def unload(self) -> None:
        """Free the model."""
        from localq.engine.load import load

        self._engine = self._vocabulary = self._tokenizer = None
        load.free_memory()

    def generate(self, request: Generate, cancelled: Callable[[], bool]) -> Iterator[Step]:
        """Continue the prompt of `request`."""
        engine, stop_ids = self._loaded_engine(), frozenset(request.stop_ids)
        constraint = self._constraint(engine, request, stop_ids)
        budget = (
            None if request.think_budget is None else self._budget(engine, request, request.think_budget, constraint)
        )
        steps = engine.generate(
            request.prompt, request.sampling, stop_ids, request.max_tokens, cancelled,
            breakers=frozenset(request.breaker_ids), constraint=budget or constraint, marks=request.marks,
            draft_tokens=request.draft_tokens, ask_draft_model=request.ask_draft_model, logits=request.logits,
        )  # fmt: skip
        return steps if budget is None else budget.count(steps)

    def _budget(
        self, engine: Engine, request: Generate, tokens: int, inner: GrammarConstraint | None
    ) -> ThinkingBudget:
        from localq.text import tokenizer  # start-up cost: only for replies with a thinking budget
        from localq.text.thought_state import ThoughtState
        from localq.worker.thinking_budget import ThinkingBudget

        assert self._files is not None
        if self._tokenizer is None:
            backend, special = tokenizer.read(self._files)
            stop_ids, rows = frozenset(request.stop_ids), engine.model.vocab
            self._tokenizer = tokenizer.Tokenizer(backend, special, self._files.chat_template, stop_ids, rows)
        state = ThoughtState(self._tokenizer, request.prompt, request.begun)
        return ThinkingBudget(tokens, state, self._tokenizer, engine.model.vocab, inner)

    def _constraint(self, engine: Engine, request: Generate, stop_ids: frozenset[int]) -> GrammarConstraint | None:
        if request.grammar is None:
            return None
        from localq.text import tokenizer  # start-up cost: only for replies with a grammar
        from localq.worker.token_masks import GrammarConstraint, Vocabulary

        assert self._files is not None
        if self._vocabulary is None or self._vocabulary.stop_ids != stop_ids:
            self._vocabulary = Vocabulary(tokenizer.read(self._files)[0], engine.model.vocab, stop_ids)
        return GrammarConstraint(request.grammar, self._vocabulary, request.grammar_begun, request.grammar_after)

    def profile(self, request: Profile) -> Profiled:
        """Time one decode step of the loaded model."""
        return Profiled(self._loaded_engine().profile_step(request.position, keep=request.keep).to_dict())

    def save_cache(self, request: SaveCache) -> CacheSaved:
        """Write the KV cache to a file."""
        return CacheSaved(self._loaded_engine().save_cache(Path(request.path), self._weights))

    def restore_cache(self, request: RestoreCache) -> CacheRestored:
        """Restore the KV cache from a file."""
        return CacheRestored(self._loaded_engine().restore_cache(Path(request.path), self._weights))

    def _loaded_engine(self) -> Engine:
        if self._engine is None:
            raise LocalqError("engine process", "no model is loaded", "Load a model first.", ExitCode.USAGE)
        return self._engine


def _age_s() -> float:
    """Return the seconds since this process was created, by a clock that nobody sets."""
    fields = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    created_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22, in ticks since the machine was started
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - created_s)


def _predicted_ledger(model: LoadedModel) -> dict[str, int]:
    """Return the planned ledger; on the CPU scratch memory is freed after every pass and not counted."""
    planned = model.plan.ledger.components
    return planned if model.device.type == "cuda" else {**planned, "scratch": 0}


def _host(model: LoadedModel) -> dict[str, int]:
    """Return `Loaded.host`."""
    from localq.engine.cache_blocks import BLOCK, WORKERS  # torch: only where a model was loaded

    kept = {"checkpoints": model.checkpoint_bytes} if model.checkpoint_bytes else {}
    if model.device.type != "cuda":
        return {"reading": model.plan.ledger.components["scratch"], **kept}
    arch, found = model.plan.arch, {"snapshots": WORKERS * BLOCK, **kept}
    if arch is not None and (rows := footprint.host_tables(arch, model.plan.placement)):
        found["embedding"] = model.dtype.itemsize * rows
    return found


def _reads(model: LoadedModel, ledger: dict[str, int]) -> dict[str, int]:
    """Return the fields of `roofline.Reads` for a model on a GPU; empty where the roofline is unknown."""
    kv_bits = 8 * model.dtype.itemsize if model.kv_bits == 16 else model.kv_bits
    if model.device.type != "cuda":
        return {}
    from localq.engine.load.stacks import idle_bytes  # torch: only where a model was loaded

    found = roofline.reads(model.plan.arch, ledger, kv_bits, idle_bytes(model.model))
    return dataclasses.asdict(found) if found else {}
