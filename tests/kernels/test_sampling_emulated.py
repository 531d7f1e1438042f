"""sample, dry_match and adjust, compiled for the CPU (sample_on_cpu.h): what DRY, XTC and a mask change.

Launchers, searches, sums and state between launches, without a GPU, against the reference on the same state. Blocks
that run at the same time are tested on a GPU (test_sampling.py, test_logit_adjust.py).
"""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace

import pytest
import torch

from localq import kernels
from localq.engine.sampler import NON_FINITE, SamplerState, adjust, repeated_lengths
from localq.engine.step.state import SKIPPED, StepState
from localq.kernels import logit_adjust, sampling
from localq.kernels.sampling import workspace_elements
from localq.sampling import Sampling
from tests.support.engine.scripted_constraint import mask_of
from tests.support.kernels.cuda_headers import compile_on_cpu

KERNELS = ["step/sample.cu", "step/logit_adjust.cu"]
CPU = torch.device("cpu")


def fields_of(**kinds):
    return type("Fields", (ctypes.Structure,), {"_fields_": list(kinds.items())})


POINTER, LONG, FLOAT, INT, BOOL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int, ctypes.c_bool
STRUCTS = {  # csrc/step/sampling.h
    "sample": fields_of(
        logits=POINTER, vocab=LONG, softcap=FLOAT, seen=POINTER, uniforms=POINTER, capacity=LONG, step=POINTER,
        floats=POINTER, top_k=POINTER, chosen=POINTER, token=POINTER, position=POINTER, workspace=POINTER,
        excludes=POINTER, adjusted=BOOL, follows=BOOL, draft=POINTER, diverged=POINTER,
    ),
    "dry_match": fields_of(
        history=POINTER, size=LONG, prompt=POINTER, step=POINTER, token=POINTER, window=POINTER, breakers=POINTER,
        longest=INT, matches=POINTER, diverged=POINTER,
    ),
    "adjust": fields_of(
        logits=POINTER, vocab=LONG, softcap=FLOAT, seen=POINTER, floats=POINTER, penalties=POINTER, matches=POINTER,
        mask=POINTER, diverged=POINTER,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("library")
    return compile_on_cpu(folder, "sample_on_cpu.cpp", KERNELS, launch="sample_on_cpu.h", faults=tuple(STRUCTS))


@pytest.fixture
def emulated(library, monkeypatch):
    """The wrappers run the kernels on the CPU, on a device of two multiprocessors."""

    def launcher(name: str):
        def launch(*, device, stream, greedy=None, **arguments):
            given = STRUCTS[name](**arguments)
            more = [] if greedy is None else [ctypes.c_bool(greedy)]
            getattr(library, f"{name}_on_cpu")(ctypes.byref(given), *more, device)

        return launch

    monkeypatch.setattr(kernels, "module", lambda: SimpleNamespace(**{name: launcher(name) for name in STRUCTS}))
    for module in (logit_adjust, sampling):
        monkeypatch.setattr(module, "check_cuda", lambda *given: None)
        monkeypatch.setattr(module, "place", lambda tensor: {"device": 2, "stream": 0})


class Twins:
    """One reply twice: chosen by the kernels, and by the reference."""

    def __init__(self, vocab: int, sampling: Sampling, prompt: list[int], breakers=(), capacity: int = 400) -> None:
        self.theirs, self.ours = (StepState(SamplerState(vocab, capacity, CPU), CPU) for _ in range(2))
        self.ours.sampler.workspace = torch.zeros(workspace_elements(vocab), dtype=torch.int64)
        self.greedy = sampling.greedy
        for state in (self.theirs, self.ours):
            state.sampler.reset(sampling, torch.tensor(prompt), 40, breakers)

    def allow(self, ids) -> None:
        mask = mask_of(ids, self.ours.sampler.vocab)
        for state in (self.theirs, self.ours):
            state.sampler.allow(mask)

    def choose(self, logits: torch.Tensor, softcap: float = 0.0) -> tuple[int, int]:
        """(what the reference takes, what the kernels take)."""
        self.theirs.choose(logits.clone(), self.greedy, softcap)
        on_gpu = OnGpu(logits.clone())
        self.ours.choose(on_gpu, self.greedy, softcap)
        return int(self.theirs.chosen), int(self.ours.chosen)

    def follow(self, logits: torch.Tensor, draft: list[int]) -> tuple[list[int], list[int]]:
        """The same of several rows, with the tokens that are drafted for all but the first."""
        found = []
        for state, on in ((self.theirs, logits.clone()), (self.ours, OnGpu(logits.clone()))):
            state.draft(draft, len(logits))
            state.follow(on, self.greedy)
            found.append(state.choices[: len(logits)].tolist())
        return found[0], found[1]


class OnGpu(torch.Tensor):
    """A tensor that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True

    def __new__(cls, tensor: torch.Tensor):
        return torch.Tensor._make_subclass(cls, tensor)


def logits_of(vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """A bulk, a few likely ones, and values that repeat."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab, generator=generator) * spread
    logits[torch.randint(vocab, (8,), generator=generator)] += 2 * spread
    repeated = torch.randint(vocab, (2, max(1, vocab // 8)), generator=generator)
    logits[repeated[0]] = logits[repeated[1]]
    return logits


def prompt_of(rng: random.Random, vocab: int, length: int) -> list[int]:
    """Of few words, so that much repeats."""
    words = [rng.randrange(vocab) for _ in range(5)]
    return [rng.choice(words) for _ in range(length)]


def random_settings(rng: random.Random, greedy: bool) -> Sampling:
    return Sampling(
        temperature=0.0 if greedy else rng.choice([0.6, 1.0, 1.7]),
        top_k=rng.choice([0, 0, 3, 40, 10**6]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.6]),
        min_p=rng.choice([0.0, 0.0, 0.02]),
        repeat_penalty=rng.choice([1.0, 1.3]),
        dry_multiplier=rng.choice([0.0, 0.8, 3.0]),
        dry_allowed_length=rng.choice([1, 2, 4]),
        dry_penalty_last_n=rng.choice([-1, -1, 30]),
        xtc_probability=rng.choice([0.0, 0.5, 1.0]),
        xtc_threshold=rng.choice([0.01, 0.1, 0.3]),
        seed=rng.randrange(1000),
    )


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("vocab", [31, 1100])
def test_random_settings_choose_as_the_reference(emulated, vocab, seed):
    rng = random.Random(seed)
    settings = random_settings(rng, greedy=seed % 4 == 3)
    twins = Twins(vocab, settings, prompt_of(rng, vocab, 60), breakers={rng.randrange(vocab) for _ in range(3)})
    masked = seed % 2
    for step in range(3):
        if masked:
            twins.allow(rng.sample(range(vocab), rng.choice([1, 5, vocab])))
        expected, got = twins.choose(logits_of(vocab, 100 * seed + step), softcap=30.0 * (seed % 3 == 0))
        assert got == expected, (settings, step)
    assert torch.equal(twins.ours.sampler.seen, twins.theirs.sampler.seen)
    assert not twins.ours.sampler.matches.any()


@pytest.mark.parametrize("seed", range(8))
def test_repetitions_are_those_of_the_reference(emulated, seed):
    """Histories of few words; of one, which overlaps itself for longer than a repetition is followed."""
    rng = random.Random(seed)
    vocab, length = 40, rng.choice([1, 2, 50, 300])
    history = [7] * length if seed == 3 else prompt_of(rng, vocab, length)
    cut = rng.randrange(1, length + 1)
    sampling = Sampling(dry_multiplier=1.0, dry_penalty_last_n=rng.choice([-1, 1, 40]))
    twins = Twins(vocab, sampling, history[:cut], breakers=[rng.choice(history)] if seed % 2 else [])
    ours, theirs = twins.ours, twins.theirs
    for state, token in [(twin, token) for token in history[cut:] for twin in (ours, theirs)]:
        state.sampler.advance(torch.tensor([token]))
        state.token.fill_(token)
    if length > cut:
        ours.sampler.history[length - 1] = 39  # the last token comes from where the step left it
    logit_adjust.dry_match(ours.sampler, ours.token)
    assert torch.equal(ours.sampler.matches.long(), repeated_lengths(theirs.sampler))
    assert torch.equal(ours.sampler.history, theirs.sampler.history)


@pytest.mark.parametrize(
    ("last_n", "breaker", "expected"),
    [
        *((8, 0, 3), (7, 0, 2), (6, 0, 1), (5, 0, 0), (1, 0, 0), (0, 0, 0)),
        *((8, 1, 2), (8, 2, 1), (8, 3, 0), (8, 9, 0), (7, 1, 2)),
    ],
)
def test_repetitions_end_at_breakers_and_before_the_last_tokens(emulated, last_n, breaker, expected):
    twins = Twins(10, Sampling(dry_multiplier=1.0), [1, 2, 3, 9, 8, 1, 2, 3], breakers=[breaker])
    twins.ours.sampler.window.fill_(last_n)
    logit_adjust.dry_match(twins.ours.sampler, twins.ours.token)
    assert twins.ours.sampler.matches.tolist() == [0] * 9 + [expected]


@pytest.mark.parametrize("masked", [False, True])
def test_scores_are_those_of_the_reference_bit_for_bit(emulated, masked):
    vocab, run = 1100, list(range(100, 160))
    for multiplier, base in ((0.8, 1.75), (100.0, 10.0)):
        sampling = Sampling(dry_multiplier=multiplier, dry_base=base, repeat_penalty=1.3)
        twins = Twins(vocab, sampling, [*run, 5, 9, *run[-3:], 6, *run])
        if masked:
            twins.allow(range(0, vocab, 3))
        logits = logits_of(vocab, 3)
        logits[[0, 3, 102]] = torch.tensor([3e38, -3e38, -3e38])  # times the penalty the last one is infinite
        expected = adjust(logits, twins.theirs.sampler)
        logit_adjust.dry_match(twins.ours.sampler, twins.ours.token)
        logit_adjust.adjust(logits, twins.ours.sampler)
        assert torch.equal(logits, expected)
        assert len(logits.unique()) > 100
        assert logits.isfinite().all()


@pytest.mark.parametrize("temperature", [0.0, 0.01])
def test_the_repetition_penalty_counts_once(emulated, temperature):
    twins = Twins(40, Sampling(temperature=temperature, repeat_penalty=1.3, seed=1), [5])
    twins.allow(range(40))
    logits = torch.zeros(40)
    logits[[5, 6]] = torch.tensor([10.0, 7.0])  # 7.7 after it, and 5.9 after another
    assert twins.choose(logits) == (5, 5)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_damage_is_told_of_behind_a_mask_and_forgotten(emulated, greedy, value):
    sampling = Sampling(temperature=0.0 if greedy else 1.0, xtc_probability=1.0, dry_multiplier=1.0, seed=1)
    twins = Twins(700, sampling, [3, 3, 600, 3, 3])
    twins.allow([5, 6])
    logits = logits_of(700, 1)
    damaged = logits.clone()
    damaged[600] = value  # what DRY would lower, and the mask forbids
    assert twins.choose(damaged) == (NON_FINITE, NON_FINITE)
    assert not twins.ours.sampler.matches.any()
    expected, got = twins.choose(logits)
    assert got == expected in (5, 6)


XTC = [
    ({"xtc_threshold": 0.1}, 1.0),
    ({"xtc_threshold": 0.3}, 1.0),
    ({"xtc_threshold": 0.5}, 1.0),
    ({"xtc_threshold": 0.001}, 1.0),
    ({"xtc_threshold": 0.05, "top_k": 4}, 1.0),
    ({"xtc_threshold": 0.05, "top_p": 0.8}, 1.0),
    ({"xtc_threshold": 0.05, "min_p": 0.3}, 1.0),
    ({"xtc_threshold": 0.02, "top_k": 7, "top_p": 0.9, "min_p": 0.01}, 1.0),
    ({"xtc_threshold": 0.1, "top_k": 5}, 0.5),
]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("settings", "probability"), XTC, ids=str)
def test_xtc_leaves_what_the_reference_leaves(emulated, settings, probability, ties):
    """For u from one end of what stays to the other."""
    sampling = Sampling(temperature=1.0, xtc_probability=probability, seed=4, **settings)
    twins, grid = Twins(31, sampling, [0]), 6
    logits = logits_of(31, 8, spread=1.0)
    if ties:  # of all in the middle, and of the likeliest two: a cut may fall among equals
        logits = logits.round()
        logits[[4, 17]] = logits.max() + 1
    for state in (twins.theirs.sampler, twins.ours.sampler):
        state.uniforms[:grid] = torch.linspace(0, 1 - 1e-9, grid, dtype=torch.float64)
    for _ in range(grid):
        expected, got = twins.choose(logits)
        assert got == expected


def test_what_is_off_launches_nothing(emulated, monkeypatch):
    """Without DRY and mask neither of their kernels; without XTC not its table."""
    called = []
    module = kernels.module()

    def noted(name):
        def launch(**arguments):
            called.append((name, arguments.get("adjusted"), bool(arguments.get("excludes"))))
            getattr(module, name)(**arguments)

        return launch

    monkeypatch.setattr(kernels, "module", lambda: SimpleNamespace(**{name: noted(name) for name in STRUCTS}))
    logits = logits_of(31, 1)
    for settings, masked, expected in (
        (Sampling(repeat_penalty=1.2), False, [("sample", False, False)]),
        (Sampling(temperature=1.0, seed=1), False, [("sample", False, False)]),
        (Sampling(temperature=1.0, xtc_probability=0.1, seed=1), False, [("sample", False, True)]),
        (Sampling(), True, [("adjust", None, False), ("sample", True, False)]),
        (
            Sampling(dry_multiplier=1.0),
            False,
            [("dry_match", None, False), ("adjust", None, False), ("sample", True, False)],
        ),
    ):
        twins = Twins(31, settings, [1, 2])
        if masked:
            twins.allow([4])
        called.clear()
        assert twins.choose(logits, softcap=5.0)[0] == twins.ours.chosen
        assert called == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": 0}, "vocab = 0"),
        ({"logits": 2}, "logits = 2, bytes past"),
        ({"softcap": -1.0}, "softcap = -1"),
        ({"penalties": 4, "matches": 0}, "matches = 0, must not be null"),
    ],
)
def test_the_launcher_of_adjust_checks_what_it_is_given(emulated, change, message):
    given = {"logits": 4, "vocab": 3, "softcap": 0.0, "seen": 4, "floats": 8, "penalties": 0, "matches": 4, "mask": 0}
    with pytest.raises(ValueError, match=message):
        kernels.module().adjust(**given | change, device=1, stream=0)


@pytest.mark.parametrize(("change", "message"), [({"size": 0}, "size = 0"), ({"longest": 0}, "longest = 0")])
def test_the_launcher_of_dry_match_checks_what_it_is_given(emulated, change, message):
    names = ("history", "prompt", "step", "token", "window", "breakers", "matches")
    given = {**dict.fromkeys(names, 8), "size": 4, "longest": 50}
    with pytest.raises(ValueError, match=message):
        kernels.module().dry_match(**given | change, device=1, stream=0)


EVERYTHING = Sampling(
    temperature=0.9, top_k=9, top_p=0.9, repeat_penalty=1.4, dry_multiplier=1.0, xtc_probability=0.5, seed=4
)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.7, seed=2), EVERYTHING])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_are_followed_as_far_as_choices_were_drafted(emulated, sampling, masked):
    vocab, rng = 600, random.Random(5)
    prompt = prompt_of(rng, vocab, 30)
    for accepted, rows in ((0, 2), (1, 2), (2, 4), (3, 4), (5, 8), (7, 8)):
        logits = torch.stack([logits_of(vocab, 100 * rows + row) for row in range(rows)])
        masks = [mask_of(range(row % 2, vocab, 2), vocab) for row in range(rows)]
        alone = Twins(vocab, sampling, prompt)
        plain = []
        for row in range(rows):  # one step of one row after the other
            if masked:
                alone.theirs.sampler.allow(masks[row])
            alone.theirs.choose(logits[row].clone(), sampling.greedy)
            plain.append(int(alone.theirs.chosen))
        twins = Twins(vocab, sampling, prompt)
        draft = [id if row < accepted else (id + 1) % vocab for row, id in enumerate(plain[:-1])]
        if masked:
            for state in (twins.theirs, twins.ours):
                state.sampler.allow(*masks)
        theirs, ours = twins.follow(logits, draft)
        assert theirs == ours == plain[: accepted + 1] + [SKIPPED] * (rows - accepted - 1)
        for state in (twins.theirs, twins.ours):
            assert int(state.token) == plain[accepted]
            assert int(state.position) == int(state.sampler.step) == accepted + 1
        assert torch.equal(twins.theirs.sampler.seen, twins.ours.sampler.seen)
        again = [logits_of(vocab, 7 + row) for row in range(2)]  # the steps behind it
        if masked:
            for state in (twins.theirs, twins.ours):
                state.sampler.allow(mask_of(range(vocab), vocab))
        for each in again:
            theirs_next, ours_next = twins.choose(each)
            assert theirs_next == ours_next
