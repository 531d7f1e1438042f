"""What files of one family leave unsaid or say in their own way: tokens with spaces, query scales, rotary borders."""

from __future__ import annotations

import contextlib
import gc
import os
import struct

import gguf
import numpy as np
import pytest
from tokenizers import Tokenizer

from localq.errors import ExitCode, LocalqError
from localq.files.gguf import binary
from localq.files.gguf.reader import read_header
from localq.files.gguf.tensors import read_tensor
from localq.files.gguf.vocab import build_tokenizer
from localq.models import ARCHITECTURES
from localq.sampling import Sampling, read_generation_config
from tests.support.files import tiny_gguf
from tests.support.files.real_model import smollm2
from tests.support.files.tiny_gguf import Case
from tests.support.text import tiny_tokenizers
from tests.support.text.tiny_tokenizers import BYTES, SENTENCES

UNKNOWN, CONTROL, NORMAL, BYTE = (gguf.TokenType[name] for name in ("UNKNOWN", "CONTROL", "NORMAL", "BYTE"))
USER_DEFINED = gguf.TokenType.USER_DEFINED
TEXTS = [
    *SENTENCES, "", "x", "two  spaces", "three   spaces", "nine         spaces", "a \n b", "12 345 6,789.01", "x == y;",
    "if (a && !b) { return c[i] ^ 0x1F; }", "ß ẞ ſ ﬁ ǆ İ ı", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𓀀 🜁", "Ünïcödé ñandú",
    "한국어 조선말", "日本語とEnglishの混在", "中文，标点。「引号」", "مرحبا بالعالم ١٢٣",
    "שָׁלוֹם", "हिन्दी में", "ไทย", "Ελληνικά", "кириллица",
    "👍🏿👨‍👩‍👧", "a\u0327\u0301", "\u202eright to left\u202c", "snake_case_name", "kebab-case-name",
    "https://example.org/?q=1&r=2", "e-mail@example.org",
    "tab\tseparated\tvalues", "\r\nwindows\r\nlines", "…—–‘’“”", "∑∫√≠≤≥", "H₂O and E=mc²", "½ ¾ Ⅳ",
]  # fmt: skip


def vocabulary_file(path, architecture: str, tokens: list[str], types: list[int], **more):
    """A file with a SentencePiece vocabulary and nothing else."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_scores([0.0 if kind != NORMAL else -float(index) for index, kind in enumerate(types)])
    writer.add_bos_token_id(1)
    writer.add_unk_token_id(0)
    for name, value in more.items():
        getattr(writer, f"add_{name}")(value)
    tiny_gguf.finish(writer)
    return path


def pieces(extra: dict[str, int]) -> tuple[list[str], list[int]]:
    """The tokens of a small trained vocabulary with their kinds, and `extra` ones behind them."""
    trained = tiny_tokenizers.llama2().get_vocab(with_added_tokens=True)
    tokens = sorted(trained, key=trained.__getitem__)
    kinds = {"<unk>": UNKNOWN, "<s>": CONTROL, "</s>": CONTROL, **dict.fromkeys(BYTES, BYTE)}
    return [*tokens, *extra], [*(kinds.get(token, NORMAL) for token in tokens), *extra.values()]


def transformers_tokenizer(architecture: str, tokens: list[str], types: list[int]) -> Tokenizer:
    """What transformers makes of the same metadata."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    scores = [0.0 if kind != NORMAL else -float(index) for index, kind in enumerate(types)]
    described = {"tokenizer_type": "llama", "tokens": tokens, "token_type": types, "scores": scores}
    return convert_gguf_tokenizer(architecture, described)[0]


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


# ---- tokens


