"""Summing up the oldest turns: what the model then reads, what is kept, how it is taken back."""

from __future__ import annotations

import sqlite3

import pytest

from localq.chat import compaction, prompt
from localq.chat.history.conversation import Message, TurnSummary, with_summary
from localq.chat.history.store import ConversationStore
from localq.chat.reply import ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.worker.messages import Load
from tests.support.chat.scripted_client import DEAD, CharTokenizer, ScriptedClient, streamed
from tests.support.chat.scripted_turns import command, said, session_over


def test_the_oldest_turns_are_read_as_their_summary_and_kept_as_they_were(tmp_path):
    store = ConversationStore(tmp_path / "sessions.db")
    session = session_over(["1"], ["2"], ["3"], ["<think>h</think>short"], ["4"], store=store)
    session.system = "Be brief."
    said(session, "a", "b", "c")
    session.stop_strings = ("short",)  # of the conversation's replies, not of the summary
    session.max_tokens = 5
    text, reply, told = streamed(command(session, "/compact"))
    assert text.endswith("short")
    assert reply.text == "short"
    asked = session.client.prompts[3]
    assert "User: a\n\nAssistant: 1\n\nUser: b\n\nAssistant: 2<" in asked
    assert "User: c" not in asked
    assert session.client.generated[3].max_tokens == 1024
    assert "oldest 4 messages" in told[0]
    assert "this summary now replaces the oldest 4 messages" in told[-1]
    assert [m.content for m in session.messages] == ["Be brief.", "a", "1", "b", "2", "c", "3"]
    said(session, "d")
    read = f"<system>Be brief.<user>{with_summary('short', 'c')}<assistant>3<user>d<assistant>"
    assert session.client.prompts[-1] == read
    assert "4 messages have been replaced by a summary" in command(session, "/tokens")
    again = store.find(None)
    assert again.conversation.summaries == session.conversation.summaries == [TurnSummary("short", 3, 5)]
    assert ChatSession(session.client, Load("path"), CharTokenizer(), record=again).prompt_messages() == (
        session.prompt_messages()
    )


class Narrow(CharTokenizer):
    """Its template takes no more than 1000 characters."""

    def chat_text(self, messages: list[dict[str, str]], **variables: object) -> str:
        if len(text := super().chat_text(messages)) > 1000:
            raise LocalqError("chat template", "the conversation is too long")
        return text


@pytest.mark.parametrize("last", [200, 600])
def test_a_conversation_longer_than_its_template_takes_is_summed_up(tmp_path, last):
    store = ConversationStore(tmp_path / "sessions.db")
    client = ScriptedClient(*[["short"]] * 9, context_size=1200)
    session = ChatSession(client, Load("path", LoadOptions("model")), Narrow(), store=store)
    for size in (200, 200, last):
        session.conversation.add(Message("assistant", "y" * size), session.conversation.add_user("x" * size))
    _, _, told = streamed(command(session, "/compact"))
    assert "this summary now replaces the oldest 4 messages. To undo" in told[-1]
    assert store.find(None).conversation.summaries == [TurnSummary("short", 3, 5)]


@pytest.mark.parametrize("reason", ["length", "context"])
def test_a_summary_that_was_cut_is_told_of(reason):
    session = said(session_over(["1"], ["2"], ["the passw"]), "a", "b")
    session.client.reason = reason
    _, _, told = streamed(command(session, "/compact"))
    assert told[1].startswith("the summary is incomplete: it reached its limit of 1024 tokens")
    assert "this summary now replaces the oldest 2 messages" in told[2]
    assert session.prompt_messages()[0].content == with_summary("the passw", "b")


def test_nothing_is_read_right_behind_what_was_summed_up():
    session = said(session_over(["1"], ["2"], ["sum"]), "a", "b")
    streamed(command(session, "/compact"))
    session.conversation.undo()
    for show in (session.prompt_text, lambda: command(session, "/tokens")):
        with pytest.raises(LocalqError, match="there is no message after the summary yet"):
            show()


