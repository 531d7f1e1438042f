"""Compact a conversation: prompts have a summary by the model in place of the oldest turns.

The conversation keeps every turn (`Conversation.add_summary`). The newest exchanges, about a quarter of the prompt,
stay unchanged. A text too long for one pass is summarized piece by piece, each pass with the summary so far. If
interrupted or failed, nothing changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from localq.chat import side_request
from localq.chat.history.conversation import Conversation, Message
from localq.chat.reply import Replies, Reply, ReplyPiece
from localq.chat.session import ChatSession
from localq.errors import LocalqError, usage_error
from localq.stats import Stats
from localq.text import thinking
from localq.text.tokenizer_like import TokenizerLike

KEPT = 1 / 4  # share of the prompt: the newest exchanges that stay unchanged
LONGEST, SHARE = 1024, 1 / 8  # limits of a summary: tokens, and share of the context
MOST_AT_ONCE = 2**16  # tokens of text in one pass; longer requests can exceed the limit of the template
RESULT = 1000  # characters of the result of a tool call
FRAME_TOKENS = 128  # upper bound of what the template adds
_REQUEST = """\
Summarize the following conversation between a user and an assistant so that it can continue without the original. \
Keep the user's goals, facts, names, numbers, decisions and open questions. Write short notes in the language of the \
conversation, and nothing else."""


def compact(session: ChatSession) -> Replies:
    """Stream the summary of the oldest turns: a notice for each pass, the text of the last one, then a Reply.

    Raises LocalqError: exit 2 for a conversation that is too short, exit 1 where the model writes no summary.
    """
    session.clear_stop()
    return _compacting(session)


def _compacting(session: ChatSession) -> Replies:
    record, conversation = session.record, session.conversation
    summary, turns = conversation.model_context()
    if turns and conversation.turns[turns[-1]].message.role == "user":
        turns = turns[:-1]
    count = _summed_up(session, conversation, turns)
    size = session.ensure_loaded().context_size
    longest = max(1, min(LONGEST, int(size * SHARE)))
    texts = [_written(conversation.turns[turn].message, session.tokenizer) for turn in turns[:count]]
    passes = _passes(session, texts, _room(session, size, longest))
    text, end, cut = summary.text if summary is not None else "", None, False
    for number, piece in enumerate(passes, 1):
        of = f", pass {number} of {len(passes)}" if len(passes) > 1 else ""
        notice = f"summarizing the oldest {count} messages{of}; press Ctrl-C to cancel"
        yield ReplyPiece("", Stats(context_size=size), notice)
        end = None
        for part in side_request.ask(session, _request(text, piece), longest):
            if isinstance(part, Reply):
                end = part
            elif number == len(passes) or not part.text:
                yield part
            else:
                yield dataclasses.replace(part, text="")  # only the next pass uses it
        if end is None or end.reason == "cancelled":
            yield Reply("", "cancelled", end.stats if end else Stats(), ("stopped; nothing changed",))
            return
        text, cut = end.text.strip(), cut or end.reason != "stop"
        if not text:
            raise LocalqError("/compact", "the model returned no summary", "Try again, or start over with /clear.")
    assert end is not None
    before = _read_tokens(session)
    conversation.add_summary(text, turns[count - 1])
    unsaved, after = session.try_save(record), _read_tokens(session)
    figures = f": {before} -> {after} tokens" if before is not None and after is not None else ""
    done = f"in the prompt, this summary now replaces the oldest {count} messages{figures}. To undo this, use /undo"
    incomplete = f"the summary is incomplete: it reached its limit of {longest} tokens"
    yield Reply(end.text, "stop", end.stats, (*([incomplete] if cut else []), done, *([unsaved] if unsaved else [])))


def _read_tokens(session: ChatSession) -> int | None:
    """Tokens of the prompt; None where it is too long for the template."""
    try:
        return len(session.prompt())
    except LocalqError:
        return None


def _summed_up(session: ChatSession, conversation: Conversation, turns: Sequence[int]) -> int:
    """Return how many of `turns` to summarize: whole exchanges, at least one, keeping at least one."""
    exchanges = len(turns) // 2
    if exchanges < 2:
        why = "the conversation is too short: it needs at least two exchanges"
        raise usage_error("/compact", why, "Start over with /clear.")
    sizes = [
        sum(len(session.tokenizer.encode(conversation.turns[turn].message.content)) for turn in turns[at : at + 2])
        for at in range(0, 2 * exchanges, 2)
    ]
    kept, room = 1, sum(sizes) * KEPT - sizes[-1]
    while kept < exchanges - 1 and sizes[-kept - 1] <= room:
        kept += 1
        room -= sizes[-kept]
    return 2 * (exchanges - kept)


def _room(session: ChatSession, size: int, longest: int) -> int:
    """Tokens of text for one pass: what the request, the summary so far and the new summary leave free."""
    room = size - 2 * longest - FRAME_TOKENS - len(session.tokenizer.encode(_REQUEST))
    if room < longest:
        why = f"a context of {size} tokens is too small for a summary"
        raise usage_error("/compact", why, "Use a larger context (--ctx), or start over with /clear.")
    return min(room, MOST_AT_ONCE)


def _written(message: Message, tokenizer: TokenizerLike) -> str:
    """The message as the prompt has it: marks of the template are escaped, which takes more tokens.

    Of tool calls, the beginning of each result.
    """
    calls = [f"[{call.line}: {call.result[:RESULT]}]" for each in message.rounds for call in each.calls]
    text = thinking.template_content(tokenizer, "user", "\n".join([*calls, message.answer.strip()]))
    return f"{'User' if message.role == 'user' else 'Assistant'}: {text}"


def _request(summary: str, text: str) -> str:
    so_far = f"\n\nSummary of the earlier conversation (include it in your notes):\n\n{summary}" if summary else ""
    return f"{_REQUEST}{so_far}\n\nThe conversation:\n\n{text}"


def _passes(session: ChatSession, texts: Sequence[str], room: int) -> list[str]:
    """`texts` joined into as few pieces as possible, each within `room` tokens; a longer text is split."""
    found: list[str] = []
    used = 0
    for text in (part for each in texts for part in _parts(session, each, room)):
        size = len(session.tokenizer.encode(text)) + 2  # with the empty line before it
        if found and used + size <= room:
            found[-1] += f"\n\n{text}"
            used += size
        else:
            found.append(text)
            used = size
    return found


def _parts(session: ChatSession, text: str, room: int) -> list[str]:
    """`text` split in halves until every part fits into `room` tokens."""
    if len(text) <= 1 or len(session.tokenizer.encode(text)) <= room:
        return [text]
    middle = len(text) // 2
    return _parts(session, text[:middle], room) + _parts(session, text[middle:], room)
