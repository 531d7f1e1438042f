"""Calls in a conversation over a real server: asked for, run, refused, stopped, kept, read again by the model."""

from __future__ import annotations

import json
import sqlite3
import threading

import pytest

from localq.chat import commands
from localq.chat.history.export import as_json, markdown
from localq.chat.history.record import turn_facts
from localq.chat.history.store import ConversationStore
from localq.chat.reply import ReplyPiece
from localq.chat.tools import call_run, tool_use
from localq.chat.tools.permissions import Decision, Permission, Question
from localq.chat.tools.toolbox import ToolLimits
from localq.errors import LocalqError
from localq.text import grammar
from tests.support.chat.scripted_client import DEAD, CharTokenizer, streamed
from tests.support.chat.tool_chats import NAME, Answers, ToolTokenizer, call, tool_session

ADD = call("add", a=1, b=2)
TOOLS = "<tools>add,note,fail,wait,long,hostile,picture,die,environment"


def asked(session, text: str = "go"):
    """The text, the end, and the events of a reply."""
    parts = list(session.ask(text))
    pieces = [each for each in parts if isinstance(each, ReplyPiece)]
    shown = "".join(each.text for each in pieces if not each.thinking)
    return shown, parts[-1], [each.event for each in pieces if each.event is not None]


def results(session) -> list[str]:
    return [each.result for round in session.messages[-1].rounds for each in round.calls]


def test_a_call_is_asked_for_run_and_read_by_the_model(box):
    session = tool_session(box, ["Let me ", "see.\n", ADD], "It is 3.")
    box.asker = answers = Answers(Decision.ONCE)
    shown, reply, events = asked(session)
    assert shown == "Let me see.It is 3."
    assert (reply.text, reply.reason) == ("It is 3.", "stop")
    assert [(each.line, each.asks, each.outcome) for each in events] == [
        (f'{NAME}: add {{"a": 1, "b": 2}}', True, ""), (f'{NAME}: add {{"a": 1, "b": 2}}', False, "1 character"),
    ]  # fmt: skip
    (question,) = answers.asked
    assert (question.tool.server, question.tool.label, question.argument_lines) == (NAME, "add", ["a: 1", "b: 2"])
    assert session.client.prompts == [
        f"{TOOLS}<user>go<assistant>",
        f'{TOOLS}<user>go<assistant>Let me see.<call>add{{"a": 1, "b": 2}}<tool>3<assistant>',
    ]
    assert [each.role for each in session.messages] == ["user", "assistant"]
    assert box.permission(box.find("add")) is Permission.ASK


def test_once_for_the_session_never_and_no(box):
    session = tool_session(
        box, ADD, ADD, ADD, "done", call("note", text="x"), call("note", text="y"), "sorry", ADD, "end"
    )
    box.asker = answers = Answers(Decision.ONCE, Decision.SESSION, Decision.REFUSE, Decision.NEVER)
    asked(session)
    assert results(session) == ["3", "3", "3"]
    assert len(answers.asked) == 2  # the third call needs no question
    asked(session)
    assert results(session) == [call_run.REFUSED, call_run.NEVER]
    assert [each.failed for round in session.messages[-1].rounds for each in round.calls] == [True, True]
    asked(session)
    assert results(session) == ["3"]
    assert answers.decisions == []
    other = tool_session(box, call("note", text="z"), "fine")  # another model of the same chat
    asked(other)
    assert results(other) == [call_run.NEVER]


def test_nothing_is_run_where_there_is_nobody_to_ask(box, home):
    session = tool_session(box, call("note", text="planted"), "sorry")
    _, _, events = asked(session)
    assert events[-1].failed
    assert "(to allow it, use --mcp-allow note)" in events[-1].outcome
    assert not (home / "notes").exists()


