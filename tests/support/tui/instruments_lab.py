"""An RTX 3090 that is not there: a loaded model, a reply, a profile, what the card tells; and an app around a panel."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

from textual.app import App, ComposeResult
from textual.pilot import Pilot

from localq.chat.session import ChatSession
from localq.gpus import Process, Reading
from localq.planner.load_options import LoadOptions
from localq.settings import Settings
from localq.stats import Operation, Stats, StepProfile
from localq.tui.app import LocalqApp
from localq.tui.instruments.instrument_facts import InstrumentFacts
from localq.tui.instruments.instrument_panel import InstrumentPanel
from localq.tui.jobs.model_handle import ModelHandle
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.tui.tui_pilot import drive, until

MIB, GIB = 2**20, 2**30
CTX = 8192
TOKENS = 80  # of every reply of a TimedClient
LEDGER = {
    "weights": 16_000 * MIB, "embedding": 0, "head": 1_000 * MIB, "kv_cache": 4_096 * MIB, "tables": 10 * MIB,
    "scratch": 380 * MIB, "sampler": 10 * MIB, "graphs": 20 * MIB, "cuda_context": 400 * MIB,
}  # fmt: skip
PREDICTED = {**LEDGER, "graphs": 25 * MIB, "cuda_context": 500 * MIB}
HOST = {"snapshots": 64 * MIB, "embedding": 2_004 * MIB}
READS = {"weights": 9_000_000_000, "slot": 1_000_000, "windowed_slot": 0, "window": 0}
GPU = Loaded(
    "test-70b@vq2", "cuda", "NVIDIA GeForce RTX 3090", "float16", "vq2", CTX, 128_256, True, 3.0, LEDGER,
    predicted=PREDICTED, host=HOST, gpu_uuid="GPU-5a1b", reads=READS,
)  # fmt: skip
CPU = Loaded(
    "smollm2-135m", "cpu", "CPU", "float32", "gguf", 2048, 49_152, False, 1.0,
    {"weights": 500 * MIB, "embedding": 108 * MIB, "head": 0, "kv_cache": 92 * MIB, "tables": 1 * MIB},
)  # fmt: skip
READING = Reading(
    at_s=1.0, sm_mhz=1695, memory_mhz=9501, watts=285.4, watts_limit=350.0, joules=1000.0, celsius=64, busy=0.97,
    held_by=("power",), total=24_564 * MIB, free=1_000 * MIB, processes=(Process(4711, 640 * MIB, "firefox"),),
)  # fmt: skip
PROFILE = StepProfile(
    (
        Operation("qkv", 80, 1000.0, 800_000_000), Operation("attention", 80, 500.0, 100_000_000),
        Operation("down", 80, 4000.0, 3_600_000_000), Operation("head", 1, 500.0, 400_000_000),
    ),
    step_us=6060.0, host_gap_us=12.5, position=1024, timer="cupti",
).to_dict()  # fmt: skip


def reply(tokens: int, tokens_per_s: float = 80.0, used: int = 1000) -> Stats:
    """An event of a reply that has made so many tokens at that speed."""
    return Stats(
        "decode", 100, generated_tokens=tokens, decode_s=(tokens - 1) / tokens_per_s, context_used=used,
        context_size=CTX,
    )  # fmt: skip


class Watch:
    """Sensors that count how often they are read, and tell what they are given."""

    def __init__(self, reading: Reading = READING) -> None:
        self.reading, self.reads, self.uuids = reading, 0, list[str]()

    def __call__(self, uuid: str) -> Watch:
        self.uuids.append(uuid)
        return self

    def read(self) -> Reading:
        self.reads += 1
        return self.reading


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Host(App[None]):
    """A panel alone on a screen; keeps what it asks for."""

    CSS = "InstrumentPanel { height: 1fr; } InstrumentPanel.-strip { height: 7; }"

    def __init__(self, mode: str = "side", watch: Watch | None = None, clock: Clock | None = None) -> None:
        super().__init__()
        self.watch_card, self.clock = watch or Watch(), clock or Clock()
        self.panel = InstrumentPanel(facts=InstrumentFacts(self.clock, self.watch_card))
        self.panel.set_reactive(InstrumentPanel.mode, mode)
        self.wanted = 0

    def compose(self) -> ComposeResult:
        yield self.panel

    def on_instrument_panel_profile_requested(self) -> None:
        self.wanted += 1


class TimedClient(ScriptedClient):
    """Says that it decodes at `tokens_per_s`, slower by `cost` while instruments are shown."""

    def __init__(self, loaded: Loaded, cost: float = 0.0) -> None:
        super().__init__(context_size=loaded.context_size)
        self.as_loaded, self.cost = loaded, cost
        self.shown: Callable[[], bool] = lambda: False

    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded:
        super().load(request, on_event)
        return self.as_loaded

    def generate(self, request: Generate) -> Iterator[Event]:
        rate = 500.0 * (1 - self.cost * self.shown())
        used = len(request.prompt)
        stats = Stats(prompt_tokens=used, context_used=used, context_size=self.context_size)
        yield Progress(request.id, stats)
        for count in range(1, TOKENS + 1):
            stats = replace(
                stats, phase="decode", generated_tokens=count, decode_s=(count - 1) / rate, context_used=used + count
            )
            yield Tokens(request.id, [ord("a")], stats)
        yield Done(request.id, "length", replace(stats, phase="done"))


def chat_app(client: TimedClient, settings: Settings, profile: Callable[[], dict[str, Any]]) -> LocalqApp:
    """The chat over that engine, its model loaded."""
    session = ChatSession(client, Load("", LoadOptions(client.as_loaded.name)), CharTokenizer())
    app = LocalqApp(settings, session=session)
    session.ensure_loaded()
    app.model = ModelHandle(session, session.ensure_loaded, lambda: None, profile)
    return app


async def settle(pilot: Pilot[Any], panel: InstrumentPanel) -> None:
    """Until what is due is drawn and the card was looked at."""
    await until(pilot, lambda: not panel._drawing and not panel.facts.looking)
    await pilot.pause()


def run(mode: str, size: tuple[int, int], scene: Callable[[Host, Pilot[Any]], Awaitable[None]], **of_host: Any) -> Host:
    """`scene` in a terminal of this size; the app behind it."""
    app = Host(mode, **of_host)
    drive(app, lambda pilot: scene(app, pilot), size)
    return app


async def chatting(app: Host, pilot: Pilot[Any], loaded: Loaded = GPU) -> None:
    """A model, half a reply, a profile, and the card."""
    app.panel.show_model(loaded)
    for tokens in range(1, 242, 8):
        app.panel.show_stats(reply(tokens, used=400))
    if loaded is GPU:
        app.panel.show_profile(PROFILE)
    await until(pilot, lambda: app.panel.facts.reading.total)
    await settle(pilot, app.panel)
