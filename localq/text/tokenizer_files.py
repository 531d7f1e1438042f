"""Tokenizer files of a model folder, read with limits: hostile or damaged ones are refused.

Without transformers; tokens that its tokenizers would add to tokenizer.json are added here too.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from localq.errors import bad_file
from localq.files.json_files import inside, read_object, read_text
from localq.processes import run_with_timeout

if TYPE_CHECKING:
    import tokenizers

    from localq.files.model_folder import ModelFiles

MAX_TOKENIZER_BYTES = 64 * 2**20
MAX_MAP_BYTES = 2**20
MAX_TOKENS = 2**19  # twice the largest published vocabulary (gemma 3: 262,145)
MAX_DECLARED = 2**16  # of tokenizer_config.json; Llama 3 has 256, gemma 3 has 6,415
# Characters that MAX_TOKENS tokens and twice as many merges need; counted before the library reads the file, to limit
# its time and memory.
MAX_CHARACTERS = {":": MAX_TOKENS + 2**17, ",": 6 * MAX_TOKENS, "[": 2 * MAX_TOKENS, "{": 2**17}
# Limit of characters that one character may become, all replacements multiplied; NFKC needs 18, published files 1.
MAX_GROWTH = 32
TOKENIZER = "the model's tokenizer"
FETCH_AGAIN = "Check its files with `localq verify`, or use another copy of the model."
SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")


@contextlib.contextmanager
def report_panics(what: str, why: str, next_step: str) -> Iterator[None]:
    """Turn errors of the library into LocalqError: Exception, and for some files a panic, which is none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # such as Ctrl-C
        raise bad_file(what, f"{why} ({str(error)[:200]})", next_step) from error


def encode_within(
    seconds: float, backend: tokenizers.Tokenizer, text: str, special: bool = False
) -> tokenizers.Encoding:
    """The encoding of `text`, with a time limit: the splitting rule of a hostile file can search for hours.

    special: with the tokens that the model wants around plain text. Raises LocalqError (exit 8).
    """

    def work() -> tokenizers.Encoding:
        with report_panics(TOKENIZER, "cannot encode this text", FETCH_AGAIN):
            # Only the library's batch call lets other threads run.
            return backend.encode_batch([text], add_special_tokens=special)[0]

    try:
        return run_with_timeout(seconds, work)
    except TimeoutError:
        why = f"processing {len(text)} characters took more than {seconds:.0f} s"
        raise bad_file(TOKENIZER, why, FETCH_AGAIN) from None


def read_backend(files: ModelFiles) -> tokenizers.Tokenizer:
    """The tokenizer of the folder. Raises LocalqError (exit 8) where tokenizer.json is missing, damaged or hostile."""
    from tokenizers import Tokenizer  # start-up cost

    path = inside(files.path, "tokenizer.json")
    next_step = "Use a copy of the model with a valid tokenizer.json."
    if path is None:
        raise bad_file(str(files.path / "tokenizer.json"), "no such file", next_step)
    text = read_text(path, MAX_TOKENIZER_BYTES)
    if any(text.count(character) > most for character, most in MAX_CHARACTERS.items()):
        raise bad_file(
            str(path),
            f"too many tokens or merges (limits: {MAX_TOKENS:,} tokens, {2 * MAX_TOKENS:,} merges)",
            next_step,
        )
    with report_panics(str(path), "malformed", next_step):
        backend = Tokenizer.from_str(text)
    for step in (backend.normalizer, backend.decoder):
        if step is not None and (growth := _growth(json.loads(step.__getstate__()))) > MAX_GROWTH:
            why = f"encoding can expand text to {growth} times its length (limit: {MAX_GROWTH})"
            raise bad_file(str(path), why, "The file may be malicious; use another copy of the model.")
    # Settings of training; a prompt must never be truncated or padded.
    backend.no_truncation()
    backend.no_padding()
    _add_declared(backend, files)
    return backend


def special_tokens(files: ModelFiles) -> dict[str, str]:
    """From tokenizer_config.json, else special_tokens_map.json; a token is text or {"content": text}."""
    found: dict[str, str] = {}
    older = inside(files.path, "special_tokens_map.json")
    fallback = read_object(older, MAX_MAP_BYTES) if older else {}
    for name in SPECIAL:
        value = files.tokenizer_config.get(name) or fallback.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _growth(step: Any) -> int:
    """Characters that one character can become in a normalizer or decoder, given as the library writes it."""
    if not isinstance(step, dict):
        return 1
    kind = step.get("type")
    if kind == "Sequence":
        return math.prod(_growth(inner) for inner in step.get("normalizers") or step.get("decoders") or ())
    if kind == "Replace":
        return max(1, len(step["content"]))
    if kind == "Prepend":
        return max(1, len(step["prepend"]))
    if kind == "Precompiled":
        return _charsmap_growth(step["precompiled_charsmap"])
    return 1


def _charsmap_growth(encoded: str) -> int:
    """Growth by SentencePiece's table: size of an index as u32, the index, then zero-terminated replacements."""
    try:
        table = base64.b64decode(encoded)
    except binascii.Error:
        return 1  # refused by the library
    replacements = table[4 + int.from_bytes(table[:4], "little") :].split(b"\0")
    return max(1, *(len(each.decode("utf-8", "replace")) for each in replacements))


def _add_declared(backend: tokenizers.Tokenizer, files: ModelFiles) -> None:
    """Added tokens that only tokenizer_config.json declares, as transformers adds them, where the id is as declared."""
    from tokenizers import AddedToken  # start-up cost

    declared = files.tokenizer_config.get("added_tokens_decoder")
    if not isinstance(declared, dict):
        return
    if len(declared) > MAX_DECLARED:
        why = f"too many added tokens ({len(declared):,}; limit: {MAX_DECLARED:,})"
        raise bad_file(str(files.path / "tokenizer_config.json"), why, "Use another copy of the model.")
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    wanted = {int(id): token for id, token in declared.items() if _is_id(id) and isinstance(token, dict)}
    added: list[AddedToken] = []
    following = backend.get_vocab_size(with_added_tokens=True)  # the id that the next new token gets
    for id, token in sorted(wanted.items()):
        content = token.get("content")
        if not isinstance(content, str) or not content or content in known:
            continue
        place = backend.token_to_id(content)
        if id == (following if place is None else place):
            flags = {name: token.get(name) is True for name in ("single_word", "lstrip", "rstrip", "special")}
            normalized = token.get("normalized", not flags["special"]) is True
            added.append(AddedToken(content, normalized=normalized, **flags))
            known.add(content)
            following += place is None
    backend.add_tokens(added)  # in one call: each call takes time proportional to all tokens


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= len(str(2**32))
