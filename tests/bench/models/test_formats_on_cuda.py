"""`localq bench --formats --synthetic` on a GPU: 16 bit beside every format, each with its figures or a reason."""

from __future__ import annotations

import json

import pytest

from localq import cli
from localq.bench.models.format_list import names
from localq.bench.models.format_report import SIXTEEN

pytestmark = pytest.mark.cuda


def test_random_weights_in_every_format(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("LOCALQ_CONFIG", str(tmp_path / "config"))
    arguments = ["bench", "--formats", "smollm2-135m", "--synthetic", "-p", "64", "-n", "16", "-r", "2", "--json"]
    assert cli.execute(arguments) == 0
    body = json.loads(capsys.readouterr().out)
    rows = {row["format"]: row for row in body["rows"]}
    assert list(rows) == [SIXTEEN, *(each for each in names() if each != "aqlm2x8")]
    assert body["failures"] == []
    assert not body["dequantized"]
    assert rows[SIXTEEN]["speedup_over_fp16"] == 1
    for row in rows.values():
        assert row["reason"] or min(row["tok_per_s"], row["share_of_roof"], row["memory_bytes"]) > 0
    assert not any(rows[format]["reason"] for format in ("nf4", "vq2", "aqlm"))
    assert rows["vq2"]["bits_per_weight"] < rows["nf4"]["bits_per_weight"] < 16
