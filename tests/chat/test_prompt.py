"""Conversations that outgrow their context: what is left out, read again and refused, driven headless."""

from __future__ import annotations

from typing import ClassVar

import pytest

from localq.chat import prompt
from localq.chat.history.conversation import Message
from localq.chat.history.store import ConversationStore
from localq.errors import ExitCode, LocalqError
from localq.text import harmony
from tests.support.chat.scripted_client import session_over, streamed


@pytest.fixture
def store(tmp_path) -> ConversationStore:
    return ConversationStore(tmp_path / "sessions.db")


SOON = (
    "(130 of 140 tokens). When it is full, the oldest turns are left out of the prompt; /compact replaces them with a "
    "summary, and /clear starts"
)
LEFT_OUT = (
    "the context is full: the oldest {} exchanges are left out of the prompt (not deleted), and the rest is "
    "reprocessed. /compact replaces the oldest turns with a summary instead"
)
# Message -> the exchanges before it that the model reads, and what is told: 140 tokens of context, one a character.
GOLDEN = [
    ([], []),
    ([0], []),
    ([0, 1], []),
    ([0, 1, 2], [f"the context is 93% full {SOON} over"]),
    ([2, 3], [LEFT_OUT.format(2)]),
    ([2, 3, 4], [f"the context is 93% full {SOON} over"]),
    ([4, 5], [LEFT_OUT.format(4)]),
    ([4, 5, 6], [f"the context is 93% full {SOON} over"]),
]


def test_the_oldest_turns_are_left_out_and_every_time_it_is_said():
    session = session_over(*[[str(number) * 10] for number in range(8)], context_size=140)
    session.system = "Brief."
    for number, (read, told) in enumerate(GOLDEN):
        _, reply, notices = streamed(session.ask(f"q{number}"))
        assert reply.text == str(number) * 10
        before = "".join(f"<user>q{turn}<assistant>{str(turn) * 10}" for turn in read)
        assert session.client.prompts[-1] == f"<system>Brief.{before}<user>q{number}<assistant>"
        assert notices == told
    assert [message.content for message in session.messages[1::2]] == [f"q{number}" for number in range(8)]
    assert [message.role for message in session.prompt_messages()] == ["system"] + ["user", "assistant"] * 4


def test_going_back_reads_again_what_was_left_out():
    session = session_over(*[["x" * 10]] * 9, context_size=140)
    for number in range(6):
        streamed(session.ask(f"q{number}"))
    assert len(session.prompt_messages()) < 12
    for _ in range(4):
        session.conversation.undo()
    assert len(session.prompt_messages()) == 4
    streamed(session.ask("anew"))
    assert session.client.prompts[-1].startswith("<user>q0<assistant>")


def test_what_one_long_message_left_out_is_read_again_when_that_is_taken_back():
    session = session_over(*[["x" * 10]] * 9, context_size=400)
    for number in range(5):
        streamed(session.ask(f"q{number}"))
    _, _, notices = streamed(session.ask("y" * 250))
    assert notices == [LEFT_OUT.format(4)]
    session.conversation.undo()
    _, _, notices = streamed(session.ask("anew"))
    assert notices == ["4 older exchanges fit in the context again; the prompt is reprocessed from there"]
    assert session.client.prompts[-1].startswith("<user>q0<assistant>")
    _, _, notices = streamed(session.ask("more"))
    assert notices == []


def test_as_many_exchanges_are_read_again_as_fit_below_the_target():
    def read(without: int) -> list[int]:
        return [0] * (10 * (10 - without))

    for before, after in ((6, 6), (7, 3), (9, 3)):  # 40, 30 and 10 of 100 tokens: half of the target is 37.5
        assert prompt.fit(read, 9, before, 100, None) == prompt.Prompt(read(after), after)
    found = prompt.fit(read, 9, 7, 100, None)
    assert prompt.omission_notice(found, 4).startswith("an older exchange fits")


def test_a_message_that_does_not_fit_alone_is_refused_and_the_conversation_goes_on():
    session = session_over(["a"], ["b"], context_size=140)
    streamed(session.ask("one"))
    with pytest.raises(
        LocalqError, match=r"too long for the 140-token context \(217 tokens, including the system prompt\)"
    ) as caught:
        streamed(session.ask("x" * 200))
    assert caught.value.exit_code == ExitCode.USAGE
    streamed(session.ask("two"))
    assert session.client.prompts[-1] == "<user>one<assistant>a<user>two<assistant>"


def test_a_limit_of_the_reply_makes_room_for_no_more_than_that():
    session = session_over(["a"], ["b"], context_size=200)
    session.max_tokens = 1
    streamed(session.ask("x" * 170))  # 187 with its frame, 13 free, where a sixteenth were 12
    streamed(session.ask("two"))
    assert session.client.prompts[-1] == "<user>two<assistant>"


def test_a_conversation_longer_than_any_template_takes_goes_on(store):
    long = session_over()
    for number in range(5000):
        long.conversation.add(Message("assistant", "y" * 120), long.conversation.add_user(f"{number} " + "x" * 120))
    store.save(long.record)
    session = session_over(["fine"], ["too"], store=store, context_size=9000)
    session.switch_to(store.find(None))
    _, _, notices = streamed(session.ask("and now?"))
    assert notices[0].startswith("the context is full: the oldest 49")
    assert 0.7 * 9000 < len(session.client.prompts[-1]) <= 0.75 * 9000
    with pytest.raises(LocalqError, match="far too many tokens"):
        streamed(session.ask("x" * 10**6))
    streamed(session.ask("again"))
    assert len(store.find(None).conversation.turns) == 10_005


class Ends:
    """A tokenizer whose turns end with 7, and its messages within one with 9."""

    stop_ids = frozenset({7})
    mark_ids: ClassVar[dict[int, str]] = {9: harmony.END, 8: harmony.START}


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        ([1, 2, 7, 3, 7, 4, 5], [3, 5]),  # a system prompt, a message, the start of the reply
        ([1, 2, 7, 3, 7, 8, 4, 9, 8], [3, 8]),
        ([1, 7, 2], [2]),
        ([1, 2], []),
    ],
)
def test_a_prompt_is_marked_behind_its_first_message_and_before_the_reply(ids, found):
    assert prompt.marks(Ends(), ids) == found
