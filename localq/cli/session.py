"""Opening a model for `chat` and `run`: name -> files -> tokenizer and engine, with progress on stderr."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from localq import catalog, prepare, remembered
from localq.chat import ChatSession, Piece, Reply
from localq.cli import choosing, fetch_progress, options
from localq.cli.output import human_bytes, is_rich_terminal, note
from localq.errors import ExitCode, LocalqError
from localq.sampling import Sampling
from localq.settings import Settings
from localq.stats import Stats
from localq.worker.client import EngineClient
from localq.worker.messages import Event, Load, Loaded, Loading


class StatusLine:
    """One line on stderr that is drawn over while work goes on; silent unless stderr is a terminal."""

    def __init__(self, quiet: bool = False) -> None:
        self._shown = 0
        self._active = is_rich_terminal(sys.stderr) and not quiet

    def show(self, text: str) -> None:
        """Draw `text` over what stood there."""
        if self._active:
            sys.stderr.write("\r" + text[:100].ljust(self._shown))
            sys.stderr.flush()
            self._shown = len(text[:100])

    def clear(self) -> None:
        """Leave an empty line."""
        if self._active and self._shown:
            sys.stderr.write("\r" + " " * self._shown + "\r")
            sys.stderr.flush()
            self._shown = 0

    def bytes(self, stage: str, done: int, total: int) -> None:
        """`stage` with its share in percent."""
        share = f" {done / total:4.0%} of {human_bytes(total)}" if total else ""
        self.show(f"{stage}{share}")

    def event(self, event: Event) -> None:
        """Progress of a load."""
        if isinstance(event, Loading):
            self.bytes(event.stage, event.done_bytes, event.total_bytes)


@dataclass(frozen=True)
class Opened:
    """A session with the client it runs on; `status` draws its progress."""

    session: ChatSession
    client: EngineClient
    status: StatusLine


@dataclass(frozen=True)
class Wanted:
    """What is said besides the name: weights in this format, and a load that the plan advises against."""

    format: str | None = None
    force: bool = False


@contextlib.contextmanager
def open_session(name: str, settings: Settings, quiet: bool, wanted: Wanted = Wanted()) -> Iterator[Opened]:
    """A session over `name`. The engine process starts at once and imports while the files are found."""
    target = _target(name, settings, wanted)
    _refuse_what_does_not_run(target)
    status = StatusLine(quiet)
    client = EngineClient()
    try:
        client.start()
        with fetch_progress.shown(target.name, quiet) as show:
            path = prepare.model_path(target, note, show, settings.offline)
        from localq.modelfiles import open_model
        from localq.tokenizer import Tokenizer  # start-up cost: a wrong name must be answered without these

        files = open_model(path)
        request = _load_request(str(path), target.name, settings, wanted.force)
        sampling = settings.sampling(Sampling.from_generation_config(files.generation_config))
        session = ChatSession(client, request, Tokenizer.load(files), sampling, settings.max_tokens)
        session.system = settings.system
        session.record.model = str(target.path.absolute()) if target.path is not None else target.name
        status.clear()
        yield Opened(session, client, status)
    finally:
        status.clear()
        client.close()


def _target(name: str, settings: Settings, wanted: Wanted) -> catalog.Target:
    """What `name` means here; where it is another format than the usual, a note says why.

    Raises LocalqError (exit 3) for what does not fit and would have to be fetched first.
    """
    budget = choosing.budget_here(settings)
    target, choice = choosing.chosen(name, wanted.format, settings, budget)
    if choice is None:
        choosing.check_unlisted(target, budget, settings, wanted.force)
        return target
    if not choice.taken.offer.preferred and wanted.format is None and target.name != name:
        note(f"{target.name}: {choice.why}")
    refusal = None if choice.taken.here or wanted.force else choosing.too_large(choice.taken.offer, budget, settings)
    if refusal is not None and choice.taken.offer.not_yet is None:
        raise refusal
    return target


def _load_request(path: str, name: str, settings: Settings, force: bool = False) -> Load:
    return Load(
        path,
        name,
        settings.device,
        settings.dtype,
        settings.ctx,
        kv_bits=settings.kv_bits,
        vram_bytes=options.budget(settings),
        embed=settings.embed,
        head=settings.head,
        reserve_bytes=options.reserved(settings),
        force=force,
    )


def _refuse_what_does_not_run(target: catalog.Target) -> None:
    """Before a download of many gigabytes: what the catalogue knows and this version cannot run."""
    reason = catalog.not_yet(target.entry.arch, target.format) if target.entry and target.format else None
    if reason is not None:
        raise LocalqError(target.name, reason, "`localq fit --vram SIZE` lists what does run.", ExitCode.FAILURE)


def load_now(opened: Opened) -> Loaded:
    """Load the model unless it is, with progress, and tell what the engine says the user must know."""
    if opened.session.loaded is not None and opened.client.alive:
        return opened.session.loaded
    loaded = opened.session.ensure_loaded(opened.status.event)
    opened.status.clear()
    for line in loaded.notes:
        note(line)
    if loaded.device == "cuda":
        took = remembered.Load(
            loaded.device_name, loaded.format, loaded.context_size, loaded.kv_bits, loaded.embed, loaded.head,
            loaded.predicted, loaded.ledger,
        )  # fmt: skip
        remembered.keep_load(loaded.name, took)
    return loaded


def memory_line(loaded: Loaded) -> str:
    """What the model takes beside what was predicted: "[memory 17.9 GiB, predicted 17.8, +0.5 %]"; empty on the CPU."""
    measured, predicted = sum(loaded.ledger.values()), sum(loaded.predicted.values())
    if loaded.device != "cuda" or not predicted:
        return ""
    off = 100 * (measured - predicted) / predicted
    return f"[memory {measured / 2**30:.2f} GiB, predicted {predicted / 2**30:.2f} GiB, {off:+.1f} %]"


@contextlib.contextmanager
def interruptible(session: ChatSession) -> Iterator[threading.Event]:
    """While a reply streams, Ctrl-C stops the reply instead of the program. The event says whether it was pressed."""
    pressed = threading.Event()

    def stop(signal_number: int, frame: FrameType | None) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt  # twice: the reply does not matter any more
        pressed.set()
        # Not from the handler itself: the interrupted frame may hold the lock of the pipe.
        threading.Thread(target=session.stop, daemon=True).start()

    previous = signal.signal(signal.SIGINT, stop)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def print_reply(parts: Iterator[Piece | Reply], status: StatusLine, write_text: bool = True) -> Reply | None:
    """Stream a reply to stdout as it arrives; returns its end, or None when the stream had none."""
    reply = None
    for part in parts:
        if isinstance(part, Reply):
            reply = part
        elif part.notice:
            status.clear()
            note(f"({part.notice})")
        elif part.text:
            status.clear()
            if write_text:
                sys.stdout.write(part.text)
                sys.stdout.flush()
        elif part.stats.phase == "prefill" and part.stats.prompt_tokens:
            done = part.stats.cached_tokens + part.stats.prefilled_tokens
            status.show(f"reading the prompt {done / part.stats.prompt_tokens:4.0%}")
    status.clear()
    if write_text:
        sys.stdout.write("\n")
        sys.stdout.flush()
    return reply


def stats_line(stats: Stats) -> str:
    """Tokens, speed and waiting time of a reply in one line."""
    speed = f", {stats.tokens_per_s:.1f} tok/s" if stats.generated_tokens > 1 else ""
    cached = f" ({stats.cached_tokens} cached)" if stats.cached_tokens else ""
    return (
        f"[{stats.generated_tokens} tokens{speed}, first after {stats.time_to_first_token_s:.2f} s, "
        f"prompt {stats.prompt_tokens}{cached}, context {stats.context_used}/{stats.context_size}]"
    )
