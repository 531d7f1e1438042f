"""A `tokenizers.Tokenizer` from the vocabulary of a .gguf file, equal to that of tokenizer.json.

Two kinds (`tokenizer.ggml.model`): byte-level BPE ("gpt2"), for which GGUF states only the name of the pre-tokenizer
(`tokenizer.ggml.pre`), and SentencePiece BPE ("llama"), whose merges follow from the scores. The regular expressions
of the pre-tokenizers come from the models' published tokenizer.json files. Torch-free.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from localq import processes
from localq.errors import ExitCode, LocalqError, bad_file
from localq.files.gguf.binary import Container
from localq.files.gguf.splits import read_first

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # `tokenizer.ggml.token_type`
MAX_TOKEN, MAX_VOCABULARY = 2**10, 2**23  # characters; the largest published vocabularies have 2 million
SPACE = "\u2581"  # SentencePiece writes a space as this

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    """OpenAI's cl100k rule, with `digits` for groups of digits."""
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


_QWEN35 = (  # cl100k's with combining marks among the letters, and single digits
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_TAIL}"
)


# cl100k's with single digits, and line breaks apart from signs
_SEED = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_TAIL}"


def _cased(contractions: str, digits: str) -> str:
    """OpenAI's o200k rule: splits words where upper case begins."""
    head = r"[^\r\n\p{L}\p{N}]?"
    words = f"{head}{_UPPER}*{_LOWER}+{contractions}|{head}{_UPPER}+{_LOWER}*{contractions}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


# `tokenizer.ggml.pre` -> regular expression of the pre-tokenizer. None: GPT-2's, which the byte-level step contains.
_RULES: dict[str, str | None] = {
    "gpt-2": None,
    "phi-2": None,
    "smollm": None,
    "refact": None,  # Granite 3
    "exaone4": None,
    "llama-bpe": _cl100k(r"\p{N}{1,3}"),
    "llama3": _cl100k(r"\p{N}{1,3}"),
    "llama-v3": _cl100k(r"\p{N}{1,3}"),
    "falcon3": _cl100k(r"\p{N}{1,3}"),
    "pixtral": _cl100k(r"\p{N}{1,3}"),
    "lfm2": _cl100k(r"\p{N}{1,3}"),
    "smaug-bpe": _cl100k(r"\p{N}{1,3}"),
    "dbrx": _cl100k(r"\p{N}{1,3}"),
    "qwen2": _cl100k(r"\p{N}"),
    "qwen35": _QWEN35,
    "deepseek-r1-qwen": _cl100k(r"\p{N}"),
    "seed-coder": _SEED,
    "tekken": _cased("", r"\p{N}"),
    "gpt-4o": _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),
    "llama4": _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),
}
# (architectures, tokens that the vocabulary has) -> the rule of files from before rules were named.
_IMPLIED = {
    (frozenset({"qwen2", "qwen3", "qwen3moe"}), frozenset({"<|endoftext|>", "<|im_start|>"})): "qwen2",
    (frozenset({"qwen35", "qwen35moe"}), frozenset({"<|endoftext|>", "<|im_start|>"})): "qwen35",
    (frozenset({"gpt-oss"}), frozenset({"<|endoftext|>", "<|start|>", "<|channel|>"})): "gpt-4o",
    (frozenset({"llama"}), frozenset({"<|begin_of_text|>", "<|start_header_id|>"})): "llama-bpe",
}
_SINGLE_DIGITS = frozenset({"refact", "smollm"})
_NFC = frozenset({"qwen2", "qwen35", "deepseek-r1-qwen"})
_ADDS_BOS = frozenset(
    {"llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral", "tekken"}
)  # where the file does not state it
# Whole words of the vocabulary need no merges. "smaug-bpe" (SmolLM3) is Llama 3's vocabulary without BOS.
_WHOLE_WORDS_FIRST = _ADDS_BOS | {"smaug-bpe"}
# Gemma's merges follow the order of the tokens, not their scores, and its tokens of spaces are spelled with spaces.
_GEMMA = frozenset({"gemma2", "gemma3", "gemma4"})
# Tokens that end a turn or a text. Converters made some of them normal tokens, which no text would ever become, and
# which would be shown; as llama.cpp does (llama-vocab.cpp), they are control tokens whatever their type is. Not "</s>"
# and "<s>": they are tags of HTML in Gemma's vocabulary.
_ENDS = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
        "<|end_of_turn|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_utterance>", "<turn|>", "<EOT>", "[EOT]",
    }
)  # fmt: skip
_KEEPS_SPACE = frozenset(
    {"<unk>", "<s>", "<|endoftext|>"}
)  # special tokens of Phi-3 that keep the space after them; the others swallow it


