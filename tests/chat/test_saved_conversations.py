"""Conversations that are saved, branch and stop at strings, driven headless."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest

from localq.chat import open_conversation
from localq.chat.attachments import Attachment
from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.history.store import ConversationStore
from localq.chat.reply import Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.sampling import Sampling
from localq.sanitize import sanitize
from localq.stats import Stats
from localq.text.grammar import Grammar
from localq.text.tokenizer import Tokenizer
from localq.worker.messages import Done, Load
from tests.support.chat.scripted_client import DEAD, CharTokenizer, ScriptedClient, session_over, streamed
from tests.support.text import tiny_tokenizers


@pytest.fixture
def store(tmp_path) -> ConversationStore:
    return ConversationStore(tmp_path / "sessions.db")


def kept(store: ConversationStore) -> list[tuple[str, bool]]:
    conversation = store.find(None).conversation
    return [(conversation.turns[turn].message.content, conversation.turns[turn].message.complete)
            for turn in conversation.path()]  # fmt: skip


# ---- saving


def test_the_question_is_saved_before_the_answer_and_the_answer_when_it_ends(store):
    session = session_over(["Hel", "lo"], store=store)
    parts = session.ask("hi")
    assert kept(store) == [("hi", True)]  # before anything was loaded
    for part in parts:
        if isinstance(part, ReplyPiece) and part.text:
            assert kept(store) == [("hi", True)]
    assert kept(store) == [("hi", True), ("Hello", True)]
    saved = store.find(None).conversation
    assert saved.turns[1].stats == session.last.stats


def test_what_came_of_a_reply_is_saved_when_the_engine_dies_or_nobody_listens_any_more(store):
    session = session_over(["par", DEAD], ["left ", "early"], ["whole"], store=store)
    with pytest.raises(LocalqError, match="SIGKILL"):
        streamed(session.ask("one"))
    assert kept(store)[-1] == ("par", False)
    parts = session.ask("two")
    while not (isinstance(part := next(parts), ReplyPiece) and part.text):
        pass
    parts.close()
    assert kept(store)[-2:] == [("two", True), ("left ", False)]
    streamed(session.regenerate())
    assert [message.content for message in session.messages] == ["one", "par", "two", "whole"]
    assert len(store.find(None).conversation.turns) == 5


def test_a_stalled_reply_is_stopped_and_saved(store):
    session = session_over(["a", "b", "c"], store=store)
    for part in session.ask("go"):
        if isinstance(part, ReplyPiece) and part.text == "b":
            session.stop()
    assert kept(store) == [("go", True), ("ab", False)]


class StalledClient(ScriptedClient):
    """Says one word, then nothing until it is cancelled."""

    def generate(self, request):
        yield from itertools.islice(super().generate(request), 2)
        assert self.cancelled.wait(30)
        yield Done(request.id, "cancelled", Stats())


def test_a_stall_is_ended_from_another_thread_at_once(store):
    took = []
    for _ in range(20):
        session = ChatSession(StalledClient(["word"]), Load("path"), CharTokenizer(), store=store)
        asked: list[float] = []

        def stop(session=session, asked=asked) -> None:
            asked.append(time.perf_counter())
            session.stop()

        for part in session.ask("go"):
            if isinstance(part, ReplyPiece) and part.text:
                threading.Timer(0.01, stop).start()
        took.append(time.perf_counter() - asked[0])
        assert kept(store) == [("go", True), ("word", False)]
    assert max(took) < 15  # the stall lasts 30 s


def test_another_process_goes_on_where_one_stopped(store):
    session = session_over(["a"], ["b"], store=store)
    session.record.model = "tiny"
    session.system, session.sampling, session.stop_strings = "Be brief.", Sampling(0.5, seed=2), ("#",)
    streamed(session.ask("one"))
    later = session_over(["c"], store=store)
    later.record.model = "tiny"
    later.switch_to(store.find(None))
    assert later.sampling == Sampling(0.5, seed=2)
    assert later.stop_strings == ("#",)
    streamed(later.ask("two"))
    assert later.client.prompts == ["<system>Be brief.<user>one<assistant>a<user>two<assistant>"]
    assert kept(store) == [("one", True), ("a", True), ("two", True), ("c", True)]


def test_a_reply_that_ends_after_the_user_went_elsewhere_belongs_where_it_was_asked(store):
    session = session_over(["one ", "two"], ["other"], store=store)
    first = session.record
    for part in session.ask("count"):
        if isinstance(part, ReplyPiece) and part.text == "one ":
            session.switch_to(Record())
    assert session.messages == []
    assert [turn.message.content for turn in store.load(first.id).conversation.turns] == ["count", "one two"]
    streamed(session.ask("new"))
    assert len(store.summaries()) == 2


def test_settings_of_another_model_are_not_taken_over(store):
    session = session_over(["a"], store=store)
    session.record.model, session.sampling = "large", Sampling(2.0)
    streamed(session.ask("one"))
    later = session_over(store=store)
    later.record.model = "tiny"
    later.switch_to(store.find(None))
    assert later.sampling == Sampling()
    assert later.record.model == "tiny"


def test_what_answers_keep_to_is_taken_over_from_another_model_and_kept(store):
    session = session_over(["{}"], store=store)
    session.record.model, session.stop_strings, session.grammar = "large", ("END",), Grammar("json_schema", "{}")
    streamed(session.ask("one"))
    later = session_over(["{}"], store=store)
    later.record.model, later.stop_strings = "tiny", ("\n",)
    later.switch_to(store.find(None))
    streamed(later.ask("two"))
    assert (later.stop_strings, later.grammar) == (session.stop_strings, session.grammar)
    kept_settings = store.find(None).settings
    assert (kept_settings.stop, kept_settings.grammar) == (session.stop_strings, session.grammar)


def test_a_message_whose_answer_never_began_can_be_answered_after_a_restart(store):
    session = session_over([DEAD], store=store)
    with pytest.raises(LocalqError):
        streamed(session.ask("question"))
    later = session_over(["answer"], store=store)
    later.switch_to(store.find(None))
    assert later.messages == []
    streamed(later.regenerate())
    assert kept(store) == [("question", True), ("answer", True)]


def test_a_save_that_fails_is_told_and_made_up_for(store, tmp_path):
    session = session_over(["a"], ["b"], store=ConversationStore(tmp_path / "file" / "sessions.db"))
    (tmp_path / "file").write_text("in the way")
    _, _, notices = streamed(session.ask("one"))
    assert len(notices) == 1
    assert "not saved" in notices[0]
    (tmp_path / "file").unlink()
    _, _, notices = streamed(session.ask("two"))
    assert notices == []
    assert [content for content, _ in kept(session.store)] == ["one", "a", "two", "b"]


def test_a_save_that_fails_is_not_forgotten_over_another_conversation(store, monkeypatch):
    """The reply of a conversation ends after the user went on to another, and cannot be saved just then."""
    session = session_over(["one"], ["two"], store=store)
    first, parts = session.record, session.ask("a question")
    next(parts)
    session.switch_to(Record(model="tiny"))
    with monkeypatch.context() as patch:
        patch.setattr(store, "save", failing)
        notices = [notice for part in parts if isinstance(part, Reply) for notice in part.notices]
        assert any("not saved (will retry" in each for each in notices)
        assert session.unsaved == [first]
        session.conversation.add_user("elsewhere")
        assert "not saved" in session.try_save()
        assert len(session.unsaved) == 2
        told: list[str] = []
        lost = open_conversation.save_at_exit(session, told.append)
        assert lost is not None
        assert lost.exit_code == ExitCode.DISK
        assert "were not saved" in told[0]
    assert session.try_save() == ""
    assert session.unsaved == []
    assert store.load(first.id).conversation.messages()[-1].content == "one"
    assert open_conversation.save_at_exit(session, told.append) is None


def failing(record):
    raise LocalqError("sessions.db", "the disk is full", "Make room.", ExitCode.DISK)


def test_a_regeneration_that_fails_leaves_the_reply_that_was_there(store):
    session = session_over(["good"], [DEAD], ["better"], store=store)
    streamed(session.ask("one"))
    with pytest.raises(LocalqError):
        streamed(session.regenerate())
    assert [message.content for message in session.messages] == ["one", "good"]
    streamed(session.edit("two"))
    assert [message.content for message in session.messages] == ["two", "better"]
    assert [content for content, _ in kept(store)] == ["two", "better"]


def test_files_go_before_the_next_message_only():
    session = session_over(["a"], ["b"])
    session.attached.append(Attachment("notes.txt", "milk"))
    streamed(session.ask("What is missing?"))
    streamed(session.ask("And now?"))
    assert session.client.prompts[0] == "<user>notes.txt:\n\nmilk\n\nWhat is missing?<assistant>"
    assert session.client.prompts[1].endswith("<user>And now?<assistant>")


# ---- stop strings, and streams that equal their end


def test_a_stop_string_ends_the_reply_as_a_stop_and_cancels_the_rest():
    session = session_over(["one\n", "#", "## tw", "o", "never"])
    session.stop_strings = ("###",)
    text, reply, notices = streamed(session.ask("list"))
    assert (text, reply.text, reply.reason, notices) == ("one\n", "one\n", "stop", [])
    assert session.client.cancelled.is_set()
    assert session.messages[-1] == Message("assistant", "one\n")


CORPUS = [
    "Grüße, naïve café — „Zitat“.", "Привет, как дела?", "日本語のテキスト。漢字かな", "한국어 문장입니다",
    "مرحبا بالعالم",
    "שלום עולם", "नमस्ते दुनिया", "สวัสดีชาวโลก", "👩‍👩‍👧‍👦 family 🏳️‍🌈 flag 🇩🇪", "e\u0301 combining \u1e69",
    "a\x1b[31mred\x1b]52;c;eA==\x07b", "\u202eevil\u2066x", "tab\tline\n", "\U00020000 rare", "½ ‰ ∑ ∞",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["byte_level", "llama2", "unigram"])
def test_what_streams_is_what_stays_over_many_languages(kind):
    backend = getattr(tiny_tokenizers, kind)()
    tokenizer = Tokenizer(backend, {}, "scripted", frozenset())
    rng = random.Random(5)
    for _ in range(150):
        ids = tokenizer.encode("".join(rng.choices(CORPUS, k=rng.randint(1, 4))))
        if rng.random() < 0.5:  # cut in the middle of a character, or anything at all
            ids = [*ids[: rng.randint(0, len(ids))], *rng.choices(range(backend.get_vocab_size()), k=rng.randint(0, 9))]
        final = sanitize(tokenizer.decode(ids))
        stop = (final[5:8],) if len(final) > 8 and rng.random() < 0.5 else ()
        pieces, place = [], 0
        while place < len(ids):
            size = rng.randint(1, 4)
            pieces.append("".join(map(chr, ids[place : place + size])))  # the scripted client sends ord()s
            place += size
        session = ChatSession(ScriptedClient(pieces, context_size=10**6), Load("path"), tokenizer, stop_strings=stop)
        text = ""
        for part in session.complete([1], session.ensure_loaded()):
            text += part.text if isinstance(part, ReplyPiece) else ""
        assert text == session.last.text == (final.split(stop[0])[0] if stop else final)
