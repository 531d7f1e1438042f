"""Multi-token prediction (MTP) of Qwen3.5 to 3.8: a block that drafts the token after the next.

For a position it reads what the last norm of the model gives there, and the embedding of the token that follows. Both
are normed and joined by `fc`; a layer of full attention, with keys and values of its own, and a norm follow. The head
of the model turns the result into the logits of the token after the one that follows. The result also stands for that
of the model where a further token is drafted. After vLLM's model_executor/models/qwen3_5_mtp.py; embedding and head are
those of the model, and all norms multiply by 1 + weight. That the block reads the output of the last norm, and not its
input, was measured by llama.cpp (pull request 24025) and LightLLM (1402): with the other, it drafts well-formed text
that is accepted less often.

Files hold it beside the model, under `mtp.` (`files.extra_tensors`). It runs as a decoder of one layer, whose token at
position p is the one behind p in the text: so steps, caches and graphs are those of a draft model (`engine.draft`).
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from localq.models import qwen3_moe
from localq.models.attention import Pass
from localq.models.config import DecoderConfig
from localq.models.decoder import Block, Decoder
from localq.models.layers import Cache, Linear, OffsetRMSNorm, product
from localq.models.qwen3_5 import Config, GatedAttention, HybridBlock

_PREFIX = re.compile(r"^(?:(?:model|language_model)\.)*mtp\.")


class MultiTokenPrediction(Decoder):
    """The block of a model with `config`, whose layers are `block_class`; parameters are named as in files.

    hiddens   [slots, hidden]: what the block reads of position p, in slot p % slots. The model writes what its last
              norm gives (`take`); the block writes its own result where the next position is drafted from that
    """

    def __init__(self, config: Config, block_class: type[Block] = HybridBlock) -> None:
        """Without embedding, head and tables, which `share` takes from the model."""
        self.block_class = block_class
        alone = replace(
            config, layers=1, tied=True, ropes=config.ropes[:1], windows=config.windows[:1], recurrent=frozenset()
        )
        super().__init__(alone)
        del self.embed_tokens
        self.redundant = frozenset()
        self.pre_fc_norm_embedding = OffsetRMSNorm(config.hidden, config.eps)
        self.pre_fc_norm_hidden = OffsetRMSNorm(config.hidden, config.eps)
        self.fc = Linear(2 * config.hidden, config.hidden, bias=False)
        self.hiddens = torch.empty(0)

    def share(self, model: Decoder, slots: int) -> int:
        """Take embedding, head and tables of `model`, finish the norms, and allocate `hiddens`; call once, last.

        Returns the bytes of what it allocates.
        """
        norms = [module for module in self.modules() if isinstance(module, OffsetRMSNorm)]
        for norm in norms:
            norm.finish()
        self.embed_tokens, self.lm_head = model.embed_tokens, model.lm_head
        self.rotary_tables, self.slots = model.rotary_tables, model.slots
        weight = self.norm.weight
        self.hiddens = torch.zeros(slots, self.config.hidden, dtype=weight.dtype, device=weight.device)
        return self.hiddens.nbytes + sum(norm.derived_bytes() for norm in norms)

    def take(self, positions: Tensor, hidden: Tensor) -> None:
        """Keep hidden [T, hidden], what the last norm of the model gives at `positions` int64 [T]: the last ones."""
        slots = len(self.hiddens)
        self.hiddens.index_copy_(0, positions[-slots:] % slots, hidden[-slots:])

    def combine(self, hidden: Tensor, following: Tensor, step: Pass) -> Tensor:
        """hidden [T, hidden], behind the last norm; following [T, hidden], embeddings -> [T, hidden], for the head.

        step: of `begin`, over the positions of `hidden`.
        """
        out: Tensor = self.norm(self.layers[0](self._joined(hidden, following), step))
        return out

    def forward(self, ids: Tensor, positions: Tensor, cache: Cache, live: int, last_only: bool = True) -> Tensor:
        """As `Decoder.forward`, of the tokens `ids` behind `positions`, whose `hiddens` are kept; logits of the last.

        The result of the last position is kept as that of the model at the next.
        """
        assert last_only
        slots = len(self.hiddens)
        hidden = self.hiddens.index_select(0, positions % slots)
        out = self.combine(hidden, self.embed(ids), self.begin(positions, cache, live))[-1:]
        self.take(positions[-1:] + 1, out)
        head = self.lm_head
        logits: Tensor = (product(out, self.embed_tokens.weight) if head is None else head(out)).float()
        return logits

    def remember(self, ids: Tensor, positions: Tensor, cache: Cache, live: int, known: bool = True) -> None:
        """Store the keys and values of such tokens, which are all that later ones need of them.

        known False: there are no `hiddens` of these positions, and zeros stand for them.
        """
        hidden = self.hiddens.index_select(0, positions % len(self.hiddens))
        hidden = hidden if known else torch.zeros_like(hidden)
        block = self.layers[0]
        assert isinstance(block, HybridBlock)
        attention = block.mixer()
        assert isinstance(attention, GatedAttention)
        joined = self._joined(hidden, self.embed(ids))
        attention.remember(block.input_layernorm(joined), self.begin(positions, cache, live))

    def _joined(self, hidden: Tensor, following: Tensor) -> Tensor:
        both = torch.cat((self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden)), -1)
        joined: Tensor = self.fc(both)
        return joined


def rename(key: str) -> str | None:
    """Checkpoint key of the block -> parameter name; None = not of the block. Of experts as in `qwen3_moe.rename`."""
    return qwen3_moe.rename(_PREFIX.sub("", key)) if _PREFIX.match(key) else None


def block_of(config: DecoderConfig, model: type[Decoder]) -> MultiTokenPrediction | None:
    """The block of a `model` with these facts, without weights; None where its family has none."""
    return MultiTokenPrediction(config, model.block_class) if isinstance(config, Config) else None
