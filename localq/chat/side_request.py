"""One-off requests to the loaded model; they do not enter the conversation.

They overwrite the KV cache of the conversation, which is read again, or restored, for the next reply.
"""

from __future__ import annotations

import dataclasses

from localq.chat import reply_stream
from localq.chat.history.conversation import Message
from localq.chat.reply import Replies
from localq.chat.reply_stream import ReplyDecoder
from localq.chat.session import ChatSession
from localq.sampling import Sampling
from localq.text import thinking
from localq.worker.messages import Generate


def ask(session: ChatSession, text: str, max_tokens: int) -> Replies:
    """Stream an answer to `text` alone, with the session's sampling, minimal thinking, no stop strings."""
    tokenizer = session.tokenizer
    message = Message("user", text).to_dict(tokenizer)
    prompt = tokenizer.chat_ids([message], **thinking.minimal_variables(tokenizer.chat_template))
    request = session.generate_request(prompt, reply_stream.reply_decoder(tokenizer, prompt))
    generate = dataclasses.replace(
        request, max_tokens=max_tokens, grammar=None, grammar_begun="", grammar_after="", think_budget=None
    )
    yield from _beside(session, generate, reply_stream.reply_decoder(tokenizer, prompt))


def measure(session: ChatSession, prompt: list[int], tokens: int) -> Replies:
    """Stream exactly `tokens` tokens after `prompt` (token ids), greedy; `session.last` is unchanged."""
    last, incoming = session.last, ReplyDecoder(session.tokenizer.stream())  # channel marks do not end it
    try:
        generate = Generate(next(session.request_ids), prompt, Sampling(), [], tokens)
        yield from _beside(session, generate, incoming)
    finally:
        session.last = last


def _beside(session: ChatSession, generate: Generate, incoming: ReplyDecoder) -> Replies:
    session.ensure_loaded()
    if session.keeper is not None:
        session.keeper.save(session.client)
    try:
        yield from session.stream(generate, incoming)
    finally:
        if session.keeper is not None:
            session.keeper.forget()
