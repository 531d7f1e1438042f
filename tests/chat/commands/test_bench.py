"""`/bench` in a conversation: what is asked of the engine, what is told, and that nothing of it stays."""

from __future__ import annotations

import re
import time

import pytest

from localq.chat.commands import COMMANDS, parse
from localq.chat.commands import bench as bench_command
from localq.chat.reply import ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import ExitCode, LocalqError
from localq.sampling import Sampling
from localq.stats import Stats
from localq.worker.messages import Done, Progress, Tokens
from tests.support.chat.scripted_client import ScriptedClient, session_over, streamed
from tests.support.tui.tui_pilot import chat_app, drive_chat, idle, say, screen_text, until


class Timed(ScriptedClient):
    """Reads 1000 tokens a second and writes 100; a script is said where it has one."""

    def generate(self, request):
        if self.scripts:
            yield from super().generate(request)
            return
        self.generated.append(request)
        self.prompts.append("")
        self.cancelled.clear()
        read, size = len(request.prompt), self.context_size
        yield Progress(request.id, Stats(prompt_tokens=read, context_size=size))
        for count in range(1, request.max_tokens + 1):
            if self.cancelled.is_set():
                yield Done(request.id, "cancelled", Stats(context_size=size))
                return
            stats = Stats("decode", read, 0, read, count, 0.1, read / 1000, (count - 1) / 100, read + count, size)
            yield Tokens(request.id, [65], stats)
        yield Done(request.id, "length", stats)


def over(*scripts, size: int = 4096, **more) -> ChatSession:
    session = session_over(**more)
    session.client = Timed(*scripts, context_size=size)
    return session


def bench(session: ChatSession, argument: str = ""):
    return COMMANDS["/bench"](session, argument, None)


def test_it_tells_both_speeds_and_leaves_the_conversation_alone():
    session = over(["hello"])
    session.sampling, session.max_tokens = Sampling(temperature=1.0), 7
    streamed(session.ask("hi"))
    last, messages = session.last, session.messages
    text, reply, told = streamed(bench(session))
    assert (text, reply.text, reply.reason) == ("", "", "measured")
    assert told[0] == "measuring; press Ctrl-C to cancel"
    assert "model (bf16) on test CPU: prefill 1,000.0 tok/s (1,000.0 to 1,000.0) (512 tokens)" in told[1]
    assert "decode 100.0 tok/s (100.0 to 100.0) (128 tokens); 3 runs, greedy, empty context" in told[1]
    assert session.last is last
    assert session.messages == messages
    asked = session.client.generated[1:]
    assert [(len(each.prompt), each.max_tokens, each.stop_ids) for each in asked] == [(32, 4, [])] + [
        (512, 128, [])
    ] * 3
    assert {each.sampling for each in asked} == {Sampling()}
    assert len({each.prompt[0] for each in asked}) == 4  # no run reads what another has left in the cache
    assert all(0 <= id < 256 for each in asked for id in each.prompt)


def test_a_short_context_and_a_slow_machine_measure_less(monkeypatch):
    session = over(size=100)
    _, _, told = streamed(bench(session))
    assert "prefill 1,000.0 tok/s (1,000.0 to 1,000.0) (50 tokens)" in told[1]
    monkeypatch.setattr(bench_command, "LIMIT_S", 0.0)
    _, _, told = streamed(bench(session))
    assert "1 run, greedy" in told[1]
    assert "prefill 1,000.0 tok/s (50 tokens)" in told[1]
    monkeypatch.setattr(bench_command, "RUN_S", 0.1)
    session = over()
    streamed(bench(session))
    assert [(len(each.prompt), each.max_tokens) for each in session.client.generated] == [(32, 4), (100, 10)]


@pytest.mark.parametrize(
    ("size", "argument", "why"),
    [(4096, "fast", "unexpected argument 'fast'"), (63, "", "a context of 63 tokens is too small")],
)
def test_what_it_does_not_do_is_said(size, argument, why):
    with pytest.raises(LocalqError, match=re.escape(why)) as caught:
        list(bench(over(size=size), argument))
    assert caught.value.exit_code == ExitCode.USAGE


def test_a_stop_ends_it_and_an_engine_without_times_is_named():
    session = over()
    parts = bench(session)
    for part in parts:
        if isinstance(part, ReplyPiece) and part.stats.generated_tokens:
            session.stop()
    assert part.notices == ("stopped; nothing was measured",)
    assert len(session.client.generated) == 1
    untimed = session_over(["a"])
    with pytest.raises(LocalqError, match="the engine reported no timings"):
        list(bench(untimed))


def test_the_next_reply_takes_the_conversation_up_again():
    calls = []

    class Keeper:
        take_up = replied = told = lambda self, *_: calls.append("reply")

        def save(self, client):
            calls.append("save")

        def forget(self):
            calls.append("forget")

    session = over()
    session.keeper = Keeper()
    list(bench(session))
    assert calls == ["save", "forget"] * 4


def test_on_the_screen_it_is_notices_and_can_be_stopped():
    app = chat_app()
    app.model.session.client = client = Timed()

    async def script(pilot):
        await say(pilot, "/bench")
        shown = " ".join(screen_text(app).split())
        assert "prefill 1,000.0 tok/s" in shown
        assert "Reply" not in shown

        def slow(request, generate=client.generate):
            for event in generate(request):
                time.sleep(0.01)
                yield event

        client.generate = slow
        app.chat.composer.put("/bench")
        await pilot.press("enter")
        await until(pilot, lambda: len(client.generated) > 5)
        await pilot.press("escape")
        await idle(pilot)
        assert "stopped; nothing was measured" in " ".join(screen_text(app).split())

    drive_chat(app, script)
    assert parse("/bench") == ("/bench", "")
