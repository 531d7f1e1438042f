"""Damaged and hostile .gguf files: an error that names the file, within a second, with the documented exit code."""

from __future__ import annotations

import os
import struct
import time

import numpy as np
import pytest

from localq.errors import ExitCode, LocalqError
from localq.files.gguf import binary
from localq.files.gguf.binary import read_container
from localq.files.gguf.reader import read_header
from localq.files.gguf.tensors import FileBytes, read_tensor
from localq.files.gguf.vocab import build_tokenizer, special_tokens
from localq.files.model_folder import open_model

U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = 4, 5, 6, 7, 8, 9, 10, 11, 12
LAYOUT = {U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind: int, value) -> bytes:
    return text(value) if kind == STRING else struct.pack("<" + LAYOUT[kind], value)


def key(name: str, kind: int, value) -> bytes:
    return text(name) + struct.pack("<I", kind) + scalar(kind, value)


def array(name: str, kind: int, values: list) -> bytes:
    head = text(name) + struct.pack("<IIQ", ARRAY, kind, len(values))
    return head + b"".join(scalar(kind, value) for value in values)


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    """A directory entry; `shape` as PyTorch has it."""
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


TOKENS = ["<unk>", "<s>", "</s>", "a", "b", "ab"]
KEYS = {  # a sound little model; each case changes one thing
    "general.architecture": key("general.architecture", STRING, "llama"),
    "block_count": key("llama.block_count", U32, 2),
    "context_length": key("llama.context_length", U32, 64),
    "embedding_length": key("llama.embedding_length", U32, 8),
    "feed_forward_length": key("llama.feed_forward_length", U32, 12),
    "head_count": key("llama.attention.head_count", U32, 2),
    "head_count_kv": key("llama.attention.head_count_kv", U32, 1),
    "eps": key("llama.attention.layer_norm_rms_epsilon", F32, 1e-5),
    "theta": key("llama.rope.freq_base", F32, 1e4),
    "model": key("tokenizer.ggml.model", STRING, "llama"),
    "tokens": array("tokenizer.ggml.tokens", STRING, TOKENS),
    "scores": array("tokenizer.ggml.scores", F32, [0.0, 0.0, 0.0, -1.0, -2.0, -3.0]),
    "types": array("tokenizer.ggml.token_type", I32, [2, 3, 3, 1, 1, 1]),
    "bos": key("tokenizer.ggml.bos_token_id", U32, 1),
    "eos": key("tokenizer.ggml.eos_token_id", U32, 2),
}
TENSORS = {
    "token_embd.weight": tensor("token_embd.weight", (6, 8)),
    "q": tensor("blk.0.attn_q.weight", (8, 8), offset=192),
}
DATA = bytes(192 + 256)
BPE = {
    "model": key("tokenizer.ggml.model", STRING, "gpt2"),
    "pre": key("tokenizer.ggml.pre", STRING, "qwen2"),
    "merges": array("tokenizer.ggml.merges", STRING, ["a b"]),
}
RULE = {"scores": None, **BPE}


def gguf_file(keys: dict | None = None, tensors: dict | None = None, *, data: bytes = DATA, version: int = 3,
              magic: bytes = b"GGUF", counts: tuple[int, int] | None = None, align: int = 32) -> bytes:  # fmt: skip
    """A file of `KEYS` and `TENSORS` with changes; None takes one away."""
    all_keys = [value for value in {**KEYS, **(keys or {})}.values() if value is not None]
    all_tensors = [value for value in {**TENSORS, **(tensors or {})}.values() if value is not None]
    head = magic + struct.pack("<IQQ", version, *(counts or (len(all_tensors), len(all_keys))))
    body = head + b"".join(all_keys) + b"".join(all_tensors)
    return body + bytes(-len(body) % align) + data


def one(name: str, kind: int, value) -> dict[str, bytes]:
    """Another value for a key of the model."""
    return {name: key(f"llama.{'attention.' if name.startswith('head') else ''}{name}", kind, value)}


