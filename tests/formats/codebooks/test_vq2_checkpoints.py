"""vq2 in files: what is stored is what is read, codebooks of modules around, and damaged ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from localq.errors import ExitCode, LocalqError
from localq.formats import FORMATS, owner
from localq.formats.checkpoint import Checkpoint
from localq.formats.codebooks import vq2
from localq.formats.codebooks.vq2 import Packed
from tests.support.formats.memory_checkpoint import Held
from tests.support.formats.vq2_checkpoints import SCHEMES, packed_of

SHAPE = (67, 160)  # five blocks of 32
Q = "model.layers.3.self_attn.q_proj"
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 5, "num_key_value_heads": 5, "head_dim": 16,
    "hidden_size": 160, "intermediate_size": 96, "vocab_size": 320, "max_position_embeddings": 64,
}  # fmt: skip


class Stored(Held):
    """Tensors in memory, with a config.json."""

    def __init__(self, tensors: dict[str, Tensor], config: dict | None = CONFIG) -> None:
        super().__init__(tensors)
        self.config = config

    def checkpoint(self) -> Checkpoint:
        return super().checkpoint(config=self.config)


@pytest.mark.parametrize("signs", [True, False], ids=["rotated", "plain"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_stored_is_what_is_read(scheme, signs):
    packed = packed_of(SHAPE, scheme, signs)
    held = Stored(vq2.to_tensors(packed, Q))
    checkpoint = held.checkpoint()
    assert owner(checkpoint.tensors, f"{Q}.codes") == ("vq2", Q)
    assert [name for name, module in FORMATS.items() if module.is_quantized(checkpoint.tensors, Q)] == ["vq2"]
    assert not vq2.is_quantized(checkpoint.tensors, "model.layers.3.self_attn.k_proj")
    read = vq2.from_checkpoint(checkpoint, Q)
    assert read.shape == SHAPE
    assert read.strides == packed.strides
    assert torch.equal(vq2.dequantize(read, torch.float32), vq2.dequantize(packed, torch.float32))
    assert vq2.stored_bytes(checkpoint.tensors, Q) == packed.nbytes
    assert vq2.shared_names(checkpoint.tensors, Q) == []
    places: list[Tensor] = []
    moved = read.placed(lambda each: places.append(each) or each.clone(), torch.device("cpu"))
    assert sorted(each.nbytes for each in places) == sorted(vq2.placed_bytes(checkpoint.tensors, Q))
    assert torch.equal(vq2.dequantize(moved, torch.float32), vq2.dequantize(packed.to("cpu"), torch.float32))


@pytest.mark.parametrize("home", ["model.layers.3.self_attn", "model.layers.3", "model.layers", "model"])
def test_codebooks_of_modules_around(home):
    packed = packed_of(SHAPE, "s4l16+s8l16")
    held = Stored(vq2.to_tensors(packed, Q, home))
    checkpoint = held.checkpoint()
    assert vq2.shared_names(checkpoint.tensors, Q) == [f"{home}.codebook", f"{home}.codebook_2"]
    assert vq2.stored_bytes(checkpoint.tensors, Q) == packed.nbytes - 2 * 2 * 256 * 16
    read = vq2.from_checkpoint(checkpoint, Q)
    assert read.books[1][1] is held.held[f"{home}.codebook_2"]
    assert torch.equal(vq2.dequantize(read, torch.float32), vq2.dequantize(packed, torch.float32))


def test_the_nearest_codebook_counts_each_by_itself():
    packed, other = packed_of(SHAPE, "s4l16+s8l16"), packed_of(SHAPE, "s4l16+s8l16", seed=8)
    tensors = vq2.to_tensors(packed, Q, "model.layers.3.self_attn")
    tensors |= {
        f"model{suffix}": book[1] for suffix, book in zip((".codebook", ".codebook_2"), other.books, strict=True)
    }
    tensors[f"{Q}.codebook"] = tensors.pop("model.layers.3.self_attn.codebook")
    tensors["model.layers.3.self_attn.q.codebook"] = other.books[0][1]  # of a module beside
    checkpoint = Stored(tensors).checkpoint()
    assert vq2.shared_names(checkpoint.tensors, Q) == ["model.layers.3.self_attn.codebook_2"]
    read = vq2.from_checkpoint(checkpoint, Q)
    assert torch.equal(vq2.dequantize(read, torch.float32), vq2.dequantize(packed, torch.float32))


def test_columns_are_those_of_the_configuration():
    """[out, 40] codes of 160 columns have a stride of 4; of 80 columns they would have one of 2."""
    tensors = vq2.to_tensors(packed_of(SHAPE, signs=False), "model.layers.0.mlp.down_proj")
    for width, stride in ((160, 4), (80, 2), (320, 8)):
        checkpoint = Stored(tensors, CONFIG | {"intermediate_size": width}).checkpoint()
        assert vq2.from_checkpoint(checkpoint, "model.layers.0.mlp.down_proj").strides == (stride,)
    rotated = Stored(vq2.to_tensors(packed_of(SHAPE), Q), None).checkpoint()  # in memory, without one
    assert vq2.from_checkpoint(rotated, Q).shape == SHAPE


def stored(config: dict | None = CONFIG, prefix: str = Q, **changes: Tensor | None) -> Stored:
    """A matrix with two books and its tensors changed, None: removed."""
    made = vq2.to_tensors(packed_of(SHAPE, "s4l16+s8l16"), prefix)
    made |= {f"{prefix}.{name}": each for name, each in changes.items()}
    return Stored({name: each for name, each in made.items() if each is not None}, config)


def bytes_of(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


def halves(*shape: int) -> Tensor:
    return torch.ones(shape).half()


DAMAGED: dict[str, tuple[Stored, str]] = {
    "no scales": (stored(scales=None), r"lacks .*q_proj\.scales"),
    "no codebook": (stored(codebook=None), r"lacks .*q_proj\.codebook, and no enclosing module provides one"),
    "no second codebook": (stored(codebook_2=None), r"lacks .*q_proj\.codebook_2, and no enclosing module"),
    "no second codes": (stored(codes_2=None), r"has a codebook for .*q_proj\.codes_2, but not"),
    "signed codes": (stored(codes=bytes_of(67, 40).view(torch.int8)), r"codes is int8 \[67, 40\]; expected uint8"),
    "signed second codes": (stored(codes_2=bytes_of(67, 20).short()), r"codes_2 is int16 \[67, 20\]; expected uint8"),
    "codes of one size": (stored(codes=bytes_of(67)), r"codes is uint8 \[67\]"),
    "codes of three sizes": (stored(codes=bytes_of(67, 40, 1)), r"codes is uint8 \[67, 40, 1\]"),
    "codes of no size": (stored(codes=bytes_of()), "0 x 160 weights"),
    "no rows": (stored(codes=bytes_of(0, 40)), "0 x 160 weights"),
    "no codes": (stored(codes=bytes_of(67, 0)), r"codes is uint8 \[67, 0\]"),
    "codes that do not divide": (stored(codes=bytes_of(67, 39)), r"\[67, 39\]; expected uint8 for 67 x 160"),
    "a stride of 1": (stored(codes=bytes_of(67, 160)), "and a stride of 2, 4, 8 or 16"),
    "a stride of 32": (stored(codes=bytes_of(67, 5)), "and a stride of 2, 4, 8 or 16"),
    "a stride of 5": (stored(codes=bytes_of(67, 32)), "and a stride of 2, 4, 8 or 16"),
    "fewer second codes": (stored(codes_2=bytes_of(66, 20)), r"codes_2 is uint8 \[66, 20\]"),
    "255 codewords": (stored(codebook=halves(255, 16)), r"codebook is float16 \[255, 16\], not float16 \[256, 16\]"),
    "short codewords": (stored(codebook_2=halves(256, 4)), r"\[256, 4\]; expected \[256, length\]"),
    "long codewords": (stored(codebook=halves(256, 36)), "with a length from 4 to 32 that is a multiple of 4"),
    "uneven codewords": (stored(codebook=halves(256, 14)), "a multiple of 4"),
    "codewords of nothing": (stored(codebook=halves(256, 0)), r"codebook is float16 \[256, 0\]"),
    "a codebook of three sizes": (stored(codebook=halves(1, 256, 16)), r"codebook is float16 \[1, 256, 16\]"),
    "a codebook in f32": (stored(codebook=halves(256, 16).float()), r"codebook is float32 \[256, 16\]"),
    "scales in bf16": (stored(scales=halves(67).bfloat16()), r"scales is bfloat16 \[67\], not float16 \[67\]"),
    "too few scales": (stored(scales=halves(66)), r"scales is float16 \[66\]"),
    "scales of two sizes": (stored(scales=halves(67, 1)), r"scales is float16 \[67, 1\]"),
    "signs for bits": (stored(signs=bytes_of(160)), r"signs is uint8 \[160\], not uint8 \[20\]"),
    "signs of bools": (stored(signs=bytes_of(20).bool()), r"signs is bool \[20\]"),
    "infinite codeword": (stored(codebook_2=halves(256, 16) / 0), "codebook_2 contains NaN or infinity"),
    "scale that is no number": (stored(scales=halves(67) * torch.nan), "scales contains NaN or infinity"),
    "uneven columns": (stored(CONFIG | {"hidden_size": 168}), "67 x 168 weights, where columns are a multiple of 16"),
    "no columns": (stored(CONFIG | {"hidden_size": 0}), "67 x 0 weights"),
    "other columns": (stored(CONFIG | {"hidden_size": 480}), r"codes is uint8 \[67, 40\]; expected uint8 for 67 x 480"),
    "signs of other columns": (stored(CONFIG | {"hidden_size": 320}), r"signs is uint8 \[20\], not uint8 \[40\]"),
    "a module not known": (stored(prefix="model.layers.3.router"), "does not specify the number of columns"),
    "half a configuration": (stored({"model_type": "llama"}), r"the number of columns is unknown \(config.json"),
    "neither": (stored(None, signs=None), "does not specify the number of columns"),
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_checkpoints_are_refused(case):
    held, why = DAMAGED[case]
    prefix = next(name for name in held.held if name.endswith((".codes", ".codes_2"))).rpartition(".")[0]
    with pytest.raises(LocalqError, match=why) as caught:
        vq2.from_checkpoint(held.checkpoint(), prefix)
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert caught.value.what == prefix
    assert caught.value.next_step


@pytest.mark.parametrize("count", [0, 3])
def test_one_or_two_books(count):
    packed = packed_of(SHAPE)
    with pytest.raises(ValueError, match=f"{count} codebooks, not 1 or 2"):
        Packed(packed.books * count, packed.scales, None, SHAPE)


def test_the_configuration_names_the_format():
    said = vq2.quantization_config("bfloat16", ["lm_head"])
    assert (said["quant_method"], said["modules_to_not_convert"]) == ("localq_vq2", ["lm_head"])
