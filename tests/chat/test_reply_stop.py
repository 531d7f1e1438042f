"""A reply that is stopped before it has begun."""

from __future__ import annotations

import pytest

from localq.chat.session import ChatSession
from localq.planner.load_options import LoadOptions
from localq.worker.messages import Generate, Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient


class Remembers(ScriptedClient):
    """As the engine process: what is cancelled before it comes does not run."""

    def __init__(self, *scripts: list[str]) -> None:
        super().__init__(*scripts)
        self.cancelled_ids: list[int] = []

    def cancel(self, id: int) -> None:
        self.cancelled_ids.append(id)

    def generate(self, request: Generate):
        events = super().generate(request)
        yield next(events)
        if request.id in self.cancelled_ids:
            self.cancelled.set()
        yield from events


@pytest.fixture
def session():
    return ChatSession(Remembers(["one"], ["two"]), Load("path", LoadOptions("model")), CharTokenizer())


def test_stopped_between_the_message_and_the_first_step(session):
    parts = session.ask("hello")
    session.stop()
    last = list(parts)[-1]
    assert (last.reason, last.text) == ("cancelled", "")


def test_stopped_while_the_model_is_loaded(session):
    load = session.client.load
    session.client.load = lambda *arguments: (session.stop(), load(*arguments))[1]
    assert list(session.ask("hello"))[-1].reason == "cancelled"


def test_a_stop_that_comes_after_the_end_does_not_reach_the_next_reply(session):
    assert list(session.ask("hello"))[-1].reason == "stop"
    session.stop()
    assert list(session.ask("again"))[-1].text == "two"
    assert session.client.cancelled_ids == []
