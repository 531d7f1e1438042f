"""What `localq pull` says of the fit before the first byte, for models of the catalogue and for any other."""

from __future__ import annotations

from types import SimpleNamespace

import psutil
import pytest

from localq import cli, settings
from localq.files import catalog
from localq.files.architecture import Architecture
from localq.files.hub import client as hub_client
from localq.files.hub import remote as hub_remote
from localq.files.safetensors_headers import read_header
from localq.planner import budget, choose, ram
from localq.planner import plan as memory_plan
from tests.support.files import hub_server
from tests.support.files.hub_server import REPO
from tests.support.files.uncatalogued_models import CONFIG, model


@pytest.fixture
def server(tmp_path, monkeypatch):
    with hub_server.running(tmp_path, monkeypatch) as server:
        monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config.toml"))
        monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * 2**30))
        monkeypatch.setattr(ram, "CGROUP", tmp_path)
        files = model()
        del files["model.safetensors"]
        server.add(REPO, files)
        yield server


def localq(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert cli.execute(list(arguments)) == code
    return capsys.readouterr().err


def test_a_repository_is_judged_by_its_configuration_and_headers_alone(server, capsys):
    err = localq(capsys, "pull", REPO, "--vram", "1MiB", code=2)
    assert "too little" in err
    err = localq(capsys, "pull", REPO, "--vram", "520MiB", code=3)
    assert "does not fit" in err
    assert "--force" in err
    assert all(f"({number})" in err for number in (1, 2, 3))  # ways out
    assert "with a larger --vram" in err
    asked = {each.path.rpartition("/")[2]: each.headers.get("range") for each in server.seen("GET", "/resolve/")}
    assert set(asked) == {
        "config.json", "generation_config.json", "tokenizer_config.json", "chat_template.jinja",
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
    }  # fmt: skip
    assert asked["model-00002-of-00002.safetensors"] == f"bytes=0-{hub_remote.HEAD_BYTES - 1}"
    assert server.sent_of("model-00002-of-00002.safetensors") <= hub_remote.HEAD_BYTES
    assert localq(capsys, "ls").startswith("no models yet")


def test_what_fits_is_said_with_its_context_and_fetched(server, capsys):
    err = localq(capsys, "pull", REPO, "--vram", "4")
    assert "fits: " in err
    assert "8,192 tokens of context" in err
    assert "downloaded and verified" in err
    assert "fits" not in localq(capsys, "pull", REPO, "--vram", "4")  # it is here


def test_force_fetches_what_does_not_fit(server, capsys):
    err = localq(capsys, "pull", REPO, "--vram", "520MiB", "--force")
    assert "does not fit" in err
    assert "downloaded and verified" in err


def test_without_a_gpu_the_ram_counts(server, capsys, monkeypatch):
    assert "of RAM for 8,192 tokens of context, and 68.7 GB is free (on the CPU, in " in localq(capsys, "pull", REPO)
    monkeypatch.setenv("LOCALQ_DTYPE", "float32")
    for verb in (["pull"], ["chat", "--dry-run"], ["run", "--dry-run"]):
        err = localq(capsys, *verb, "qwen3-32b", code=3)  # the hub of this test has no such repository
        assert "of RAM in float32" in err
        assert all(f"({number})" in err for number in (1, 2, 3))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10 * 2**20))
    server.repos["maker/other"] = server.repos[REPO]
    assert "does not fit" in localq(capsys, "pull", "maker/other", code=3)


def test_a_card_that_is_not_here_has_a_desktop_unless_told_otherwise(server, capsys):
    err = localq(capsys, "pull", REPO, "--vram", "4")
    assert (
        "card's memory is free, less 668 MiB for the desktop (assumed; use --desktop 0 if no monitor is attached)"
        in err
    )
    server.repos["maker/other"] = server.repos[REPO]
    assert "desktop" not in localq(capsys, "pull", "maker/other", "--vram", "4", "--desktop", "0")


