"""sample on a GPU draws what the reference draws from the same state, for all settings, and moves the state on."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from localq.engine import sampler as reference
from localq.engine.sampler import NON_FINITE, SamplerState
from localq.kernels.sampling import sample, sample_bytes, workspace_elements
from localq.sampling import Sampling

VOCABS = [1, 2, 31, 1000, 49152, 128256, 262208]
STEPS = 64
CUDA = torch.device("cuda")


@dataclasses.dataclass
class Draw:
    """A sampler state and the places that a step writes to, poisoned."""

    state: SamplerState

    def __post_init__(self) -> None:
        device = self.state.step.device
        self.chosen = torch.full((1,), -77, device=device)
        self.token = torch.full((1,), -77, device=device)
        self.position = torch.full((1,), 5, device=device)

    def kernel(self, logits: torch.Tensor, greedy: bool = False, softcap: float = 0.0) -> int:
        places = {"chosen": self.chosen, "token": self.token, "position": self.position}
        sample(logits, self.state, greedy=greedy, softcap=softcap, **places)
        return int(self.chosen)


def draw_of(sampling: Sampling, vocab: int, prompt: torch.Tensor | None = None, device: torch.device = CUDA) -> Draw:
    state = SamplerState(vocab, STEPS, device)
    prompt = torch.tensor([0, 7, 29]) if prompt is None else prompt
    state.reset(sampling, prompt % vocab, STEPS)
    return Draw(state)


def logits_of(vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """f32 on the GPU: a bulk, a few likely ones, and values that repeat."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator) * spread
    logits[torch.randint(vocab, (20,), generator=generator)] += 4 * spread
    repeated = torch.randint(vocab, (2, max(1, vocab // 8)), generator=generator)
    logits[repeated[0]] = logits[repeated[1]]
    return logits.cuda()


def random_settings(seed: int) -> Sampling:
    rng = random.Random(seed)
    return Sampling(
        temperature=rng.choice([0.3, 0.7, 1.0, 1.9]),
        top_k=rng.choice([0, 0, 1, 5, 40, 1000, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.98, 0.9, 0.5, 1e-9]),
        min_p=rng.choice([0.0, 0.0, 0.01, 0.2, 0.999]),
        repeat_penalty=rng.choice([1.0, 1.15, 0.8, 30.0]),
        seed=seed,
    )


def both(draw: Draw, logits: torch.Tensor, greedy: bool = False, softcap: float = 0.0) -> tuple[int, int]:
    """(what the reference draws, what the kernel draws) from one state; the state moves on once."""
    capped = torch.tanh(logits / softcap) * softcap if softcap else logits
    expected = int(reference.sample(capped, draw.state, greedy))
    return expected, draw.kernel(logits, greedy, softcap)


@pytest.mark.cuda
@pytest.mark.parametrize("vocab", VOCABS)
def test_random_settings_draw_as_the_reference(vocab):
    for seed in range(24):
        sampling = random_settings(seed)
        prompt = torch.randint(vocab, (50,), generator=torch.Generator().manual_seed(seed))
        draw = draw_of(sampling, vocab, prompt)
        for step in range(4):
            expected, got = both(draw, logits_of(vocab, 10 * seed + step), softcap=30.0 * (seed % 3 == 0))
            assert got == expected, (sampling, step)


@pytest.mark.cuda
@pytest.mark.parametrize("vocab", VOCABS)
def test_greedy_chooses_as_the_reference(vocab):
    draw = draw_of(Sampling(repeat_penalty=1.4), vocab)
    for step in range(6):
        expected, got = both(draw, logits_of(vocab, step), greedy=True, softcap=20.0 * (step % 2))
        assert got == expected


SETTINGS = [
    Sampling(temperature=1.0, seed=1),
    Sampling(temperature=0.8, top_k=3, seed=2),
    Sampling(temperature=1.3, top_p=0.5, seed=3),
    Sampling(temperature=1.0, top_k=700, top_p=0.25, min_p=0.999, seed=4),
]


@pytest.mark.cuda
@pytest.mark.parametrize("vocab", [2, 1000, 128256])
@pytest.mark.parametrize("sampling", SETTINGS, ids=repr)
def test_equal_logits_are_taken_in_the_order_of_ids(sampling, vocab):
    draw = draw_of(sampling, vocab)
    zeros = torch.zeros(vocab, device="cuda")
    zeros[1::2] = -0.0
    for logits in (torch.full((vocab,), -3.25, device="cuda"), zeros, logits_of(vocab, 3).round()):
        for _ in range(4):
            expected, got = both(draw, logits)
            assert got == expected
    assert both(draw, zeros, greedy=True) == (0, 0)


@pytest.mark.cuda
@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 100.0])
def test_extreme_temperatures(temperature):
    draw = draw_of(Sampling(temperature=temperature, seed=6), 49152)
    for step in range(5):
        logits = logits_of(49152, step)
        expected, got = both(draw, logits)
        assert got == expected
        assert temperature > 1e-3 or logits[got] == logits.max()


@pytest.mark.cuda
def test_scores_that_lie_far_apart_and_close_together():
    draw = draw_of(Sampling(temperature=1.0, top_k=4000, top_p=0.999, seed=8), 5003)
    far, near = logits_of(5003, 1) * 1e30, 1e-6 * logits_of(5003, 2) + 17
    for logits in (far, near, far, near):
        expected, got = both(draw, logits)
        assert got == expected


@pytest.mark.cuda
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_logits_are_reported_and_forgotten(value, greedy):
    draw = draw_of(Sampling(temperature=1.0, top_k=9, top_p=0.9, seed=1), 1000, torch.tensor([5]))
    clean = logits_of(1000, 4)
    for place in (0, 517, 999):
        logits = clean.clone()
        logits[place] = value
        assert draw.kernel(logits, greedy) == NON_FINITE
        assert int(draw.token) == 0
    assert draw.state.seen.nonzero().flatten().tolist() == [0, 5]
    expected, got = both(draw, clean, greedy)
    assert got == expected


@pytest.mark.cuda
@pytest.mark.parametrize("greedy", [True, False])
def test_the_state_moves_on(greedy):
    draw = draw_of(Sampling(temperature=1.5, repeat_penalty=1.2, seed=3), 1000)
    seen = set(draw.state.seen.nonzero().flatten().tolist())
    for step in range(1, 6):
        seen.add(draw.kernel(logits_of(1000, step), greedy))
        assert int(draw.token) == int(draw.chosen)
        assert int(draw.state.step) == step
        assert int(draw.position) == 5 + step
        assert set(draw.state.seen.nonzero().flatten().tolist()) == seen
    sample(logits_of(1000, 9), draw.state, greedy=greedy, chosen=draw.chosen, token=draw.token)
    assert int(draw.position) == 10


@pytest.mark.cuda
def test_draws_follow_the_probabilities():
    """Every possible u of a grid: each token is drawn as often as its probability says."""
    logits = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5, -9.0], device="cuda")
    grid = 500
    state = SamplerState(6, grid, CUDA)
    state.reset(Sampling(temperature=1.0, top_k=4, seed=1), torch.tensor([0]), 1)
    state.uniforms.copy_((torch.arange(grid, dtype=torch.float64) + 0.5) / grid)
    drawn = torch.zeros(grid, dtype=torch.int64, device="cuda")
    token = torch.zeros(1, dtype=torch.int64, device="cuda")
    for step in range(grid):
        sample(logits, state, greedy=False, chosen=drawn[step : step + 1], token=token)
    dropped = torch.tensor([False, False, False, True, False, True], device="cuda")
    expected = logits.masked_fill(dropped, -torch.inf).softmax(0)
    frequencies = drawn.bincount(minlength=6) / grid
    assert (frequencies - expected).abs().max() <= 1.5 / grid  # both edges of a token's part of the grid


