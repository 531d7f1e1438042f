"""The MTP block of Qwen3.5: against the same block made of transformers' parts, as vLLM joins them."""

from __future__ import annotations

import importlib

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from localq.engine.cache import KVCache
from localq.engine.load import weights
from localq.engine.load.placing import Destinations
from localq.errors import LocalqError
from localq.formats.checkpoint import in_memory
from localq.models import ARCHITECTURES
from localq.models.layers import OffsetRMSNorm
from localq.models.qwen3_5_mtp import MultiTokenPrediction, block_of, rename
from localq.planner.placement import Placement
from tests.support.models import tiny_models
from tests.support.models.tiny_cases import BY_NAME

NAMES = ("qwen3.5", "qwen3.5-moe")
TOKENS, CONTEXT, SLOTS = 21, 64, 23


class Reference(nn.Module):
    """The block of transformers' parts, over a whole text at once."""

    def __init__(self, config) -> None:
        super().__init__()
        moe = "_moe" in config.model_type
        name = "qwen3_5_moe" if moe else "qwen3_5"
        parts, prefix = importlib.import_module(f"transformers.models.{name}.modeling_{name}"), f"Qwen3_5{'Moe' * moe}"
        norm = getattr(parts, f"{prefix}RMSNorm")
        full = config.layer_types.index("full_attention")
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (
            norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(3)
        )
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([getattr(parts, f"{prefix}DecoderLayer")(config, full)])
        self.turn = getattr(parts, f"{prefix}TextRotaryEmbedding")(config)

    def forward(self, hidden, following):
        count = len(hidden)
        joined = torch.cat((self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(hidden)), -1)
        positions = torch.arange(count)[None]
        mask = torch.full((count, count), -torch.inf).triu(1)[None, None]
        x = self.fc(joined)[None]
        turns = self.turn(x, positions[None].expand(3, 1, count))
        return self.norm(self.layers[0](x, position_embeddings=turns, attention_mask=mask)[0])