def build_tokenizer(path: Path) -> Tokenizer:
    """Build the tokenizer of `path`.

    Raises LocalqError: exit 8 for a malformed vocabulary, 1 for an unsupported kind.
    """
    container = read_first(path)
    tokens, types = _tokens(container)
    kind = container.values.get("tokenizer.ggml.model")
    makers = {"gemma4": _sentencepiece, "gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in makers:
        why = f"the tokenizer type {str(kind)[:40]!r} is not supported"
        raise LocalqError(str(path), why, "Supported: gemma4, gpt2 and llama.", ExitCode.FAILURE)
    try:
        with processes.without_collections():  # 100,000 pairs set them off: a third of the time, for no garbage
            tokenizer = makers[kind](container, tokens)
        strips = kind == "llama" and container.values.get("general.architecture") == "phi3"
        _add_special(tokenizer, tokens, types, strips)
        _add_ends(tokenizer, container, tokens)
    except LocalqError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise _malformed_error(container, f"the vocabulary is malformed ({str(error)[:200]})") from error
    return tokenizer


def special_tokens(path: Path) -> dict[str, Any]:
    """{"bos_token", "eos_token", "unk_token", "pad_token": text or None, "add_bos", "add_eos": bool}."""
    container = read_first(path)
    tokens, _ = _tokens(container)
    ids = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found: dict[str, Any] = {name: _token(container, tokens, key) for name, key in ids.items()}
    return {**found, "add_bos": _adds(container, "bos"), "add_eos": _adds(container, "eos")}


def _tokens(container: Container) -> tuple[list[str], list[int]]:
    tokens = container.values.get("tokenizer.ggml.tokens")
    types = container.values.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens or ()))
    if not isinstance(tokens, list) or not tokens or not isinstance(types, list) or len(types) != len(tokens):
        raise _malformed_error(container, "the vocabulary is missing or malformed")
    if set(map(type, tokens)) != {str}:
        raise _malformed_error(container, "the vocabulary is not text")
    if max(map(len, tokens)) > MAX_TOKEN or sum(map(len, tokens)) > MAX_VOCABULARY:
        raise _malformed_error(container, "the vocabulary is implausibly large")
    return tokens, types


def _malformed_error(container: Container, why: str) -> LocalqError:
    return bad_file(str(container.path), why, "Download the file again.")


def _token(container: Container, tokens: list[str], key: str) -> str | None:
    index = container.values.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[index] if isinstance(index, int) and 0 <= index < len(tokens) else None


def _adds(container: Container, end: str) -> bool:
    stated = container.values.get(f"tokenizer.ggml.add_{end}_token")
    if isinstance(stated, bool):
        return stated
    by_kind = container.values.get("tokenizer.ggml.model") == "llama"
    return end == "bos" and (by_kind or _rule(container) in _ADDS_BOS)


def _rule(container: Container) -> str:
    """The pre-tokenizer's name; of a file without one that of its model, where the vocabulary leaves no doubt."""
    stated = container.values.get("tokenizer.ggml.pre")
    if stated not in (None, "default"):
        return stated if isinstance(stated, str) else ""
    tokens = container.values.get("tokenizer.ggml.tokens")
    known = {token for token in tokens if isinstance(token, str)} if isinstance(tokens, list) else set()
    architecture = container.values.get("general.architecture")
    return next((rule for (of, marks), rule in _IMPLIED.items() if architecture in of and known >= marks), "")


def _rule_error(container: Container) -> LocalqError:
    """A wrong guess would split text wrongly without an error, so an unnamed rule is refused as an unknown one is."""
    stated = container.values.get("tokenizer.ggml.pre")
    why = f"the pre-tokenizer {str(stated)[:40]!r} is not supported"
    step = "Use another file, or the model's safetensors files."
    if stated in (None, "default"):
        value = "is missing" if stated is None else "is 'default'"
        why = f"names no pre-tokenizer (the key tokenizer.ggml.pre {value})"
        step = "Convert the model again with a current version of llama.cpp, or use the model's safetensors files."
    return LocalqError(str(container.path), why, step, ExitCode.FAILURE)


