"""The job of a reply: prompt, engine, decoded text, in the order of `events`. Runs in the thread of the slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from localq.chat import reply_stream, stop_strings
from localq.chat.reply import Reply, ReplyPiece
from localq.chat.reply_limits import ReplyLimits
from localq.chat.reply_stream import ReplyDecoder
from localq.chat.session import ChatSession
from localq.sampling import Sampling
from localq.server import prompt as prompts
from localq.server.api_error import ApiError
from localq.server.events import AnswerText, CalledTool, Finished, ReplyEvent, Started, ThoughtText, TokenText
from localq.server.job_client import JobClient
from localq.server.model import OpenModel
from localq.server.prompt import RequestPrompt
from localq.server.request import ReplyRequest
from localq.stats import TokenLogprob
from localq.text.tokenizer import Tokenizer
from localq.worker.messages import Event, Generate, Tokens

_REASONS = {"stop": "stop", "cancelled": "cancelled"}  # all others are lengths


def job(request: ReplyRequest) -> Callable[[OpenModel], Iterator[ReplyEvent]]:
    """The job of `Slot.submit` for a request."""
    return lambda model: _ReplyJob(request, model).run()


class _ReplyJob:
    """One reply."""

    def __init__(self, request: ReplyRequest, model: OpenModel) -> None:
        self._request, self._model = request, model

    def run(self) -> Iterator[ReplyEvent]:
        request, model = self._request, self._model
        prompt = prompts.build(request, model.tokenizer)
        self._check_length(prompt)
        yield Started(model.name, len(prompt.ids))
        session, incoming, client = self._prepare(prompt)
        generate = session.generate_request(prompt.ids, incoming, prompt.begun)
        generate = dataclasses.replace(generate, logits=request.logits)
        limits = ReplyLimits(None, model.settings.loop_guard)
        translation = _Events(incoming, client, request.tool_choice.parallel)
        parts = reply_stream.stream(client, generate, incoming, False, limits, model.tokenizer.decode, in_chat=False)
        for part in parts:
            if isinstance(part, Reply):
                yield from translation.end(part)
                return
            yield from translation.add(part)
            if part.calls and not request.tool_choice.parallel:
                client.cancel(generate.id)

    def _check_length(self, prompt: RequestPrompt) -> None:
        size, length = self._model.loaded.context_size, len(prompt.ids)
        if not prompt.ids:
            raise ApiError(400, f"{self._request.field}: the prompt is empty.", self._request.field)
        if length >= size:
            why = f"the prompt has {length} tokens, but this model's context is limited to {size}"
            step = "Shorten it, or start `localq serve` with a larger --ctx."
            raise ApiError(400, f"{self._request.field}: {why}. {step}", self._request.field, "context_length_exceeded")

    def _prepare(self, prompt: RequestPrompt) -> tuple[ChatSession, ReplyDecoder, TokenLog]:
        request, model = self._request, self._model
        client = TokenLog(model.client, model.tokenizer, request.logits is not None)
        incoming = reply_stream.reply_decoder(
            model.tokenizer, prompt.ids, stop_strings.validate(request.stops), prompt.begun, prompt.tools
        )
        session = ChatSession(
            client, model.request, model.tokenizer, self._sampling(),
            max_tokens=model.max_tokens if request.max_tokens is None else request.max_tokens,
            grammar=prompt.grammar, draft=model.settings.draft, draft_max=model.settings.draft_max,
            think_budget=model.settings.think_budget if request.think_budget is None else request.think_budget,
        )  # fmt: skip
        return session, incoming, client

    def _sampling(self) -> Sampling:
        return dataclasses.replace(self._model.sampling, **self._request.sampling)


class TokenLog(JobClient):
    """A client that keeps the tokens of its reply with their log probabilities, and passes them on one by one."""

    def __init__(self, client: JobClient, tokenizer: Tokenizer, wanted: bool) -> None:
        """wanted: log probabilities were asked for; else nothing is kept."""
        self._inner, self._tokenizer, self._wanted = client, tokenizer, wanted
        self._tokens: list[TokenText] = []

    @property
    def alive(self) -> bool:
        """As of the client."""
        return self._inner.alive

    def cancel(self, id: int) -> None:
        """As the client does."""
        self._inner.cancel(id)

    def generate(self, request: Generate) -> Iterator[Event]:
        """As the client does; with log probabilities, an event has one token."""
        for event in self._inner.generate(request):
            if not self._wanted or not isinstance(event, Tokens) or not event.logprobs:
                yield event
                continue
            for id, logprob in zip(event.ids, event.logprobs, strict=True):
                self._tokens.append(self._token(id, logprob))
                yield dataclasses.replace(event, ids=[id], logprobs=[logprob])

    def take(self) -> Sequence[TokenText]:
        """The tokens since the last call."""
        found, self._tokens = self._tokens, []
        return found

    def _token(self, id: int, found: TokenLogprob) -> TokenText:
        text = self._tokenizer.token_text
        return TokenText(text(id), found.logprob, tuple((text(each), value) for each, value in found.top))


class _Events:
    """Pieces of a reply to events. Tokens go with the text that they make; those of a thought and its tags do not."""

    def __init__(self, incoming: ReplyDecoder, log: TokenLog, parallel: bool) -> None:
        """parallel: more than one call counts."""
        self._incoming, self._log, self._parallel = incoming, log, parallel
        self._calls = 0
        self._tokens: list[TokenText] = []  # whose text is held back
        self._thinking, self._thought_ids = incoming.thinking, 0

    def add(self, piece: ReplyPiece) -> Iterator[ReplyEvent]:
        """Add a piece."""
        self._read()
        if piece.text and piece.thinking:
            yield ThoughtText(piece.text)
        elif piece.text:
            tokens, self._tokens = self._tokens, []
            yield AnswerText(piece.text, tuple(tokens))
        for call in piece.calls if self._parallel else piece.calls[: 1 - self._calls]:
            self._tokens.clear()
            yield CalledTool(self._calls, call.name, call.arguments)
            self._calls += 1

    def _read(self) -> None:
        self._tokens += self._log.take()
        thinking = self._incoming.thinking
        if thinking:
            self._thought_ids = len(self._incoming.ids)
        if thinking or self._thinking:
            self._tokens.clear()
        self._thinking = thinking

    def end(self, reply: Reply) -> Iterator[ReplyEvent]:
        """End the reply."""
        self._read()
        stopped_at = self._incoming.stop_string
        if self._tokens and stopped_at is None:
            yield AnswerText("", tuple(self._tokens))
        reason = _REASONS.get(reply.reason, "length")
        if self._calls and (reason == "stop" or not self._parallel):
            reason = "tool_calls"
        yield Finished(reason, reply.stats, stopped_at, self._thought_ids)
