"""Where localq keeps its files: variables, ~ in them, and users without a home folder."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from localq import places
from localq.errors import ExitCode, LocalqError

VARIABLES = {
    "LOCALQ_CONFIG": places.config_file,
    "LOCALQ_MODELS": places.user_models_file,
    "LOCALQ_DATA": places.data_dir,
    "LOCALQ_CACHE": places.cache_dir,
    "HF_HUB_CACHE": places.hub_cache,
    "HUGGINGFACE_HUB_CACHE": places.hub_cache,
    "HF_HOME": places.hub_cache,
    "XDG_CACHE_HOME": places.hub_cache,
}
XDG = {
    "XDG_CONFIG_HOME": places.config_file,
    "XDG_DATA_HOME": places.data_dir,
    "XDG_CACHE_HOME": places.cache_dir,
    "XDG_STATE_HOME": places.state_dir,
}


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    for name in (*VARIABLES, *XDG):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def homeless(monkeypatch):
    """A container under a user number: no HOME, and no entry in the user database."""

    def unknown(_: object) -> pwd.struct_passwd:
        raise KeyError

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize(("name", "place"), VARIABLES.items())
def test_a_tilde_in_a_variable_is_the_home_folder(name, place, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, "~/elsewhere")
    assert place().is_relative_to(tmp_path / "elsewhere")


@pytest.mark.parametrize(("name", "place"), XDG.items())
def test_no_xdg_variable_makes_a_folder_called_tilde(name, place, monkeypatch, tmp_path):
    """The platform's rules ignore a path that is not absolute; older libraries take it as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(name, "~/elsewhere")
    assert place().is_relative_to(tmp_path)


@pytest.mark.parametrize(("name", "place"), VARIABLES.items())
def test_an_unknown_user_in_a_variable_is_named_with_the_variable(name, place, monkeypatch):
    monkeypatch.setenv(name, "~nobody-of-that-name/x")
    with pytest.raises(
        LocalqError, match=f"^{name}=~nobody-of-that-name/x: there is no user nobody-of-that-name"
    ) as caught:
        place()
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.usefixtures("homeless")
@pytest.mark.parametrize("place", dict.fromkeys([*VARIABLES.values(), *XDG.values()]))
def test_without_a_home_folder_the_error_names_the_variables_to_set(place):
    with pytest.raises(LocalqError, match=r"^home folder: HOME is not set.* LOCALQ_CONFIG, .* and HF_HOME") as caught:
        place()
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_four_variables_suffice(monkeypatch, tmp_path):
    for name in ("LOCALQ_CONFIG", "LOCALQ_DATA", "LOCALQ_CACHE", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    for place in (*VARIABLES.values(), *XDG.values(), places.downloads_dir):
        assert place().is_relative_to(tmp_path)
    assert places.user_models_file() == tmp_path / "models.toml"


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_a_tilde_is_refused(monkeypatch):
    monkeypatch.setenv("LOCALQ_DATA", "~/data")
    with pytest.raises(LocalqError, match=r"^LOCALQ_DATA=~/data: HOME is not set"):
        places.data_dir()


@pytest.mark.usefixtures("homeless")
def test_without_a_home_folder_xdg_folders_are_enough(monkeypatch, tmp_path):
    for name in XDG:
        monkeypatch.setenv(name, str(tmp_path / name))
    assert places.config_file() == tmp_path / "XDG_CONFIG_HOME/localq/config.toml"
    assert places.hub_cache() == tmp_path / "XDG_CACHE_HOME/huggingface/hub"


def test_expand():
    assert places.expand("a/~/b") == Path("a/~/b")
    assert places.expand("~") == Path(os.path.expanduser("~"))
    assert places.expand(Path("~root/x")) == Path(os.path.expanduser("~root/x"))
    with pytest.raises(LocalqError, match=r"^--out ~nobody-of-that-name: there is no user"):
        places.expand("~nobody-of-that-name", "--out")
