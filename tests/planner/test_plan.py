"""The planner against published sizes, against bitsandbytes' own tensors, and against itself: the largest context is
the largest. What it refuses: `test_plan_refusals.py`."""

from __future__ import annotations

import pytest
import torch

from localq import kv_bits, wording
from localq.errors import ExitCode, LocalqError
from localq.files import format_facts, format_sizes
from localq.files.linears import Linears
from localq.planner import costs, footprint
from localq.planner import plan as memory_plan
from localq.planner.footprint import head_bytes, per_token_bytes
from localq.planner.growth import Growth
from localq.planner.placement import Placement, Wishes
from tests.support.planner.catalogue_models import arch

pytestmark = pytest.mark.usefixtures("no_own_models")

MIB, GB = 2**20, 1e9
# Published sizes: parameters (1e9), bf16 and NF4 files (GB), KV cache (KiB a token, 16 bit).
PUBLISHED = {
    "llama-2-7b": (6.74, 13.5, 3.87, 512),
    "llama-2-13b": (13.02, 26.0, 7.20, 800),
    "llama-2-70b": (68.98, 138, 36.4, 320),
    "llama-3.1-8b": (8.03, 16.1, 5.70, 128),
    "llama-3.3-70b": (70.55, 141, 39.5, 320),
    "llama-3.2-1b": (1.24, 2.47, 1.03, 32),
    "llama-3.2-3b": (3.21, 6.43, 2.24, 112),
    "mistral-7b": (7.25, 14.5, 4.14, 128),
    "mistral-nemo-12b": (12.25, 24.5, 8.31, 160),
    "mistral-small-24b": (23.57, 47.1, 14.2, 160),
    "mixtral-8x7b": (46.7, 93.4, 24.6, 128),
    "qwen2.5-0.5b": (0.494, 0.99, 0.46, 12),
    "qwen2.5-1.5b": (1.54, 3.09, 1.14, 28),
    "qwen2.5-3b": (3.09, 6.17, 2.05, 36),
    "qwen2.5-7b": (7.62, 15.2, 5.55, 56),
    "qwen2.5-14b": (14.77, 29.5, 9.93, 192),
    "qwen2.5-32b": (32.76, 65.5, 19.2, 256),
    "qwen2.5-72b": (72.71, 145, 41.2, 320),
    "qwen3-0.6b": (0.596, 1.19, 0.54, 112),
    "qwen3-1.7b": (1.72, 3.44, 1.35, 112),
    "qwen3-4b": (4.02, 8.04, 2.65, 144),
    "qwen3-8b": (8.19, 16.4, 6.07, 144),
    "qwen3-14b": (14.77, 29.5, 9.93, 160),
    "qwen3-32b": (32.76, 65.5, 19.2, 256),
    "qwen3-30b-a3b": (30.5, 61.1, 16.7, 96),
    "gemma-2-2b": (2.61, 5.23, 2.22, 104),
    "gemma-2-9b": (9.24, 18.5, 6.13, 336),
    "gemma-2-27b": (27.23, 54.5, 15.8, 368),
    "gemma-3-1b": (1.00, 2.00, 0.96, 26),
    "gemma-3-4b": (3.88, 7.76, 3.00, 136),
    "gemma-3-12b": (11.77, 23.5, 7.57, 384),
    "gemma-3-27b": (27.01, 54.0, 16.0, 496),
    "phi-3.5-mini": (3.82, 7.64, 2.26, 384),
    "phi-3-medium": (13.96, 27.9, 7.69, 200),
    "phi-4-mini": (3.84, 7.67, 2.89, 128),
    "phi-4": (14.66, 29.3, 9.09, 200),
    "smollm2-135m": (0.1345, 0.269, 0.11, 22.5),
    "smollm2-360m": (0.362, 0.72, 0.26, 40),
    "smollm2-1.7b": (1.71, 3.42, 1.03, 192),
    "smollm3-3b": (3.08, 6.15, 1.98, 72),
}


def total(name: str, format: str, scheme: str = "") -> int:
    return sum(footprint.weights_bytes(arch(name), format, scheme).values())


# ---- sizes


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes(name):
    parameters, bf16, nf4, kv = PUBLISHED[name]
    assert arch(name).parameters / 1e9 == pytest.approx(parameters, rel=0.005)
    assert total(name, "bf16") / GB == pytest.approx(bf16, rel=0.01)
    assert total(name, "nf4") / GB == pytest.approx(nf4, rel=0.015, abs=0.006)  # printed with two or three digits
    assert arch(name).kv_bytes_per_token() / 1024 == kv


