"""What the instruments of the full-screen chat cost, and whether the profile of a step adds up. For a GPU.

    python -m tests.tools.tui_report OUT [--model NAME] [--rounds N] [--tokens N] [--device cuda] [--vram SIZE]
        [--size 200x60] [--prompt TEXT]

One run of the real app, without a terminal: the same prompt is answered greedily again and again, in turns without the
instruments and with them (A-B-A-B). tok/s are the engine's, all tokens of a kind over all their seconds of decoding.
With instruments they may be 1 % fewer; the rows of the profile may be 5 % off the step that was measured whole. Prints
every reply, writes OUT/tui_report.json and a picture of the screen, OUT/instruments.svg; exit code 1 where a bound does
not hold. On a CPU everything runs and nothing is judged: there tok/s says who else computes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from localq.errors import LocalqError
from localq.settings import Settings
from localq.stats import Stats
from localq.tui.app import LocalqApp

LEAST_RATIO = 0.99  # of tok/s, with instruments over without
MOST_APART = 0.05  # of the step: its rows' sum
LEAST_TOKENS = 64  # of a reply: fewer say nothing
SIZE = (200, 60)
LOOK_S, WAIT_S = 0.02, 600.0  # for what the app does: between two looks, and at most
PROMPT = "Tell a very long story about a ship, in many chapters, and do not stop."


@dataclass
class Arm:
    """Replies of one kind: tokens after the first, and seconds of decoding."""

    rates: list[float] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0

    def add(self, stats: Stats) -> None:
        """Another reply."""
        self.rates.append(round(stats.tokens_per_s, 2))
        self.tokens += max(0, stats.generated_tokens - 1)
        self.seconds += stats.decode_s

    @property
    def tokens_per_s(self) -> float:
        """All of them together."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass
class Outcome:
    """What a run showed. profile: `StepProfile.to_dict()`, or why there is none; read_bytes: what the roof counts."""

    device: str
    device_name: str
    without: Arm
    shown: Arm
    profile: dict[str, Any] | None = None
    untimed: str = ""
    read_bytes: int = 0

    @property
    def ratio(self) -> float:
        """tok/s with instruments over those without."""
        return self.shown.tokens_per_s / self.without.tokens_per_s if self.without.tokens_per_s else 0.0

    @property
    def apart(self) -> float:
        """Share of the step by which the sum of its rows is off."""
        return abs(self.profile["sum_us"] / self.profile["step_us"] - 1) if self.profile else 1.0

    def failures(self) -> list[str]:
        """The bounds that do not hold; none are judged on a CPU."""
        if self.device != "cuda":
            return []
        found = []
        if min(self.without.tokens, self.shown.tokens) < LEAST_TOKENS * len(self.without.rates):
            found.append(f"replies are shorter than {LEAST_TOKENS} tokens: choose another model")
        if self.ratio < LEAST_RATIO:
            found.append(f"with instruments {self.ratio:.4f} of the speed without, at least {LEAST_RATIO} is asked for")
        if self.profile is None:
            found.append(f"no profile: {self.untimed}")
        elif self.apart > MOST_APART:
            found.append(f"the rows are {self.apart:.1%} off the step, at most {MOST_APART:.0%} is allowed")
        return found


# ---- the run


async def until(app: LocalqApp, condition: Callable[[], object], what: str) -> None:
    """Wait while the app goes on. Raises LocalqError for what does not come."""
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end or not app.is_running:
            raise LocalqError("tui_report", f"it did not come: {what}")
        await asyncio.sleep(LOOK_S)


async def measure(pilot: Pilot[Any], app: LocalqApp, rounds: int, prompt: str, say: Callable[[str], None]) -> Outcome:
    """Replies in turns, then the profile. Raises LocalqError where the model cannot be opened."""
    panel = app.chat.instruments
    await until(app, lambda: app.model is not None or app.error is not None, "the model")
    if app.error is not None:
        raise app.error
    await answered(app, prompt)  # warms it up
    loaded = app.model.session.loaded if app.model is not None else None
    assert loaded is not None
    outcome = Outcome(loaded.device, loaded.device_name, Arm(), Arm())
    for turn in range(2 * rounds):
        arm, is_shown = (outcome.shown, True) if turn % 2 else (outcome.without, False)
        await show(pilot, app, is_shown)
        began, busy = time.perf_counter(), time.process_time()
        stats = await answered(app, prompt)
        share = (time.process_time() - busy) / (time.perf_counter() - began)
        arm.add(stats)
        kind = "with instruments" if is_shown else "without"
        say(f"{kind:<17} {stats.generated_tokens:>6} tokens {stats.tokens_per_s:>8.1f} tok/s, "
            f"the front end computes {share:.0%} of the time")  # fmt: skip
    facts = panel.facts
    await until(app, lambda: not (facts.asked or app.chat.conversation.busy), "the panel's own profile")
    facts.sample, facts.untimed = None, ""  # what it came to, behind a reply or in front of the next, is not meant
    panel.action_profile()
    await until(app, lambda: facts.sample or facts.untimed or not facts.on_gpu, "a profile")
    if facts.sample is not None:
        outcome.profile = facts.sample.profile
        outcome.read_bytes = facts.roof.reads.at(outcome.profile["position"] + 1) if facts.roof else 0
    outcome.untimed = facts.untimed or ("" if facts.on_gpu else "the CPU's step is not timed")
    return outcome


