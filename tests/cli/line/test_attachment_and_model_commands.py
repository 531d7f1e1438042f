"""Commands that came later: files in messages, other models, near matches."""

from __future__ import annotations

import contextlib
import io
import json
import sqlite3
import sys

import pytest

from localq.chat import attachments, commands, open_model, side_request
from localq.chat.attachments import expand_mentions, read_attachment
from localq.chat.commands.models import SwitchModel
from localq.chat.commands.sessions import recap
from localq.chat.history.store import ConversationStore
from localq.chat.open_conversation import Start
from localq.chat.session import ChatSession
from localq.cli.line import line_chat
from localq.cli.options import PromptText
from localq.errors import ExitCode, LocalqError
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from localq.settings import Settings
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient

pytestmark = pytest.mark.usefixtures("own_folder")


class Host:
    """A front end that shows nothing."""

    def show(self, text: str, remark: str) -> str:
        return text + remark


def session_over(*replies: list) -> ChatSession:
    session = ChatSession(ScriptedClient(*replies), Load("path", LoadOptions("tiny")), CharTokenizer())
    session.record.model = "smollm2-135m"
    return session


def command(session: ChatSession, line: str):
    name, argument = commands.parse(line)
    return commands.COMMANDS[name](session, argument, Host())


# ---- files


def test_files_named_with_an_at_go_before_the_message(own_folder):
    (own_folder / "a.txt").write_text("alpha\n")
    (own_folder / "b c.txt").write_text("beta")
    (own_folder / "data.bin").write_bytes(b"\0\1")
    text = 'compare @a.txt, with @"b c.txt"? and @a.txt'
    message = expand_mentions(text)
    assert message.words == text
    assert [each.text for each in message.attachments] == ["a.txt:\n\nalpha\n", "b c.txt:\n\nbeta"]
    for text in (
        "mail me@a.txt",
        "ask @nobody",
        "@",
        "in @sub/",
        'and @"',
        "@" + "x" * 5000,
        "@dataclass\nclass A: ...",
    ):
        assert expand_mentions(text) == expand_mentions(text).__class__(text)
    assert expand_mentions("\\@a.txt is a name") == expand_mentions("").__class__("@a.txt is a name")
    binary = expand_mentions("what is @data.bin")
    assert (binary.words, binary.attachments) == ("what is @data.bin", ())
    assert str(binary.failures[0]) == "@data.bin: not a text file. Use a text file."


def test_a_message_of_a_front_end_takes_files_along(own_folder):
    (own_folder / "a.txt").write_text("alpha")
    (own_folder / "data.bin").write_bytes(b"\0\1")
    session = session_over(["fine"])
    told, parts = commands.ask_with_files(session, "read @a.txt, @data.bin", "from a pipe, @a.txt")
    list(parts)
    assert told == ("attached a.txt · 5 B · 13 tokens", "could not attach @data.bin: not a text file")
    before = "from a pipe, @a.txt\n\na.txt:\n\nalpha\n\n"
    assert session.client.prompts == [f"<user>{before}read @a.txt, @data.bin<assistant>"]