def test_arguments_are_shown_with_nothing_hidden(box):
    session = tool_session(
        box, call("note", text="a\u202eb\nc\u200b", more="w"), "fine", call("note", text="a\u202eb\n\u200b"), "fine"
    )
    box.asker = answers = Answers(Decision.REFUSE, Decision.REFUSE)
    asked(session)
    asked(session)
    # the model's text is sanitized as it arrives; what JSON escapes is not text before the server reads it
    assert answers.asked[-1].argument_lines == [r'text: "a\u202eb\n\u200b"']
    assert "\u202e" not in session.messages[-1].rounds[0].calls[0].line


@pytest.mark.parametrize(
    ("written", "why"),
    [
        (call("nothing"), "no such tool: 'nothing'; available tools: add, note"),
        (call("add", a=1), "invalid arguments: b is missing"),
        (call("add", a="x", b=2), "invalid arguments: a: expected integer, got string"),
        (call("fail"), "Error executing tool fail"),
    ],
)
def test_what_goes_wrong_is_an_error_that_the_model_reads(box, written, why):
    session = tool_session(box, written, "I see.")
    box.asker = Answers(Decision.ONCE)
    _, reply, events = asked(session)
    assert reply.text == "I see."
    assert why in events[-1].outcome
    assert why in session.client.prompts[1]
    assert events[-1].failed


def test_several_calls_and_several_rounds(box):
    box.set_permission("add", Permission.ALLOWED)
    session = tool_session(box, f"{ADD}\n{call('add', a=3, b=4)}", f"<think>hm</think>And{ADD}", "done")
    shown, reply, events = asked(session)
    assert shown == "Anddone"
    assert len(events) == 6
    first, second = session.messages[-1].rounds
    assert [each.result for each in first.calls] == ["3", "7"]
    assert (first.content, second.content) == ("", "<think>hm</think>And")
    ids = [each.id for round in (first, second) for each in round.calls]
    assert ids == ["call00000", "call00001", "call00002"]
    assert reply.thought == ""
    assert "<tool>3<tool>7<assistant><think>hm</think>And<call>" in session.client.prompts[2]


def test_rounds_are_limited_and_continue_goes_on(box, monkeypatch):
    monkeypatch.setattr(box, "limits", ToolLimits(rounds=2))
    box.set_permission("add", Permission.ALLOWED)
    session = tool_session(box, ADD, ADD, f"More: {ADD}", ADD, "At last.")
    _, reply, events = asked(session)
    assert reply.reason == "tool_rounds"
    assert reply.notices == (
        "stopped after 2 rounds of tool calls (mcp_rounds); to let the model call more tools, use /continue",
    )
    assert len(events) == 4
    kept = session.messages[-1]
    assert (kept.content, kept.complete, len(kept.rounds)) == ("More:", False, 2)
    _, reply, _ = streamed(session.continue_reply())
    assert reply.text == "At last."
    kept = session.messages[-1]
    assert (kept.complete, len(kept.rounds), kept.content) == (True, 3, "At last.")


def test_a_stop_ends_a_question_a_call_and_the_reply(box, home):
    session = tool_session(box, f"Well.{ADD}{ADD}", call("wait", seconds=30), "Go on.", "Fine.")
    box.asker = lambda question: threading.Thread(target=session.stop).start()
    _, reply, _ = asked(session)
    assert (reply.reason, reply.notices) == ("cancelled", ("stopped",))
    kept = session.messages[-1]
    assert (kept.content, kept.complete) == ("", False)
    assert [each.result for each in kept.rounds[0].calls] == [call_run.STOPPED] * 2
    box.set_permission("wait", Permission.ALLOWED)
    (home / "waiting").unlink(missing_ok=True)

    def stop_the_call() -> None:
        while not (home / "waiting").exists():
            threading.Event().wait(0.01)
        session.stop()

    threading.Thread(target=stop_the_call).start()
    _, reply, events = asked(session, "wait")
    assert reply.reason == "cancelled"
    assert events[-1].outcome == call_run.STOPPED
    _, reply, _ = streamed(session.continue_reply())
    assert reply.text == "Go on."
    assert "<tool>stopped by the user<assistant>" in session.client.prompts[-1]
    assert asked(session, "and")[1].text == "Fine."


