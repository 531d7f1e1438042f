"""A pretended RTX 3090 of 24 GB with a scripted engine, and conversations of some weeks, for pictures of the screen."""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from localq import gpus
from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import Start
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.gpus import Gpu, NvmlReport, Process, Reading
from localq.planner import card as planner_card
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.stats import Operation, Stats, StepProfile
from localq.tui.app import LocalqApp
from localq.tui.jobs.model_handle import ModelHandle
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.cli.terminal_localq import environment

MIB, DAY_S = 2**20, 86400.0
LEDGER = {
    "weights": 16_420 * MIB, "embedding": 0, "head": 742 * MIB, "kv_cache": 3_264 * MIB, "tables": 8 * MIB,
    "scratch": 310 * MIB, "sampler": 10 * MIB, "graphs": 96 * MIB, "cuda_context": 402 * MIB,
}  # fmt: skip
CARD = Loaded(
    "qwen3-32b@nf4", "cuda", "NVIDIA GeForce RTX 3090", "bfloat16", "nf4", 24_576, 151_936, True, 6.2, LEDGER,
    predicted={**LEDGER, "graphs": 120 * MIB, "cuda_context": 450 * MIB}, kv_bits=8, embed="host", head="nf4",
    host={"embedding": 1_484 * MIB, "snapshots": 64 * MIB}, gpu_uuid="GPU-5a1b",
    reads={"weights": 18_000_000_000, "slot": 139_264},
)  # fmt: skip
HOST_ONLY = Loaded(
    "smollm2-135m", "cpu", "CPU", "float32", "gguf", 2048, 49_152, False, 1.0,
    {"weights": 500 * MIB, "embedding": 108 * MIB, "head": 0, "kv_cache": 92 * MIB, "tables": 1 * MIB},
)  # fmt: skip
SENSED = Reading(
    at_s=1.0, sm_mhz=1695, memory_mhz=9501, watts=285.4, watts_limit=350.0, joules=1000.0, celsius=64, busy=0.97,
    held_by=("power",), total=24_564 * MIB, free=1_340 * MIB,
    processes=(Process(4711, 640 * MIB, "firefox"), Process(812, 310 * MIB, "gnome-shell")),
)  # fmt: skip
PROFILE = StepProfile(
    (
        Operation("embed", 1, 9.0, 10_240), Operation("norm", 129, 410.0, 2_600_000),
        Operation("qkv", 64, 2_890.0, 2_300_000_000), Operation("attention", 64, 1_120.0, 640_000_000),
        Operation("o", 64, 2_240.0, 1_790_000_000), Operation("gate_up", 64, 9_900.0, 8_700_000_000),
        Operation("down", 64, 5_100.0, 4_350_000_000), Operation("head", 1, 880.0, 778_000_000),
        Operation("sample", 1, 61.0, 304_000),
    ),
    step_us=22_710.0, host_gap_us=18.5, position=1180, timer="cupti",
).to_dict()  # fmt: skip


class CardClient(ScriptedClient):
    """An engine on the pretended card. A script may hold a `threading.Event`, where it waits."""

    def __init__(self, *scripts: Any, loaded: Loaded = CARD, tokens_per_s: float = 37.4) -> None:
        super().__init__(*scripts, context_size=loaded.context_size)
        self.as_loaded, self.rate, self.used = loaded, tokens_per_s, 380

    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded:
        super().load(request, on_event)
        return self.as_loaded

    def generate(self, request: Generate) -> Iterator[Event]:
        self.used += 420
        stats = Stats(prompt_tokens=self.used, prefilled_tokens=self.used * 2 // 5, context_size=self.context_size)
        yield Progress(request.id, replace(stats, context_used=stats.prefilled_tokens))
        count = 0
        for part in self.scripts.pop(0):
            if isinstance(part, threading.Event):
                part.wait(60)
                continue
            if isinstance(part, LocalqError):
                raise part
            for at in range(0, len(part), 4):
                count += 1
                wave = 1 + 0.05 * math.sin(count / 23) - 0.0003 * count
                stats = replace(
                    stats, phase="decode", generated_tokens=count, time_to_first_token_s=0.41,
                    prefilled_tokens=self.used, decode_s=stats.decode_s + (count > 1) / (self.rate * wave),
                    context_used=self.used + count,
                )  # fmt: skip
                if count % 10 == 0:
                    time.sleep(0.06)  # longer than between two looks of the screen: the curve has more than one point
                yield Tokens(request.id, [ord(letter) for letter in part[at : at + 4]], stats)
        self.used += count
        yield Done(request.id, "stop", replace(stats, phase="done"))


def chat_app(*scripts: Any, loaded: Loaded = CARD, store: ConversationStore | None = None) -> LocalqApp:
    """The chat over the scripted engine."""
    client = CardClient(*scripts, loaded=loaded)
    record = Record(model=loaded.name)
    session = ChatSession(
        client, Load("", LoadOptions(loaded.name)), CharTokenizer(), max_tokens=2048, record=record, store=store
    )
    app = LocalqApp(Settings(), Start(None, store), session=session)
    session.ensure_loaded()
    app.model = ModelHandle(session, session.ensure_loaded, lambda: None, lambda: PROFILE)
    return app


def talks(folder: Path) -> ConversationStore:
    """Conversations of the last weeks."""
    store, now_s = ConversationStore(folder / "sessions.db"), time.time()
    titles = (
        ("A recipe for bread with 70 % water", 40, "llama-3.1-8b"), ("Translate the letter to the landlord", 21,
        "gemma-3-27b"), ("Regular expression for ISO dates", 9.1, "qwen3-32b"), ("Why is the sky dark at night?", 6.0,
        "llama-3.1-8b"), ("Refactor the parser into two passes", 2.2, "qwen2.5-coder-32b"), ("Names for a cat",
        1.3, "llama-3.1-8b"), ("Plan a week in Lisbon with children", 1.05, "qwen3-32b"),
        ("Explain CUDA graphs to a web developer", 0.1, "qwen3-32b"),
    )  # fmt: skip
    for title, days, model in titles:
        record = Record(model=model, title=title)
        for turn in range(1 + len(title) % 4):
            record.conversation.add(
                Message("assistant", f"About {title}."),
                record.conversation.add_user(f"{title}: part {turn + 1}"),
                Stats("done", 30, generated_tokens=9, decode_s=0.3),
            )
        with mock.patch("time.time", lambda at=now_s - days * DAY_S: at):
            store.save(record)
    return store


def _sense(sensors: gpus.Sensors) -> Reading:
    return replace(SENSED, at_s=time.monotonic())


@contextlib.contextmanager
def pretended(home: Path) -> Iterator[None]:
    """A card of 24 GB, and a user who has nothing yet."""
    gpu = Gpu(0, "NVIDIA GeForce RTX 3090", "GPU-5a1b", (8, 6), 24_564 * MIB, 23_300 * MIB, SENSED.processes)
    variables = {name: value for name, value in environment(home).items() if name != "LOCALQ_DEVICE"}
    with (
        mock.patch.dict(os.environ, variables, clear=True),
        mock.patch.object(gpus, "probe", return_value=NvmlReport("580.65.06", (gpu,))),
        mock.patch.object(gpus.Sensors, "read", _sense),
        mock.patch.object(planner_card, "measure_bandwidth", return_value=8.71e11),
        mock.patch("localq.planner.speed.local_measurements.bandwidth", return_value=8.71e11),
    ):
        yield
