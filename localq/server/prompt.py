"""The prompt of a request: its messages as the model's chat template takes them, rendered to token ids.

Text of messages never becomes a turn mark or a special token (`text.turn_marks`). Nothing is left out: a conversation
that does not fit is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localq.errors import ExitCode, LocalqError
from localq.server.api_error import ApiError, bad_field
from localq.server.request import AUTO, NAMED, ChatMessage, ReplyRequest
from localq.text import harmony, template, thinking, thought_tags
from localq.text.grammar import Grammar
from localq.text.thinking_levels import SWITCH, levels
from localq.text.tokenizer import Tokenizer
from localq.text.tools.format import ToolFormat
from localq.text.tools.formats import tool_format
from localq.text.tools.stream import ToolStream

_LEAST, _MOST = ("none", "minimal"), ("xhigh", "max")


@dataclass(frozen=True)
class RequestPrompt:
    """Token ids of a prompt. begun: the start of the reply that it ends with, "" for none.

    tools    reads calls in the reply; None where no tool is offered
    grammar  of the reply: the one that was asked for, or of calls that must be made
    """

    ids: list[int]
    begun: str = ""
    tools: ToolStream | None = None
    grammar: Grammar | None = None


def check_size(request: ReplyRequest) -> None:
    """Raise ApiError (400) for a text that is too long for any template, before it waits for its turn."""
    texts = [each for message in request.messages for each in (message.text, message.thought)]
    texts += [request.prompt] if isinstance(request.prompt, str) else []
    size, limit = sum(len(each.encode()) for each in texts), template.MAX_CONVERSATION_BYTES
    if size > limit:
        why = f"the text is too long ({size} bytes; limit: {limit})"
        raise ApiError(400, f"{request.field}: {why}. Send a shorter one.", request.field, "context_length_exceeded")


def build(request: ReplyRequest, tokenizer: Tokenizer) -> RequestPrompt:
    """The prompt of a request. Raises ApiError, and LocalqError where the template refuses the conversation."""
    if isinstance(request.prompt, str):
        return RequestPrompt(tokenizer.prompt_ids(request.prompt), grammar=request.grammar)
    if request.prompt is not None:
        largest = max(request.prompt, default=0)
        if largest >= min(tokenizer.rows, tokenizer.vocab_size):
            raise bad_field("prompt", f"{largest} is not a token id in this model's vocabulary")
        return RequestPrompt(list(request.prompt), grammar=request.grammar)
    if tokenizer.chat_template is None:
        why = "this base model has no chat template, so it supports only /v1/completions"
        raise ApiError(400, f"{request.field}: {why}.", request.field)
    return _ChatPrompt(request, tokenizer).prompt()


class _ChatPrompt:
    """The prompt of a conversation."""

    def __init__(self, request: ReplyRequest, tokenizer: Tokenizer) -> None:
        self._request, self._tokenizer = request, tokenizer
        self._template = tokenizer.chat_template or ""
        self._escape = tokenizer.turn_marks.escape
        self._form = self._tool_form()

    def _tool_form(self) -> ToolFormat | None:
        request = self._request
        has_calls = any(each.calls or each.role == "tool" for each in request.messages)
        if not has_calls and not request.offered:
            return None
        form = tool_format(self._template)
        if form is None:
            field = "tools" if request.offered else request.field
            raise bad_field(field, "this model's chat template does not support tools")
        return form

    def prompt(self) -> RequestPrompt:
        """Render and encode it."""
        request, tokenizer = self._request, self._tokenizer
        messages, begun = request.messages, ""
        if messages[-1].role == "assistant" and len(messages) > 1:  # to be continued
            messages, begun = messages[:-1], _stored(messages[-1], tokenizer)
        text = self._rendered(messages)
        grammar, tools = self._tools()
        if not begun and request.grammar is not None:
            begun = harmony.answer_opening(self._template)
        if not begun:
            return RequestPrompt(tokenizer.encode(text), "", tools, grammar)
        begun = thinking.convert_for(self._template, begun)
        continued = thinking.continue_prompt(text, thinking.escape_continuation(tokenizer, begun))
        return RequestPrompt(tokenizer.encode(continued), begun, tools, grammar)

    def _tools(self) -> tuple[Grammar | None, ToolStream | None]:
        """The grammar of the reply, and the reader of its calls."""
        request, form = self._request, self._form
        if form is None or not request.offered:
            return request.grammar, None
        stream, choice = form.stream(request.offered), request.tool_choice
        if request.grammar is not None:
            raise ApiError(400, "tools: cannot be combined with a response format. Set tool_choice to none.", "tools")
        if choice.mode == AUTO and not any(tool.strict for tool in request.offered):
            return None, stream
        wanted = choice.name if choice.mode == NAMED else choice.mode
        try:
            made = form.grammar(request.offered, wanted, self._tokenizer.grammar_tokens, choice.parallel)
        except LocalqError as error:
            raise bad_field("tools", error.why, error.next_step) from None
        return made, stream

    def _rendered(self, messages: Sequence[ChatMessage]) -> str:
        request, form = self._request, self._form
        variables = _thinking(request.effort, self._template)
        if form is not None and request.offered:
            variables |= form.variables(request.offered, self._escape)
        joined = _joined(messages)
        try:
            return self._tokenizer.chat_text(self._dicts(messages), **variables)
        except LocalqError as error:
            if error.exit_code != ExitCode.FAILURE or joined == list(messages):
                raise _refusal(request, error) from None
        try:
            return self._tokenizer.chat_text(self._dicts(joined), **variables)
        except LocalqError as error:
            raise _refusal(request, error) from None

    def _dicts(self, messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
        has_developer = "developer" in self._template
        found = [
            self._dict(each, "system" if each.role == "developer" and not has_developer else each.role)
            for each in messages
        ]
        return found if self._form is None else self._form.messages(found, self._escape)

    def _dict(self, message: ChatMessage, role: str) -> dict[str, Any]:
        made: dict[str, Any] = {**thinking.template_message(self._tokenizer, role, _stored(message, self._tokenizer))}
        if message.calls:
            made["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in message.calls
            ]
        if role == "tool":  # `ToolFormat.messages` escapes it
            made |= {"content": message.text, "tool_call_id": message.call_id, "name": message.name}
        return made


def _refusal(request: ReplyRequest, error: LocalqError) -> LocalqError:
    """A template's refusal (exit 1) is the client's error; others are as they are."""
    if error.exit_code == ExitCode.FAILURE and type(error) is LocalqError:
        return ApiError(400, f"{request.field}: the model's chat template rejects them ({error.why}).", request.field)
    return error


def _thinking(effort: str, template: str) -> dict[str, Any]:
    """Variables of the template for an effort. It is a wish: a model without levels thinks or does not."""
    if not effort:
        return {}
    known = levels(template)
    if effort in _LEAST:
        return thinking.minimal_variables(template)
    if effort in known:
        return thinking.variables(template, effort)
    if known and effort != "on":
        return thinking.variables(template, known[-1] if effort in _MOST else known[0])
    return {SWITCH: True} if SWITCH in template else {}


def _joined(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Messages as strict templates take them: one system message, at the start (later ones as the user's), and no two
    of one role behind each other."""
    found: list[ChatMessage] = []
    for each in messages:
        role = "system" if each.role == "developer" else each.role
        if role == "system" and found and found[-1].role != "system":
            role = "user"
        if found and role in ("system", "user") and found[-1].role == role:
            found[-1] = ChatMessage(role, f"{found[-1].text}\n\n{each.text}")
        else:
            found.append(each if role == each.role else ChatMessage(role, each.text))
    return found


def _stored(message: ChatMessage, tokenizer: Tokenizer) -> str:
    """The message as a conversation stores it: a thought in its tags before the answer."""
    if not message.thought:
        return message.text
    tags = thought_tags.of_template(tokenizer.chat_template) or thought_tags.THINK
    return tags.wrap(message.thought) + tags.ending + message.text
