"""What a model is asked besides the conversation: nothing of it is kept there.

What the model has read of the conversation is displaced, and read again, or brought back, for the next reply.
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
    """Stream an answer to `text` alone, sampled as replies are. Little thought, no stop strings."""
    tokenizer = session.tokenizer
    told = Message("user", text).to_dict(tokenizer.chat_template)
    prompt = tokenizer.chat_ids([told], **thinking.minimal_variables(tokenizer.chat_template))
    request = session.generate_request(prompt, reply_stream.reply_decoder(tokenizer, prompt))
    generate = dataclasses.replace(request, max_tokens=max_tokens, grammar=None, grammar_begun="", grammar_after="")
    yield from _beside(session, generate, reply_stream.reply_decoder(tokenizer, prompt))


def measure(session: ChatSession, prompt: list[int], tokens: int) -> Replies:
    """Stream exactly `tokens` tokens behind `prompt` (token ids), greedy; `session.last` stays as it was."""
    last, incoming = session.last, ReplyDecoder(session.tokenizer.stream())  # no mark ends it
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
