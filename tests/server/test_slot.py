"""Turns, limits, cancel, switch, idle, faults and end of the slot."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

import pytest

from localq.errors import LocalqError
from localq.server.model import ModelRequest, OpenModel
from localq.server.slot import SWITCH_S, QueueFull, Slot, SlotClosed
from localq.server.ticket import BUFFER_BYTES, SlowReader
from localq.settings import Settings
from localq.worker.messages import Done, Event, Generate
from tests.support.server.scripted_model import DEAD, Models, QuietWatcher, SteadyClient

A, B = ModelRequest("a"), ModelRequest("b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Lab:
    """A slot with model `a` loaded, whose engine answers one token after the other."""

    def __init__(
        self, keep_alive_s: float | None = None, limit: int = 4, clock: Callable[[], float] | None = None
    ) -> None:
        self.models, self.watcher, self.clock = Models(), QuietWatcher(), Clock()
        self.slot = Slot(self.watcher, keep_alive_s, limit, self.models, clock or self.clock)
        self.order: list[str] = []
        self.slot.open(A, self.watcher)

    @property
    def engine(self) -> SteadyClient:
        return self.models.clients[-1]

    def reply(self, name: str, tokens: int = 3) -> Callable[[OpenModel], Iterator[Event]]:
        def job(model: OpenModel) -> Iterator[Event]:
            self.order.append(f"{name}:{model.name}")
            yield from model.client.generate(Generate(1, [1], max_tokens=tokens))

        return job

    def hold(self) -> None:
        """Start a reply that waits for `engine.gate`."""
        self.engine.gate.clear()
        self.engine.begun.clear()
        self.held = self.slot.submit("holder", A, self.reply("held"))
        assert self.engine.begun.wait(5)


@pytest.fixture
def lab() -> Iterator[Lab]:
    made = Lab()
    yield made
    made.engine.gate.set()
    made.slot.close(5)


def reason(events: list[Event]) -> str:
    assert isinstance(events[-1], Done)
    return events[-1].reason


def test_a_job_runs_in_the_thread_of_the_slot_and_is_read_in_another(lab: Lab) -> None:
    events = list(lab.slot.submit("one", A, lab.reply("x")))
    assert [getattr(each, "ids", None) for each in events] == [[0], [1], [2], None]
    assert {each.id for each in events} == {1}  # as the job numbers them, whatever the engine's numbers are


def test_a_job_is_read_in_an_event_loop(lab: Lab) -> None:
    async def read() -> list[Event]:
        return [event async for event in lab.slot.submit("one", A, lab.reply("x"))]

    assert reason(asyncio.run(read())) == "length"


def test_clients_take_turns_and_each_has_its_order(lab: Lab) -> None:
    lab.hold()
    tickets = [lab.slot.submit(client, A, lab.reply(name)) for client, name in [("p", "p1"), ("p", "p2"), ("q", "q1")]]
    assert [each.position for each in tickets] == [1, 3, 2]
    lab.engine.gate.set()
    for each in tickets:
        list(each)
    assert lab.order == ["held:a", "p1:a", "q1:a", "p2:a"]
    assert [each.position for each in tickets] == [0, 0, 0]


def test_beyond_the_limit_nothing_is_queued(lab: Lab) -> None:
    lab.hold()
    for number in range(4):
        lab.slot.submit(f"client {number}", A, lab.reply("x"))
    with pytest.raises(QueueFull, match="4 requests are already waiting"):
        lab.slot.submit("late", A, lab.reply("x"))
    assert lab.slot.state().queued == 4


def test_one_client_leaves_places_to_others(lab: Lab) -> None:
    lab.hold()
    for _ in range(3):
        lab.slot.submit("greedy", A, lab.reply("x"))
    with pytest.raises(QueueFull, match="3 requests from this client"):
        lab.slot.submit("greedy", A, lab.reply("x"))
    lab.slot.submit("another", A, lab.reply("y"))


def test_a_cancelled_reply_ends_within_a_step_and_says_so(lab: Lab) -> None:
    lab.hold()
    lab.held.cancel()
    assert reason(list(lab.held)) == "cancelled"


def test_a_job_that_waits_is_withdrawn_by_its_cancel(lab: Lab) -> None:
    lab.hold()
    waiting = lab.slot.submit("one", A, lab.reply("x"))
    waiting.cancel()
    assert list(waiting) == []
    assert lab.slot.state().queued == 0
    lab.engine.gate.set()
    list(lab.held)
    assert lab.order == ["held:a"]


def test_a_cancel_does_not_reach_the_reply_of_another_job(lab: Lab) -> None:
    first = lab.slot.submit("one", A, lab.reply("x"))
    list(first)
    first.cancel()
    assert reason(list(lab.slot.submit("one", A, lab.reply("y")))) == "length"


def test_a_job_that_ends_early_cancels_its_reply(lab: Lab) -> None:
    def job(model: OpenModel) -> Iterator[Event]:
        yield next(model.client.generate(Generate(1, [1], max_tokens=100)))

    assert len(list(lab.slot.submit("one", A, job))) == 1
    assert reason(list(lab.slot.submit("one", A, lab.reply("y")))) == "length"


def test_an_error_of_a_job_is_raised_where_it_is_read(lab: Lab) -> None:
    def refused(model: OpenModel) -> Iterator[Event]:
        raise LocalqError("the prompt", "too long")
        yield

    def broken(model: OpenModel) -> Iterator[Event]:
        raise KeyError("a bug")
        yield

    with pytest.raises(LocalqError, match="too long"):
        list(lab.slot.submit("one", A, refused))
    with pytest.raises(LocalqError, match=r"internal error \(KeyError\).*Report"):
        list(lab.slot.submit("one", A, broken))
    assert reason(list(lab.slot.submit("one", A, lab.reply("y")))) == "length"


def test_a_reader_that_does_not_read_is_dropped_and_others_go_on(lab: Lab) -> None:
    def flood(model: OpenModel) -> Iterator[str]:
        for _ in range(3):
            yield "x" * (BUFFER_BYTES // 8)

    ticket = lab.slot.submit("one", A, flood)
    assert reason(list(lab.slot.submit("two", A, lab.reply("y")))) == "length"
    with pytest.raises(SlowReader):
        list(ticket)


def test_a_job_of_another_model_switches_to_it(lab: Lab) -> None:
    list(lab.slot.submit("one", B, lab.reply("x")))
    assert lab.order == ["x:b"]
    assert lab.models.log == ["load a", "close", "load b"]  # both may not fit
    assert lab.slot.state().model == "b"
    other = ModelRequest("b", Settings(ctx=64))
    list(lab.slot.submit("one", other, lab.reply("y")))
    assert lab.models.log[-2:] == ["close", "load b"]


def test_jobs_of_the_loaded_model_go_first_until_another_has_waited(lab: Lab) -> None:
    lab.hold()
    tickets = [lab.slot.submit(*each) for each in [("p", B, lab.reply("b")), ("q", A, lab.reply("a"))]]
    lab.engine.gate.set()
    [list(each) for each in tickets]
    assert lab.order[1:] == ["a:a", "b:b"]
    lab.order.clear()
    list(lab.slot.submit("x", A, lab.reply("back")))
    lab.hold()
    tickets = [lab.slot.submit(*each) for each in [("p", B, lab.reply("b")), ("q", A, lab.reply("a"))]]
    lab.clock.now += SWITCH_S
    lab.engine.gate.set()
    [list(each) for each in tickets]
    assert lab.order[2:] == ["b:b", "a:a"]


def test_a_switch_that_fails_leaves_the_slot_in_use(lab: Lab) -> None:
    lab.models.unknown.add("b")
    with pytest.raises(LocalqError, match="no such model"):
        list(lab.slot.submit("one", B, lab.reply("x")))
    assert lab.slot.state().model is None
    assert reason(list(lab.slot.submit("one", A, lab.reply("y")))) == "length"


@pytest.mark.parametrize("keep_alive_s", [0.0, 0.05])
def test_an_idle_model_is_unloaded_and_loaded_again(keep_alive_s: float) -> None:
    lab = Lab(keep_alive_s, clock=time.monotonic)
    try:
        deadline = time.monotonic() + 5
        while lab.slot.state().loaded is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        state = lab.slot.state()
        assert (state.model, state.loaded) == ("a", None)
        assert lab.slot.model is not None  # its tokenizer counts tokens meanwhile
        assert reason(list(lab.slot.submit("one", A, lab.reply("y")))) == "length"
        assert lab.models.log[:3] == ["load a", "close", "load a"]
        assert lab.watcher.said[0] == "a: unloaded after being idle"
    finally:
        lab.slot.close(5)


def test_state_tells_when_an_idle_model_will_be_unloaded() -> None:
    lab = Lab(60.0)
    try:
        assert lab.slot.state().unloads_at is not None
        lab.hold()
        state = lab.slot.state()
        assert (state.busy, state.unloads_at) == (True, None)
        lab.engine.gate.set()
        list(lab.held)
    finally:
        lab.slot.close(5)


def test_where_the_engine_dies_all_open_jobs_get_the_error_and_the_next_loads_again(lab: Lab) -> None:
    lab.hold()
    waiting = [lab.slot.submit(f"client {number}", A, lab.reply("x")) for number in range(3)]
    lab.engine.die_at = 0
    lab.engine.gate.set()
    for each in [lab.held, *waiting]:
        with pytest.raises(LocalqError, match="stopped unexpectedly"):
            list(each)
    lab.engine.die_at = None
    assert reason(list(lab.slot.submit("one", A, lab.reply("y")))) == "length"
    assert lab.order == ["held:a", "y:a"]
    assert lab.models.log == ["load a", "load a"]


def test_a_load_that_fails_is_the_error_of_its_job(lab: Lab) -> None:
    lab.engine.alive = False
    lab.engine.load_error = DEAD
    with pytest.raises(LocalqError, match="stopped unexpectedly"):
        list(lab.slot.submit("one", A, lab.reply("x")))


def test_at_the_end_what_waits_is_refused_and_what_runs_is_finished(lab: Lab) -> None:
    lab.hold()
    waiting = lab.slot.submit("one", A, lab.reply("x"))
    lab.slot.drain(5)
    with pytest.raises(SlotClosed):
        list(waiting)
    with pytest.raises(SlotClosed):
        lab.slot.submit("late", A, lab.reply("x"))
    lab.engine.gate.set()
    assert reason(list(lab.held)) == "length"


def test_at_the_end_a_long_reply_is_cut(lab: Lab) -> None:
    lab.hold()
    lab.slot.close(0.05)
    with pytest.raises(SlotClosed):
        list(lab.held)
    assert lab.models.log[-1] == "close"