@pytest.fixture(scope="module", params=NAMES)
def case(request):
    """(reference, tensors as a file holds them, model of the trunk, what makes our block of tensors)."""
    torch.manual_seed(3)
    trunk = tiny_models.reference(BY_NAME[request.param])
    config = trunk.config.get_text_config()
    config._attn_implementation = "eager"
    reference = Reference(config).eval()
    for parameter in reference.parameters():
        parameter.data = torch.randn(parameter.shape) * (0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    tensors = {f"mtp.{name}": each.contiguous() for name, each in reference.state_dict().items() if "turn." not in name}
    model = tiny_models.built(request.param)
    model.make_tables(CONTEXT, "cpu")
    facts = BY_NAME[request.param].config
    family = ARCHITECTURES[facts["model_type"]]

    def make(tensors: dict[str, torch.Tensor]) -> MultiTokenPrediction:
        with torch.device("meta"):
            block = block_of(family.Config.from_dict(facts), family.Model)
        assert block is not None
        checkpoint = in_memory(tensors, facts)
        assignment = weights.assign(checkpoint, block, rename, "mtp")
        places = Destinations(torch.device("cpu"), torch.float32, Placement(), [])
        weights.fill(block, assignment, checkpoint, places, lambda done, total: None)
        block.share(model, SLOTS)
        return block

    return reference, tensors, model, make


def in_passes(block, model, hidden, following, passes=(9, 1, 1, 4, 6)):
    cache, parts, start = KVCache(block.cache_layout(), CONTEXT, torch.float32, "cpu"), [], 0
    for count in passes:
        span = slice(start, start + count)
        step = model.begin(torch.arange(start, start + count), cache, start + count)
        parts.append(block.combine(hidden[span], following[span], step))
        start += count
    return torch.cat(parts)


@torch.inference_mode()
def test_it_gives_the_logits_of_the_reference_in_passes_of_any_length(case, tmp_path):
    reference, tensors, model, make = case
    save_file(tensors, tmp_path / "mtp.safetensors")
    block = make({**load_file(tmp_path / "mtp.safetensors"), "model.norm.weight": torch.ones(3)})
    hidden, following = torch.randn(2, TOKENS, reference.fc.out_features)
    expected, found = reference(hidden, following), in_passes(block, model, hidden, following)
    head = model.embed_tokens.weight if model.lm_head is None else model.lm_head.weight
    logits = expected @ head.T
    assert logits.std() > 0.05, "the comparison needs logits that differ"
    torch.testing.assert_close(found @ head.T, logits, rtol=0, atol=1e-4)
    swapped = in_passes(block, model, following, hidden)
    assert (swapped - expected).abs().max() > 0.1, "the order of what `fc` joins is seen"


@torch.inference_mode()
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_drafts_of_several_tokens_have_the_logits_of_the_reference(case, count):
    """Each further token is drafted from the block's own result; a text longer than the ring, in passes and steps."""
    reference, tensors, model, make = case
    block, width = make(tensors), reference.fc.out_features
    hidden, ids = torch.randn(TOKENS, width), torch.randint(0, model.config.vocab_size, (TOKENS + count,))
    cache = KVCache(block.cache_layout(), CONTEXT, torch.float32, "cpu")
    for first, last in ((0, 9), (9, 16), (16, TOKENS)):
        block.take(torch.arange(first, last), hidden[first:last])
        stop = last if last < TOKENS else last - 1  # the last token begins the draft
        block.remember(ids[first:stop], torch.arange(first, stop), cache, stop)
    found = [block(ids[at : at + 1], torch.tensor([at]), cache, at + 1) for at in range(TOKENS - 1, TOKENS + count - 1)]
    known, rows, head = hidden, model.embed(ids), model.embed_tokens.weight
    head = head if model.lm_head is None else model.lm_head.weight
    for number, logits in enumerate(found):
        result = reference(known, rows[: TOKENS + number])[-1:]
        torch.testing.assert_close(logits, result @ head.T, rtol=0, atol=2e-4)
        known = torch.cat((known, result))
    assert found[0].std() > 0.05


@torch.inference_mode()
def test_a_position_whose_hidden_state_is_not_known_is_read_with_zeros(case):
    reference, tensors, _, make = case
    blocks, caches = [make(tensors), make(tensors)], []
    ids, hidden = torch.arange(7), torch.randn(7, reference.fc.out_features)
    for block, known in zip(blocks, (True, False), strict=True):
        block.take(torch.arange(7), torch.zeros_like(hidden) if known else hidden)
        caches.append(KVCache(block.cache_layout(), CONTEXT, torch.float32, "cpu"))
        block.remember(ids, torch.arange(7), caches[-1], 7, known)
    for ours, theirs in zip(caches[0].parts(7), caches[1].parts(7), strict=True):
        assert ours.equal(theirs)
        assert ours.count_nonzero()


@torch.inference_mode()
def test_experts_in_one_tensor_and_a_prefix_give_the_same(case):
    _, tensors, _, make = case
    experts = [key for key in tensors if key.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    apart = {f"language_model.{key}": each for key, each in tensors.items() if key not in experts}
    for key in experts:
        path, _, name = key.rpartition(".")
        for number, matrix in enumerate(tensors[key]):
            parts = zip(("gate", "up"), matrix.chunk(2), strict=True) if "gate_up" in name else [("down", matrix)]
            apart |= {f"language_model.{path}.{number}.{part}_proj.weight": each for part, each in parts}
    blocks = [make(tensors), make(apart)]
    for left, right in zip(blocks[0].parameters(), blocks[1].parameters(), strict=True):
        assert left.equal(right)


def test_tensors_that_are_missing_or_have_no_place_are_named(case):
    _, tensors, _, make = case
    with pytest.raises(LocalqError, match=r"1 weights are missing \(first: 'fc\.weight'\)"):
        make({key: each for key, each in tensors.items() if key != "mtp.fc.weight"})
    with pytest.raises(LocalqError, match=r"do not belong to this architecture \(first: 'gate\.weight'\)"):
        make({**tensors, "mtp.gate.weight": torch.ones(1)})
    with pytest.raises(LocalqError, match=r"'mtp\.norm\.weight' has shape \[5\]"):
        make({**tensors, "mtp.norm.weight": torch.ones(5)})


def test_its_norms_multiply_by_one_more_than_the_weight(case):
    assert sum(isinstance(module, OffsetRMSNorm) for module in case[3](case[1]).modules()) == 7
