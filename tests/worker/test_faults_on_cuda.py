"""GPU faults of the real engine process (reliability G4, G7): each injected 50 times on a GPU, the conversation intact.

The engine is the real one under a tiny model; the fault is a kernel of `gpu_faults.cu`. What a process says after a
restart is what an engine says that never failed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

from localq.chat.history.conversation import Message
from localq.chat.reply import Reply
from localq.chat.session import ChatSession
from localq.engine.generate import Engine
from localq.engine.load.device import DeviceChoice
from localq.engine.load.load import load
from localq.errors import LocalqError
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.worker.client import EngineClient
from localq.worker.messages import Load
from localq.worker.recovery import RESTART_S, Recovery
from tests.support.chat.broken_replies import failed_reply
from tests.support.chat.scripted_client import CharTokenizer
from tests.support.engine.engine_runs import GREEDY, ids_of
from tests.support.models.tiny_checkpoints import make_checkpoint
from tests.support.worker import gpu_faults

pytestmark = [pytest.mark.cuda, pytest.mark.slow]
AT_ONCE, EACH = 17, 3  # 51 injections: processes beside each other, and faults one after the other in each
TOKENS = 12  # of a reply
STEP_LIMIT_S = 2.0
CONTEXT = 4096
LETTERS = 0x100  # of this and later numbers none is a control character


class LetterTokenizer(CharTokenizer):
    """Ids as letters that come through to the reader as they are, and back. No id ends a reply."""

    stop_ids = frozenset[int]()

    def chat_ids(self, messages: list[dict[str, str]], **variables: Any) -> list[int]:
        """ASCII stands for itself."""
        return [ord(each) - (LETTERS if ord(each) >= LETTERS else 0) for each in self.chat_text(messages)]

    def decode(self, ids: list[int]) -> str:
        """A letter for each."""
        return "".join(chr(LETTERS + id) for id in ids)

    def stream(self) -> LetterTokenizer:
        """It keeps nothing."""
        return self

    def push(self, ids: list[int]) -> str:
        """A letter for each."""
        return self.decode(ids)


class Machine:
    """A session on the real engine process, with a clock that is told. `order`: the next fault, see `gpu_faults`."""

    def __init__(self, library: Path, folder: Path, order: Path) -> None:
        self.now, self.order = 1000.0, order
        self.orders("")
        command = (sys.executable, str(Path(gpu_faults.__file__)), str(library), str(order), str(STEP_LIMIT_S))
        self.client = EngineClient(command, Recovery(lambda: self.now))
        request = Load(str(folder), LoadOptions("tiny", device="cuda", ctx=CONTEXT))
        self.session = ChatSession(self.client, request, LetterTokenizer(), max_tokens=TOKENS)

    def __enter__(self) -> Machine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.close()

    def orders(self, what: str) -> None:
        """Of the replies that follow."""
        self.order.write_text(what)

    def says(self, text: str) -> tuple[list[int], str]:
        """A reply that comes to its end: the prompt's ids, and the text."""
        prompt = self.session.tokenizer.chat_ids(
            [{"role": each.role, "content": each.content} for each in [*self.session.messages, Message("user", text)]]
        )
        *_, reply = self.session.ask(text)
        assert isinstance(reply, Reply)
        return prompt, reply.text

    def fails(self, text: str) -> tuple[LocalqError, str]:
        """See `failed_reply`."""
        return failed_reply(self.session, text)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    built = gpu_faults.build(tmp_path_factory.mktemp("faults"))
    if built is None:
        pytest.skip("no nvcc to build gpu_faults.cu with")
    return built


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(
        tmp_path_factory.mktemp("model") / "tiny", initializer_range=0.15, max_position_embeddings=CONTEXT
    )


@pytest.fixture(scope="module")
def unbroken(folder) -> Callable[[list[int]], str]:
    """What an engine that never failed says to a prompt that it has read nothing of."""
    options = LoadOptions(device="cuda", ctx=CONTEXT)
    engine = Engine(load(open_model(folder), options, pick=lambda word: DeviceChoice(torch.device("cuda", 0))))

    def answer(prompt: list[int]) -> str:
        ids_of(engine, [7], GREEDY, max_tokens=1)  # no prompt begins so: nothing of the last one is taken up
        return LetterTokenizer().decode(ids_of(engine, prompt, GREEDY, max_tokens=TOKENS))

    return answer


def injected(library: Path, folder: Path, order: Path, way: str, words: str) -> list[tuple[list[int], str]]:
    """Faults one after the other, each followed by a restart; the replies after these, with their prompts."""
    said = []
    with Machine(library, folder, order) as machine:
        machine.says("hello")
        for count in range(EACH):
            step = (3 * count) % (TOKENS - 2)
            process = machine.client.pid
            machine.orders(f"{way} {step}")
            started = time.monotonic()
            error, got = machine.fails(f"now fail, {count}")
            assert time.monotonic() - started < 30
            assert error.what == "GPU"
            assert words in error.why
            assert len(got) <= step + 2  # none that was made after the fault; a pass ahead of it was on its way
            assert not machine.client.alive
            machine.orders("")
            machine.now += RESTART_S
            said.append(machine.says(f"and now, {count}?"))
            assert machine.client.pid not in (None, process)
        assert len(machine.session.messages) >= 2 + 2 * EACH
    return said


@pytest.mark.parametrize(
    ("way", "words"), [("bad_store", "illegal memory access"), ("hang", "no step finished within 2 s")]
)
def test_a_fault_on_the_gpu_ends_the_process_and_the_conversation_goes_on(
    way, words, library, folder, unbroken, tmp_path
):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = [
            pool.submit(injected, library, folder, tmp_path / f"order {number}", way, words)
            for number in range(AT_ONCE)
        ]
        said = [each for run in runs for each in run.result()]
    assert len(said) == AT_ONCE * EACH
    for prompt, text in said:
        assert text == unbroken(prompt)
