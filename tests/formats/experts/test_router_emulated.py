"""The router, and mixtures with a shared expert: launchers and kernels compiled for the CPU, against fp64."""

from __future__ import annotations

import pytest
import torch

from localq import kernels
from localq.formats.experts import kernel as expert_kernel
from localq.kernels import gemv
from tests.support.kernels.expert_operands import FORMATS, assert_near, gate_up
from tests.support.kernels.nf4_operands import bits, inputs
from tests.support.kernels.row_operands import normed

DTYPES = [torch.float16, torch.bfloat16]


def reference_route(logits, active, how):
    order = sorted(range(len(logits)), key=lambda expert: (-logits[expert], expert))[:active]
    over = logits[order] if how == "softmax_of_chosen" else logits
    weights = torch.exp(logits[order].double() - torch.logsumexp(over.double(), 0))
    return torch.tensor(order, dtype=torch.int32), weights.float()


@pytest.mark.parametrize("how", expert_kernel.HOW)
@pytest.mark.parametrize(("count", "active"), [(1, 1), (8, 2), (32, 4), (33, 8), (128, 8), (512, 16)])
def test_route(emulated, count, active, how):
    generator = torch.Generator().manual_seed(count)
    for _ in range(4):
        logits = (3 * torch.randn(count, generator=generator)).round()  # many are equal
        weights, chosen = torch.empty(active), torch.empty(active, dtype=torch.int32)
        expert_kernel.route(logits[None], active, how=how, weights=weights, chosen=chosen)
        expected = reference_route(logits, active, how)
        assert torch.equal(chosen, expected[0])
        torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=1e-7)


def test_damage_among_the_logits_shows(emulated):
    for value in (torch.nan, torch.inf):
        logits, weights, chosen = torch.zeros(40), torch.empty(4), torch.empty(4, dtype=torch.int32)
        logits[33] = value
        expert_kernel.route(logits, 4, how="softmax_of_chosen", weights=weights, chosen=chosen)
        assert chosen[0] == 33
        assert weights[0].isnan()
    logits = torch.full((8,), -torch.inf)
    logits[[6, 2]] = 0.0
    weights, chosen = torch.empty(3), torch.empty(3, dtype=torch.int32)
    expert_kernel.route(logits, 3, how="softmax_of_all", weights=weights, chosen=chosen)
    assert chosen.tolist() == [2, 6, 0]
    assert weights.tolist() == [0.5, 0.5, 0.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("count", "active", "columns", "kind"), [(7, 2, 72, None), (32, 4, 576, "plain"), (3, 3, 4800, "offset")]
)
def test_router(emulated, count, active, columns, kind, dtype):
    generator = torch.Generator().manual_seed(count)
    x = inputs(1, columns, dtype, seed=count)
    weight = (torch.randn(count, columns, generator=generator) / columns**0.5).to(dtype)
    bias = torch.randn(count, generator=generator).to(dtype) if kind else None
    factor = torch.rand(columns, generator=generator) + 0.5
    norm = None if kind is None else gemv.Norm(factor if kind == "offset" else factor.to(dtype), 1e-5)
    workspace = expert_kernel.router_workspace(count, "cpu")
    exact = (x if norm is None else normed(x, norm)).double() @ weight.double().T
    exact = exact if bias is None else exact + bias.double()
    for _ in range(2):  # a launch leaves the workspace as the next needs it
        weights, chosen = torch.empty(active), torch.empty(active, dtype=torch.int32)
        expert_kernel.router(
            x, weight, bias, active, norm=norm, how="softmax_of_chosen", weights=weights, chosen=chosen,
            workspace=workspace,
        )  # fmt: skip
        logits = workspace[1:].view(torch.float32)
        torch.testing.assert_close(logits.double(), exact[0], rtol=1e-4, atol=1e-4)
        expected = reference_route(logits, active, "softmax_of_chosen")
        assert torch.equal(chosen, expected[0])
        torch.testing.assert_close(weights, expected[1], rtol=1e-5, atol=1e-7)
        assert workspace[0] == 0


# Experts, chosen, columns: E no power of two; one and all chosen; one word of a row, and more than are asked for early.
SHARED = [(7, 1, 72), (33, 2, 8), (5, 3, 2064), (9, 4, 576), (11, 5, 320), (6, 6, 4800), (13, 7, 64), (257, 8, 128),
          (512, 15, 64)]  # fmt: skip


