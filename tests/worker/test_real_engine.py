"""The real engine behind the pipe: it says what the engine in this process says, and it can be killed and replaced."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

import pytest
import torch

from localq.engine.generate import Engine
from localq.engine.load.load import load
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from localq.sampling import Sampling
from localq.worker import backend
from localq.worker.client import EngineClient
from localq.worker.messages import Done, Generate, Load, Loading, Tokens
from tests.support.engine.engine_runs import ids_of, prompt_of
from tests.support.models.tiny_checkpoints import make_checkpoint

SAMPLING = Sampling(temperature=0.9, top_k=50, top_p=0.95, repeat_penalty=1.1, seed=11)


def collect(client: EngineClient, request: Generate, seen: list[int]) -> Done:
    for event in client.generate(request):
        if isinstance(event, Tokens):
            seen += event.ids
            if request.id == 2 and client.pid:
                os.kill(client.pid, signal.SIGKILL)
    assert isinstance(event, Done)
    return event


@pytest.mark.parametrize("embed", ["device", "host"])
def test_on_a_gpu_memory_of_the_host_is_told_besides(tmp_path, embed):
    files = open_model(make_checkpoint(tmp_path / "tiny"))
    model = load(files, LoadOptions(device="cpu", dtype="float32", ctx=400))
    model = replace(model, device=torch.device("cuda"), plan=replace(model.plan, embed=embed), embed=embed)
    found = backend._host(model)
    assert found.pop("snapshots") == 4 * 2**24  # four blocks at a time
    table = model.plan.ledger.components["embedding"]  # of the plan for the device, in f32
    assert table > 0
    assert found == ({"embedding": table} if embed == "host" else {})
    assert backend._predicted_ledger(model) == model.plan.ledger.components


def test_life_of_an_engine_process(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # tiny matrices lose by threads where the machine is busy
    folder = make_checkpoint(tmp_path / "tiny", initializer_range=0.15)
    here = Engine(load(open_model(folder), LoadOptions(device="cpu", dtype="float32")))
    prompt = prompt_of(90)
    request = Load(str(folder), LoadOptions("tiny", device="cpu", dtype="float32", ctx=400))
    with EngineClient() as client:
        with pytest.raises(LocalqError, match="no such folder") as caught:
            client.load(Load(str(tmp_path / "missing")))
        assert caught.value.exit_code == ExitCode.UNKNOWN_MODEL
        with pytest.raises(LocalqError, match="no model is loaded"):
            collect(client, Generate(1, prompt), [])
        stages = set()
        loaded = client.load(request, lambda event: stages.add(event.stage) if isinstance(event, Loading) else None)
        assert stages == {"starting the device", "planning", "loading weights", "allocating the KV cache"}
        assert list(loaded.stages)[:2] == ["starting the engine process", "importing torch"]
        assert stages < set(loaded.stages)
        assert 0 < sum(loaded.stages.values()) < 300
        assert "importing torch" not in client.load(request).stages  # of a process that has it already
        assert (loaded.name, loaded.device, loaded.dtype, loaded.format) == ("tiny", "cpu", "float32", "bf16")
        assert (loaded.context_size, loaded.vocab_size, loaded.graphs) == (400, 320, False)
        assert loaded.ledger["kv_cache"] == 3 * 2 * 2 * 32 * 400 * 4
        # What a pass gives back is in neither sum, so that the two can be compared.
        assert loaded.predicted["scratch"] == 0 < loaded.host["reading"]
        assert loaded.predicted["kv_cache"] == loaded.ledger["kv_cache"]
        seen: list[int] = []
        done = collect(client, Generate(3, prompt, SAMPLING, max_tokens=40), seen)
        assert seen == ids_of(here, prompt, SAMPLING, max_tokens=40)
        assert (done.reason, done.stats.generated_tokens, done.stats.cached_tokens) == ("length", 40, 0)
        done = collect(client, Generate(4, [*prompt, *seen], max_tokens=2), [])
        assert done.stats.cached_tokens == 129

        with pytest.raises(LocalqError, match=r"engine process: stopped unexpectedly \(signal SIGKILL\)"):
            collect(client, Generate(2, prompt), [])
        client.load(request)
        again: list[int] = []
        collect(client, Generate(5, prompt, SAMPLING, max_tokens=40), again)
        assert again == seen
