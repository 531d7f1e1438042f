"""Decoders of two tiny layers, and matrices of 2 bits for them, that tests of training share."""

from __future__ import annotations

import torch

from localq.formats.codebooks.rotation import packed_signs
from localq.formats.codebooks.vq2 import Packed
from localq.models import ARCHITECTURES
from localq.models.decoder import Block, Decoder
from localq.quantize.model.matrix_groups import groups_of


def tiny_decoder(model_type: str) -> Decoder:
    """Two layers of random f32 weights."""
    module = ARCHITECTURES[model_type]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    others = {"vocab_size": 40, "num_hidden_layers": 2, "head_dim": 16, "max_position_embeddings": 64}
    if model_type == "mixtral":
        others |= {"num_local_experts": 3, "num_experts_per_tok": 2}
    config = module.Config.from_dict({"model_type": model_type, "rms_norm_eps": 1e-5, **sizes, **others})
    with torch.device("meta"):
        model: Decoder = module.Model(config)
    model.to_empty(device="cpu").requires_grad_(False)
    generator = torch.Generator().manual_seed(9)
    for parameter in model.parameters():
        offset = 1.0 if parameter.dim() == 1 and not model_type.startswith("gemma") else 0.0
        parameter.normal_(offset, 0.1, generator=generator)
    model.make_tables(32, "cpu")
    return model.eval()


def packed_block(block: Block, seed: int) -> dict[str, Packed]:
    """Random matrices in vq2 for all linears of `block`, those of a group with one codebook, the last one rotated."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for group in groups_of(block):
        codebook = torch.randn(256, 16, generator=generator).half() / 2
        for name in group.names:
            out, columns = block.get_submodule(name).weight.shape
            codes = torch.randint(0, 256, (out, columns // 4), generator=generator, dtype=torch.uint8)
            minus = torch.randint(0, 2, (columns,), generator=generator).bool()
            signs = packed_signs(minus) if name == "mlp.down_proj" else None
            scales = (torch.rand(out, generator=generator) + 0.5).half() / 12
            found[name] = Packed(((codes, codebook),), scales, signs, (out, columns))
    return found