@pytest.mark.cuda
def test_one_graph_serves_all_settings():
    vocab = 49152
    logits, draw = logits_of(vocab, 0), draw_of(Sampling(temperature=1.0), vocab)
    draw.kernel(logits)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        places = {"chosen": draw.chosen, "token": draw.token, "position": draw.position}
        sample(logits, draw.state, greedy=False, **places)
    for seed in range(20):
        draw.state.reset(random_settings(seed), torch.tensor([3]), STEPS)
        for step in range(2):
            logits.copy_(logits_of(vocab, 100 * seed + step))
            expected = int(reference.sample(logits, draw.state, False))
            graph.replay()
            assert int(draw.chosen) == expected


@pytest.mark.cuda
@pytest.mark.parametrize("sampling", [Sampling(temperature=1.2, seed=5), Sampling(temperature=1, top_p=0.9, seed=5)])
def test_the_same_seed_draws_the_same_tokens(sampling):
    batch = [logits_of(128256, step) for step in range(12)]
    runs = []
    for _ in range(2):
        draw = draw_of(sampling, 128256)
        runs.append([draw.kernel(logits) for logits in batch])
    assert runs[0] == runs[1]
    other = draw_of(dataclasses.replace(sampling, seed=6), 128256)
    assert [other.kernel(logits) for logits in batch] != runs[0]


def cpu_arguments() -> dict[str, object]:
    one = torch.zeros(1, dtype=torch.int64)
    state = SamplerState(40, 8, torch.device("cpu"))
    state.workspace = torch.zeros(workspace_elements(40), dtype=torch.int64)
    return {"logits": torch.zeros(40), "state": state, "greedy": True, "chosen": one, "token": one.clone()}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(40).half()}, "logits is torch.float16"),
        ({"logits": torch.zeros(39)}, "seen has shape"),
        ({"logits": torch.zeros(0)}, "must have 1 to 16777215 elements"),
        ({"softcap": -1.0}, "softcap = -1.0"),
        ({"softcap": float("nan")}, "softcap = nan"),
        ({"chosen": torch.zeros(1)}, "chosen is torch.float32"),
        ({"token": torch.zeros(2, dtype=torch.int64)}, "token has shape"),
        ({"position": torch.zeros(1, dtype=torch.int32)}, "position is torch.int32"),
        ({}, "logits are on cpu, must be on a CUDA device"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        sample(**{**cpu_arguments(), **changes})


def test_bytes_are_those_of_the_tensors():
    arguments = cpu_arguments()
    assert sample_bytes(40) == arguments["logits"].nbytes + arguments["state"].seen.nbytes