SOUND = gguf_file()
GEMMA = {name: value.replace(b"\x05\0\0\0\0\0\0\0llama", b"\x06\0\0\0\0\0\0\0gemma2") for name, value in KEYS.items()}
BAD, FAILS = ExitCode.BAD_FILE, ExitCode.FAILURE
HEADERS = {
    "empty": (b"", BAD),
    "no-gguf": (b"PK\x03\x04" + bytes(100), BAD),
    "pickle": (b"\x80\x02cos\nsystem\n" + bytes(100), BAD),
    "text": (b'{"model_type": "llama"}' * 10, BAD),
    "version-1": (gguf_file(version=1), BAD),
    "version-99": (gguf_file(version=99), BAD),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 2, 15) + bytes(1000), BAD),
    "tensors-2**63": (gguf_file(counts=(2**63, 15)), BAD),
    "keys-2**64-1": (gguf_file(counts=(2, 2**64 - 1)), BAD),
    "one-key-more": (gguf_file(counts=(2, 16)), BAD),
    "one-tensor-more": (gguf_file(counts=(3, 15)), BAD),
    "one-key-less": (gguf_file(counts=(2, 14)), BAD),
    "string-past-the-end": (gguf_file({"x": struct.pack("<Q", 10**6) + b"x"}), BAD),
    "string-2**64-1": (gguf_file({"x": struct.pack("<Q", 2**64 - 1) + b"x"}), BAD),
    "string-2**63": (gguf_file({"x": struct.pack("<Q", 2**63) + b"x"}), BAD),
    "value-type-13": (gguf_file({"x": text("x") + struct.pack("<IQ", 13, 0)}), BAD),
    "value-type-2**32-1": (gguf_file({"x": text("x") + struct.pack("<IQ", 2**32 - 1, 0)}), BAD),
    "array-2**60": (gguf_file({"x": text("x") + struct.pack("<IIQ", ARRAY, U32, 2**60)}), BAD),
    "array-of-strings-2**40": (gguf_file({"x": text("x") + struct.pack("<IIQ", ARRAY, STRING, 2**40)}), BAD),
    "array-over-the-end": (gguf_file({"x": text("x") + struct.pack("<IIQ", ARRAY, U64, 900)}), BAD),
    "nested-array": (gguf_file({"x": text("x") + struct.pack("<IIQIQ", ARRAY, ARRAY, 1, U32, 0)}), BAD),
    "deeply-nested-array": (gguf_file({"x": text("x") + struct.pack("<I", ARRAY) * 9 * 1000}), BAD),
    "array-of-unknown": (gguf_file({"x": text("x") + struct.pack("<IIQ", ARRAY, 77, 1)}), BAD),
    "key-twice": (gguf_file({"x": KEYS["block_count"]}), BAD),
    "tensor-twice": (gguf_file(tensors={"x": TENSORS["q"]}), BAD),
    "tensor-twice-by-leading-zero": (gguf_file(tensors={"x": tensor("blk.00.attn_q.weight", (8, 8))}), BAD),
    "alignment-0": (gguf_file({"x": key("general.alignment", U32, 0)}), BAD),
    "alignment-odd": (gguf_file({"x": key("general.alignment", U32, 33)}), BAD),
    "alignment-huge": (gguf_file({"x": key("general.alignment", U64, 2**63)}), BAD),
    "alignment-text": (gguf_file({"x": key("general.alignment", STRING, "32")}), BAD),
    "no-dimensions": (gguf_file(tensors={"x": tensor("output.weight", ())}), BAD),
    "five-dimensions": (gguf_file(tensors={"x": tensor("output.weight", (1, 1, 1, 1, 1))}), BAD),
    "2**32-1-dimensions": (gguf_file(tensors={"x": text("output.weight") + struct.pack("<I", 2**32 - 1)}), BAD),
    "dimension-0": (gguf_file(tensors={"x": tensor("output.weight", (0, 8))}), BAD),
    "shape-2**63": (gguf_file(tensors={"x": tensor("output.weight", (2**63, 8))}), BAD),
    "shape-product-over-2**64": (gguf_file(tensors={"x": tensor("output.weight", (2**33, 2**33))}), BAD),
    "shape-product-wraps-to-0": (gguf_file(tensors={"x": tensor("output.weight", (2**32, 2**32))}), BAD),
    "offset-past-the-end": (gguf_file(tensors={"x": tensor("output.weight", (6, 8), offset=10**9)}), BAD),
    "offset-2**64-1": (gguf_file(tensors={"x": tensor("output.weight", (6, 8), offset=2**64 - 1)}), BAD),
    "offset-at-the-end": (gguf_file(tensors={"x": tensor("output.weight", (6, 8), offset=448)}), BAD),
    "data-cut-by-one": (SOUND[:-1], BAD),
    "no-data": (gguf_file(data=b""), BAD),
    "half-a-block": (gguf_file(tensors={"x": tensor("output.weight", (6, 8), kind=8)}), BAD),
    "unknown-type-far-too-large": (gguf_file(tensors={"x": tensor("output.weight", (2**30, 2**30), kind=99)}), BAD),
    "no-architecture": (gguf_file({"general.architecture": None}), BAD),
    "architecture-number": (gguf_file({"general.architecture": key("general.architecture", U32, 3)}), BAD),
    "unknown-architecture": (gguf_file({"general.architecture": key("general.architecture", STRING, "mamba")}), FAILS),
    "projector": (gguf_file({"general.architecture": key("general.architecture", STRING, "clip")}), FAILS),
    "split": (gguf_file({"x": key("split.count", U32, 3)}), FAILS),
    "split-count-text": (gguf_file({"x": key("split.count", STRING, "3")}), BAD),
    "split-count-2**32-1": (gguf_file({"x": key("split.count", U32, 2**32 - 1)}), BAD),
    "split-count-negative": (gguf_file({"x": key("split.count", I32, -1)}), BAD),
    "experts-2**31": (gguf_file(one("expert_count", U32, 2**31)), BAD),
    "experts-text": (gguf_file(one("expert_count", STRING, "8")), BAD),
    "experts-without-used": (gguf_file(one("expert_count", U32, 8)), BAD),
    "unknown-tensor": (gguf_file(tensors={"x": tensor("blk.0.ffn_gate_inp.weight", (2, 8))}), FAILS),
    "unknown-tensor-outside": (gguf_file(tensors={"x": tensor("per_layer.weight", (2, 8))}), FAILS),
    "no-embedding": (gguf_file(tensors={"token_embd.weight": None}), BAD),
    **{f"no-{name}": (gguf_file({name: None}), BAD) for name in
       ("block_count", "context_length", "embedding_length", "feed_forward_length", "head_count", "eps")},
    "heads-0": (gguf_file(one("head_count", U32, 0)), BAD),
    "kv-heads-0": (gguf_file(one("head_count_kv", U32, 0)), BAD),
    "kv-heads-do-not-divide": (gguf_file(one("head_count_kv", U32, 3)), BAD),
    "heads-negative": (gguf_file(one("head_count", I32, -2)), BAD),
    "heads-text": (gguf_file(one("head_count", STRING, "2")), BAD),
    "heads-float": (gguf_file(one("head_count", F32, 2.0)), BAD),
    "heads-bool": (gguf_file(one("head_count", BOOL, True)), BAD),
    "heads-differ-by-layer": (gguf_file({"head_count": array("llama.attention.head_count", U32, [2, 4])}), BAD),
    "heads-2**31": (gguf_file(one("head_count", U32, 2**31)), BAD),
    "layers-2**32-1": (gguf_file(one("block_count", U32, 2**32 - 1)), BAD),
    "layers-2**63-gemma": (gguf_file({**GEMMA, "block_count": key("gemma2.block_count", U64, 2**63)}), BAD),
    "context-2**60": (gguf_file(one("context_length", U64, 2**60)), BAD),
    "key-length-0": (gguf_file({"x": key("llama.attention.key_length", U32, 0)}), BAD),
    "rotary-0": (gguf_file({"x": key("llama.rope.dimension_count", U32, 0)}), BAD),
    "theta-nan": (gguf_file({"theta": key("llama.rope.freq_base", F32, float("nan"))}), BAD),
    "theta-infinite": (gguf_file({"theta": key("llama.rope.freq_base", F32, float("inf"))}), BAD),
    "theta-negative": (gguf_file({"theta": key("llama.rope.freq_base", F32, -1e4)}), BAD),
    "theta-0": (gguf_file({"theta": key("llama.rope.freq_base", F32, 0.0)}), BAD),
    "theta-1e300": (gguf_file({"theta": key("llama.rope.freq_base", F64, 1e300)}), BAD),
    "theta-text": (gguf_file({"theta": key("llama.rope.freq_base", STRING, "1e4")}), BAD),
    "eps-0": (gguf_file({"eps": key("llama.attention.layer_norm_rms_epsilon", F32, 0.0)}), BAD),
    "scaling-unknown": (gguf_file({"x": key("llama.rope.scaling.type", STRING, "dynamic")}), FAILS),
    "scaling-without-factor": (gguf_file({"x": key("llama.rope.scaling.type", STRING, "linear")}), BAD),
    "scaling-number": (gguf_file({"x": key("llama.rope.scaling.type", U32, 1)}), FAILS),
    "rope-factors-0": (gguf_file(tensors={"x": tensor("rope_freqs.weight", (2,))}), BAD),
    "rope-factors-too-many": (gguf_file(tensors={"x": tensor("rope_freqs.weight", (3,))}), BAD),
    "rope-factors-fp16": (gguf_file(tensors={"x": tensor("rope_freqs.weight", (2,), kind=1)}), BAD),
    "rope-factors-unknown": (gguf_file(tensors={"x": tensor("rope_freqs.weight", (2,))},
                                       data=struct.pack("<2f", 3.0, 7.0) + DATA), FAILS),
    "rope-factors-nan": (gguf_file(tensors={"x": tensor("rope_freqs.weight", (2,))},
                                   data=struct.pack("<2f", float("nan"), 1.0) + DATA), BAD),
    "eos-text": (gguf_file({"eos": key("tokenizer.ggml.eos_token_id", STRING, "</s>")}), BAD),
}  # fmt: skip
VOCABULARIES = {
    "no-tokens": ({"tokens": None}, BAD),
    "no-tokens-at-all": ({"tokens": array("tokenizer.ggml.tokens", STRING, [])}, BAD),
    "tokens-are-numbers": ({"tokens": array("tokenizer.ggml.tokens", U32, range(6))}, BAD),
    "tokens-are-one-text": ({"tokens": key("tokenizer.ggml.tokens", STRING, "abcdef")}, BAD),
    "types-too-few": ({"types": array("tokenizer.ggml.token_type", I32, [1])}, BAD),
    "no-scores": ({"scores": None}, BAD),
    "scores-too-few": ({"scores": array("tokenizer.ggml.scores", F32, [0.0])}, BAD),
    "scores-are-text": ({"scores": array("tokenizer.ggml.scores", STRING, TOKENS)}, BAD),
    "token-of-2-KiB": ({"tokens": array("tokenizer.ggml.tokens", STRING, [*TOKENS[:5], "a" * 2048])}, BAD),
    "unknown-kind": ({"model": key("tokenizer.ggml.model", STRING, "bert")}, FAILS),
    "kind-is-a-number": ({"model": key("tokenizer.ggml.model", U32, 1)}, FAILS),
    "no-kind": ({"model": None}, FAILS),
    "unknown-rule": ({**RULE, "pre": key("tokenizer.ggml.pre", STRING, "mpt")}, FAILS),
    "rule-is-a-list": ({**RULE, "pre": array("tokenizer.ggml.pre", STRING, ["qwen2"])}, FAILS),
    "no-rule": ({**RULE, "pre": None}, FAILS),
    "default-rule": ({**RULE, "pre": key("tokenizer.ggml.pre", STRING, "default")}, FAILS),
    "no-merges": ({**RULE, "merges": None}, BAD),
    "merges-are-numbers": ({**RULE, "merges": array("tokenizer.ggml.merges", U32, [1])}, BAD),
    "merges-of-one": ({**RULE, "merges": array("tokenizer.ggml.merges", STRING, ["ab"])}, BAD),
    "merges-of-three": ({**RULE, "merges": array("tokenizer.ggml.merges", STRING, ["a b c"])}, BAD),
}