def test_a_message_without_a_reply_is_no_reply_to_go_on_with_or_to_edit():
    session = said(session_over(["1"], [DEAD], ["2"]), "a")
    with pytest.raises(LocalqError):
        said(session, "b")
    for line in ("/continue", "/edit -a otherwise"):
        with pytest.raises(LocalqError, match=r"there is no reply to .*Generate one with /regen") as caught:
            command(session, line)
        assert caught.value.exit_code == ExitCode.USAGE
    streamed(command(session, "/regen"))
    assert [message.content for message in session.messages] == ["a", "1", "b", "2"]


def test_undo_right_behind_it_takes_it_back_and_later_takes_back_messages_first(tmp_path):
    store = ConversationStore(tmp_path / "sessions.db")
    session = said(session_over(["1"], ["2"], ["sum"], ["3"], ["sum"], store=store), "a", "b")
    streamed(command(session, "/compact"))
    said(session, "c")
    assert command(session, "/undo") == "removed: c"
    assert store.find(None).conversation.model_context()[0].text == "sum"
    assert "original turns again" in command(session, "/undo")
    assert store.find(None).conversation.summaries == []
    assert [m.content for m in session.prompt_messages()] == ["a", "1", "b", "2"]
    with pytest.raises(LocalqError, match="has not been compacted"):
        command(session, "/compact off")
    streamed(command(session, "/compact"))
    assert "original turns again" in command(session, "/compact off")
    assert command(session, "/undo") == "removed: b"


def test_a_second_summary_takes_the_first_into_account_and_other_branches_do_without():
    session = said(session_over(["1"], ["2"], ["one"], ["3"], ["4"], ["two"], ["5"]), "a", "b")
    streamed(command(session, "/compact"))
    said(session, "c", "d")
    streamed(command(session, "/compact"))
    asked = session.client.prompts[-1]
    assert "Summary of the earlier conversation" in asked
    assert "one" in asked
    assert "User: b" in asked
    assert "User: a" not in asked
    assert session.prompt_messages()[0].content == with_summary("two", "d")
    for _ in range(3):
        command(session, "/undo")  # the second summary, d, c
    assert session.prompt_messages()[0].content == with_summary("one", "b")
    session.clear()
    said(session, "anew")
    assert session.client.prompts[-1] == "<user>anew<assistant>"


@pytest.mark.parametrize("script", [["half", DEAD], [" \n"]])
def test_a_summary_that_fails_changes_nothing(script):
    session = said(session_over(["1"], ["2"], script, ["3"]), "a", "b")
    with pytest.raises(LocalqError):
        streamed(command(session, "/compact"))
    assert session.conversation.summaries == []
    said(session, "c")
    assert session.client.prompts[-1] == "<user>a<assistant>1<user>b<assistant>2<user>c<assistant>"


def test_an_interrupted_summary_changes_nothing():
    session = said(session_over(["1"], ["2"], ["half ", "a sum"], ["sum"]), "a", "b")
    for part in command(session, "/compact"):
        if isinstance(part, ReplyPiece) and part.text:
            session.stop()
    assert (part.reason, part.notices) == ("cancelled", ("stopped; nothing changed",))
    assert session.conversation.summaries == []
    assert streamed(command(session, "/compact"))[0] == "sum"  # that stop was meant for the other


def test_what_is_longer_than_the_context_is_summed_up_in_several_passes():
    session = session_over(["1"], ["2"], ["first"], ["second"], ["third"], ["last"], context_size=1000)
    long = "".join(f"word {number} " for number in range(100))
    said(session, "a", long[:700])
    session.conversation.add(Message("user", long), session.conversation.head)
    session.conversation.add(Message("assistant", "3"), session.conversation.head)
    count = len(session.client.prompts)
    session.client.scripts = [["sum"] for _ in range(20)]
    text, _, told = streamed(command(session, "/compact"))
    asked = session.client.prompts[count:]
    assert len(asked) > 1
    assert f"pass 1 of {len(asked)}" in told[0]
    assert all(len(each) + 125 <= 1000 for each in asked)
    assert text == "sum"
    assert "Summary of the earlier" not in asked[0]
    assert all("Summary of the earlier conversation (include it in your notes)" in each for each in asked[1:])
    assert session.conversation.turns[session.conversation.model_context()[0].upto].message.content == "2"


