"""Tiny tokenizers of every family's kind, with its special tokens and its chat template."""

from __future__ import annotations

import functools

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from localq.text.tokenizer import Tokenizer
from tests.support.text import tiny_tokenizers
from tests.support.text.chat_templates import ENDS, MARKS, family, source

SENTENCEPIECE = ("llama-2", "mistral", "gemma-4", "gemma", "phi-3")
trained = functools.cache(lambda kind: getattr(tiny_tokenizers, kind)().to_str())


def family_backend(name: str) -> Backend:
    """A tiny tokenizer of the family's kind with its special tokens, BOS put first as its file does."""
    known = family(name)
    backend = Backend.from_str(trained("llama2" if known in SENTENCEPIECE else "byte_level"))
    texts = [text for text in (*ENDS[known], *MARKS[known]) if text]
    rstrip = known == "phi-3"  # its tokens take the white space behind them along
    backend.add_special_tokens([AddedToken(text, normalized=False, rstrip=rstrip) for text in texts])
    bos = ENDS[known][0]
    if bos and known in ("llama", "llama-2", "mistral", "gemma-4", "gemma", "deepseek"):
        ends = [(bos, backend.token_to_id(bos))]
        backend.post_processor = TemplateProcessing(single=[bos, "$A"], special_tokens=ends)
    return backend


def family_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a template's family; a reply ends at its eos."""
    text, special = source(name)
    backend = family_backend(name)
    return Tokenizer(backend, special, text, frozenset({backend.token_to_id(special["eos_token"])}))