def refused(path, action) -> LocalqError:
    start = time.process_time()
    with pytest.raises(LocalqError) as caught:
        action(path)
    assert time.process_time() - start < 1.0
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 600
    assert caught.value.next_step
    return caught.value


@pytest.mark.parametrize("name", HEADERS)
def test_a_hostile_header_is_refused(tmp_path, name):
    data, exit_code = HEADERS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert refused(path, open_model).exit_code == exit_code


@pytest.mark.parametrize("name", VOCABULARIES)
def test_a_hostile_vocabulary_is_refused(tmp_path, name):
    keys, exit_code = VOCABULARIES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file(keys))
    assert refused(path, build_tokenizer).exit_code == exit_code


@pytest.mark.parametrize("keys", [{}, RULE], ids=["sentencepiece", "byte-level"])
def test_the_file_that_the_cases_change_is_sound(tmp_path, keys):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file(keys))
    assert open_model(path).config["num_hidden_layers"] == 2
    assert read_tensor(read_header(path), "model.layers.0.self_attn.q_proj.weight").shape == (8, 8)
    assert build_tokenizer(path).get_vocab_size() == 6
    assert special_tokens(path)["eos_token"] == "</s>"


def test_every_truncation_is_refused(tmp_path):
    for length in range(0, len(SOUND), 7):
        path = tmp_path / f"{length}.gguf"
        path.write_bytes(SOUND[:length])
        with pytest.raises(LocalqError):
            open_model(path)