def test_the_newest_quarter_stays_and_one_exchange_is_refused():
    session = session_over(*[["x" * 49] for _ in range(8)], ["sum"])
    for _ in range(1):
        said(session, "y")
        with pytest.raises(LocalqError, match="too short"):
            streamed(command(session, "/compact"))
    said(session, *"y" * 7)
    streamed(compaction.compact(session))
    assert len(session.conversation.model_context()[1]) == 4  # two exchanges of eight
    with pytest.raises(LocalqError, match="unexpected argument"):
        command(session, "/compact now")


def test_a_context_without_room_for_a_summary_is_said():
    session = said(session_over(["1"], ["2"], context_size=300), "a", "b")
    with pytest.raises(LocalqError, match="300 tokens is too small"):
        streamed(command(session, "/compact"))


def test_a_full_context_offers_it_by_name():
    assert "/compact" in prompt.fill_warning(95, 100)
    assert "/compact" in prompt.omission_notice(prompt.Prompt([1], 2), 0)


def test_a_file_from_before_there_were_summaries_gets_them_and_stays_readable_by_what_wrote_it(tmp_path):
    path = tmp_path / "sessions.db"
    session = said(session_over(["1"], ["2"], ["sum"], store=ConversationStore(path)), "a", "b")
    with sqlite3.connect(path) as db:
        db.execute("DROP TABLE summaries")
    assert ConversationStore(path).find(None).conversation.messages() == session.messages
    streamed(command(session, "/compact"))
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
        assert db.execute("SELECT content FROM summaries").fetchall() == [("sum",)]
    store = ConversationStore(path)
    store.delete(session.record.id)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE sessions SET deleted_s = 1")
    store.check()
    with sqlite3.connect(path) as db:
        assert db.execute("SELECT count(*) FROM summaries").fetchone() == (0,)


def test_two_processes_may_sum_up_the_same_turns(tmp_path):
    store = ConversationStore(tmp_path / "sessions.db")
    one = said(session_over(["1"], ["2"], ["one"], ["3"], store=store), "a", "b")
    other = session_over(["other"], store=store)
    other.record = store.find(None)
    streamed(command(one, "/compact"))
    streamed(command(other, "/compact"))
    said(one, "c")
    assert one.prompt_messages()[0].content == with_summary("one", "b")
    both = store.find(None)
    assert [each.text for each in both.conversation.summaries] == ["one", "other"]
    assert both.conversation.model_context()[0].text == "other"
    again = ChatSession(one.client, Load("path"), CharTokenizer(), record=both, store=store)
    command(again, "/compact off")
    assert store.find(None).conversation.summaries == []


def test_a_summary_in_the_middle_of_an_exchange_is_damage(tmp_path):
    path = tmp_path / "sessions.db"
    said(session_over(["1"], store=ConversationStore(path)), "a")
    for upto, code in ((1, ExitCode.BAD_FILE), (99, ExitCode.BAD_FILE), (2, None)):
        with sqlite3.connect(path) as db:
            db.execute("DELETE FROM summaries")
            db.execute("INSERT INTO summaries VALUES (NULL, 1, ?, 2, 'x')", (upto,))
        if code is None:
            assert ConversationStore(path).find(None).conversation.model_context() == (TurnSummary("x", 1, 1), [])
            continue
        with pytest.raises(LocalqError) as caught:
            ConversationStore(path).find(None)
        assert caught.value.exit_code == code
