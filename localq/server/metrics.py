"""`Metrics`: counts of this server in Prometheus's text format, version 0.0.4."""

from __future__ import annotations

import collections
import time

from localq.server.events import Finished, Started
from localq.server.slot import SlotState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Counts since the start. All are changed by the event loop alone."""

    def __init__(self) -> None:
        self._began = time.time()
        self._requests: collections.Counter[tuple[str, int]] = collections.Counter()
        self._tokens: collections.Counter[str] = collections.Counter()
        self._first_token = [0] * (len(_BUCKETS) + 1)
        self._first_token_s = self._decode_s = 0.0
        self._replies: collections.Counter[str] = collections.Counter()

    def responded(self, route: str, status: int) -> None:
        """A response was begun, or its client had gone."""
        self._requests[route, status] += 1

    def started(self, event: Started) -> None:
        """A prompt was accepted."""
        self._tokens["prompt"] += event.prompt_tokens

    def finished(self, event: Finished) -> None:
        """A reply has ended."""
        stats = event.stats
        self._replies[event.reason] += 1
        self._tokens["cached"] += stats.cached_tokens
        self._tokens["generated"] += stats.generated_tokens
        self._decode_s += stats.decode_s
        if stats.generated_tokens:
            first = stats.time_to_first_token_s
            self._first_token_s += first
            self._first_token[sum(first > limit for limit in _BUCKETS)] += 1

    def text(self, state: SlotState) -> str:
        """The text of all metrics."""
        lines: list[str] = []

        def add(name: str, kind: str, about: str, *rows: tuple[str, float]) -> None:
            lines.extend((f"# HELP localq_{name} {about}", f"# TYPE localq_{name} {kind}"))
            lines.extend(f"localq_{name}{labels} {float(value)!r}" for labels, value in rows)

        requests = [(f'{{route="{route}",status="{status}"}}', n) for (route, status), n in self._requests.items()]
        add("requests_total", "counter", "Responses by route and status.", *requests)
        replies = [(f'{{reason="{reason}"}}', count) for reason, count in self._replies.items()]
        add("replies_total", "counter", "Replies by finish reason.", *replies)
        kinds = [(f'{{kind="{kind}"}}', self._tokens[kind]) for kind in ("prompt", "cached", "generated")]
        add("tokens_total", "counter", "Prompt tokens, cached prompt tokens and reply tokens.", *kinds)
        add("decode_seconds_total", "counter", "Seconds spent generating tokens.", ("", self._decode_s))
        lines += self._histogram()
        add("queue_length", "gauge", "Requests waiting in the queue.", ("", state.queued))
        add("busy", "gauge", "1 while a reply is being generated.", ("", state.busy))
        add("model_loaded", "gauge", "1 while the model is in memory.", ("", state.loaded is not None))
        add("start_time_seconds", "gauge", "Start time of the server (Unix time).", ("", round(self._began)))
        return "\n".join(lines) + "\n"

    def _histogram(self) -> list[str]:
        name, total = "localq_time_to_first_token_seconds", 0
        lines = [f"# HELP {name} Time from the start of a reply to its first token.", f"# TYPE {name} histogram"]
        for limit, count in zip((*map(str, _BUCKETS), "+Inf"), self._first_token, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{limit}"}} {total}')
        return [*lines, f"{name}_sum {self._first_token_s:g}", f"{name}_count {total}"]