def test_random_damage_is_survived(tmp_path):
    """Bytes flipped anywhere in the header: an error of ours, or a model; nothing else, and no time lost."""
    generator = np.random.default_rng(3)
    head = len(SOUND) - len(DATA)
    for number in range(400):
        data = bytearray(SOUND)
        for place in generator.integers(4, head, size=3):
            data[place] = generator.integers(0, 256)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(bytes(data))
        start = time.process_time()
        for action in (open_model, build_tokenizer):
            try:
                action(path)
            except LocalqError:
                continue
        assert time.process_time() - start < 1.0


@pytest.mark.parametrize("content", [SOUND[:-1], SOUND + b"x", SOUND], ids=["shorter", "longer", "as long"])
@pytest.mark.parametrize("is_open", [False, True], ids=["", "open"])
def test_a_file_that_changes_after_its_header_was_read(tmp_path, content, is_open):
    """What was checked is what is used, also where the file is open already."""
    path = tmp_path / "model.gguf"
    path.write_bytes(SOUND)
    header = read_header(path)
    file = FileBytes(header) if is_open else None
    with pytest.raises(LocalqError, match=r"tensor 'lm_head.weight' is missing"):
        read_tensor(header, "lm_head.weight", file)
    path.write_bytes(content)
    os.utime(path, ns=(0, header.files[0].mtime_ns + 1))
    with pytest.raises(LocalqError, match=r"changed while it was being read|truncated") as caught:
        read_tensor(header, "model.layers.0.self_attn.q_proj.weight", file)
    assert (caught.value.what, caught.value.exit_code) == (str(path), ExitCode.BAD_FILE)
    if file is not None:
        file.close()


