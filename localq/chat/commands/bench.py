"""`/bench`: prefill and decode speed of the loaded model, without leaving the conversation.

Random tokens from an empty context, greedy, timed by the engine. `localq bench` measures more: a baseline, several
depths, the conditions.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from dataclasses import dataclass

from localq.chat import side_request
from localq.chat.commands.host import Host
from localq.chat.reply import MEASURED, Replies, Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import LocalqError, usage_error
from localq.planner.speed import roofline
from localq.stats import Stats

READ, WRITTEN = 512, 128  # tokens of a run; fewer in a short context
RUNS = 3
WARM_READ, WARM_WRITTEN = 32, 4
LIMIT_S = 10.0  # no run starts later than this
RUN_S = 2.5  # about, for each of prefill and decode
LEAST = 64  # tokens of context that a measurement needs


def bench(session: ChatSession, argument: str, host: Host) -> Replies:
    """Stream a measurement; the result is in the notices of the last part."""
    if argument:
        why = f"unexpected argument '{argument[:20]}'"
        raise usage_error("/bench", why, "`localq bench MODEL -p LIST -n LIST -d LIST` measures other lengths.")
    session.clear_stop()
    return _measuring(session)


def _measuring(session: ChatSession) -> Replies:
    loaded = session.ensure_loaded()
    size = loaded.context_size
    if size < LEAST:
        why = f"a context of {size} tokens is too small for a benchmark"
        raise usage_error("/bench", why, "Use a larger context (--ctx).")
    written = min(WRITTEN, size // 4)
    lengths = _Lengths(WARM_READ, WARM_WRITTEN)
    ids, runs, began_s = random.Random(0), list[Stats](), 0.0
    yield ReplyPiece("", Stats(context_size=size), "measuring; press Ctrl-C to cancel")
    for run in range(1 + RUNS):  # the first is to warm up
        if run > 1 and time.monotonic() - began_s >= LIMIT_S:
            break
        prompt = [run, *(ids.randrange(loaded.vocab_size) for _ in range(lengths.read - 1))]  # no two begin alike
        end = None
        for part in side_request.measure(session, prompt, lengths.written):
            if isinstance(part, Reply):
                end = part
            else:
                yield dataclasses.replace(part, text="", thinking=False)
        if end is None or end.reason == "cancelled":
            yield Reply("", MEASURED, end.stats if end else Stats(), ("stopped; nothing was measured",))
            return
        if end.stats.decode_s <= 0 or end.stats.prefill_s <= 0:
            raise LocalqError("/bench", "the engine reported no timings", "Use `localq bench`.")
        if run == 0:
            lengths, began_s = _lengths(end.stats, min(READ, size - 2 * written), written), time.monotonic()
        else:
            runs.append(end.stats)
    yield Reply("", MEASURED, runs[-1], _result(session, runs))


@dataclass(frozen=True)
class _Lengths:
    """Tokens of a run."""

    read: int
    written: int


def _lengths(warm: Stats, read: int, written: int) -> _Lengths:
    """At most `read` and `written` tokens, fewer where the warm-up shows that a run would take long."""
    allowed = int(warm.prefilled_tokens / warm.prefill_s * RUN_S), int(warm.tokens_per_s * RUN_S)
    return _Lengths(max(WARM_READ, min(read, allowed[0])), max(2 * WARM_WRITTEN, min(written, allowed[1])))


def _result(session: ChatSession, runs: list[Stats]) -> tuple[str, ...]:
    """The result as two notices."""
    last, loaded = runs[-1], session.loaded
    roof = roofline.model_roof(loaded) if loaded is not None else None
    allowed = f" = {share}" if roof is not None and (share := roof.text(last)) else ""
    read = [each.prefilled_tokens / each.prefill_s for each in runs]
    written = [each.tokens_per_s for each in runs]
    model = f"{loaded.name} ({loaded.format}) on {loaded.device_name}: " if loaded is not None else ""
    figures = (
        f"{model}prefill {_rate(read)} ({last.prefilled_tokens} tokens), decode {_rate(written)}{allowed} "
        f"({last.generated_tokens} tokens); {len(runs)} run{'s' if len(runs) > 1 else ''}, greedy, empty context"
    )
    kept = (
        "the conversation is unchanged, but will be reprocessed before the next reply; for more tests, "
        "use `localq bench`"
    )
    return figures, kept


def _rate(rates: list[float]) -> str:
    """ "1,234.5 tok/s (1,200.0 to 1,250.0)": the median, and how far they lie apart."""
    spread = f" ({min(rates):,.1f} to {max(rates):,.1f})" if len(rates) > 1 else ""
    return f"{statistics.median(rates):,.1f} tok/s{spread}"