def test_an_attachment_is_folded_everywhere_but_in_the_prompt_and_the_record(own_folder, tmp_path):
    (own_folder / "notes.txt").write_text("milk\nand <b>bread</b>")
    session = session_over(["fine"], ["again"], ["and again"])
    session.store = ConversationStore(tmp_path / "sessions.sqlite")
    assert command(session, "/read notes.txt") == "attached to your next message: notes.txt · 21 B · 33 tokens"
    list(session.ask("What is missing?"))
    content = "notes.txt:\n\nmilk\nand <b>bread</b>\n\nWhat is missing?"
    assert session.client.prompts == [f"<user>{content}<assistant>"]
    assert session.record.name() == "What is missing?"
    saved = session.store.find(None)
    message = saved.conversation.turns[0].message
    assert (message.content, message.words) == (content, "What is missing?")
    assert [(each.name, each.bytes, each.tokens) for each in message.attachments] == [("notes.txt", 21, 33)]
    assert message.attached_texts()[0][1] == "notes.txt:\n\nmilk\nand <b>bread</b>"
    assert str(recap(saved)).split("\n") == [
        "What is missing? (2 messages)", "[notes.txt · 21 B · 33 tokens]", ">>> What is missing?", "fine",
    ]  # fmt: skip
    list(command(session, "/edit And what else?"))
    assert session.client.prompts[1].endswith("bread</b>\n\nAnd what else?<assistant>")
    assert ">>> What is missing?" in command(session, "/n")
    exported = command(session, "/export md")
    assert "<details><summary>notes.txt · 21 B · 33 tokens</summary>\n\nnotes.txt:" in exported
    assert command(session, "/undo") == "removed: And what else?"
    assert session.store.summaries("bread")


def test_a_message_of_files_alone_is_named_after_them(own_folder):
    (own_folder / "a.txt").write_text("alpha")
    session = session_over(["fine"])
    list(session.ask("", [read_attachment(own_folder / "a.txt")]))
    message = session.conversation.turns[0].message
    assert (message.content, message.words, session.record.name()) == ("a.txt:\n\nalpha", "", "a.txt")


def test_a_record_whose_attachments_are_not_those_of_the_message_is_damaged(own_folder, tmp_path):
    (own_folder / "a.txt").write_text("alpha")
    store = ConversationStore(tmp_path / "sessions.sqlite")
    for damage in ({"length": 999}, {"length": -1}, {"length": "1"}, {"name": 3}, {"more": 1}):
        session = session_over(["fine"])
        session.store = store
        list(session.ask("x", [read_attachment(own_folder / "a.txt")]))
        with sqlite3.connect(store.path) as db:
            ((facts,),) = db.execute("SELECT stats FROM turns WHERE role = 'user' ORDER BY id DESC LIMIT 1")
            file = {**json.loads(facts)["attachments"][0], **damage}
            db.execute("UPDATE turns SET stats = ? WHERE stats = ?", (json.dumps({"attachments": [file]}), facts))
        with pytest.raises(LocalqError, match="damaged"):
            store.find(None)
        store.delete(session.record.id)


def test_glob_reads_all_that_fit_and_names_what_is_no_text(own_folder):
    (own_folder / "sub").mkdir()
    for name, raw in (("a.py", b"a = 1"), ("sub/b.py", b"b = 2"), ("c.py", b"\0"), ("d.txt", b"no")):
        (own_folder / name).write_bytes(raw)
    session = session_over(["fine"])
    told = command(session, "/glob **/*.py")
    assert "skipped: c.py" in told
    assert told.endswith("2 files attached to your next message")
    list(session.ask("what?"))
    assert session.client.prompts == ["<user>a.py:\n\na = 1\n\nsub/b.py:\n\nb = 2\n\nwhat?<assistant>"]
    for line, why in (("/glob", "no pattern given"), ("/glob *.none", "no file matches")):
        with pytest.raises(LocalqError, match=why):
            command(session, line)
    for number in range(101):
        (own_folder / f"{number}.md").write_text("x")
    with pytest.raises(LocalqError, match="more than 100 files"):
        command(session, "/glob *.md")
    (own_folder / "big1.log").write_text("x" * 600_000)
    (own_folder / "big2.log").write_text("x" * 600_000)
    with pytest.raises(LocalqError, match="the limit is"):
        command(session, "/glob *.log")
    assert session.attached == []