def test_a_header_that_is_longer_than_what_is_read_at_first(tmp_path, monkeypatch):
    path = tmp_path / "model.gguf"
    path.write_bytes(SOUND)
    whole = read_container(path)
    for first in (1, 30, 100, len(SOUND)):
        monkeypatch.setattr(binary, "_FIRST_BYTES", first)
        os.utime(path, ns=(0, first))  # as another file: it is read again
        found = read_container(path)
        assert (found.values, found.tensors, found.size) == (whole.values, whole.tensors, whole.size)


def test_rows_that_do_not_divide_into_heads(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(gguf_file(tensors={"q": tensor("blk.0.attn_q.weight", (6, 8), offset=192)}))
    with pytest.raises(LocalqError, match="6 rows cannot be divided into 2 heads"):
        read_tensor(read_header(path), "model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("make", ["folder", "missing"])
def test_what_is_no_file_is_refused(tmp_path, make):
    path = tmp_path / "model.gguf"
    if make == "folder":
        path.mkdir()
    refused(path, read_header)


def test_a_bos_that_the_library_s_template_language_uses(tmp_path):
    """`$A` and `:1` mean something in the library's post-processor; as names of tokens they must not."""
    for number, name in enumerate(("$A", "$B:1", "a:1", ":", "$")):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(gguf_file({"tokens": array("tokenizer.ggml.tokens", STRING, ["<unk>", name, *TOKENS[2:]])}))
        assert refused(path, build_tokenizer).exit_code == BAD
