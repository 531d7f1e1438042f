"""`localq eval` of several models: one reference, one text, a table, and the plot of quality against size."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from localq.bench import plot
from localq.bench.models import speed
from localq.bench.quality import bits, comparison, evaluation
from localq.bench.quality.evaluation import REFERENCE, EvaluationRequest
from localq.errors import ExitCode, LocalqError
from localq.files.model_folder import open_model
from localq.planner.load_options import LoadOptions
from tests.support.models.tiny_checkpoints import make_checkpoint

TEXT = Path(__file__).parents[3] / "LICENSE"
WINDOW = 96


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def nf4(nf4_folder: Path) -> Path:
    return nf4_folder


def asked(*folders: Path, **more: Any) -> list[EvaluationRequest]:
    return [
        EvaluationRequest(open_model(each), _options(each), TEXT.read_bytes(), "LICENSE", WINDOW, 2, **more)
        for each in folders
    ]


def _options(folder: Path) -> LoadOptions:
    return LoadOptions(str(folder), "cpu", dtype="float32")


def compared(*folders: Path, **more: Any) -> tuple[list[dict[str, Any]], list[LocalqError]]:
    return comparison.run_all(asked(*folders, **more), lambda stage, done, total: None)


def test_the_reference_of_several_is_the_first(plain, nf4):
    (first, second), failed = compared(plain, nf4, against=REFERENCE)
    assert failed == []
    assert (first["kl"], first["top1"]) == (0.0, 1.0)
    assert second["kl"] > 1e-4
    assert second["perplexity_reference"] == first["perplexity"]
    (alone,), _ = compared(nf4, against=REFERENCE)
    assert alone["kl"] == 0  # its own weights
    (_, other), _ = compared(plain, nf4, against=str(nf4), rival=open_model(nf4))
    assert other["kl"] == 0


def test_tasks_are_a_column_a_kind(plain, nf4):
    results, _ = compared(plain, nf4, tasks=1)
    headers, rows = comparison.table(results)
    assert headers[-3:] == ["code", "arithmetic", "fact"]
    assert [row[-3:] for row in rows] == [["0/1"] * 3] * 2


def test_without_a_reference_there_is_no_column_of_it(plain, nf4):
    results, _ = compared(plain, nf4)
    headers, rows = comparison.table(results)
    assert headers == ["model", "format", "bits/weight", "weights MB", "perplexity", "llama.cpp"]
    assert [row[:3] for row in rows] == [[str(plain), "fp32", "16.000"], [str(nf4), "nf4", rows[1][2]]]
    assert float(rows[1][2]) == pytest.approx(bits.per_weight(open_model(nf4)), abs=5e-4)


def test_one_that_fails_leaves_the_others(plain, nf4, tmp_path):
    wider = make_checkpoint(tmp_path / "wider", vocab_size=384)
    results, (error,) = compared(plain, wider, nf4)
    assert [each["model"] for each in results] == [str(plain), str(nf4)]
    assert "wider" in str(error)
    assert error.exit_code == ExitCode.USAGE
    request = EvaluationRequest(open_model(plain), LoadOptions(device="cpu", dtype="float32"), b"", "nothing")
    with pytest.raises(LocalqError, match="the text is empty"):
        comparison.run_all([request], lambda *_: None)


def test_progress_names_the_model(plain, nf4):
    told: list[str] = []
    comparison.run_all(asked(plain, nf4), lambda stage, done, total: told.append(stage))
    assert f"{plain}: windows" in told
    assert f"{nf4}: llama.cpp windows" in told


# ---- size and speed


def test_the_size_of_a_model_is_all_of_its_weights(plain, nf4):
    # 3 blocks of `tiny_checkpoints.TINY`, embedding and head 320 x 128, norms
    linears = 3 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 192)
    dense = 2 * 320 * 128 + 7 * 128
    files = open_model(plain)
    assert bits.size_of(files).weights_bytes == 2 * (linears + dense)
    small = bits.size_of(open_model(nf4))
    assert small.weights_bytes == small.bits_per_weight * linears / 8 + 2 * dense
    assert bits.size_of(files, "8").weights_bytes == 2 * (linears + dense - 320 * 128) + 320 * 128 + 4 * 320


def test_a_reply_is_timed_when_asked_for(plain, monkeypatch):
    monkeypatch.setattr(speed, "CASE", speed.BenchTest(0, 5, 0))
    (found,), _ = compared(plain, speed=speed.speed_test())
    timed = found["speed"]
    assert timed["test"] == "tg5"
    assert timed["tok_per_s_min"] <= timed["tok_per_s"] <= timed["tok_per_s_max"]
    assert timed["peak_bytes"] > 4 * 320 * 128
    headers, (row,) = comparison.table([found])
    assert headers[-2:] == ["tg5 tok/s", "peak GiB"]
    assert row[-2] == f"{timed['tok_per_s']:.1f}"
    assert compared(plain)[0][0]["speed"] is None


def test_the_context_holds_the_reply(plain):
    (request,) = asked(plain, speed=speed.speed_test())
    assert evaluation._options(request).ctx == speed.CASE.positions > WINDOW
    (short,) = asked(plain, speed=speed.speed_test())
    request = EvaluationRequest(short.files, LoadOptions(ctx=100), b"", "x", WINDOW, speed=speed.speed_test())
    with pytest.raises(LocalqError, match="is too short for a reply of 128"):
        evaluation._options(request)


# ---- the plot


def result(name: str, size: float, perplexity: float) -> dict[str, Any]:
    return {"model": name, "weights_bytes": size, "perplexity": perplexity, "text": "T"}


def test_points_lie_where_they_belong():
    lines = comparison.grid([("small", 1e6, math.e**3), ("large", 4e6, math.e), ("middle", 2.5e6, math.e**2)], "title")
    rows = [line[12:] for line in lines[1 : 1 + plot.LINES]]
    assert rows[0].rstrip() == "A"
    assert rows[-1] == " " * (plot.COLUMNS - 1) + "B"
    (middle,) = [number for number, row in enumerate(rows) if "C" in row]
    assert middle == pytest.approx(plot.LINES / 2, abs=1)
    assert rows[middle].index("C") == pytest.approx(plot.COLUMNS / 2, abs=1)
    assert lines[1].split("|")[0].strip() == f"{math.e**3:.2f}"
    assert "1.0 MB" in lines[-4]
    assert lines[-1] == "  C  middle: 2.5 MB, 7.39"


def test_equal_points_stand_side_by_side():
    lines = comparison.grid([("a", 1e6, 5.0), ("b", 1e6, 5.0)], "title")
    assert any("|AB" in line for line in lines)


def test_a_picture_or_the_terminal(tmp_path, capsys):
    out = io.StringIO()
    comparison.draw([result("a", 1e6, 20.0), result("b", 2e6, 10.0)], "-", out)
    assert "perplexity on T vs. weight size" in out.getvalue()
    pytest.importorskip("matplotlib")
    comparison.draw([result("a", 1e6, 20.0), result("b", 2e6, 10.0)], str(tmp_path / "x.png"), out)
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "plot: " in capsys.readouterr().err