@pytest.mark.parametrize("architecture", ["gemma2", "gemma3", "phi3"])
def test_the_ids_are_those_of_transformers(tmp_path, architecture):
    tokens, types = pieces({"<start_of_turn>": CONTROL, "<|end|>": CONTROL, "<mark>": USER_DEFINED})
    if architecture != "phi3":  # "▁▁" is stored as two spaces
        tokens += ["▁" * 3, "  ", "the▁", "\n\n"]
        types += [NORMAL, USER_DEFINED, NORMAL, USER_DEFINED]
    path = vocabulary_file(tmp_path / "m.gguf", architecture, tokens, types, add_space_prefix=architecture == "phi3")
    ours, theirs = build_tokenizer(path), transformers_tokenizer(architecture, tokens, types)
    assert len(TEXTS) >= 60
    for text in [*TEXTS, "a<start_of_turn>user\n\n\nx<mark>y", "<mark><|end|><s>", "the the  the   the    the"]:
        assert ids(ours, text) == ids(theirs, text), text
        assert ours.decode(ids(ours, text)) == theirs.decode(ids(theirs, text)), text


def test_gemma_merges_by_place_where_others_merge_by_score(tmp_path):
    tokens = ["<unk>", "<s>", "a", "b", "c", "bc", "ab"]  # the better score has the later place
    types = [UNKNOWN, CONTROL, *[NORMAL] * 5]
    found = {}
    for architecture in ("llama", "gemma2"):
        path = vocabulary_file(tmp_path / f"{architecture}.gguf", architecture, tokens, types, add_space_prefix=False,
                               token_scores=[0.0, 0.0, -1.0, -2.0, -3.0, -9.0, -8.0])  # fmt: skip
        found[architecture] = build_tokenizer(path).encode("abc", add_special_tokens=False).tokens
    assert found == {"llama": ["ab", "c"], "gemma2": ["a", "bc"]}


def test_phi_3_swallows_the_space_behind_its_tokens(tmp_path):
    tokens, types = pieces({"<|user|>": CONTROL, "<|end|>": CONTROL, "<|endoftext|>": CONTROL})
    user, end, plain = (tokens.index(token) for token in ("<|user|>", "<|end|>", "▁"))
    phi = build_tokenizer(vocabulary_file(tmp_path / "phi.gguf", "phi3", tokens, types))
    assert ids(phi, "<|user|>\n ship<|end|>\n") == [user, *ids(phi, "ship"), end]
    assert ids(phi, "<|endoftext|>  ") == [tokens.index("<|endoftext|>"), plain, plain, plain]
    other = build_tokenizer(vocabulary_file(tmp_path / "llama.gguf", "llama", tokens, types))
    assert ids(other, "<|user|>\nship<|end|>\n") == [user, *ids(other, "\nship"), end, *ids(other, "\n")]


def test_mistral_puts_a_space_before_the_text_only(tmp_path):
    tokens, types = pieces({"[INST]": CONTROL, "[/INST]": CONTROL})
    opening, closing = tokens.index("[INST]"), tokens.index("[/INST]")
    mistral = build_tokenizer(vocabulary_file(tmp_path / "m.gguf", "llama", tokens, types))
    assert ids(mistral, "<s>[INST] ship[/INST]") == [1, opening, *ids(mistral, "ship"), closing]
    assert mistral.encode("ship", add_special_tokens=False).tokens[0].startswith("▁")
    assert mistral.decode(ids(mistral, "The ship leaves")) == "The ship leaves"


def test_the_unknown_token_is_special(tmp_path):
    tokens, types = pieces({})
    tokenizer = build_tokenizer(vocabulary_file(tmp_path / "m.gguf", "llama", tokens, types))
    assert ids(tokenizer, "<unk>") == [0]
    assert tokenizer.decode([0, 2]) == ""


@pytest.mark.parametrize("is_on", [True, False])
def test_garbage_is_collected_again_after_a_vocabulary(tmp_path, is_on):
    files = (vocabulary_file(tmp_path / "right.gguf", "llama", *pieces({})), tmp_path / "wrong.gguf")
    vocabulary_file(files[1], "llama", *pieces({}), token_scores=[])
    was_on = gc.isenabled()
    try:
        gc.enable() if is_on else gc.disable()
        for path in files:
            with contextlib.suppress(LocalqError):
                build_tokenizer(path)
            assert gc.isenabled() == is_on
    finally:
        gc.enable() if was_on else gc.disable()


