"""Every entry of the catalogue, in every format that it has: a tiny random model of its shape loads and answers."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from localq.engine.load.load import LoadedModel, load
from localq.files import catalog, format_facts
from localq.files.architecture import Architecture
from localq.files.model_folder import open_model
from localq.formats import FORMATS
from localq.planner import offers
from localq.planner.load_options import LoadOptions
from localq.planner.offers import Offer
from tests.support.models import catalogue_checkpoints

IDS = torch.randint(3, 256, (24,), generator=torch.Generator().manual_seed(3))
SOLVED = ("bcq", "squeezellm")  # made by solvers that take seconds: of one dense entry, and of mixtures


def offered() -> dict[str, Offer]:
    every = [(entry, offer) for entry in catalog.load_catalogue() for offer in offers.of_entry(entry)]
    return {
        f"{entry.name}@{offer.format}": offer
        for entry, offer in every
        if offer.source is not None or offer.format not in SOLVED or entry.arch.experts or entry.name == "smollm2-135m"
    }


OFFERS = offered()
OTHER_NAMES = {"fp16": "bf16"}  # 16-bit types that are stored alike


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("catalogue")


@functools.cache
def tiny(folder: Path, arch: Architecture, format: str, scheme: str) -> tuple[LoadedModel, Architecture] | None:
    """Loaded once for all entries that are alike but for their sizes."""
    place = folder / str(tiny.cache_info().misses)
    made = catalogue_checkpoints.write(place, arch, OTHER_NAMES.get(format, format), scheme)
    if made is None:
        return None
    files = open_model(made)
    return load(files, LoadOptions(device="cpu", dtype="float32")), Architecture.from_config(files.config)


@pytest.mark.parametrize("name", OFFERS)
def test_an_entry_loads_as_a_tiny_model_of_its_shape_and_answers(name, folder):
    offer = OFFERS[name]
    assert format_facts.why_unsupported(offer.arch, offer.format) is None
    arch = catalogue_checkpoints.shrunk(offer.arch)
    found = tiny(folder, arch, offer.format, offer.scheme)
    if found is None:
        pytest.skip(f"no tiny writer makes {offer.format} of a {arch.model_type}")
    loaded, stated = found
    if offer.format != "gguf":  # its facts are those of a tiny file of its own
        assert stated == arch, "the facts of the catalogue are not those of such a model's config.json"
    assert loaded.format == OTHER_NAMES.get(offer.format, offer.format)
    is_kept = offer.format not in format_facts.full_precision()
    assert (loaded.format in FORMATS) == is_kept
    loaded.cache.clear()
    ids = IDS % loaded.vocab
    with torch.inference_mode():
        whole = loaded.model(ids, torch.arange(24), loaded.cache, 24, last_only=False)
        loaded.cache.clear()
        loaded.model(ids[:-1], torch.arange(23), loaded.cache, 23)
        last = loaded.model(ids[-1:], torch.arange(23, 24), loaded.cache, 24)
    assert whole.shape == (24, loaded.vocab)
    assert torch.isfinite(whole).all()
    assert whole.std() > 0.05, "the comparison needs logits that differ"
    torch.testing.assert_close(last, whole[-1:], rtol=0, atol=1e-3 * float(whole.std()))


def test_every_entry_is_there_in_every_format_it_states():
    stated = {f"{entry.name}@{source.format}" for entry in catalog.load_catalogue() for source in entry.sources}
    assert stated <= OFFERS.keys()