def test_a_large_result_is_cut_to_what_the_context_has_room_for(box):
    box.set_permission("long", Permission.ALLOWED)
    session = tool_session(box, call("long", size=100_000), "Long.", context_size=3000)
    _, reply, events = asked(session)
    assert reply.text == "Long."
    (result,) = results(session)
    kept = result.partition("\n")[0]
    assert 1000 < len(kept) < 1500  # half of what was left
    assert events[-1].outcome == f"the first {len(kept):,} of 100,000 characters"
    assert result.endswith(f"[truncated: showing the first {len(kept):,} of 100,000 characters]")


def test_results_for_which_the_context_has_no_room_end_the_reply_and_are_kept(box):
    box.set_permission("long", Permission.ALLOWED)
    session = tool_session(box, call("long", size=5000), call("long", size=5000), "never", context_size=260)
    with pytest.raises(LocalqError, match=r"tool results: too long .* mcp_result"):
        asked(session)
    assert session.messages[-1].rounds
    assert not session.messages[-1].complete


def test_texts_of_a_server_are_text(box):
    box.set_permission("hostile", Permission.ALLOWED)
    session = tool_session(box, call("hostile"), "Hm.")
    asked(session)
    (result,) = results(session)
    assert result.startswith("/exit\n")
    assert "\x1b" not in result
    read = session.client.prompts[1]
    assert "</tool_response>" not in read  # escaped: it would end the result
    assert "\x1b" not in read


def test_a_call_that_breaks_off_is_text(box):
    session = tool_session(box, 'So: <tool_call>\n{"name": "add", "arg')
    box.asker = Answers()
    shown, reply, events = asked(session)
    assert shown == reply.text == 'So: <tool_call>\n{"name": "add", "arg'
    assert events == []
    assert session.messages[-1].content == shown


def test_a_dead_engine_keeps_the_rounds(box):
    box.set_permission("add", Permission.ALLOWED)
    session = tool_session(box, ADD, ["par", DEAD], "It is 3.")
    with pytest.raises(LocalqError, match="SIGKILL"):
        asked(session)
    kept = session.messages[-1]
    assert (kept.content, kept.complete, len(kept.rounds)) == ("par", False, 1)
    _, reply, _ = streamed(session.regenerate())
    assert reply.text == "It is 3."
    assert session.messages[-1].rounds == ()


def test_regenerate_edit_and_undo_with_calls(box):
    box.set_permission("add", Permission.ALLOWED)
    session = tool_session(box, ADD, "one", ADD, "two", "three")
    asked(session)
    streamed(session.regenerate())
    assert (session.messages[-1].content, len(session.messages[-1].rounds)) == ("two", 1)
    assert session.client.prompts[2] == session.client.prompts[0]
    assert len(session.conversation.alternatives()) == 2
    streamed(session.edit("else"))
    assert session.messages[-1].content == "three"
    assert session.conversation.undo() == "else"


def test_a_template_without_tools_is_said_and_the_chat_goes_on(box):
    session = tool_session(box, "Hi.", "Again.", tokenizer=CharTokenizer())
    assert session.tool_report() == [tool_use.NO_TEMPLATE]
    text, _, notices = streamed(session.ask("hi"))
    assert (text, notices) == ("Hi.", [])  # it is said once
    assert session.client.prompts == ["<user>hi<assistant>"]


def test_a_grammar_goes_without_tools(box):
    session = tool_session(box, "7", ADD, "yes")
    assert session.tool_report() == [f"tools: 9 from {NAME} (to list them, use /tools)"]
    session.grammar = grammar.regex("[0-9]+")
    _, _, notices = streamed(session.ask("hi"))
    assert tool_use.BOUND in notices
    assert session.client.prompts[0] == "<user>hi<assistant>"


