"""Bias, penalties by count and log probabilities of a reply, against the logits of transformers."""

from __future__ import annotations

import math

import pytest
import torch

from localq.engine.generate import Engine
from localq.errors import ExitCode, LocalqError
from localq.sampling import MOST_BIASES, LogitOptions, Sampling
from localq.worker import messages
from localq.worker.messages import Generate, Tokens
from tests.support.engine.engine_runs import GREEDY, ids_of, prompt_of, steps_of
from tests.support.engine.lossless import Oracle

DRAW = Sampling(temperature=0.9, top_p=0.97, seed=9)


def logits_along(reference, prompt: list[int], reply: list[int]) -> torch.Tensor:
    """f32 [len(reply), vocab]: the logits that each token of the reply was chosen from."""
    with torch.inference_mode():
        logits = reference(torch.tensor([prompt + reply])).logits[0].float()
    return logits[len(prompt) - 1 : len(prompt) - 1 + len(reply)].clone()


@pytest.mark.parametrize("sampling", [GREEDY, DRAW, Sampling(dry_multiplier=2.0, repeat_penalty=1.3)])
def test_log_probabilities_are_those_of_the_model_before_sampling(engine, reference, sampling):
    prompt = prompt_of(23)
    steps = steps_of(engine, prompt, sampling, max_tokens=17, logits=LogitOptions(logprobs=5))
    reply = [id for step in steps for id in step.ids]
    assert reply == ids_of(engine, prompt, sampling, max_tokens=17)
    found = [each for step in steps for each in step.logprobs]
    expected = torch.log_softmax(logits_along(reference, prompt, reply), dim=-1)
    assert len(found) == len(reply) == 17
    for row, id, each in zip(expected, reply, found, strict=True):
        assert each.logprob == pytest.approx(float(row[id]), abs=1e-4)
        top = torch.topk(row, 5)
        assert [value for _, value in each.top] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert [id for id, _ in each.top] == top.indices.tolist()


def test_the_chosen_token_alone(engine):
    steps = steps_of(engine, prompt_of(9), max_tokens=4, logits=LogitOptions(logprobs=0))
    assert [step.logprobs[0].top for step in steps if step.ids] == [()] * 4
    assert not any(step.logprobs for step in steps_of(engine, prompt_of(9), max_tokens=4))


def test_a_bias_forbids_and_forces(engine):
    prompt = prompt_of(31)
    plain = ids_of(engine, prompt, max_tokens=8)
    banned = ids_of(engine, prompt, max_tokens=8, logits=LogitOptions(bias=((plain[0], -100.0), (10**6, 5.0))))
    assert plain[0] not in banned
    assert ids_of(engine, prompt, DRAW, max_tokens=8, logits=LogitOptions(bias=((7, 100.0),))) == [7] * 8
    assert ids_of(engine, prompt, max_tokens=8) == plain  # the next reply has none of it


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-0.5, 0.9)])
def test_penalties_count_the_tokens_of_the_reply(engine, reference, presence, frequency):
    prompt = prompt_of(12, seed=4)
    options = LogitOptions(((3, 2.0),), presence, frequency)
    reply = ids_of(engine, prompt, max_tokens=40, logits=options)
    counts, expected = torch.zeros(320), []
    for row in logits_along(reference, prompt, reply):
        row[3] += 2.0
        chosen = int((row - presence * (counts > 0) - frequency * counts).argmax())
        counts[chosen] += 1
        expected.append(chosen)
    assert reply == expected
    assert reply != ids_of(engine, prompt, max_tokens=40)


def test_drafts_change_nothing(loaded):
    prompt, options = prompt_of(70), LogitOptions(presence_penalty=0.4, logprobs=3)
    for sampling in (GREEDY, DRAW):
        plain = steps_of(Engine(loaded), prompt, sampling, max_tokens=50, logits=options)
        ids = [id for step in plain for id in step.ids]
        drafting = Engine(loaded, draft_tokens=7)
        drafting._drafter = Oracle(ids, seed=1)
        drafted = steps_of(drafting, prompt, sampling, max_tokens=50, logits=options, draft_tokens=7)
        assert [id for step in drafted for id in step.ids] == ids
        first, second = ([each for step in steps for each in step.logprobs] for steps in (plain, drafted))
        assert [each.logprob for each in first] == pytest.approx([each.logprob for each in second], abs=1e-4)
        stats = drafted[-1].stats
        assert 0 < sum(stats.accepted.values()) < sum(stats.drafted.values())


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"bias": ((1, 101.0),)}, "logit_bias"),
        ({"bias": ((-1, 1.0),)}, "logit_bias"),
        ({"bias": ((True, 1.0),)}, "logit_bias"),
        ({"bias": ((1, math.nan),)}, "logit_bias"),
        ({"bias": tuple((id, 1.0) for id in range(MOST_BIASES + 1))}, "logit_bias"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": math.nan}, "frequency_penalty"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
    ],
)
def test_values_out_of_range_are_refused(options, name):
    with pytest.raises(LocalqError) as caught:
        LogitOptions(**options)
    assert caught.value.what == name
    assert caught.value.exit_code == ExitCode.USAGE


def test_they_pass_through_the_pipe(engine):
    request = Generate(1, [1, 2], logits=LogitOptions(((5, -1.0),), 0.5, -0.5, 2))
    assert messages.decode(messages.encode(request)) == request
    assert messages.decode(messages.encode(Generate(1, [1]))) == Generate(1, [1])
    step = next(each for each in steps_of(engine, [1, 2, 3], max_tokens=1, logits=request.logits) if each.ids)
    sent = Tokens(1, [*step.ids], step.stats, [*step.logprobs])
    assert messages.decode(messages.encode(sent)) == sent
