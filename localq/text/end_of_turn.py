"""The tokens that end a reply: all ways in which a model states where a turn ends.

stated    ids of generation_config.json, config.json or a .gguf file; eos_token and eot_token of tokenizer_config.json
listed    tokens whose names say it (`NAMES`), where they are special or the chat template writes them
written   the token that the chat template writes behind an answer, special or not

A token that starts a text never ends one, unless it is stated. Of gpt-oss, `<|end|>` ends a message and not the reply,
nor does `<|eom|>` of Muse Glimmer. Results of tools begin with a token of their own in Gemma 4 and GLM: there the
reply is over.
llama.cpp and vLLM end a reply at the same tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from localq.errors import ExitCode, LocalqError
from localq.text import harmony, template, thought_tags

if TYPE_CHECKING:
    import tokenizers

    from localq.files.model_folder import ModelFiles

NAMES = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<|end_of_turn|>", "<turn|>", "<|end|>",
    "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>",
    "<|tool_response>", "<|observation|>", "<EOT>", "[EOT]", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<eos>", "</s>",
)  # fmt: skip
_STATED = ("eos_token", "eot_token", "eom_token")
_ANSWER = "Quite so indeed"  # of the conversation that is rendered; no template writes it


def stop_ids(backend: tokenizers.Tokenizer, special: Mapping[str, str], files: ModelFiles) -> frozenset[int]:
    """The ids that end a reply. special: names of special tokens -> their text."""
    text = files.chat_template or ""
    tokens = _ends_stated(special, files) | _ends_listed(backend, special, text) | _ends_written(backend, special, text)
    found = {backend.token_to_id(token) for token in tokens}
    found |= {id for id in files.eos_ids if backend.id_to_token(id) is not None}
    if harmony.is_template(text):  # their answer follows the end of a message of thoughts, whatever a file states
        found -= {backend.token_to_id(mark) for mark in (harmony.END, harmony.MUSE_END)}
    return frozenset(id for id in found if id is not None)


def _ends_stated(special: Mapping[str, str], files: ModelFiles) -> set[str]:
    """Texts that the configuration of the tokenizer names."""
    more = files.tokenizer_config.get("extra_special_tokens")
    found = {special[name] for name in _STATED if name in special}
    for source in (files.tokenizer_config, more if isinstance(more, dict) else {}):
        for value in map(source.get, _STATED):
            content = value.get("content") if isinstance(value, dict) else value
            found |= {content} if isinstance(content, str) and content else set()
    return found


def _ends_listed(backend: tokenizers.Tokenizer, special: Mapping[str, str], text: str) -> set[str]:
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    found = {name for name in NAMES if added.get(name, False) or name in text}
    if harmony.is_template(text) or harmony.LAST in added:
        found.discard(harmony.END)
    return found - {special.get("bos_token", "")}


def _ends_written(backend: tokenizers.Tokenizer, special: Mapping[str, str], text: str) -> set[str]:
    """The added token that follows an answer in the rendered template; empty for a template that does not write it."""
    if not text or harmony.is_template(text):
        return set()
    turns = (("user", "How so?"), ("assistant", _ANSWER), ("user", "Why?"))
    try:
        rendered = template.render(text, [{"role": role, "content": said} for role, said in turns], special)
    except LocalqError as error:
        if isinstance(error, template.LimitExceeded) and error.exit_code == ExitCode.FAILURE:
            raise  # a busy machine: without the token no reply would end
        return set()  # reported when the first message is sent
    _, said, after = rendered.rpartition(_ANSWER)
    if not said:  # a template that writes no earlier answers
        return set()
    after = after.lstrip()
    tokens = [token.content for token in backend.get_added_tokens_decoder().values()]
    found = max((token for token in tokens if after.startswith(token)), key=len, default="")
    is_end = found.strip() and found != special.get("bos_token") and not thought_tags.is_shown(found)
    return {found} if is_end else set()