def test_quiet_is_quiet(server, capsys):
    assert localq(capsys, "pull", REPO, "--vram", "4", "-q") == ""


@pytest.mark.parametrize(
    ("config", "said"),
    [({**CONFIG, "model_type": "mamba"}, "mamba"), ({"model_type": "bert"}, "cannot determine whether it fits")],
)
def test_a_shape_that_is_not_known_is_said_and_no_reason_to_refuse(server, capsys, config, said):
    files = {**model(config)}
    del files["model.safetensors"]
    server.add(REPO, files)
    err = localq(capsys, "pull", REPO, "--vram", "4")
    assert said in err
    assert "downloaded and verified" in err


@pytest.mark.parametrize(("config", "said"), [({"model_type": "llama"}, "num_hidden_layers"), ({"a": 1}, "model_type")])
def test_unsound_files_are_refused_before_the_weights_unless_forced(server, capsys, config, said):
    files = model(config)
    del files["model.safetensors"]
    server.add(REPO, files)
    assert said in localq(capsys, "pull", REPO, "--vram", "4", code=8)
    assert localq(capsys, "ls").startswith("no models yet")
    err = localq(capsys, "pull", REPO, "--vram", "4", "--force")
    assert "cannot determine whether it fits" in err
    assert "downloaded and verified" in err


def test_the_catalogue_is_enough_for_its_own(server, capsys):
    err = localq(capsys, "pull", "llama-3.3-70b@bf16", "--vram", "24", code=3)
    assert "does not fit" in err
    assert server.requests == []


def test_a_bare_name_means_what_chat_would_load(server, capsys):
    entry = catalog.find("llama-3.3-70b")
    fits = choose.choose_target("llama-3.3-70b", None, settings.Settings(), budget.card_bytes("24"))[0]
    assert fits.format not in (None, entry.default_format)
    assert fits.source is not None
    server.repos.clear()
    err = localq(capsys, "pull", "llama-3.3-70b", "--vram", "24", code=4)  # this hub does not have it
    assert err.splitlines()[0].startswith(f"llama-3.3-70b@{fits.format}: ")
    assert fits.source.repo in err.splitlines()[-1]


def test_bytes_of_the_blocks_are_those_of_the_headers(server):
    listing = hub_client.list_files(REPO, "main")
    with hub_remote.outline(listing) as folder:
        assert hub_remote.block_bytes(folder) == 2 * (64 * 64 + 3 * 4000 * 640)
        stub = folder / "model-00002-of-00002.safetensors"
        assert read_header(stub).tensors["model.layers.1.mlp.up_proj.weight"].shape == (4000, 640)
        assert stub.stat().st_size == listing.files[stub.name].size
        assert stub.stat().st_blocks * 512 < stub.stat().st_size / 4  # it takes no room
    exact = memory_plan.assess(Architecture.from_config(CONFIG), "bf16", 2**32, weights=15_368_192)
    assert exact.ledger.components["weights"] == 2 * (64 * 64 + 3 * 4000 * 640)


@pytest.mark.parametrize("switch", ["--offline", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "LOCALQ_OFFLINE"])
def test_offline_no_socket_is_ever_connected(server, capsys, monkeypatch, switch):
    localq(capsys, "pull", REPO)

    def connect(*given):
        raise AssertionError(f"connected to {given}")

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr("socket.socket." + name, connect)
    monkeypatch.setattr("socket.getaddrinfo", connect)
    flags = [switch] if switch.startswith("--") else []
    if not flags:
        monkeypatch.setenv(switch, "1")
    assert "already on this machine" in localq(capsys, "pull", REPO, *flags)
    for missing in ("maker/other", "llama-3.1-8b", f"{REPO}@v2"):
        assert "localq is in offline mode" in localq(capsys, "pull", missing, *flags, code=6)
    for verb in ("ls", "verify", "prune"):
        localq(capsys, verb)
