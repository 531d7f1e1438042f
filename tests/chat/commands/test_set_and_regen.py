"""/set of limits and their short names, and /regen where the sampling gives the same reply again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from localq.chat import commands, open_conversation, reply_stream
from localq.chat.commands.models import SwitchModel
from localq.chat.history.store import ConversationStore
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.sampling import Sampling
from localq.settings import NO_LIMIT, Settings
from tests.support.chat.scripted_client import CharTokenizer, session_over, streamed


class Host:
    """A front end that shows nothing."""


def command(session: ChatSession, line: str):
    name, argument = commands.parse(line)
    return commands.COMMANDS[name](session, argument, Host())


def session_decoder(session: ChatSession):
    return reply_stream.reply_decoder(session.tokenizer, [1])


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(), "temperature 0 always gives the same reply; to vary replies, use /set temp 0.7"),
        (Sampling(temperature=1.0, seed=5), "seed 5 always gives the same reply; to vary replies, use /set seed none"),
        (Sampling(temperature=1.0), None),
    ],
)
def test_regen_says_where_it_gives_the_same_reply(sampling, said):
    session = session_over(["one"], ["one"])
    session.sampling = sampling
    streamed(session.ask("x"))
    text, reply, told = streamed(command(session, "/regen"))
    assert (text, reply.text) == ("one", "one")
    assert told == ([] if said is None else [said])


def test_regen_of_a_message_without_a_reply_says_nothing():
    session = session_over([LocalqError("engine process", "ended", "")], ["one"])
    with pytest.raises(LocalqError):
        streamed(session.ask("x"))
    assert streamed(command(session, "/regen"))[2] == []


def test_a_stop_between_the_command_and_its_reply_is_not_forgotten():
    session = session_over(["one"], ["t", "w", "o"])
    streamed(session.ask("x"))
    parts, cancelled = command(session, "/regen"), []
    session.client.cancel = cancelled.append
    session.stop()
    streamed(parts)
    assert cancelled == [session.client.generated[1].id]


def test_set_takes_the_short_name_and_limits():
    session = session_over()
    assert command(session, "/set temp 0.7") == "temperature = 0.7"
    assert session.sampling.temperature == 0.7
    assert command(session, "/set temp") == "temperature = 0.7"
    assert command(session, "/set max_tokens max") == "max_tokens = max"
    assert session.max_tokens == NO_LIMIT
    assert command(session, "/set max_tokens none") == "max_tokens = None"
    assert command(session, "/set loop_guard off") == "loop_guard = off"
    assert not session.loop_guard
    assert "loop_guard = off" in command(session, "/set").split("\n")
    with pytest.raises(LocalqError, match="is not true or false"):
        command(session, "/set loop_guard perhaps")


def test_set_changes_the_thinking_budget_and_what_prompts_keep_of_thoughts():
    session = session_over(["one"], tokenizer=Keeping())
    assert command(session, "/set think_budget 2k") == "think_budget = 2048"
    assert session.think_budget == 2048
    assert command(session, "/set think_budget max") == "think_budget = max"
    assert command(session, "/set think_budget 0") == "think_budget = 0"
    for wrong in ("-1", "many", "0.5"):
        with pytest.raises(LocalqError):
            command(session, f"/set think_budget {wrong}")
    assert session.think_budget == 0
    assert command(session, "/set think_budget none") == "think_budget = None"
    assert command(session, "/set preserve_thinking") == "preserve_thinking = auto (the model's default)"
    assert command(session, "/set preserve_thinking off") == "preserve_thinking = off"
    streamed(session.ask("x"))
    assert session.client.prompts == ["<user>x<assistant>False"]
    assert "preserve_thinking = off" in command(session, "/set").split("\n")
    with pytest.raises(LocalqError, match="not a valid value"):
        command(session, "/set preserve_thinking perhaps")
    other = session_over()
    with pytest.raises(LocalqError, match="does not support this option"):
        command(other, "/set preserve_thinking on")
    assert other.preserve_thinking == "auto"


class Keeping(CharTokenizer):
    """Its template has a switch for earlier thoughts."""

    chat_template = "scripted, with preserve_thinking"

    def chat_text(self, messages: list[dict[str, str]], **variables: object) -> str:
        return f"{super().chat_text(messages)}{variables.get('preserve_thinking', '')}"


def test_a_conversation_keeps_the_guard_of_its_replies(tmp_path):
    session = session_over(["one"], tokenizer=Keeping())
    session.store = ConversationStore(tmp_path / "sessions.sqlite")
    command(session, "/set loop_guard off")
    command(session, "/set think_budget 9")
    command(session, "/set preserve_thinking on")
    command(session, "/set max_tokens max")
    streamed(session.ask("x"))
    record = session.store.find(None)
    other = session_over()
    other.record.model = record.model
    other.switch_to(record)
    assert (other.loop_guard, other.max_tokens) == (False, NO_LIMIT)
    assert (other.think_budget, other.preserve_thinking) == (9, "on")
    now = open_conversation.resumed_settings(record, Settings(), {})
    assert (now.think_budget, now.preserve_thinking) == (9, "on")


def test_set_changes_drafts_and_says_where_that_has_no_effect():
    session = session_over(["one"])
    assert command(session, "/set draft off") == "draft = off"
    assert session.generate_request([1], session_decoder(session)).draft_tokens == 0
    assert command(session, "/set draft lookup") == "draft = lookup"
    assert command(session, "/set draft_max 3") == "draft_max = 3"
    assert session.generate_request([1], session_decoder(session)).draft_tokens == 3
    assert {"draft = lookup", "draft_max = 3"} <= set(command(session, "/set").split("\n"))
    session.loaded = replace(session.ensure_loaded(), draft_tokens=1)
    assert "loaded with drafts of at most 1 tokens, so restart localq with --draft-max 5" in command(
        session, "/set draft_max 5"
    )
    session.loaded = replace(session.loaded, no_drafts="the model has recurrent layers")
    assert command(session, "/set draft auto") == "draft = auto, but drafts stay off: the model has recurrent layers"
    with pytest.raises(LocalqError, match="draft heads"):
        command(session, "/set draft medusa")


def test_set_takes_the_mtp_block_of_the_model_or_says_why_not():
    session = session_over(["one"])
    session.record.model = "qwen3.5-4b"
    loaded = session.ensure_loaded()

    def state(mtp: str, **loading: str) -> None:
        options = replace(session.request.options, name="qwen3.5-4b", mtp=mtp)
        session.request, session.loaded = replace(session.request, options=options), replace(loaded, **loading)

    state("auto", draft_tokens=7, draft_model="mtp")
    assert command(session, "/set draft mtp") == "draft = mtp"
    assert session.generate_request([1], session_decoder(session)).ask_draft_model
    assert command(session, "/set draft lookup") == "draft = lookup"
    assert not session.generate_request([1], session_decoder(session)).ask_draft_model
    assert command(session, "/set draft auto") == "draft = auto"
    assert session.generate_request([1], session_decoder(session)).ask_draft_model
    session.loaded = None  # and not loaded yet
    assert command(session, "/set draft mtp") == "draft = mtp"
    state("")  # it was left out
    assert command(session, "/set draft mtp") == SwitchModel("qwen3.5-4b", draft="mtp")
    state("auto", draft_tokens=7, no_mtp="the files contain no MTP block")
    with pytest.raises(LocalqError, match=r"qwen3\.5-4b --draft mtp: the files contain no MTP block") as caught:
        command(session, "/set draft mtp")
    assert caught.value.exit_code == ExitCode.USAGE
    state("auto", no_drafts="models with recurrent layers can verify drafts only on the CPU")
    assert command(session, "/set draft mtp").startswith("draft = mtp, but drafts stay off: models with recurrent")


def test_set_names_a_draft_model_which_is_opened_with_the_model():
    session = session_over()
    session.record.model = "llama-3.1-8b"
    assert command(session, "/set draft llama-3.2-1b") == SwitchModel("llama-3.1-8b", draft="llama-3.2-1b")
    assert session.draft == "auto"
    with pytest.raises(LocalqError, match="nor a known model"):
        command(session, "/set draft llama-3.2-1bb")
    options = replace(session.request.options, draft_name="llama-3.2-1b")
    session.request, session.draft = replace(session.request, options=options), "llama-3.2-1b"
    assert session.generate_request([1], session_decoder(session)).ask_draft_model
    assert command(session, "/set draft lookup") == "draft = lookup"
    assert not session.generate_request([1], session_decoder(session)).ask_draft_model
    assert command(session, "/set draft llama-3.2-1b") == "draft = llama-3.2-1b"  # it is loaded
