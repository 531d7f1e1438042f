"""A chat over the real engine in this process, without a pipe: a reply can be stopped at a token that a test names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from localq.chat.session import ChatSession
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.text.tokenizer import Tokenizer
from localq.worker.backend import TorchBackend
from localq.worker.messages import Done, Event, Generate, Load, Loaded, Progress, Tokens


class InProcessClient:
    """`worker.client.EngineClient` without a process."""

    alive = True

    def __init__(self) -> None:
        self.backend, self.cancelled = TorchBackend(), set()

    def load(self, request: Load, on_event: Callable[[Event], None] | None = None) -> Loaded:
        return self.backend.load(request, lambda *report: None)

    def cancel(self, id: int) -> None:
        self.cancelled.add(id)

    def generate(self, request: Generate) -> Iterator[Event]:
        for step in self.backend.generate(request, lambda: request.id in self.cancelled):
            if step.reason:
                yield Done(request.id, step.reason, step.stats)
            else:
                yield Tokens(request.id, list(step.ids), step.stats) if step.ids else Progress(request.id, step.stats)


def session_over(
    path: Path,
    ctx: int = 512,
    checkpoint_bytes: int | None = None,
    draft_tokens: int = 0,
    draft: Path | None = None,
    mtp: str = "",
) -> ChatSession:
    """A chat with the model at `path`, on the CPU. draft_tokens: of a draft that a step can verify, at most; draft: a
    draft model; mtp: as of `LoadOptions`."""
    options = LoadOptions(
        "model", device="cpu", dtype="float32", ctx=ctx, checkpoint_bytes=checkpoint_bytes, draft_tokens=draft_tokens,
        draft_path="" if draft is None else str(draft), mtp=mtp,
    )  # fmt: skip
    request = Load(str(path), options)
    session = ChatSession(InProcessClient(), request, Tokenizer.load(open_model(path)))
    if draft is not None:
        session.draft = "draft"
    return session
