"""The tree of turns, and stop strings."""

from __future__ import annotations

import random

import pytest

from localq.chat.history.conversation import Conversation, Message
from localq.chat.history.export import code_blocks
from localq.chat.stop_strings import Matcher, validate
from localq.errors import LocalqError


def talk(*replies: str) -> Conversation:
    """Messages 1, 2, ... with these replies."""
    conversation = Conversation()
    for number, reply in enumerate(replies, 1):
        conversation.add(Message("assistant", reply), conversation.add_user(str(number)))
    return conversation


def said(conversation: Conversation) -> list[str]:
    return [message.content for message in conversation.messages()]


def test_edited_and_regenerated_turns_are_branches_that_can_be_gone_back_to():
    conversation = talk("a", "b")
    conversation.add(Message("assistant", "c"), conversation.edit_user("2 otherwise"))
    assert said(conversation) == ["1", "a", "2 otherwise", "c"]
    conversation.add(Message("assistant", "d"), conversation.last_user())
    assert said(conversation) == ["1", "a", "2 otherwise", "d"]
    last = conversation.last_reply()
    assert [conversation.turns[turn].message.content for turn in conversation.siblings(last)] == ["c", "d"]
    conversation.switch_to(1)  # of the turns behind the first reply, the newest
    assert said(conversation) == ["1", "a", "2 otherwise", "d"]
    conversation.switch_to(2)
    assert said(conversation) == ["1", "a", "2", "b"]


def test_an_earlier_message_can_be_edited():
    conversation = talk("a", "b", "c")
    conversation.edit_user("new", 2)
    assert said(conversation) == ["1", "a"]  # as far as it is answered
    assert conversation.turns[conversation.last_user()].message.content == "new"
    with pytest.raises(LocalqError, match="no message to edit"):
        conversation.edit_user("new", 1)  # that is a reply


def test_undo_goes_back_turn_by_turn_and_then_says_that_there_is_nothing():
    conversation = talk("a", "b")
    assert [conversation.undo(), conversation.undo()] == ["2", "1"]
    assert said(conversation) == []
    with pytest.raises(LocalqError, match="nothing to undo") as caught:
        conversation.undo()
    assert caught.value.exit_code == 2
    conversation.add(Message("assistant", "z"), conversation.add_user("anew"))
    assert said(conversation) == ["anew", "z"]
    assert len(conversation.turns) == 6


def test_a_message_without_an_answer_is_replaced_by_the_next():
    conversation = talk("a")
    conversation.add_user("unanswered")
    assert said(conversation) == ["1", "a"]
    conversation.add(Message("assistant", "b"), conversation.add_user("2"))
    assert said(conversation) == ["1", "a", "2", "b"]


def test_every_turn_is_reached_by_going_back_and_taking_alternatives():
    rng = random.Random(5)
    for _ in range(30):
        conversation = Conversation()
        for step in range(12):
            if conversation.head is not None and rng.random() < 0.6:
                if rng.random() < 0.5:
                    conversation.undo()
                else:
                    conversation.head = None  # cleared
            last = conversation.last_user()
            user = conversation.add_user(str(step)) if last is None or rng.random() < 0.6 else last
            if rng.random() < 0.8:
                conversation.add(Message("assistant", str(step)), user)
        heads, left = set(), [conversation.head]
        while left:
            conversation.head = left.pop()
            if conversation.head not in heads:
                heads.add(conversation.head)
                alternatives, here = conversation.alternatives(), conversation.head
                for turn in alternatives:
                    conversation.switch_to(turn)
                    left.append(conversation.head)
                conversation.head = here
                if here is not None:
                    conversation.undo()
                    left.append(conversation.head)
        parents = {turn.parent for turn in conversation.turns}
        assert heads >= set(range(len(conversation.turns))) - parents


def test_a_title_is_the_first_words_on_one_line():
    conversation = Conversation()
    assert conversation.title() == ""
    conversation.add_user("  two\n words " + "x" * 100)
    assert conversation.title().startswith("two words xxx")
    assert len(conversation.title()) == 60


def reference(text: str, strings: list[str]) -> str:
    return text[: min((place for s in strings if (place := text.find(s)) >= 0), default=len(text))]


def test_a_text_ends_before_the_first_stop_string_however_it_is_cut():
    rng, matched = random.Random(3), 0
    for _ in range(4000):
        text = "".join(rng.choices("ab#\n", k=rng.randint(0, 24)))
        strings = ["".join(rng.choices("ab#\n", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        matcher, got, place = Matcher(strings), "", 0
        while place < len(text):
            size = rng.randint(1, 6)
            got += matcher.push(text[place : place + size])
            place += size
        assert got + matcher.finish() == reference(text, strings)
        assert matcher.has_matched() == any(s in text for s in strings)
        matched += matcher.has_matched()
    assert 1000 < matched < 3900


def test_what_cannot_begin_a_stop_string_is_not_held_back():
    matcher = Matcher(["###"])
    assert [matcher.push(piece) for piece in ("a", "b#", "#", "c", "#")] == ["a", "b", "", "##c", ""]
    assert matcher.finish() == "#"


@pytest.mark.parametrize("strings", [[""], ["x" * 1001], ["x"] * 17])
def test_what_cannot_be_a_stop_string_is_refused(strings):
    with pytest.raises(LocalqError, match="stop") as caught:
        validate(strings)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("no code", []),
        ("a\n```py\nx = 1\n\ny\n```\nb\n```\nz\n```", ["x = 1\n\ny", "z"]),
        ("````md\n```\ninner\n```\n````", ["```\ninner\n```"]),
        ("~~~\na ``` b\n```\n~~~", ["a ``` b\n```"]),
        ("```py\ncut of", ["cut of"]),
        ("```inline``` and ```more```", []),
    ],
)
def test_blocks_of_code_are_found_as_markdown_has_them(text, blocks):
    assert code_blocks(text) == blocks