def shared_entry(x, gate, norm):
    """(fp64, T) of the weight of a shared expert, T rounded as a Linear and a sigmoid do."""
    given = x if norm is None else normed(x, norm)
    logit = given.double() @ gate.double().T
    return torch.sigmoid(logit)[0], torch.sigmoid(logit.to(x.dtype))[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("count", "active", "columns"), SHARED)
def test_router_adds_a_shared_expert_behind_the_chosen_ones(emulated, count, active, columns, dtype):
    generator = torch.Generator().manual_seed(count)
    x = inputs(1, columns, dtype, seed=count)
    weight = (torch.randn(count, columns, generator=generator) / columns**0.5).to(dtype)
    gate = (2 * torch.randn(1, columns, generator=generator) / columns**0.5).to(dtype)
    norm = gemv.Norm((torch.rand(columns, generator=generator) + 0.5).to(dtype), 1e-5) if active % 2 else None
    workspace = expert_kernel.router_workspace(count, "cpu")
    how, found = ("softmax_of_chosen", "softmax_of_all")[count % 2], []
    for shared_gate in (None, gate, gate):  # a launch leaves the workspace as the next needs it, with and without
        entries = active + (shared_gate is not None)
        weights, chosen = torch.full((entries,), torch.nan), torch.full((entries,), -1, dtype=torch.int32)
        expert_kernel.router(
            x, weight, None, active, norm=norm, how=how, weights=weights, chosen=chosen, workspace=workspace,
            shared_gate=shared_gate,
        )  # fmt: skip
        assert workspace[0] == 0
        found.append((weights, chosen))
    (alone, without), (weights, chosen), (again, _) = found
    assert torch.equal(bits(weights), bits(again))
    assert torch.equal(bits(weights[:active]), bits(alone))
    assert chosen.tolist() == [*without.tolist(), count]
    exact, rounded = shared_entry(x, gate, norm)
    step = torch.finfo(dtype).eps * rounded.float()
    assert ((weights[active:] - rounded.float()).abs() <= step).all()  # a sum in another order may round elsewhere
    assert ((weights[active:] - exact).abs() <= 8 * torch.finfo(dtype).eps).all()
    assert torch.equal(weights[active:], weights[active:].to(dtype).float())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_weight_of_a_shared_expert_over_the_whole_range(emulated, dtype):
    """Zeros and ones far out, NaN of NaN and of infinity minus infinity; the others do not change."""
    x, weight = torch.ones(1, 8, dtype=dtype), torch.arange(24.0).view(3, 8).to(dtype)
    for values in ([0.0], [-1000.0], [1000.0], [-9.0, 0.5], [9.0], [torch.nan], [torch.inf, -torch.inf], [-torch.inf]):
        gate = torch.tensor([values + [0.0] * (8 - len(values))], dtype=dtype)
        weights, chosen = torch.full((3,), torch.nan), torch.full((3,), -1, dtype=torch.int32)
        workspace = expert_kernel.router_workspace(3, "cpu")
        expert_kernel.router(
            x, weight, None, 2, norm=None, how="softmax_of_all", weights=weights, chosen=chosen, workspace=workspace,
            shared_gate=gate,
        )  # fmt: skip
        assert chosen.tolist() == [2, 1, 3]
        expected = torch.sigmoid(gate.sum(1)).float()
        torch.testing.assert_close(weights[2:], expected, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)
        assert weights[0] == 1.0


# Experts without the shared one, chosen, width, columns: k from 1 to 8, odd and even numbers of slots; most experts.
MIXTURES = [(5, 1, 64, 320), (9, 2, 128, 64), (7, 3, 64, 192), (11, 4, 64, 448), (13, 5, 192, 128), (6, 6, 64, 64),
            (12, 7, 64, 128), (17, 8, 128, 192), (512, 10, 64, 64)]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(MIXTURES)))
@pytest.mark.parametrize("name", FORMATS)
def test_three_launches_are_a_mixture_with_a_shared_expert(emulated, name, number, dtype):
    """router, gate and up, down; x is read before it changes. The shared expert is the last of both stacks."""
    count, active, width, columns = MIXTURES[number]
    if number == len(MIXTURES) - 1:
        width, columns = {"16 bit": (8, 8)}.get(name, (64, 64))
    given = (name, (count, active, width, columns), dtype, number)
    x, found, exact, naive = mixture_of(*given)
    assert_near(found, exact, naive)
    assert torch.equal(bits(found), bits(mixture_of(*given)[1]))
    assert not torch.equal(found, x)