def test_glob_looks_at_a_limited_number_of_names_and_follows_no_links_to_folders(own_folder, monkeypatch):
    (own_folder / "sub" / ".hidden").mkdir(parents=True)
    for name in ("sub/a.py", "sub/.hidden/b.py", "sub/.c.py"):
        (own_folder / name).write_text("x")
    (own_folder / "sub" / "again").symlink_to(own_folder / "sub")
    session = session_over()
    for pattern in ("**/*.py", "**/**/a.py", "sub/[a].py", "~/*/a.py", f"{own_folder}/**"):
        monkeypatch.setenv("HOME", str(own_folder))
        assert command(session, f"/glob {pattern}").endswith("1 files attached to your next message"), pattern
    assert "sub/again/a.py" in command(session, "/glob sub/again/*.py")
    monkeypatch.setattr(attachments, "LOOKED_AT", 2)
    with pytest.raises(LocalqError, match="this pattern would require scanning more than 2 files"):
        command(session, "/glob **/*.zzz")


# ---- commands


def test_a_thought_alone_is_nothing_to_copy():
    session = session_over(["<think>hm"])
    list(session.ask("x"))
    with pytest.raises(LocalqError, match="contains thinking but no answer"):
        command(session, "/copy")


def test_an_edited_reply_is_gone_on_with():
    session = session_over(["no"], [" if asked"])
    list(session.ask("x"))
    assert "/continue continues it" in command(session, "/edit -a yes,")
    list(command(session, "/continue"))
    assert session.messages[-1].content == "yes, if asked"
    assert session.client.prompts[-1] == "<user>x<assistant>yes,"


def test_near_matches_and_aliases():
    assert commands.parse("/load x") == ("/model", "x")
    assert commands.parse("/tps") == ("/stats", "")
    with pytest.raises(LocalqError, match="Did you mean /export"):
        commands.parse("/exprot md")
    with pytest.raises(LocalqError, match=r"unknown command. See /help"):
        commands.parse("/zzzzzz")


def test_show_params_and_info():
    session = session_over()
    assert command(session, "/show params") == command(session, "/set")
    assert "think = auto" in command(session, "/set")
    assert "grammar = None" in command(session, "/set")
    command(session, "/grammar regex a+")
    assert "grammar = regex a+" in command(session, "/set")
    session.ensure_loaded()
    told = command(session, "/show info")
    assert "SmolLM2" in told
    assert "on test CPU, context 1000" in told


def test_model_names_what_is_here_and_wishes_for_another():
    session = session_over()
    assert command(session, "/model").startswith("current model: smollm2-135m")
    assert command(session, "/model smollm2-135m nf4") == SwitchModel("smollm2-135m", "nf4")
    with pytest.raises(LocalqError) as caught:
        command(session, "/model no-such-model-at-all")
    assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL


def test_fit_tells_formats_of_a_card(monkeypatch):
    with pytest.raises(LocalqError, match="no usable NVIDIA GPU"):
        command(session_over(), "/fit")
    monkeypatch.setenv("LOCALQ_VRAM", "24")
    told = command(session_over(), "/fit llama-3.1-8b")
    assert "GPU memory 24,564 MiB" in told
    assert any(line.split()[:3] == ["llama-3.1-8b", "nf4", "131,072"] for line in told.split("\n"))


# ---- the line chat


@pytest.fixture
def talk(monkeypatch, tmp_path, capsys):
    """Runs a line chat over these lines; what it opened, its exit code, and what it printed."""

    def talk(*lines: str, terminal: bool = True, replies=(), fails: str = "", **more):
        opened: list[ChatSession] = []
        given = iter(lines)

        def read() -> str:
            for line in given:
                return line
            raise EOFError

        @contextlib.contextmanager
        def open_session(name, settings, watcher, wanted):
            if name == fails:
                raise LocalqError(name, "it does not fit", "Take a smaller one.", ExitCode.DOES_NOT_FIT)
            client = ScriptedClient(*(replies or [["a"], ["b"]]))
            session = ChatSession(client, Load("path", LoadOptions(name)), CharTokenizer(), Sampling(top_k=len(name)))
            session.record.model, session.system = name, settings.system
            opened.append(session)
            yield open_model.OpenSession(session, client)

        monkeypatch.setattr(sys, "stdin", type("Stdin", (io.StringIO,), {"isatty": lambda self: terminal})())
        monkeypatch.setattr(open_model, "open_session", open_session)
        monkeypatch.setattr(line_chat.Reader, "__call__", lambda _: read())
        start = Start(store=ConversationStore(tmp_path / "sessions.db"), stop=("END",))
        capsys.readouterr()
        code = line_chat.converse(Settings(model="smollm2-135m"), start, quiet=False, **more)
        return opened, code, *capsys.readouterr()

    return talk


