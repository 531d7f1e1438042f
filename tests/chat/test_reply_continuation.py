"""Going on with a reply that was cut or stopped, token by token."""

from __future__ import annotations

import pytest

from localq.chat.history.conversation import Message
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.text import thinking
from localq.text.tokenizer import Tokenizer
from localq.worker.messages import Load
from tests.support.chat.scripted_client import DEAD, ScriptedClient, streamed
from tests.support.chat.scripted_turns import command, said, session_over
from tests.support.text import tiny_tokenizers


def test_a_cut_reply_is_gone_on_with_token_by_token_and_the_shorter_one_stays():
    session = session_over(["one ", "two"], [" three", " four"], reason="length")
    said(session, "count")
    session.client.reason = "stop"
    text, reply, told = streamed(command(session, "/continue"))
    assert (text, reply.text, reply.reason, told) == (" three four", "one two three four", "stop", [])
    assert session.client.prompts[1] == "<user>count<assistant>one two"
    assert session.messages[-1] == Message("assistant", "one two three four")
    assert [session.conversation.turns[turn].message.content for turn in session.conversation.alternatives()] == [
        "one two", "one two three four"
    ]  # fmt: skip


def test_nothing_more_to_say_leaves_the_reply_as_it_is():
    session = said(session_over(["all"], []), "x")
    _, reply, told = streamed(command(session, "/continue"))
    assert (reply.text, told) == ("all", ["the model added nothing"])
    assert len(session.conversation.turns) == 2
    with pytest.raises(LocalqError, match="no reply to continue"):
        command(session_over(), "/continue")


def test_a_continuation_that_is_stopped_or_dies_keeps_what_came():
    session = said(session_over(["a"], [" b", DEAD], [DEAD], [" c", " d"]), "x")
    with pytest.raises(LocalqError, match="SIGKILL"):
        streamed(command(session, "/continue"))
    assert session.messages[-1] == Message("assistant", "a b", complete=False)
    with pytest.raises(LocalqError, match="SIGKILL"):
        streamed(command(session, "/continue"))
    assert session.messages[-1] == Message("assistant", "a b", complete=False)
    parts = command(session, "/continue")
    while not next(parts).text:
        pass
    parts.close()
    assert session.messages[-1] == Message("assistant", "a b c", complete=False)


def test_a_thought_goes_on_where_it_was_cut_also_one_that_the_prompt_opened():
    session = session_over(["<think>so"], [" so</think>", "yes"], reason="length")
    said(session, "x")
    _, reply, _ = streamed(command(session, "/continue"))
    assert (reply.thought, reply.text) == ("so so", "yes")
    assert session.messages[-1].content == "<think>so so</think>yes"
    opening = "<user>q<assistant><think>\n"
    assert thinking.continue_prompt(opening, "<think>\nso") == "<user>q<assistant><think>\nso"
    assert thinking.continue_prompt(opening, "edited") == f"{opening}\n</think>\n\nedited"
    assert thinking.continue_prompt("<assistant>", "plain") == "<assistant>plain"


def test_half_a_character_at_the_cut_becomes_whole():
    backend = tiny_tokenizers.byte_level()
    tokenizer = Tokenizer(
        backend, {}, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", frozenset({9})
    )
    ids = tokenizer.encode("ab \U0001f9a6 cd")
    half = next(at for at in range(1, len(ids)) if tokenizer.decode(ids[:at]).endswith("\ufffd"))
    client = ScriptedClient([[*ids[:half]]], [[*ids[half:]]], reason="length")
    session = ChatSession(client, Load("path"), tokenizer)
    said(session, "x")
    assert session.messages[-1].content == tokenizer.decode(ids[:half]).rstrip("\ufffd")  # which is none yet
    streamed(command(session, "/continue"))
    assert client.generated[1].prompt == [*client.generated[0].prompt, *ids[:half]]
    assert session.messages[-1].content == "ab \U0001f9a6 cd"


def test_half_a_character_that_the_model_ends_with_is_kept_as_it_decodes():
    backend = tiny_tokenizers.byte_level()
    tokenizer = Tokenizer(backend, {}, "{{ messages[0].content }}", frozenset({9}))
    ids = tokenizer.encode("ab \U0001f9a6")[:-1]
    session = ChatSession(ScriptedClient([[*ids]]), Load("path"), tokenizer)
    text, reply, _ = streamed(session.ask("x"))
    assert text == reply.text == tokenizer.decode(ids)
    assert text.endswith("\ufffd")