def _byte_level(container: Container, tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers  # start-up cost

    rule = _rule(container)
    if rule not in _RULES:
        raise _rule_error(container)
    pairs = _pairs(container.values.get("tokenizer.ggml.merges"))
    if pairs is None:
        raise _malformed_error(container, "the merges are missing or malformed")
    vocabulary, whole_words = _vocabulary(tokens), rule in _WHOLE_WORDS_FIRST
    try:
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_words)
    except Exception:  # a merge of what is no token; the library finds it sooner than a loop here
        pairs = [pair for pair in pairs if {*pair, "".join(pair)} <= vocabulary.keys()]
        model = models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=whole_words)
    tokenizer = Tokenizer(model)
    if rule in _NFC:
        tokenizer.normalizer = normalizers.NFC()
    pattern = _RULES[rule]
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if rule in _SINGLE_DIGITS else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Token -> id; the first of equal tokens wins."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def _pairs(merges: Any) -> list[tuple[str, str]] | None:
    """Merges as pairs; None where they are no list of two pieces of text with a space between them."""
    if not isinstance(merges, list) or not set(map(type, merges)) <= {str}:
        return None
    pairs: list[Any] = [tuple(each.split(" ")) for each in merges]
    return pairs if set(map(len, pairs)) <= {2} else None


def _sentencepiece(container: Container, tokens: list[str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers  # start-up cost

    scores = container.values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not isinstance(scores[0], float):
        raise _malformed_error(container, "the vocabulary has no scores")
    if container.values.get("general.architecture") in _GEMMA:
        tokens = [_spelled(token) for token in tokens]
        scores = [-float(index) for index in range(len(tokens))]
    vocabulary = _vocabulary(tokens)
    unknown = _token(container, tokens, "unknown") or "<unk>"
    tokenizer = Tokenizer(
        models.BPE(
            vocabulary,
            _stated_merges(container) or _merges(vocabulary, scores),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    parts: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not container.values.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Replace(" ", SPACE)
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif "[INST]" in vocabulary:
        # Mistral since v0.3: a space before the whole text, none after a special token.
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme="first", split=False)
        parts.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
        parts.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _spelled(token: str) -> str:
    """A token of spaces only, spelled as in SentencePiece."""
    return SPACE * len(token) if token and not token.strip(" ") else token


def _stated_merges(container: Container) -> list[tuple[str, str]]:
    """The merges that a file of Gemma 4 states; none elsewhere."""
    stated = container.values.get("tokenizer.ggml.merges")
    if container.values.get("tokenizer.ggml.model") != "gemma4" or not isinstance(stated, list):
        return []
    pairs = _pairs(stated)
    if pairs is None:
        raise _malformed_error(container, "the merges are malformed")
    return pairs


def _merges(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of tokens that join to a token, best score first, as SentencePiece merges them."""
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, index in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[index], -cut, cut - len(token), index, left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


def _add_special(tokenizer: Tokenizer, tokens: list[str], types: list[int], strips: bool) -> None:
    """Add the control, unknown and user-defined tokens, which are matched in the raw text first.

    `strips`: most of them include the space after them, as in Phi-3.
    """
    from tokenizers import AddedToken  # start-up cost

    added = []
    marked = (
        (token, stated) for token, stated in zip(tokens, types, strict=True) if stated != NORMAL or token in _ENDS
    )
    for token, stated in marked:
        kind = CONTROL if token in _ENDS else stated
        if kind in (CONTROL, UNKNOWN, USER_DEFINED) and tokenizer.token_to_id(token) is not None:
            swallows = strips and token not in _KEEPS_SPACE
            added.append(AddedToken(token, normalized=False, special=kind != USER_DEFINED, rstrip=swallows))
    tokenizer.add_tokens(added)


def _add_ends(tokenizer: Tokenizer, container: Container, tokens: list[str]) -> None:
    from tokenizers import processors  # start-up cost

    ends = {end: _token(container, tokens, end) for end in ("bos", "eos") if _adds(container, end)}
    texts = {end: text for end, text in ends.items() if text}
    if any(mark in text for text in texts.values() for mark in "$:"):  # the library's template syntax
        raise _malformed_error(container, f"the BOS or EOS token contains '$' or ':' ({sorted(texts.values())})")
    if texts:
        single = [*([texts["bos"]] if "bos" in texts else []), "$A", *([texts["eos"]] if "eos" in texts else [])]
        special = [(text, tokenizer.token_to_id(text)) for text in dict.fromkeys(texts.values())]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