async def show(pilot: Pilot[Any], app: LocalqApp, wanted: bool) -> None:
    """By the key, as a user does; with all that is asked for once they are seen."""
    panel = app.chat.instruments
    if panel.is_visible != wanted:
        await pilot.press("f2")
        await until(app, lambda: panel.is_visible == wanted, "the instruments")
    await until(app, lambda: not panel.facts.asked and not panel.facts.looking, "what they ask")


async def answered(app: LocalqApp, prompt: str = PROMPT) -> Stats:
    """Of a reply to `prompt`, in an empty conversation."""
    conversation = app.chat.conversation
    assert app.model is not None
    session = app.model.session
    session.clear()
    session.last = None
    await until(app, lambda: not conversation.busy, "the model to be free")
    conversation.send_message(prompt)
    await until(app, lambda: not conversation.busy, "a reply")
    if session.last is None:
        told = " ".join(str(each.render()) for each in app.chat.query("Notice.failed"))
        raise LocalqError("tui_report", f"a reply failed: {told}")
    return session.last.stats


def run(
    app: LocalqApp, rounds: int, picture: Path, say: Callable[[str], None], size: tuple[int, int] = SIZE,
    prompt: str = PROMPT,
) -> Outcome:  # fmt: skip
    """The app, from its start to its end."""

    async def main() -> Outcome:
        async with app.run_test(size=size) as pilot:
            outcome = await measure(pilot, app, rounds, prompt, say)
            picture.write_text(app.export_screenshot(), encoding="utf-8")
            return outcome

    try:
        return asyncio.run(main())
    finally:
        app.close()


def main(arguments: Sequence[str] | None = None, made: Callable[[Settings], LocalqApp] = LocalqApp) -> int:
    """Run and judge; 0, or 1 where a bound does not hold."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path, help="a folder for the results")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=10, help="replies of each kind")
    parser.add_argument("--tokens", type=int, default=1024, help="of a reply, at most")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--vram", help="GPU memory to use at most, as for `localq chat`")
    parser.add_argument("--size", default="x".join(map(str, SIZE)), help="columns and rows of the screen")
    parser.add_argument("--prompt", default=PROMPT)
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        model=asked.model,
        device=asked.device,
        max_tokens=asked.tokens,
        temperature=0.0,
        save=False,
        offline=True,
        vram=asked.vram,
    )
    out = sys.stdout  # an app that runs has another
    columns, rows = map(int, asked.size.split("x"))
    size = (columns, rows)

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    try:
        outcome = run(made(settings), asked.rounds, asked.out / "instruments.svg", say, size, asked.prompt)
    except LocalqError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    failures = outcome.failures()
    body = {
        "schema": 1, "ok": not failures, "judged": outcome.device == "cuda", "failures": failures,
        "model": asked.model, **asdict(outcome), "ratio": round(outcome.ratio, 4),
        "apart_share": round(outcome.apart, 4),
    }  # fmt: skip
    text = json.dumps(body)
    (asked.out / "tui_report.json").write_text(text + "\n", encoding="utf-8")
    report(outcome)
    for failure in failures:
        print("FAILED", failure)
    print(text)
    return int(bool(failures))


def report(outcome: Outcome) -> None:
    """The figures in words."""
    print(f"tok/s with instruments over without, on {outcome.device_name}: {outcome.ratio:.4f}")
    if outcome.profile is None:
        print(f"no profile: {outcome.untimed}")
        return
    moved = sum(row["bytes"] for row in outcome.profile["rows"])
    print(f"the rows' sum is {outcome.profile['sum_us']:.1f} us, the step {outcome.profile['step_us']:.1f} us: "
          f"{outcome.apart:.1%} apart; they move {moved:,} bytes, the roof counts {outcome.read_bytes:,}")  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
