"""What the kernel benchmark prints and draws: a profile, bars, a picture."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from localq.bench import plot
from localq.bench.models.profile import print_profile
from localq.errors import ExitCode, LocalqError
from localq.stats import Operation, StepProfile

PROFILE = StepProfile(
    rows=(Operation("qkv", 32, 200.0, 400_000_000), Operation("head", 1, 100.0, 300_000_000)),
    step_us=310.0,
    host_gap_us=4.25,
    position=128,
    timer="events",
)


def test_a_profile_by_hand():
    out = io.StringIO()
    print_profile(PROFILE, 4e12, out)
    _, qkv, head, total, host = out.getvalue().splitlines()
    assert qkv.split() == ["qkv", "32", "200.0", "6.25", "400.00", "2000", "50%", "67%"]
    assert head.split() == ["head", "1", "100.0", "100.00", "300.00", "3000", "75%", "33%"]
    assert total == ("kernels 300.0 µs, complete graph 310.0 µs (-3.2%): 700.0 MB, 56% of the measured 4000 GB/s")
    assert host == "host gap 4.2 µs per token at position 128, timed with events"


def test_bars_in_the_terminal():
    out = io.StringIO()
    plot.draw([("nf4_gemv 4096 x 4096", 0.5), ("embed", 0.0), ("sum", 1.0)], "shares", "-", out)
    title, half, none, whole = out.getvalue().splitlines()
    assert title.strip() == "shares"
    assert half.count("█") == plot.BAR // 2
    assert (none.count("█"), whole.count("█")) == (0, plot.BAR)
    assert [line.split()[-1] for line in (half, none, whole)] == ["50%", "0%", "100%"]


@pytest.mark.parametrize("target", ["plot.txt", "/no/such/folder/plot.png"])
def test_a_plot_that_cannot_be_drawn_is_refused_first(target):
    with pytest.raises(LocalqError) as caught:
        plot.check_target(target)
    assert caught.value.exit_code == ExitCode.USAGE


def test_only_one_function_writes_json_and_it_minds_the_encoding():
    """A module that prints `json_text` itself would write what its stream cannot take."""
    package = Path(plot.__file__).parents[1]
    users = [path.name for path in package.rglob("*.py") if "json_text(" in path.read_text(encoding="utf-8")]
    assert users == ["sanitize.py"]


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    out, target = io.StringIO(), tmp_path / "roof.png"
    plot.draw([("nf4_gemv", 0.5)], "shares", str(target), out)
    assert target.read_bytes().startswith(b"\x89PNG")
    assert out.getvalue() == ""  # stdout ends with JSON; the file is named on stderr
    with pytest.raises(LocalqError, match="cannot be written") as caught:
        plot.draw([("nf4_gemv", 0.5)], "shares", str(tmp_path / "none" / "roof.png"), out)
    assert caught.value.exit_code == ExitCode.DISK