@pytest.mark.parametrize(
    ("name", "scheme", "size"),
    [
        ("llama-2-7b", "1x16g8", 2.38), ("llama-2-7b", "2x8g8", 2.15), ("llama-2-7b", "1x16g16", 1.81),
        ("llama-2-70b", "1x16g8", 18.76), ("llama-2-70b", "2x8g8", 18.18), ("llama-3.1-70b", "1x16g8", 21.92),
        ("llama-3.1-8b", "1x16g8", 4.08), ("llama-3.1-8b", "2x8g8", 3.85), ("llama-3.1-8b", "1x16g16", 3.45),
        ("llama-3.2-3b", "2x8g8", 1.50), ("phi-3-medium", "1x16g16", 2.70), ("qwen2-72b", "1x16g8", 23.14),
    ],
)  # fmt: skip
def test_published_aqlm_sizes(name, scheme, size):
    assert total(name, "aqlm", scheme) / GB == pytest.approx(size, abs=0.0051)


def test_mixture_of_experts_with_four_bit_experts():
    assert total("gpt-oss-20b", "mxfp4") / GB == pytest.approx(13.76, abs=0.005)
    assert total("gpt-oss-120b", "mxfp4") / GB == pytest.approx(65.25, abs=0.005)
    assert arch("gpt-oss-20b").parameters / 1e9 == pytest.approx(20.9, abs=0.05)
    assert arch("gpt-oss-120b").parameters / 1e9 == pytest.approx(116.8, abs=0.05)
    assert arch("gpt-oss-20b").kv_bytes_per_token() == 48 * 1024
    small = arch("qwen3-30b-a3b")  # 3.3 B active: blocks of 8 experts of 128, and the head
    assert (small.active_linear_parameters + 2 * small.embedding_parameters) / 1e9 == pytest.approx(3.3, abs=0.06)


def test_nf4_experts_take_half_a_byte_and_an_f32_for_64_weights_in_memory():
    shape, experts = arch("qwen3-30b-a3b"), 48 * 128 * 3 * 768 * 2048
    rest = sum(each.count * format_facts.matrix_bytes(each, "nf4") for each in shape.linears if not each.expert)
    assert planned(shape, "nf4") == experts // 2 + experts // 16 + rest + 2 * shape.other_parameters
    shape = arch("gpt-oss-20b")  # of other formats memory holds what the files hold
    assert planned(shape, "mxfp4") == footprint.weights_bytes(shape, "mxfp4")["weights"]


def planned(shape, format):
    return memory_plan.assess(shape, format, None).ledger.components["weights"]


@pytest.mark.parametrize("shape", [(192, 320), (320, 64), (64, 1088)])  # 4, 2 and 5 blocks of 256 scales, two ragged
def test_nf4_bytes_are_those_of_the_tensors_that_bitsandbytes_stores(shape):
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(torch.randn(shape), quant_type="nf4", compress_statistics=True)
    stored = {name: each for name, each in state.as_dict(packed=True).items() if "bitsandbytes__" not in name}
    assert "nested_absmax" in stored
    expected = codes.nbytes + sum(each.nbytes for each in stored.values())
    assert format_facts.matrix_bytes(Linears("x", *shape, count=7), "nf4") == expected


def test_linear_bytes_by_hand():
    linear = Linears("x", rows=24, columns=256, count=1)
    assert format_facts.matrix_bytes(linear, "bf16") == 12_288
    assert format_facts.matrix_bytes(linear, "nf4") == 3072 + 96 + 4 + 4 * 272
    assert format_facts.matrix_bytes(linear, "aqlm", "2x8g8") == 24 * 32 * 2 + 48 + 2 * 2 * 256 * 8
    assert format_facts.matrix_bytes(linear, "awq") == 3072 + 48 * 2 + 24
    assert format_facts.matrix_bytes(linear, "vptq", "v8-k256-16") == 3 * 256 * 12 // 8 + 2 * 8 * (256 + 16) + 6 * 256
    assert format_facts.matrix_bytes(linear, "mxfp4") == 3072 + 192
    with pytest.raises(LocalqError, match="not a valid aqlm scheme"):
        format_facts.matrix_bytes(linear, "aqlm", "nonsense")


def test_bits_per_weight():
    assert footprint.bits_per_weight(arch("llama-3.1-70b"), "nf4") == pytest.approx(4.127, abs=0.0005)
    assert footprint.bits_per_weight(arch("qwen3-8b"), "bf16") == 16


