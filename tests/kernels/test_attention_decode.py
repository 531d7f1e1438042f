"""attention_decode on a GPU: as close to fp64 as 16 bit allow, only live slots, the same bits every time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import glu

from localq import kv_bits
from localq.engine import kv_codec
from localq.engine.cache import KVCache, stored_parts
from localq.files.layer_caches import KeysAndValues
from localq.kernels import attention
from localq.kv_bits import K8V4, KV_BITS
from tests.support.kernels.attention_operands import Case, Operands, assert_as_good_as_16_bit, poisonable

pytestmark = pytest.mark.cuda

F16, BF16 = torch.float16, torch.bfloat16
LENGTHS = [1, 2, 31, 32, 33, 63, 64, 65, 66, 129, 1000, 4097]
HEADS = [  # heads, kv_heads, head_dim: groups 1 to 16, every width of the families, odd ones
    (5, 5, 64), (9, 3, 64), (18, 2, 64), (6, 3, 72), (10, 2, 80), (32, 32, 96), (6, 1, 96), (24, 8, 128), (32, 8, 128),
    (14, 2, 128), (16, 2, 128), (27, 3, 128), (32, 2, 128), (8, 4, 256), (7, 1, 256), (9, 1, 256), (4, 2, 8),
    (6, 2, 200),
]  # fmt: skip
BASE = Case(12, 4, 128, 700, 1024, rotary=128)
FEATURES = {
    "no rope": {"rotary": 0},
    "partial rope": {"rotary": 96},
    "llama norm": {"norm": "llama"},
    "gemma norm": {"norm": "gemma"},
    "norm, no rope": {"norm": "llama", "rotary": 0},
    "norm, partial rope": {"norm": "gemma", "rotary": 34},
    "softcap": {"softcap": 2.5},
    "window of 1": {"window": 1},
    "window of 2": {"window": 2},
    "window": {"window": 129},
    "window longer than the text": {"window": 5000},
    "sinks": {"sinks": 0.0},
    "sinks and window": {"sinks": 1.0, "window": 128},
    "gate behind q": {"gate": "in q"},
    "gate apart": {"gate": "apart"},
    "all": {"norm": "gemma", "rotary": 64, "softcap": 5.0, "window": 333, "sinks": 3.0, "gate": "in q"},
}
GATES = ["in q", "apart"]
GATED_HEADS = [  # units of 32 columns that are no whole number of a cluster's blocks, parts of a unit, two passes
    (24, 4, 256), (9, 1, 256), (12, 4, 64), (5, 5, 64), (8, 4, 24), (32, 2, 128), (6, 2, 200),
]  # fmt: skip


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_lengths(length, dtype, bits):
    operands = Operands(replace(BASE, position=length - 1, capacity=length + 70, dtype=dtype, bits=bits), seed=length)
    assert_as_good_as_16_bit(operands.run(), operands)


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("shape", HEADS, ids=str)
def test_heads(shape, bits):
    heads, kv_heads, width = shape
    dtype = BF16 if heads % 2 else F16
    case = Case(heads, kv_heads, width, 299, 310, dtype, bits, rotary=width // 4 * 2, norm="llama")
    operands = Operands(case, seed=width)
    assert_as_good_as_16_bit(operands.run(), operands)


@pytest.mark.parametrize("bits", [16, K8V4, 4])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("name", FEATURES)
def test_features(name, width, bits):
    changes = FEATURES[name]
    rotary = changes.get("rotary", width)
    case = replace(BASE, head_dim=width, bits=bits, **{**changes, "rotary": min(rotary, width)})
    operands = Operands(case, seed=width)
    assert_as_good_as_16_bit(operands.run(), operands)


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("window", [0, 128])
@pytest.mark.parametrize("length", [1, 64, 127, 128, 129, 1000, 9000])
def test_sinks_in_the_shape_of_gpt_oss(length, window, bits):
    case = Case(64, 8, 64, length - 1, length + 5, BF16, bits, rotary=64, window=window, sinks=1.0)
    operands = Operands(case, seed=length)
    assert_as_good_as_16_bit(operands.run(), operands)


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("length", [1, 65, 513, 2049, 4097])  # in one cluster, in several
@pytest.mark.parametrize("shape", GATED_HEADS, ids=str)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate, shape, length, bits):
    heads, kv_heads, width = shape
    dtype = BF16 if heads % 2 else F16
    case = Case(heads, kv_heads, width, length - 1, length + 3, dtype, bits, rotary=width // 4 * 2, gate=gate)
    operands = Operands(replace(case, norm="gemma"), seed=length)
    assert_as_good_as_16_bit(operands.run(), operands)


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("width", [8, 24, 64, 128, 256])
@pytest.mark.parametrize("gate", GATES)
def test_a_gate_gives_the_bits_of_glu_behind_attention_over_q_without_gaps(gate, width, dtype, bits):
    """Blocks that join in shared memory (with clusters) and in global memory, one unit a thread and several."""
    operands = Operands(Case(12, 2, width, 2500, 2501, dtype, bits, rotary=width // 2, gate=gate))
    places = torch.arange(operands.gate.numel(), device="cuda").view(12, width)
    operands.gate[places % 61 == 7] = torch.inf
    operands.gate[places % 61 == 8] = -torch.inf
    operands.gate[places % 61 == 9] = 88  # and -88: the exponential is near its end
    operands.gate[places % 61 == 10] = -88
    plain = Operands(replace(operands.case, gate=""))
    plain.qkv = torch.cat([part.reshape(1, -1) for part in operands.parts()], -1)
    for splits in (1, 3, 7, 8, operands.workspace.splits):
        operands.workspace.splits = plain.workspace.splits = splits
        for position in (2500, 300, 0):
            operands.position.fill_(position)
            plain.position.fill_(position)
            got = operands.run()
            assert torch.equal(got, glu(torch.cat((plain.run(), operands.gate.reshape(1, -1)), -1)))
            assert got.isfinite().all()
        assert not operands.workspace.arrived.any()


@pytest.mark.parametrize("gate", GATES)
def test_a_gate_that_is_not_a_number_spoils_its_own_column(gate):
    operands = Operands(replace(BASE, gate=gate))
    operands.gate[3, 17] = torch.nan
    spoilt = operands.run().view(12, 128).isnan()
    assert spoilt[3, 17]
    assert spoilt.sum() == 1


@pytest.mark.parametrize("gate", GATES)
def test_a_graph_reads_the_gate_that_the_launch_before_it_wrote(gate):
    operands = Operands(replace(BASE, gate=gate))
    out = torch.empty(1, 12 * 128, dtype=F16, device="cuda")
    given = torch.zeros(12, 128, dtype=F16, device="cuda")
    operands.run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operands.gate.copy_(given)
        operands.run(out)
    for seed in range(5):
        given.copy_(torch.randn(12, 128, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        replayed = out.clone()
        operands.gate.copy_(given)
        assert torch.equal(replayed, operands.run())


@pytest.mark.parametrize("bits", [16, 4])
def test_sinks_far_below_all_scores_change_no_bit_and_far_above_leave_nothing(bits):
    operands = Operands(replace(BASE, bits=bits))
    without = operands.run().clone()
    operands.sinks = torch.full((12,), -60_000.0, dtype=F16, device="cuda")
    assert torch.equal(operands.run(), without)
    operands.sinks.fill_(60_000.0)
    assert not operands.run().any()


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_a_window_that_has_slid_gives_the_same_bits_and_writes_them(width, bits):
    operands = Operands(Case(12, 4, width, 700, 1024, BF16, bits, rotary=width, window=300))
    expected = operands.run()
    for base in (0, 1, 77, 401):  # with 401, the window is all that is left
        parts = {name: getattr(operands.layer, name) for name in ("k", "v", "k_scales", "v_scales")}
        slid = {name: part if part is None else part[:, base:800].clone() for name, part in parts.items()}
        for part in filter(lambda part: part is not None, slid.values()):
            part[:, 700 - base] = 0
        layer = replace(operands.layer, **slid)
        got = operands.run(layer=layer, base=torch.tensor([base], device="cuda"))
        assert torch.equal(got, expected)
        for name, part in slid.items():
            assert part is None or torch.equal(part[:, 700 - base], parts[name][:, 700])


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("width", [64, 80, 128, 256])
def test_the_token_is_stored_as_a_prefill_would_store_it(width, bits):
    operands = Operands(Case(6, 2, width, 40, 50, BF16, bits, rotary=width // 2, norm="gemma"))
    case, layer = operands.case, operands.layer
    operands.run()
    _, k, v = operands.token(torch.float64)
    expected = KVCache([KeysAndValues(2, width)], 50, BF16, "cuda", bits)
    expected.update(0, k.to(BF16)[None], v.to(BF16)[None], operands.position, 50)
    stored = expected.layer(0)
    assert torch.equal(layer.v[:, 40], stored.v[:, 40])
    # k was rounded after norm and rotation here and only once there; a code at a border may fall on the other side.
    if bits == 16:
        assert (layer.k[:, 40] - stored.k[:, 40]).abs().max() <= 2**-6 * stored.k[:, 40].abs().max()
    else:
        key_bits, _ = kv_bits.split(bits)
        read = [
            kv_codec.dequantize(each.k[:, 40], each.k_scales[:, 40], key_bits, torch.float32)
            for each in (layer, stored)
        ]
        assert (read[0] - read[1]).norm() <= {8: 0.02, 4: 0.15}[key_bits] * read[1].norm()
        assert torch.equal(layer.v_scales[:, 40], stored.v_scales[:, 40])
    for tensor in poisonable(layer):
        assert tensor[:, 41:].isnan().all(), "slots behind the position were written"
    assert case.position == operands.position.item()


@pytest.mark.parametrize("bits", KV_BITS)
def test_20_runs_give_the_same_bits_and_leave_the_counters_at_zero(bits):
    operands = Operands(replace(BASE, position=3000, capacity=3001, bits=bits))
    first = operands.run().clone()
    for _ in range(20):
        assert torch.equal(operands.run(), first)
        assert not operands.workspace.arrived.any()


@pytest.mark.parametrize("bits", KV_BITS)
def test_results_do_not_depend_on_the_number_of_splits_beyond_rounding(bits):
    operands = Operands(replace(BASE, position=2500, capacity=2501, bits=bits))
    for splits in (1, 3, 7, operands.workspace.splits):
        operands.workspace.splits = splits
        assert_as_good_as_16_bit(operands.run(), operands)


@pytest.mark.parametrize("bits", KV_BITS)
def test_one_graph_serves_all_positions(bits):
    captured = Operands(replace(BASE, position=1500, capacity=1600, bits=bits, window=700))
    out = torch.full((1, 12 * 128), torch.nan, dtype=F16, device="cuda")
    captured.run(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(out)
    for position in (3, 64, 700, 1599):
        other = Operands(replace(captured.case, position=position), seed=position)
        expected = other.run().clone()
        captured.qkv.copy_(other.qkv)
        captured.position.copy_(other.position)
        for ours, theirs in zip(_tensors(captured.layer), _tensors(other.layer), strict=True):
            ours.copy_(theirs)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, expected)


def test_values_that_are_not_finite_come_out_as_such():
    for bits in KV_BITS:
        operands = Operands(replace(BASE, bits=bits))
        operands.qkv.view(-1, 128)[13] = torch.nan  # k of kv head 1, whose query heads are 3, 4, 5
        out = operands.run().view(12, 128)
        assert out[3:6].isnan().all()
        assert out[:3].isfinite().all()
        assert out[6:].isfinite().all()


@pytest.mark.parametrize("bits", KV_BITS[1:])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("width", [8, 16, 72, 80, 96, 128, 256])
def test_kv_write_and_kv_read_are_the_codec(width, dtype, bits):
    torch.manual_seed(width)
    cache = KVCache([KeysAndValues(3, width)], 77, dtype, "cuda", bits)
    fused = torch.randn(40, 7, width, device="cuda").to(dtype)  # k and v as parts of one projection
    k, v = fused[:, 1:4], fused[:, 4:7]
    positions = torch.arange(30, 70, device="cuda")
    keys, values = cache.update(0, k, v, positions, 75)
    layer = cache.layer(0)
    kept = ((layer.k, layer.k_scales, k, keys), (layer.v, layer.v_scales, v, values))
    for (codes, scales, dense, read), part in zip(kept, kv_bits.split(bits), strict=True):
        expected, expected_scales = kv_codec.quantize(dense.transpose(0, 1).cpu(), part)
        same = (codes[:, 30:70].cpu() == expected).float().mean().item()
        assert same >= 0.99, "more than ties differ"
        assert (scales[:, 30:70].cpu() == expected_scales).float().mean().item() >= 0.99
        dequantized = kv_codec.dequantize(codes[:, :75].cpu(), scales[:, :75].cpu(), part, torch.float32)
        assert torch.allclose(read.cpu().float(), dequantized, rtol=2**-7, atol=1e-5)
        assert not read[:, :30].any()


def _tensors(layer: attention.KVLayer) -> list[torch.Tensor]:
    return [each for each in (layer.k, layer.v, layer.k_scales, layer.v_scales) if each is not None]


@pytest.mark.parametrize("bits", KV_BITS)
@pytest.mark.parametrize("rows", [2, 4, 8])
@pytest.mark.parametrize("length", [0, 5, 63, 700, 3000])
@pytest.mark.parametrize("name", ["window", "all", "gate apart"])
def test_rows_are_as_many_tokens_one_after_the_other(name, length, rows, bits):
    """The cache they leave is the same to the bit; results differ as far as the splits do."""
    case = replace(BASE, position=length, capacity=length + rows, bits=bits, **FEATURES[name])
    together, alone = (Operands(case, seed=3) for _ in range(2))
    generator = torch.Generator().manual_seed(rows)
    more = 2 * torch.randn(rows - 1, together.qkv.shape[1], generator=generator)
    qkv = torch.cat((together.qkv, more.half().cuda()))
    gates = None
    if case.gate == "in q":
        gates = qkv[:, : case.heads * case.q_stride].view(rows, case.heads, -1)[..., case.head_dim :]
    elif case.gate:
        gates = torch.randn(rows, case.heads, case.head_dim, generator=generator).half().cuda()
    expected = []
    for row in range(rows):
        alone.qkv, alone.position = qkv[row : row + 1].clone(), torch.tensor([length + row], device="cuda")
        alone.gate = None
        if gates is not None:
            alone.gate = alone.queries[:, case.head_dim :] if case.gate == "in q" else gates[row]
        expected.append(alone.run())
    together.qkv, together.gate = qkv, gates
    together.workspace = attention.AttentionWorkspace(case.heads, case.kv_heads, case.head_dim, qkv.device, rows)
    for _ in range(3):  # the same bits every time
        got = together.run()
        for mine, theirs in zip(stored_parts(together.layer), stored_parts(alone.layer), strict=True):
            assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7))
    assert torch.equal(got, together.run())
    wanted = torch.cat(expected)
    assert (got - wanted).abs().max() <= 4 * torch.finfo(F16).eps * wanted.abs().max()
    assert not together.workspace.arrived.any()