def test_the_real_vocabulary_gives_the_ids_of_transformers():
    """But for digits outside ASCII: transformers does not know that every digit stands alone in this model."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(smollm2().parent, gguf_file=smollm2().name)
    ours = build_tokenizer(smollm2())
    texts = ["".join(letter for letter in text if letter.isascii() or not letter.isnumeric()) for text in TEXTS]
    texts += ["<|im_start|>user\nHi<|im_end|>\n", "x<|endoftext|><repo_name>y"]
    for text in texts:
        assert ids(ours, text) == theirs(text)["input_ids"], text


# ---- keys


def written(path, case: Case, more=lambda writer: None):
    """A file with the keys of `case` and `more`, and an embedding."""
    config = {**tiny_gguf.SHAPE, **case.config}
    writer = gguf.GGUFWriter(path, case.architecture)
    tiny_gguf.write_keys(writer, case)
    writer.add_tensor("token_embd.weight", np.zeros((config["vocab_size"], config["hidden_size"]), np.float32))
    more(writer)
    tiny_gguf.finish(writer)
    return path


@pytest.mark.parametrize(
    ("original", "theta", "head_dim"), [(8192, 5e5, 64), (8192, 5e5, 128), (32, 500.0, 16), (65536, 1e6, 80)]
)
def test_the_parameters_of_llama_3_are_found_from_its_divisors(tmp_path, original, theta, head_dim):
    scaling = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": original}  # fmt: skip
    case = Case("llama", "llama", {"head_dim": head_dim, "rope_parameters": {**scaling, "rope_theta": theta}})
    [(name, divisors)] = tiny_gguf.rotary_factors(case)
    path = written(tmp_path / "m.gguf", case, lambda writer: writer.add_tensor(name, divisors))
    assert read_header(path).config["rope_scaling"] == scaling


def test_all_keys_of_yarn(tmp_path):
    case = Case("qwen3", "qwen3", {"head_dim": 16, "rope_parameters": {
        "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 24}})  # fmt: skip

    def more(writer):
        writer.add_rope_scaling_yarn_attn_factor(1.3)
        writer.add_rope_scaling_yarn_beta_fast(24.0)
        writer.add_rope_scaling_yarn_beta_slow(2.0)

    assert read_header(written(tmp_path / "m.gguf", case, more)).config["rope_scaling"] == {
        "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 24,
        "attention_factor": 1.3, "beta_fast": 24.0, "beta_slow": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(("head_dim", "rotary"), [(128, 96), (44, 30), (46, 26)])
def test_a_part_of_the_head_turns(tmp_path, head_dim, rotary):
    """30 of 44: the nearest fraction gives 29 back."""
    case = Case("llama", "llama", {"head_dim": head_dim, "partial_rotary_factor": rotary / head_dim})
    config = read_header(written(tmp_path / "m.gguf", case)).config
    (rope,) = ARCHITECTURES["llama"].Config.from_dict(config).rope_kinds
    assert rope.rotary_dim == rotary


def test_gemma_3_without_windows_and_with_rotary_bases_of_its_own(tmp_path):
    plain = Case("gemma3", "gemma3_text", {"head_dim": 16, "num_hidden_layers": 7, "rope_theta": 1e6})
    config = ARCHITECTURES["gemma3"].Config.from_dict(read_header(written(tmp_path / "a.gguf", plain)).config)
    assert (config.windows, {rope.theta for rope in config.rope_kinds}) == ((0,) * 7, {1e6})

    def more(writer):
        writer.add_rope_freq_base_swa(300.0)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 3)
        writer.add_final_logit_softcapping(7.5)

    windowed = Case("gemma3", "gemma3_text", {**plain.config, "sliding_window": 9})
    path = written(tmp_path / "b.gguf", windowed, more)
    config = ARCHITECTURES["gemma3"].Config.from_dict(read_header(path).config)
    assert config.windows == (9, 9, 0, 9, 9, 0, 9)
    assert [rope.theta for rope in config.ropes] == [300.0, 300.0, 1e6, 300.0, 300.0, 1e6, 300.0]
    assert config.final_softcap == 7.5


def test_how_to_sample(tmp_path):
    def more(writer):
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(0)
        writer.add_sampling_top_p(0.95)
        writer.add_sampling_penalty_repeat(1.05)

    stated = read_header(written(tmp_path / "m.gguf", tiny_gguf.CASES["qwen3"], more)).generation_config
    sampling = Sampling.from_generation_config(stated)
    assert sampling == Sampling(temperature=0.6, top_k=0, top_p=0.95, repeat_penalty=1.05)
    silent = read_header(written(tmp_path / "silent.gguf", tiny_gguf.CASES["qwen3"])).generation_config
    assert Sampling.from_generation_config(silent).greedy


def test_a_stored_default_out_of_range_does_not_refuse_the_file(tmp_path):
    def more(writer):
        writer.add_sampling_temp(0.6)
        writer.add_sampling_top_k(-1)
        writer.add_sampling_top_p(0.0)
        writer.add_sampling_penalty_repeat(float("nan"))

    stated = read_header(written(tmp_path / "m.gguf", tiny_gguf.CASES["qwen3"], more)).generation_config
    sampling, notes = read_generation_config(stated)
    assert sampling == Sampling(temperature=0.0, top_k=0)
    assert len(notes) == 3


def test_a_default_beyond_the_range_of_f32_does_not_refuse_the_file(tmp_path):
    def more(writer):
        writer.add_float64("general.sampling.temp", 1e300)

    stated = read_header(written(tmp_path / "m.gguf", tiny_gguf.CASES["qwen3"], more)).generation_config
    sampling, notes = read_generation_config(stated)
    assert sampling == read_generation_config({"do_sample": True})[0]
    assert len(notes) == 1


def test_experts_in_an_architecture_without_are_refused_by_name(tmp_path):
    path = written(tmp_path / "m.gguf", tiny_gguf.CASES["qwen3"], lambda writer: writer.add_expert_count(8))
    with pytest.raises(LocalqError, match="qwen3 models with experts are not supported in GGUF") as caught:
        read_header(path)
    assert caught.value.exit_code == ExitCode.FAILURE


# ---- the file


def test_a_file_that_changes_is_read_again(tmp_path):
    path = written(tmp_path / "m.gguf", tiny_gguf.CASES["llama"])
    first = read_header(path)
    assert binary.read_container(path) is binary.read_container(path)
    changed = path.read_bytes().replace(struct.pack("<I", 92), struct.pack("<I", 96), 1)
    path.write_bytes(changed)
    os.utime(path, ns=(1, 1))
    assert (first.config["intermediate_size"], read_header(path).config["intermediate_size"]) == (92, 96)


def test_arrays_larger_than_any_vocabulary_are_refused(tmp_path):
    """They would be a hundred times larger in memory than in the file."""

    def more(writer):
        writer.add_array("some.list", list(bytes(16)))

    path = written(tmp_path / "m.gguf", tiny_gguf.CASES["llama"], more)
    name = struct.pack("<Q", 9) + b"some.list" + struct.pack("<I", 9)
    data = path.read_bytes()
    at = data.index(name) + len(name)
    count = binary.MAX_VALUES + 1
    path.write_bytes(data[:at] + struct.pack("<IQ", 0, count) + bytes(count) + data[at + 12 + 64 :])
    with pytest.raises(LocalqError, match=f"array values: {count}") as caught:
        read_header(path)
    assert caught.value.exit_code == ExitCode.BAD_FILE


def test_a_scale_that_is_no_number_is_left_to_the_check_of_the_logits(tmp_path):
    """Without numpy's warnings about it on stderr, which the tests would take for errors."""
    block = np.frombuffer(struct.pack("<e32b", float("inf"), 0, *[1] * 31), np.uint8)[None]

    def more(writer):
        writer.add_tensor("blk.0.ffn_up.weight", block, raw_dtype=gguf.GGMLQuantizationType.Q8_0)

    header = read_header(written(tmp_path / "m.gguf", tiny_gguf.CASES["qwen2"], more))
    values = read_tensor(header, "model.layers.0.mlp.up_proj.weight")
    assert np.isnan(values[0, 0])
    assert np.isposinf(values[0, 1:]).all()