def test_kv_vectors():
    assert [kv_bits.vector_bytes(128, bits) for bits in (32, 16, 8, 4)] == [512, 256, 136, 72]  # 8.5 and 4.5 bits
    assert kv_bits.vector_bytes(64, 8) == 64 + 4
    assert kv_bits.vector_bytes(96, 4) == 48 + 8  # three blocks, and room for the scales of four
    assert kv_bits.vector_bytes(256, 4) == 128 + 16
    with pytest.raises(ValueError, match="5 bits"):
        kv_bits.vector_bytes(128, 5)
    assert kv_bits.pair_bytes(128, "k8v4") == 136 + 72
    assert [kv_bits.split(bits) for bits in kv_bits.KV_BITS] == [(16, 16), (8, 8), (8, 4), (4, 4)]
    assert [kv_bits.parse(str(bits)) for bits in kv_bits.KV_BITS] == [*kv_bits.KV_BITS]
    assert [kv_bits.text(bits) for bits in (8, "k8v4")] == ["8-bit", "8-bit keys, 4-bit values"]
    with pytest.raises(ValueError, match="k4v8"):
        kv_bits.split("k4v8")


# ---- the arithmetic of Llama 3.1 70B, 2-bit AQLM, on a 24 GB card


def test_the_70b_ledger_on_24_gb():
    shape = arch("llama-3.1-70b")
    weights = footprint.weights_bytes(shape, "aqlm", "1x16g8")
    assert shape.linear_parameters / 1e9 == pytest.approx(68.45, abs=0.005)
    assert sum(each.count for each in shape.linears) == 560
    assert weights["embedding"] / GB == pytest.approx(2.101, abs=0.0005)
    assert weights["head"] == weights["embedding"]
    assert round((sum(weights.values()) - 2 * shape.other_parameters) / MIB) == 20_901  # published without norms
    per_token = [shape.kv_bytes_per_token(bits) / 1024 for bits in kv_bits.KV_BITS]
    assert per_token == [320, 170, 130, 90]


@pytest.mark.parametrize(("taken_mib", "contexts"), [
    (0, (9.3, 17.5, 33)),  # 8 bit takes 8.5 bits an element
    (1000, (6.1, 11.5, 22)),
    (1000 - 2004, (12.5, 23.5, 45)),  # the embedding table in host memory
    (1000 - 2004 - 1002, (15.7, 29.5, 56)),  # and the head in 8 bit
])  # fmt: skip
def test_contexts_of_the_70b_on_24_gb(taken_mib, contexts):
    shape = arch("llama-3.1-70b")
    free = (24_564 - 500 - 250 - taken_mib) * MIB - total("llama-3.1-70b", "aqlm", "1x16g8")
    for bits, thousands in zip((16, 8, 4), contexts, strict=True):
        context = Growth(shape.kv_bytes_per_token(bits)).context(free)
        assert context / 1000 == pytest.approx(thousands, rel=0.02)  # printed with two digits


# ---- plans


def as_is(ctx: int | None = None, kv_bits: kv_bits.KvBits = 16) -> Wishes:
    """Nothing is left to the planner but the context."""
    return Wishes(ctx, kv_bits, "device", "16")


@pytest.mark.parametrize(
    ("name", "format", "gib"), [("llama-3.1-8b", "nf4", 8), ("qwen3-32b", "nf4", 22), ("gemma-3-4b", "bf16", 10)]
)
@pytest.mark.parametrize("kv_bits", [16, 8, "k8v4"])
def test_the_largest_context_is_the_largest(name, format, gib, kv_bits):
    budget = gib * 2**30
    plan = memory_plan.plan(arch(name), format, budget, wishes=as_is(kv_bits=kv_bits))
    assert plan.fits
    assert plan.ctx < arch(name).max_context
    assert plan.ctx % costs.CONTEXT_STEP == 0
    assert plan.ledger.total <= budget
    wishes = as_is(ctx=plan.ctx + costs.CONTEXT_STEP, kv_bits=kv_bits)
    more = memory_plan.assess(arch(name), format, budget, wishes=wishes)
    assert not more.fits
    assert more.ledger.total > budget


def test_a_context_is_never_longer_than_the_model_was_made_for():
    assert memory_plan.plan(arch("qwen2.5-0.5b"), "nf4", 80 * 2**30).ctx == 32_768
    with pytest.raises(LocalqError) as raised:
        memory_plan.plan(arch("qwen2.5-0.5b"), "nf4", 80 * 2**30, wishes=Wishes(32_769))
    assert raised.value.exit_code == ExitCode.USAGE


