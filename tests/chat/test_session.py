"""The conversation core, driven headless by a scripted client."""

from __future__ import annotations

import pytest

from localq.chat.history.conversation import Message
from localq.chat.reply import Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import LocalqError
from localq.planner.load_options import LoadOptions
from localq.worker.messages import Load
from tests.support.chat.scripted_client import DEAD, CharTokenizer, ScriptedClient, streamed


def session_over(client: ScriptedClient) -> ChatSession:
    return ChatSession(client, Load("path", LoadOptions("model")), CharTokenizer())


def texts(parts: object) -> tuple[str, Reply]:
    text, reply, _ = streamed(parts)
    return text, reply


def test_a_turn_is_rendered_streamed_and_kept():
    client = ScriptedClient(["Hel", "lo"], ["again"])
    session = session_over(client)
    session.system = "Be brief."
    streamed, reply = texts(session.ask("Hi"))
    assert streamed == reply.text == "Hello"
    assert client.prompts == ["<system>Be brief.<user>Hi<assistant>"]
    texts(session.ask("More"))
    assert client.prompts[1] == "<system>Be brief.<user>Hi<assistant>Hello<user>More<assistant>"
    assert [m.role for m in session.messages] == ["system", "user", "assistant", "user", "assistant"]


def test_stop_ends_the_reply_and_keeps_what_arrived():
    session = session_over(ScriptedClient(["one ", "two ", "three"]))
    streamed = ""
    for part in session.ask("count"):
        if isinstance(part, ReplyPiece) and part.text:
            streamed += part.text
            session.stop()
        elif isinstance(part, Reply):
            assert part.reason == "cancelled"
            assert part.notices == ("stopped",)
    assert streamed == "one "
    assert session.messages[-1] == Message("assistant", "one ", complete=False)


def test_a_dead_engine_loses_nothing_and_the_next_message_starts_a_new_one():
    client = ScriptedClient(["fine"], ["par", DEAD], ["better"])
    session = session_over(client)
    texts(session.ask("first"))
    with pytest.raises(LocalqError, match="SIGKILL"):
        texts(session.ask("second"))
    assert [m.content for m in session.messages] == ["first", "fine", "second", "par"]
    assert not session.messages[-1].complete
    texts(session.ask("third"))
    assert client.loads == 2
    assert client.prompts[-1].endswith("<user>second<assistant>par<user>third<assistant>")


def test_a_turn_that_failed_before_any_text_can_be_asked_again():
    client = ScriptedClient([DEAD], ["answer"])
    session = session_over(client)
    with pytest.raises(LocalqError):
        texts(session.ask("question"))
    assert session.messages == []
    assert texts(session.regenerate())[0] == "answer"
    assert [m.content for m in session.messages] == ["question", "answer"]


def test_regenerate_replaces_only_the_last_reply():
    client = ScriptedClient(["a"], ["b"], ["c"])
    session = session_over(client)
    texts(session.ask("1"))
    texts(session.ask("2"))
    texts(session.regenerate())
    assert [m.content for m in session.messages] == ["1", "a", "2", "c"]
    assert client.prompts[1] == client.prompts[2]


def test_regenerate_without_a_message_is_a_usage_error():
    with pytest.raises(LocalqError, match="no message") as caught:
        texts(session_over(ScriptedClient()).regenerate())
    assert caught.value.exit_code == 2


def test_clear_keeps_the_system_prompt():
    session = session_over(ScriptedClient(["x"]))
    session.system = "S"
    texts(session.ask("hi"))
    session.clear()
    assert session.messages == [Message("system", "S")]
    session.system = None
    assert session.messages == []


def test_a_context_that_fills_up_is_announced_once_and_when_full():
    client = ScriptedClient(["x" * 50], ["y"], ["z"], context_size=75)
    session = session_over(client)
    _, first = texts(session.ask("hi"))  # 6 + 2 + 11 + 50 of 75
    assert any("92% full" in line for line in first.notices)
    client.reason = "context"
    _, second = texts(session.ask("?"))
    assert [line for line in second.notices if "context is full" in line]
    assert not any("% full" in line for line in second.notices)


def test_control_characters_never_leave_the_session():
    session = session_over(ScriptedClient(["a\x1b]52;c;cm0=\x07b", "\x9b31mc\u202ed\te\n"]))
    streamed, reply = texts(session.ask("hi"))
    assert streamed == reply.text == "a]52;c;cm0=b31mcd\te\n"
