"""Which replies are drawn as Markdown: those of `run` and the line chat, at a terminal, unless that is not wanted."""

from __future__ import annotations

import contextlib
import io
import json
import sys

import pytest

from localq import settings
from localq.chat import open_model
from localq.chat.commands.sessions import recap
from localq.chat.history.conversation import Message
from localq.chat.history.record import Record
from localq.chat.reply import ReplyPiece
from localq.chat.session import ChatSession
from localq.cli import execute
from localq.cli.line.reply_printer import open_printer, print_message
from localq.cli.line.session import ProgressLine, print_reply
from localq.cli.line.thinking_lines import Thoughts
from localq.planner.load_options import LoadOptions
from localq.stats import Stats
from localq.worker.messages import Load
from tests.support.chat.scripted_client import CharTokenizer, ScriptedClient
from tests.support.cli.markdown_pages import DOCUMENT, Page
from tests.support.cli.terminal import CTRL_C
from tests.support.cli.terminal_engine import Script, latin
from tests.support.cli.terminal_faces import FACES, Place

SAID = "**one** `two`\n\n```py\nx = 1\n```"
DRAWN = "one two\n\nx = 1"

pytestmark = pytest.mark.usefixtures("own_folder")


@pytest.fixture
def page(monkeypatch):
    """A terminal of 60 columns; `page.takes("stdout")` makes it that, in the test because pytest has it before."""
    page = Page(60, 24)
    page.takes = lambda *names: [monkeypatch.setattr(sys, name, page) for name in names]
    monkeypatch.setenv("TERM", "xterm")
    yield page
    page.close()


@pytest.fixture
def run(page, monkeypatch):
    """What `localq run MODEL QUESTION ARGUMENTS` writes to that terminal, where the answer is `SAID`."""
    tokenizer = CharTokenizer()

    @contextlib.contextmanager
    def open_session(name, settings, watcher, wanted):
        client = ScriptedClient([SAID])
        yield open_model.OpenSession(ChatSession(client, Load("path", LoadOptions(name)), tokenizer), client)

    monkeypatch.setattr(open_model, "open_session", open_session)
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))

    def run(*arguments: str) -> str:
        page.takes("stdout")
        page.seek(0)
        page.truncate()
        assert execute(["run", "smollm2-135m", "q", *arguments]) == 0
        return page.text

    run.tokenizer = tokenizer
    return run


def test_an_answer_is_drawn_at_a_terminal(run):
    assert run() == run("--markdown") == DRAWN


@pytest.mark.parametrize("how", [["--no-markdown"], ["--regex", "(?s).*"]], ids=" ".join)
def test_an_answer_is_printed_as_it_was_written_where_that_is_wanted_or_a_grammar_made_it(run, how):
    assert run(*how) == SAID


@pytest.mark.parametrize(("name", "value"), [("LOCALQ_MARKDOWN", "off"), ("TERM", "dumb"), ("TERM", "")])
def test_an_answer_is_printed_as_it_was_written_by_the_environment(run, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert run() == SAID


def test_the_setting_holds_until_a_flag_says_otherwise(run, own_folder):
    (own_folder / "config.toml").write_text("markdown = false\n")
    assert not settings.load().markdown
    assert run() == SAID
    assert run("--markdown") == DRAWN


def test_what_is_no_answer_of_a_chat_or_for_programs_is_no_markdown(run):
    assert run("-x") == "x = 1"
    run("--json")
    assert json.loads(sys.stdout.getvalue())["text"] == SAID
    run.tokenizer.chat_template = None
    assert run() == SAID


def test_a_pipe_and_a_file_get_what_was_said_byte_for_byte(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    with open_printer(True, stream=stream) as printer:
        for letter in DOCUMENT:
            printer.write(letter)
        printer.end()
    assert stream.getvalue() == DOCUMENT + "\n"


def test_a_terminal_without_utf8_or_without_a_size_gets_it_as_it_was_written(page, monkeypatch):
    page.takes("stdout")
    page.resize(0, 0)
    with open_printer(True) as printer:
        printer.write("**a**")
    page.resize(60, 24)
    monkeypatch.setattr(Page, "encoding", "latin-1")
    with open_printer(True) as printer:
        printer.write("**b**")
    assert page.getvalue() == "**a****b**"


def test_the_line_chat_draws_until_it_is_told_not_to(start, page):
    talk = start(SAID, SAID, SAID)
    page.takes("stdout")
    assert talk.loop.handle("hi") is None
    assert page.text == DRAWN
    assert talk.says("/markdown off")[1] == "replies are printed unformatted\n"
    talk.loop.handle("hi")
    assert page.text == f"{DRAWN}\n{SAID}"
    assert talk.says("/markdown on")[1] == talk.says("/markdown")[1] == "replies are rendered as Markdown\n"
    talk.loop.handle("hi")
    assert page.text == f"{DRAWN}\n{SAID}\n{DRAWN}"
    assert "unexpected argument 'maybe'" in talk.refuses("/markdown maybe")


def test_what_goes_on_with_code_that_was_cut_is_code(start, page):
    talk = start("```py\nx = 1\n", "# *two*\n```\n*three*")
    page.takes("stdout")
    talk.loop.handle("hi")
    talk.loop.handle("/continue")
    assert page.text == "x = 1\n# *two*\n\nthree"


def test_replies_of_a_conversation_that_is_gone_on_with_are_drawn(page):
    page.takes("stderr")
    record = Record(model="tiny", title="Ships")
    for role, content in (("user", "**hi**"), ("assistant", SAID)):
        record.conversation.add(Message(role, content), record.conversation.head)
    told = recap(record)
    assert told == f"Ships (2 messages)\n>>> **hi**\n{SAID}"
    print_message(told, markdown=True)
    assert page.text == f"Ships (2 messages)\n>>> **hi**\n{DRAWN}"


def test_a_note_amid_a_reply_stands_on_rows_of_its_own_and_nothing_is_drawn_over_it(page):
    page.takes("stdout", "stderr")
    stats = Stats("decode")
    parts = [ReplyPiece("**a** b", stats), ReplyPiece("", stats, notice="told"), ReplyPiece("c **d**", stats)]
    with open_printer(True) as printer:
        print_reply(iter(parts), ProgressLine(True), Thoughts(None), printer)
    assert page.text == "a b\n(told)\nc d"


def test_a_reply_that_is_stopped_while_the_terminal_is_resized_leaves_both_sound(tmp_path):
    face, place = FACES["line"](), Place(tmp_path)
    endless = " ".join(f"goes on {number}" for number in range(10_000))  # not a loop, which would be stopped
    place.says(Script(step_s=0.002, step=4, text=latin(f"**first**\n\nthe **second** {endless}")))
    with face.start(place) as terminal:
        terminal.until(lambda: face.is_ready(terminal))
        face.say(terminal, "say it")
        terminal.until("goes on")
        terminal.resize(70, 24)
        terminal.until(lambda: len(terminal.raw) > 3000)
        terminal.send(CTRL_C)
        terminal.until(lambda: face.is_stopped(terminal, 1))
        terminal.until(lambda: face.is_ready(terminal))
        assert ">>> say it\nfirst\n\nthe **second** goes on" in terminal.scrolled
        assert face.leave(terminal) == 0
        assert terminal.left_behind() == []