def test_the_ledger_names_every_component_and_exact_weights_replace_the_estimate():
    shape = arch("qwen3-8b")
    ledger = memory_plan.plan(shape, "nf4", 12 * 2**30, wishes=as_is(3000)).ledger
    assert list(ledger.components) == list(costs.COMPONENTS)
    assert ledger.components["kv_cache"] == 3000 * 144 * 1024
    assert ledger.components["embedding"] == ledger.components["head"] == 2 * 151_936 * 4096
    tables = 3000 * (2 * 128 * 2 + 8)  # cos and sin of a head, and the slot's number
    assert ledger.components["tables"] == tables + format_sizes.WORKSPACE_BYTES
    assert ledger.components["step_buffers"] == 2 * (2 * 4096 + (2 * 32 + 2 * 8) * 128 + 12_288) + 4 * 151_936
    assert ledger.total == sum(ledger.components.values())
    exact = memory_plan.plan(shape, "nf4", 12 * 2**30, wishes=as_is(3000), weights=4_000_000_001).ledger
    assert exact.components["weights"] == 4_000_000_001
    assert {**exact.components, "weights": 0} == {**ledger.components, "weights": 0}


def test_heads_by_hand():
    shape = arch("qwen3-8b")  # 151,936 rows of 4,096
    assert head_bytes(shape, "16") == 1_244_659_712
    assert head_bytes(shape, "8") == 622_329_856 + 4 * 151_936
    assert head_bytes(shape, "nf4") == 311_164_928 + 9_723_904 + 4 * 37_984 + 4 * 272
    assert head_bytes(arch("qwen3-0.6b"), "16") == 0  # the table is the head
    assert head_bytes(arch("qwen3-0.6b"), "8") == 151_936 * 1024 + 4 * 151_936


def test_a_token_of_a_quantized_cache_by_hand():
    """8 kv heads of 128 in 36 layers: codes and four scales a vector, and one layer in 16 bit for prefill to read."""
    grown = per_token_bytes(arch("qwen3-8b"), Placement(8), 2)
    assert grown["kv_cache"] == 36 * 2 * 8 * (128 + 8) + 2 * 8 * 128 * 2
    assert per_token_bytes(arch("qwen3-8b"), Placement(4), 2)["kv_cache"] == 36 * 2 * 8 * (64 + 8) + 2 * 8 * 128 * 2
    mixed = per_token_bytes(arch("qwen3-8b"), Placement("k8v4"), 2)["kv_cache"]
    assert mixed == 36 * 8 * (128 + 8 + 64 + 8) + 2 * 8 * 128 * 2
    assert per_token_bytes(arch("qwen3-8b"), Placement(), 4)["kv_cache"] == 36 * 2 * 8 * 128 * 4


# ---- amounts of memory


@pytest.mark.parametrize(("text", "size"), [
    ("24", 24 * 2**30), ("1.5", 1536 * MIB), ("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("24g", 24 * 2**30),
    ("900MiB", 900 * MIB), ("900mb", 900_000_000), (" 8 ", 8 * 2**30),
])  # fmt: skip
def test_parse_bytes(text, size):
    assert wording.parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "lots", "-3", "24TB", "1e9", "nan", "inf", "24 GiB extra", "٢٤x", "9" * 30])
def test_what_is_not_an_amount_of_memory_is_a_usage_error(text):
    with pytest.raises(LocalqError) as raised:
        wording.parse_bytes(text)
    assert raised.value.exit_code == ExitCode.USAGE


def test_a_bare_number_is_what_the_driver_of_such_a_card_reports():
    assert memory_plan.parse_card("24") == 24_564 * MIB
    assert memory_plan.parse_card("16.0") == 16_376 * MIB
    assert memory_plan.parse_card("24GiB") == 24_576 * MIB
    assert memory_plan.parse_card("20") == 20_470 * MIB
    assert memory_plan.parse_card("24GB") == memory_plan.parse_card("24 gb") == 24_564 * MIB
    assert memory_plan.parse_card("22GB") == 22 * 10**9  # no card is sold as this
    assert memory_plan.parse_card("23.5GB") == 23_500_000_000
    assert (memory_plan.nominal_gib(24_564 * MIB), memory_plan.nominal_gib(24_576 * MIB)) == (24, None)
    assert memory_plan.parse_card("11.5") < 11.5 * 2**30
