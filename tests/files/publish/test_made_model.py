"""A model made by the command: what is recorded of it, and its bits per weight."""

from __future__ import annotations

import dataclasses
import json

import pytest

from localq.files import checked_files
from localq.files.model_folder import open_model
from tests.support.files.made_models import BASE, REVISION


def test_quantize_records_source_and_command_without_paths(made):
    record = json.loads((made / "localq.json").read_text())
    assert (record["repo"], record["revision"], record["format"]) == (BASE, REVISION, "nf4")
    assert record["command"] == f"localq quantize {BASE} --format nf4"
    assert str(made.parent) not in json.dumps(record)
    assert "localq.json" in checked_files.recorded_sums(made)


def test_bits_are_those_that_eval_counts(made):
    from localq.bench.quality import bits
    from localq.files.publish import made_model

    found = made_model.open_made(made)
    assert found.bits == pytest.approx(bits.per_weight(open_model(made)), rel=0.06)  # with the state of each matrix
    assert dataclasses.asdict(found)["scheme"] == ""
