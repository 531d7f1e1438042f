"""The server with a real model, SmolLM2-135M on the CPU: what a script cannot show."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest

from tests.support.files.real_model import smollm2

MESSAGES = [{"role": "user", "content": "Name three colours."}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    home = tmp_path_factory.mktemp("home")
    variables = {f"LOCALQ_{name}": str(home / name.lower()) for name in ("CONFIG", "DATA", "CACHE", "RUNTIME")}
    command = [sys.executable, "-m", "localq", "serve", str(smollm2()), "--port", "0", "--ctx", "1k", "--device", "cpu"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, **variables})
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if "press Ctrl-C" in line:
            break
    found = [word for line in lines for word in line.split() if word.startswith("http://")]
    assert found, lines
    yield found[0]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=20)
    assert process.returncode == 0


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


def name_of(client: openai.OpenAI) -> str:
    return next(iter(client.models.list())).id


def test_a_schema_is_kept(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"colours": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}},
        "required": ["colours"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "colours", "schema": schema, "strict": True}}
    whole = client.chat.completions.create(
        model=name_of(client), messages=MESSAGES, response_format=form, max_tokens=60
    )
    found = json.loads(whole.choices[0].message.content or "")
    assert set(found) == {"colours"}
    assert set(found["colours"]) <= {"red", "green", "blue"}


def test_log_probabilities_are_those_of_the_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=name_of(client), messages=MESSAGES, logprobs=True, top_logprobs=3, max_tokens=4, temperature=0
    )
    choice = whole.choices[0]
    assert choice.logprobs is not None
    tokens = choice.logprobs.content or []
    assert len(tokens) == 4
    assert "".join(each.token for each in tokens) == choice.message.content
    for each in tokens:
        assert each.logprob == max(top.logprob for top in each.top_logprobs)  # greedy
        assert sum(math.exp(top.logprob) for top in each.top_logprobs) <= 1.001
        assert len(each.top_logprobs) == 3
    text = client.completions.create(
        model=name_of(client), prompt="The capital of France is", max_tokens=2, logprobs=2, temperature=0
    ).choices[0]
    assert text.logprobs is not None
    assert "".join(text.logprobs.tokens or []) == text.text


def test_a_seed_repeats_a_reply_and_a_bias_decides_a_token(client: openai.OpenAI) -> None:
    def ask(**more: object) -> str:
        reply = client.chat.completions.create(
            model=name_of(client), messages=MESSAGES, max_tokens=4, **{"temperature": 1.5, **more}
        )
        return reply.choices[0].message.content or ""

    ask(seed=7)  # the prompt is in the cache from here on, and is computed alike
    first = ask(seed=7)
    assert ask(seed=7) == first
    assert len({first, ask(seed=0), ask(seed=1)}) > 1
    greedy = ask(temperature=0)
    chosen = client.chat.completions.create(
        model=name_of(client), messages=MESSAGES, max_tokens=4, temperature=0, logit_bias={"42": 100}
    )
    assert len(set(chosen.choices[0].message.content or "")) <= 2  # one token, again and again
    assert ask(temperature=0, presence_penalty=2, frequency_penalty=2)
    assert greedy == ask(temperature=0)


def test_a_prompt_is_reused_for_another_client(client: openai.OpenAI, url: str) -> None:
    system = {"role": "system", "content": "You are a helpful assistant of a library. " * 10}

    def cached(client: openai.OpenAI, text: str) -> tuple[int, int]:
        usage = client.chat.completions.create(
            model=name_of(client), messages=[system, {"role": "user", "content": text}], max_tokens=2
        ).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens

    cached(client, "Hello")
    with openai.OpenAI(base_url=url, api_key="x", default_headers={"user-agent": "another"}) as other:
        found, whole = cached(other, "Good morning")
    assert found > whole * 0.8


def test_a_reply_ends_at_its_limit_and_at_the_context(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=name_of(client), messages=MESSAGES, max_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError, match="context is limited to 1024"):
        client.chat.completions.create(model=name_of(client), messages=[{"role": "user", "content": "word " * 3000}])
