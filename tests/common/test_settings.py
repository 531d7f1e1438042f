"""Settings: where a value comes from, what is refused, what a write keeps."""

from __future__ import annotations

import pytest

from localq import keymap, settings, settings_file
from localq.errors import ExitCode, LocalqError
from localq.sampling import Sampling


@pytest.fixture
def config_file(tmp_path, monkeypatch):
    path = tmp_path / "config.toml"
    monkeypatch.setenv("LOCALQ_CONFIG", str(path))
    return path


def test_environment_beats_file_beats_built_in(config_file):
    config_file.write_text('temperature = 0.5\nctx = "8k"\nmodel = "phi-4"\n')
    found = settings.origins({"LOCALQ_CTX": "4096"})
    assert (found["ctx"].value, found["ctx"].source) == (4096, "LOCALQ_CTX")
    assert (found["temperature"].value, found["temperature"].source) == (0.5, "config.toml")
    assert (found["device"].value, found["device"].source) == ("auto", "built-in")
    assert settings.load({}).ctx == 8192


def test_memory_settings_may_be_numbers_or_words(config_file):
    config_file.write_text('kv = 8\nvram = 12\nhead = "nf4"\n')
    found = settings.load({"LOCALQ_EMBED": "host"})
    assert (found.kv_bits, found.vram, found.head, found.embed) == (8, "12", "nf4", "host")
    assert settings.Settings().kv_bits is None
    config_file.write_text('kv = "k8v4"\n')
    assert settings.load({}).kv_bits == "k8v4"


def test_settings_lie_over_the_models_own_sampling(config_file):
    own = Sampling(temperature=0.6, top_p=0.9)
    assert settings.Settings(top_p=0.5).sampling(own) == Sampling(temperature=0.6, top_p=0.5)


@pytest.mark.parametrize(
    ("text", "code", "names"),
    [
        ("temprature = 1.0", ExitCode.USAGE, "temperature"),
        ("temperature = -1", ExitCode.USAGE, "temperature"),
        ("temperature = nan", ExitCode.USAGE, "temperature"),
        ('device = "gpu"', ExitCode.USAGE, "cuda"),
        ("ctx = 0", ExitCode.USAGE, "ctx"),
        ("kv = 5", ExitCode.USAGE, "16"),
        ('embed = "disk"', ExitCode.USAGE, "host"),
        ('head = "q4"', ExitCode.USAGE, "nf4"),
        ("ctx = 2.5", ExitCode.USAGE, "whole number"),
        ("top_k = inf", ExitCode.USAGE, "whole number"),
        ("stats = 3", ExitCode.USAGE, "true or false"),
        ("model = ", ExitCode.BAD_FILE, "config.toml"),
    ],
)
def test_a_bad_file_is_refused_by_name(config_file, text, code, names):
    config_file.write_text(text)
    with pytest.raises(LocalqError, match=names) as caught:
        settings.load({})
    assert caught.value.exit_code == code
    assert str(config_file) in str(caught.value)


def test_what_is_wrong_in_the_environment_names_the_variable(config_file):
    with pytest.raises(LocalqError, match=r"^temperature in LOCALQ_TEMPERATURE: 101.0 is out of range"):
        settings.load({"LOCALQ_TEMPERATURE": "101"})


def test_a_name_that_is_near_none_is_told_where_they_are_and_abbreviations_stay_as_they_are():
    with pytest.raises(LocalqError, match=r"unknown setting\. To list all settings, run `localq config show`\.$"):
        settings.check_name("qqq")
    with pytest.raises(LocalqError, match="DRY multiplier"):
        settings.parse("dry_multiplier", "x", "/set")


def test_a_write_keeps_comments_and_can_be_undone(config_file):
    config_file.write_text("# mine\nseed = 7 # lucky\n")
    settings_file.write("top_k", "40")
    assert config_file.read_text() == "# mine\nseed = 7 # lucky\ntop_k = 40\n"
    settings_file.write("seed", None)
    assert settings.read_config() == {"top_k": 40}
    with pytest.raises(LocalqError, match="top_p"):
        settings_file.write("top_p", "1.5")
    assert settings.read_config() == {"top_k": 40}


def test_every_setting_is_described():
    assert set(settings.DESCRIPTIONS) == set(settings.Settings.__annotations__)


def test_settings_without_keys_compare_none_for_clashes(monkeypatch):
    """The catalogue has settings for every model."""
    monkeypatch.setattr(keymap, "_refuse_clashes", lambda chosen: pytest.fail("nothing is chosen"))
    assert settings.Settings().keys == {}


@pytest.mark.parametrize("name", ["seed", "ctx", "top_k", "max_tokens"])
@pytest.mark.parametrize("value", ["9" * 400, "9" * 400 + "k", "1e400k", "nank", str(2**63), 10**400, float("inf")])
def test_a_number_of_more_than_64_bits_is_none(name, value):
    with pytest.raises(LocalqError, match="is not a whole number") as caught:
        settings.parse(name, value, "config.toml")
    assert caught.value.exit_code == ExitCode.USAGE
    assert len(str(caught.value)) < 300
    assert settings.parse("seed", str(2**63 - 1), "config.toml") == 2**63 - 1


def test_sources_of_drafts_that_are_not_built_are_refused_by_name():
    assert (settings.Settings().draft, settings.Settings().draft_max, settings.Settings().draft_tokens) == (
        "auto",
        7,
        7,
    )
    assert settings.Settings(draft="off").draft_tokens == 0
    assert settings.Settings(draft="lookup", draft_max=3).draft_tokens == 3
    for value in ("medusa", "EAGLE3"):
        with pytest.raises(LocalqError, match=r"draft heads .* are not supported") as caught:
            settings.Settings(draft=value)
        assert (
            caught.value.next_step == "Use auto, off, lookup, mtp or the name of a small model with the same tokenizer."
        )
    assert settings.Settings(draft="llama-3.2-1b").draft_model == "llama-3.2-1b"
    assert [settings.Settings(draft=source).draft_model for source in ("auto", "off", "lookup")] == [None, None, None]
    with pytest.raises(LocalqError, match="the value is empty"):
        settings.Settings(draft=" ")
    for count in (0, 8):
        with pytest.raises(LocalqError, match="draft_max"):
            settings.Settings(draft_max=count)
