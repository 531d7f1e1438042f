"""The table of licences: every id of the catalogue is in it, and what each one allows."""

from __future__ import annotations

import re

import pytest

from localq.errors import ExitCode, LocalqError
from localq.files import catalog
from localq.files.publish import licences

FORBIDDEN = {"cc-by-nd-4.0", "cc-by-nc-nd-4.0"}
NAMED = {"llama3": "Llama-3", "llama3.1": "Llama", "llama3.2": "Llama", "llama3.3": "Llama"}


def test_every_licence_of_the_catalogue_is_known():
    used = {source.licence for entry in catalog.load_catalogue() for source in entry.sources}
    assert used - licences.table().keys() == set()


@pytest.mark.parametrize("id", licences.table())
def test_a_row_says_what_it_is_and_where_that_is_written(id):
    terms = licences.terms_of(id.upper())
    assert terms.is_known
    assert terms.id == id == id.casefold()
    assert re.fullmatch(r"https://\S+", terms.source)
    assert all(each.endswith(".") for each in terms.conditions)
    assert bool(terms.forbids) == (id in FORBIDDEN)
    assert terms.prefix == NAMED.get(id, "")
    assert not terms.notice or terms.notice.strip() == terms.notice
    if terms.forbids:
        with pytest.raises(LocalqError) as caught:
            licences.check(terms, "org/source", "me/model")
        assert caught.value.exit_code == ExitCode.FAILURE
        assert terms.source in caught.value.why
        assert caught.value.next_step
    else:
        licences.check(terms, "org/source", f"me/{terms.prefix.lower()}-model")


def test_licences_of_publishers_need_a_copy():
    free = ("apache", "mit", "bsd", "cc")
    assert {id for id, terms in licences.table().items() if not terms.copy} == {
        id for id in licences.table() if id.startswith(free)
    }


@pytest.mark.parametrize("id", NAMED)
def test_names_that_a_licence_requires(id):
    with pytest.raises(LocalqError) as caught:
        licences.check(licences.terms_of(id), "org/source", "llama/my-model")
    assert caught.value.exit_code == ExitCode.USAGE
    assert f"llama/{NAMED[id]}-my-model" in caught.value.next_step


def test_an_unknown_licence_has_no_terms():
    terms = licences.terms_of(" Some-Licence ")
    assert (terms.id, terms.is_known, terms.hub, terms.conditions) == ("Some-Licence", False, False, ())
    licences.check(terms, "org/source", "me/model")
