"""GPU faults of the engine process (reliability G2, G4, G5, G7): each injected 50 times, the conversation intact.

A conversation is intact when all of its messages are there and the next answer is right: the engine's answer is a
checksum of the whole prompt.
"""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from localq.chat.history.conversation import Message
from localq.chat.reply import Reply
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.worker import faults
from localq.worker.client import EngineClient
from localq.worker.messages import Load, Profile
from localq.worker.recovery import RESTART_S, Recovery
from tests.support.chat.broken_replies import failed_reply
from tests.support.chat.scripted_client import CharTokenizer
from tests.support.worker.faulty_engine import ALLOCATIONS, CONTEXT, KINDS, answer

ENGINE = "tests.support.worker.faulty_engine"
PATIENCE_S = 40.0  # for what comes at once on an idle machine
INJECTIONS = 50
LETTERS = 8  # of an answer


class Clock:
    """Seconds, which pass when told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Machine:
    """A session on a faulty engine. `gone`: why the GPU cannot be reached."""

    def __init__(self, *arguments: str, step_limit_s: float = 30.0, silence_s: float = 35.0) -> None:
        self.clock, self.gone = Clock(), ""
        command = (sys.executable, "-m", ENGINE, str(step_limit_s), *arguments)
        self.client = EngineClient(command, Recovery(self.clock, lambda: self.gone), silence_s)
        self.session = ChatSession(self.client, Load("path", LoadOptions("model")), CharTokenizer())

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def says(self, text: str) -> str:
        """The answer to a message, which must be the right one, and be kept."""
        turns = [*self.session.messages, Message("user", text)]
        prompt = "".join(f"<{turn.role}>{turn.content}" for turn in turns) + "<assistant>"
        *_, reply = self.session.ask(text)
        assert isinstance(reply, Reply)
        assert reply.text == answer(prompt)
        assert self.session.messages == [*turns, Message("assistant", reply.text)]
        return reply.text

    def fails(self, text: str) -> tuple[LocalqError, str]:
        """See `failed_reply`."""
        return failed_reply(self.session, text)

    def waits_for_the_end(self) -> None:
        """Of the process, which says why it ends when nobody asks any more."""
        deadline = time.monotonic() + PATIENCE_S
        while self.client.alive and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not self.client.alive


# ---- G4: an error that stays


def test_a_sticky_fault_ends_the_process_and_the_conversation_goes_on():
    with Machine() as machine:
        machine.says("hello")
        for count in range(INJECTIONS):
            step, kind = count % LETTERS, [*KINDS][count % len(KINDS)]
            process = machine.client.pid
            error, got = machine.fails(f"sticky {kind} {step}")
            assert error.what == "GPU"
            assert str(KINDS[kind]).splitlines()[0] in error.why
            assert len(got) <= step  # no token after the fault
            assert not machine.client.alive
            machine.clock.now += RESTART_S
            machine.says(f"and now, {count}?")
            assert machine.client.pid not in (None, process)
        assert len(machine.session.messages) >= 2 * INJECTIONS


def test_a_process_that_dies_without_a_word_is_replaced():
    with Machine() as machine:
        for step in range(3):
            error, got = machine.fails(f"segfault {step}")
            assert "signal SIGSEGV" in error.why
            assert len(got) <= step
            machine.clock.now += RESTART_S
            machine.says("and now?")


def test_at_most_one_restart_in_a_minute():
    with Machine() as machine:
        machine.says("hello")
        machine.fails("sticky 700 1")
        machine.says("the first restart comes at once")
        machine.fails("sticky 700 1")
        for passed in (0.0, 1.0, RESTART_S - 2):
            machine.clock.now += passed
            error, _ = machine.fails("hello?")
            assert "failed again within 60 s" in error.why
            assert "Wait" in error.next_step
            assert not machine.client.alive
        machine.clock.now += 1.0
        machine.says("a minute has passed")


def test_a_restart_that_fails_counts():
    with Machine() as machine:
        machine.says("hello")
        machine.fails("sticky 700 0")
        machine.session.request = Load("oom:5:leak", LoadOptions("model"))
        error, _ = machine.fails("hello?")
        assert error.what == "GPU"
        machine.waits_for_the_end()
        machine.session.request = Load("path", LoadOptions("model"))
        assert "failed again" in machine.fails("hello?")[0].why
        machine.clock.now += RESTART_S
        machine.says("hello?")


def test_a_card_that_gives_other_answers_does_not_serve(tmp_path):
    spoiled = tmp_path / "spoiled"
    with Machine(str(spoiled)) as machine:
        machine.says("hello")
        for _ in range(3):
            machine.fails("sticky 719 2")
            machine.clock.now += RESTART_S
            spoiled.touch()
            error, got = machine.fails("are you well?")
            assert (error.exit_code, got) == (ExitCode.NO_DEVICE, "")
            assert "a known prompt produces a different reply" in error.why
            assert not machine.client.alive
            spoiled.unlink()
            assert "failed again" in machine.fails("now?")[0].why
            machine.clock.now += RESTART_S
            machine.says("and now?")


def test_a_restart_repeats_the_load_that_worked():
    with Machine() as machine:
        first = machine.session.ensure_loaded()
        assert (first.notes, first.kv_bits) == (["auto"], 16)
        machine.fails("sticky 700 0")
        again = machine.session.ensure_loaded()
        assert (again.notes, again.kv_bits, again.context_size) == (["cuda"], 16, CONTEXT)
        machine.fails("sticky 700 0")
        machine.clock.now += RESTART_S
        other = machine.client.load(Load("path", LoadOptions("model", ctx=77)))  # what was asked anew is not what was
        assert (other.notes, other.context_size) == (["auto"], 77)


def test_a_failure_of_the_weights_is_no_fault_of_the_device():
    with Machine() as machine:
        machine.says("hello")
        process = machine.client.pid
        error, _ = machine.fails("weights 3")
        assert "non-finite" in error.why
        assert machine.client.pid == process
        machine.says("hello again")


# ---- G5: the GPU is gone


def test_a_lost_gpu_is_said_at_once_and_nothing_is_restarted():
    with Machine() as machine:
        machine.says("hello")
        for count in range(INJECTIONS):
            machine.gone = f"initialization failed (CUDA error {(46, 100, 999)[count % 3]})"
            started = time.monotonic()
            error, _ = machine.fails(f"sticky 719 {count % LETTERS}")
            assert time.monotonic() - started < PATIENCE_S
            assert error.exit_code == ExitCode.NO_DEVICE
            assert "lost because" in error.why
            assert machine.gone in error.why
            assert "reseat" in error.next_step
            assert "`localq chat --continue` resumes the conversation" in error.next_step
            machine.clock.now += RESTART_S
            error, _ = machine.fails("hello?")
            assert "lost because" in error.why
            assert machine.client.pid is None
            machine.gone = ""
            machine.says(f"back again, {count}")


# ---- G7: a step that never ends


def hang(number: int) -> None:
    """Ten hangs, ended by the process's own watchdog, or from here where that is stuck."""
    own = number % 2 == 0
    with Machine(step_limit_s=0.3 if own else 60.0, silence_s=60.0 if own else 0.3) as machine:
        machine.says("hello")
        for step in range(INJECTIONS // 5):
            started = time.monotonic()
            error, got = machine.fails(f"hang {step % LETTERS}")
            assert time.monotonic() - started < PATIENCE_S
            assert error.what == "GPU"
            assert ("no step finished within 0.3 s" if own else "did not respond for 0.3 s") in error.why
            assert len(got) <= step
            assert not machine.client.alive
            machine.clock.now += RESTART_S
            machine.says("and now?")


def test_a_hanging_step_ends_the_process():
    with ThreadPoolExecutor(5) as pool:  # they wait more than they work
        assert list(pool.map(hang, range(5))) == [None] * 5


# ---- G2: memory that runs out while loading


def test_memory_that_runs_out_while_loading_is_given_back():
    """The nth allocation fails, for every n: the process stays, holds nothing, and loads the next model."""
    with Machine() as machine:
        machine.says("hello")
        process = machine.client.pid
        for number in range(ALLOCATIONS):
            with pytest.raises(LocalqError, match="ran out of memory") as caught:
                machine.client.load(Load(f"oom:{number}", LoadOptions("model")))
            assert caught.value.exit_code == ExitCode.DOES_NOT_FIT
            assert machine.client.profile(Profile()) == {"held": 0}
            machine.session.loaded = None
            machine.says(f"and now, {number}?")
        assert machine.client.pid == process


def test_memory_that_cannot_be_given_back_ends_the_process():
    with Machine() as machine:
        with pytest.raises(LocalqError, match="ran out of memory"):
            machine.client.load(Load("oom:3:leak", LoadOptions("model")))
        machine.waits_for_the_end()
        machine.says("hello")
        machine.fails("sticky 700 1")
        assert "failed again" in machine.fails("hello?")[0].why  # the end that nobody saw has counted


@pytest.mark.parametrize(
    ("words", "fault"),
    [("CUDA error: out of memory\nmore words", False), ("CUDA error: an illegal memory access was encountered", True)],
)
def test_memory_that_the_driver_refuses_to_pin_is_no_fault_of_the_device(words, fault):
    error = type("AcceleratorError", (RuntimeError,), {})(words)
    assert faults.is_device_fault(error) is fault
    assert faults.is_out_of_memory(error) is not fault