def test_the_conversation_goes_on_with_another_model(talk, own_folder):
    (own_folder / "f.txt").write_text("file")
    opened, code, out, err = talk("one", "/system S", "/read f.txt", "/model qwen3-8b", "two")
    assert code == ExitCode.OK
    assert [session.request.options.name for session in opened] == ["smollm2-135m", "qwen3-8b"]
    assert opened[1].client.prompts == ["<system>S<user>one<assistant>a<user>f.txt:\n\nfile\n\ntwo<assistant>"]
    assert (out, opened[1].stop_strings, opened[1].sampling.top_k) == ("a\na\n", ("END",), 8)
    record = ConversationStore(own_folder / "sessions.db").find(None)
    assert (record.id, record.model) == (1, "qwen3-8b")
    assert err.count("Saved as conversation 1") == 1


def test_a_model_that_does_not_open_leaves_the_one_at_hand(talk):
    opened, code, out, err = talk("one", "/model qwen3-8b", "two", fails="qwen3-8b")
    assert [session.request.options.name for session in opened] == ["smollm2-135m", "smollm2-135m"]
    assert "it does not fit" in err
    assert "continuing with smollm2-135m" in err
    assert (code, out) == (0, "a\na\n")
    assert opened[1].client.prompts == ["<user>one<assistant>a<user>two<assistant>"]
    with pytest.raises(LocalqError, match="does not fit"):
        talk(fails="smollm2-135m")


def test_a_first_message_then_more_at_a_terminal_and_no_more_from_a_pipe(talk):
    opened, _, out, _ = talk("two", first=PromptText("/one"))
    assert (out, opened[0].client.prompts[0]) == ("a\nb\n", "<user>/one<assistant>")
    opened, code, out, _ = talk("two", first=PromptText("one"), terminal=False)
    assert (code, out) == (0, "a\n")
    dead = LocalqError("engine process", "ended", "")
    with pytest.raises(LocalqError, match="ended"):
        talk(first=PromptText("one"), terminal=False, replies=[["x", dead]])
    _, code, out, err = talk("two", first=PromptText("one"), replies=[["x", dead], ["b"]])
    assert (code, out) == (0, "x\nb\n")
    assert "engine process: ended" in err


def test_ctrl_c_in_a_command_ends_the_command_alone(talk, monkeypatch):
    def long(session, argument, host):
        raise KeyboardInterrupt

    monkeypatch.setitem(commands.COMMANDS, "/tokens", long)
    _, code, out, err = talk("/tokens", "one")
    assert (code, out) == (0, "a\n")
    assert "(stopped)\n" in err
    opened, *_ = talk("/tokens", "one", terminal=False)  # text, without a terminal
    assert opened[0].client.prompts[0] == "<user>/tokens<assistant>"


def test_an_answer_besides_the_conversation_is_sampled_as_its_replies_are_and_free():
    session = session_over(["sum"])
    session.tokenizer.breaker_ids = {7}
    session.sampling = Sampling(dry_multiplier=0.8)
    command(session, "/grammar regex a+")
    list(side_request.ask(session, "sum up", 5))
    made = session.client.generated[0]
    assert (made.breaker_ids, made.max_tokens, made.grammar, made.grammar_begun) == ([7], 5, None, "")
