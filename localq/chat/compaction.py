"""Making room in a full context: the model sums up the oldest turns, and reads that in their place from then on.

The conversation keeps every turn; `Conversation.summarise` says what is read instead. The newest exchanges, about a
quarter of what is read, stay as they are. A text that is too long for one pass is summed up piece by piece, each time
together with the summary so far. Interrupted or failed, nothing has changed.
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

KEPT = 1 / 4  # of what the model reads: the newest exchanges that stay as they are
LONGEST, SHARE = 1024, 1 / 8  # tokens of a summary: at most, and of the context
MOST_AT_ONCE = 2**16  # tokens of text: more, and templates may take the request for too long
FRAME_TOKENS = 128  # that a template and the request itself need at most, besides the texts
_REQUEST = """\
Sum up the conversation below between a user and an assistant, so that it can go on without it. Keep what the user \
wants, facts, names, numbers, decisions, and what is still open. Write short notes in the language of the \
conversation, and nothing else."""


def compact(session: ChatSession) -> Replies:
    """Stream the summary of the oldest turns: a notice for each pass, the text of the last one, then a Reply.

    Raises LocalqError: exit 2 where nothing is old enough, exit 1 where the model gives no summary.
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
    template = session.tokenizer.chat_template
    texts = [_written(conversation.turns[turn].message, template) for turn in turns[:count]]
    passes = _passes(session, texts, _room(session, size, longest))
    text, end, cut = summary.text if summary is not None else "", None, False
    for number, piece in enumerate(passes, 1):
        of = f", pass {number} of {len(passes)}" if len(passes) > 1 else ""
        yield ReplyPiece("", Stats(context_size=size), f"summing up the oldest {count} messages{of}; a stop changes nothing")
        end = None
        for part in side_request.ask(session, _request(text, piece), longest):
            if isinstance(part, Reply):
                end = part
            elif number == len(passes) or not part.text:
                yield part
            else:
                yield dataclasses.replace(part, text="")  # of use for the next pass only
        if end is None or end.reason == "cancelled":
            yield Reply("", "cancelled", end.stats if end else Stats(), ("stopped: nothing was changed",))
            return
        text, cut = end.text.strip(), cut or end.reason != "stop"
        if not text:
            raise LocalqError("/compact", "the model gave no summary", "Try again, or begin anew with /clear.")
    assert end is not None
    before = _read_tokens(session)
    conversation.add_summary(text, turns[count - 1])
    unsaved, after = session.try_save(record), _read_tokens(session)
    figures = f", {after} tokens in all instead of {before}" if before is not None and after is not None else ""
    told = (
        f"the model reads this in place of the oldest {count} messages from now on{figures}; the conversation itself "
        "keeps them, and /undo takes it back"
    )
    missing = f"the summary was cut before its end (it may have {longest} tokens): what would have followed is missing"
    yield Reply(end.text, "stop", end.stats, (*([missing] if cut else []), told, *([unsaved] if unsaved else [])))


def _read_tokens(session: ChatSession) -> int | None:
    """Tokens of what the model would read; None where that is too long for its template."""
    try:
        return len(session.prompt())
    except LocalqError:
        return None


def _summed_up(session: ChatSession, conversation: Conversation, turns: Sequence[int]) -> int:
    """How many of `turns` go into the summary: whole exchanges, one at least, and one at least stays."""
    exchanges = len(turns) // 2
    if exchanges < 2:
        why = "there is at most one exchange to read: nothing is old enough to be summed up"
        raise usage_error("/compact", why, "/clear begins anew.")
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
    """Tokens of text for one pass, beside the request, the summary so far and the one to be made."""
    room = size - 2 * longest - FRAME_TOKENS - len(session.tokenizer.encode(_REQUEST))
    if room < longest:
        why = f"a context of {size} tokens has no room to sum anything up in"
        raise usage_error("/compact", why, "Use a larger one (--ctx), or begin anew with /clear.")
    return min(room, MOST_AT_ONCE)


def _written(message: Message, template: str | None) -> str:
    """As the model reads it: what is plain text there has more tokens than the marks that it looks like."""
    text = thinking.template_content(template, "user", message.answer.strip())
    return f"{'User' if message.role == 'user' else 'Assistant'}: {text}"


def _request(summary: str, text: str) -> str:
    so_far = f"\n\nWhat came before it, summed up already (take it into your notes):\n\n{summary}" if summary else ""
    return f"{_REQUEST}{so_far}\n\nThe conversation:\n\n{text}"


def _passes(session: ChatSession, texts: Sequence[str], room: int) -> list[str]:
    """`texts` joined to as few pieces as fit into `room` tokens each; one that is too long alone is cut."""
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
    """`text` halved until every part fits into `room` tokens."""
    if len(text) <= 1 or len(session.tokenizer.encode(text)) <= room:
        return [text]
    middle = len(text) // 2
    return _parts(session, text[:middle], room) + _parts(session, text[middle:], room)