def mixture_of(name, shape, dtype, seed):
    """(x, what the launches make of it, fp64, 16 bit)."""
    count, active, width, columns = shape
    generator = torch.Generator().manual_seed(seed)
    first = FORMATS[name]((count + 1, 2 * width, columns), dtype, seed, "cpu")
    second = FORMATS[name]((count + 1, columns, width), dtype, seed + 50, "cpu")
    x = inputs(1, columns, dtype, seed=seed) / 16
    weight = (torch.randn(count, columns, generator=generator) / columns**0.5).to(dtype)
    shared_gate = (torch.randn(1, columns, generator=generator) / columns**0.5).to(dtype)
    norm = gemv.Norm((torch.rand(columns, generator=generator) + 0.5).to(dtype), 1e-5)
    weights, chosen = torch.empty(active + 1), torch.empty(active + 1, dtype=torch.int32)
    gated, out = torch.full((active + 1, width), torch.nan, dtype=dtype), x.clone()
    expert_kernel.router(
        out, weight, None, active, norm=norm, how="softmax_of_chosen", weights=weights, chosen=chosen,
        workspace=expert_kernel.router_workspace(count, "cpu"), shared_gate=shared_gate,
    )  # fmt: skip
    expert_kernel.experts_gate_up(out, first.stack, None, chosen, norm=norm, gate="silu", interleaved=False, out=gated)
    expert_kernel.experts_down(gated, second.stack, None, chosen, weights, residual=out, out=out, behind_gate_up=True)
    assert chosen[active] == count
    exact, naive = gate_up(x, first.dense, None, chosen, norm, "silu", False)
    wide = torch.einsum("koi,ki->ko", second.dense[chosen.long()].double(), exact)
    narrow = torch.stack([torch.nn.functional.linear(row.to(dtype), each.to(dtype))
                          for row, each in zip(naive, second.dense[chosen.long()], strict=True)])  # fmt: skip
    share, _ = shared_entry(x, shared_gate, norm)
    true = torch.cat((weights[:active].double(), share))
    routed = (weights[:active, None] * narrow[:active]).sum(0, keepdim=True).to(dtype)
    with_shared = routed + weights[active].to(dtype) * narrow[active:]
    return x, out, x.double() + true[None] @ wide, x + with_shared


def test_what_there_is_no_room_for_beside_a_shared_expert_is_refused(emulated):
    x, weight, gate = torch.ones(1, 64).half(), torch.ones(20, 64).half(), torch.ones(1, 64).half()
    room = {"weights": torch.empty(17), "chosen": torch.empty(17, dtype=torch.int32)}
    given = {"norm": None, "how": "softmax_of_all", "workspace": expert_kernel.router_workspace(20, "cpu"), **room}
    with pytest.raises(ValueError, match="16 experts and a shared one, must be at most 16 together"):
        expert_kernel.router(x, weight, None, 16, **given, shared_gate=gate)
    with pytest.raises(ValueError, match="shared_gate has shape"):
        expert_kernel.router(x, weight, None, 15, **{**given, "weights": room["weights"][:16],
                             "chosen": room["chosen"][:16]}, shared_gate=gate[:, :32].contiguous())  # fmt: skip
    with pytest.raises(ValueError, match="weights has shape"):
        expert_kernel.router(x, weight, None, 15, **given, shared_gate=gate)
    stack = {"format": 2, "codes": 16, "scales": 0, "nested_absmax": 0, "nested_map": 0, "offset": 0.0, "code_map": 0,
             "experts": 514, "out_features": 16, "in_features": 64}  # fmt: skip
    asked = {"x": 16, "bias": 0, "chosen": 4, "active": 2, "norm": 0, "norm_weight": 0, "eps": 0.0, "gate": 0}
    more = {"alpha": 0.0, "limit": 0.0, "interleaved": False, "y": 16, "type": 0, "device": 0, "stream": 0}
    with pytest.raises(ValueError, match="experts = 514, must be from 1 to 512, and a shared one"):
        kernels.module().experts_gate_up(stack=stack, **asked, **more)
    of_router = {"x": 16, "weight": 16, "bias": 0, "norm": 0, "norm_weight": 0, "eps": 0.0, "in_features": 64,
                 "experts": 20, "active": 16, "how": 0, "workspace": 4, "weights": 4, "chosen": 4}  # fmt: skip
    with pytest.raises(ValueError, match="active = 16, must be at most 15 with a shared expert"):
        kernels.module().router(**of_router, shared_gate=16, type=0, device=0, stream=0)
    with pytest.raises(ValueError, match="shared_gate = 8, bytes past"):
        kernels.module().router(**{**of_router, "active": 3}, shared_gate=24, type=0, device=0, stream=0)