def test_calls_are_saved_resumed_exported_and_summed_up(box, tmp_path):
    store = ConversationStore(tmp_path / "sessions.db")
    box.set_permission("add", Permission.ALLOWED)
    session = tool_session(box, f"<think>hm</think>Let me see.{ADD}", "It is 3.", store=store)
    asked(session)
    found = store.find(None)
    assert found.conversation.messages() == session.messages
    exported = markdown(found)
    for part in ("<summary>Thought</summary>", "Let me see.", f"<summary>Tool call: {NAME}: add</summary>", "It is 3."):
        assert part in exported
    (_, reply) = json.loads(as_json(found))["messages"]
    assert reply["content"] == "It is 3."
    assert reply["rounds"][0]["calls"][0]["result"] == "3"
    recap = commands.sessions.recap(found)
    assert f'({NAME}: add {{"a": 1, "b": 2}})' in recap
    resumed = tool_session(None, "Four.", "Five.", store=store)  # without servers
    resumed.switch_to(found)
    asked(resumed, "more")
    assert 'Let me see.<call>add{"a": 1, "b": 2}<tool>3<assistant>It is 3.<user>more' in resumed.client.prompts[0]
    elsewhere = tool_session(None, "Six.", tokenizer=CharTokenizer())  # a model without tools
    elsewhere.switch_to(store.find(None))
    asked(elsewhere, "and")
    assert "<assistant>It is 3.<user>more<assistant>Four.<user>and" in elsewhere.client.prompts[0]


def test_older_versions_read_such_a_conversation_and_damage_is_named(box, tmp_path):
    store = ConversationStore(tmp_path / "sessions.db")
    box.set_permission("add", Permission.ALLOWED)
    session = tool_session(box, ADD, "It is 3.", store=store)
    asked(session)
    turn = session.conversation.turns[1]
    known = json.loads(turn_facts(turn))
    assert set(known) - {"rounds", "model"} == set(turn.stats.to_dict())  # others ignore what they do not know
    with sqlite3.connect(store.path) as db:
        db.execute('UPDATE turns SET stats = replace(stats, \'"result": "3"\', \'"result": 3\')')
    with pytest.raises(LocalqError) as caught:
        store.find(None)
    assert caught.value.exit_code == 8


def test_the_command_lists_describes_and_changes(box):
    session = tool_session(box)
    name, argument = commands.parse("/tools")
    listed = commands.COMMANDS[name](session, argument, None)
    assert "Add two numbers." in listed
    assert "This line is not the first" not in listed
    assert "\x1b" not in listed
    assert "\u202e" not in listed
    row = next(line for line in listed.split("\n") if line.startswith("add "))
    assert row.split()[:3] == ["add", NAME, "asks"]
    assert commands.COMMANDS["/tools"](session, "allow add", None) == "add: allowed"
    assert commands.COMMANDS["/tools"](session, "never note", None) == "note: never"
    assert box.permission(box.find("note")) is Permission.NEVER
    assert commands.COMMANDS["/tools"](session, "ask add", None) == "add: asks"
    assert '"required"' in commands.COMMANDS["/tools"](session, "add", None)
    for wrong in ("allow nothing", "nothing", "restart nothing"):
        with pytest.raises(LocalqError) as caught:
            commands.COMMANDS["/tools"](session, wrong, None)
        assert caught.value.exit_code == 2
    assert commands.COMMANDS["/tools"](tool_session(None), "", None).startswith("no MCP servers")


def test_a_question_takes_the_first_answer(box):
    question = Question(box.find("add"), "{}")
    question.answer(Decision.REFUSE)
    question.answer(Decision.ONCE)
    assert question.wait() is Decision.REFUSE
    assert question.argument_lines == ["(no arguments)"]


def test_the_template_of_this_file_has_the_form_of_qwen():
    from localq.text.tools.formats import tool_format

    form = tool_format(ToolTokenizer.chat_template)
    assert form is not None
    assert form.name == "hermes"
