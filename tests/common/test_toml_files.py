"""TOML files are looked at before they are parsed: every reader, every limit, in little time and memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from localq import places, settings, settings_file, toml_files
from localq.errors import ExitCode, LocalqError
from localq.files import catalog, catalog_file

DOTTED = ".".join(["a"] * 20_000)
HOSTILE = {
    "a dotted key": f"{DOTTED} = 1\n",
    "quoted parts": ".".join(['"a"'] * 20_000) + " = 1\n",
    "literal parts with blanks": " . ".join(["'a'"] * 20_000) + " = 1\n",
    "a table's name": f"[{DOTTED}]\n",
    "the name of a table in a list": f"[[{DOTTED}]]\n",
    "an inline table": f"x = {{{DOTTED} = 1}}\n",
    "behind a string of four quotes": f'x = ["""a"""", {{{DOTTED} = 1}}, "b"]\n',
    "behind a string of five quotes": f"x = ['''a''''', {{{DOTTED} = 1}}, 'b']\n",
    "behind an escaped backslash": f'x = ["\\\\", {{{DOTTED} = 1}}, "b"]\n',
    "behind a literal backslash": f"x = ['\\', {{{DOTTED} = 1}}, 'b']\n",
    "behind a hash in a string": f'x = ["#", {{{DOTTED} = 1}}]\n',
    "a hexadecimal number": "top_k = 0x" + "f" * 5_000 + "\n",
    "an octal number": "top_k = 0o" + "7" * 5_000 + "\n",
    "a binary number": "top_k = 0b" + "1" * 20_000 + "\n",
    "a decimal number": "top_k = -" + "9" * 5_000 + "\n",
    "a number with underscores": "top_k = " + "9_" * 5_000 + "9\n",
    "a number of many decimals": "top_p = 0." + "0" * 100_000 + "\n",
    "a number in a list": "top_k = [1, 0x" + "f" * 5_000 + "]\n",
    "lists in lists": "x = " + "[" * 5_000 + "]" * 5_000 + "\n",
    "tables in tables": "x = " + "{a = " * 5_000 + "1" + "}" * 5_000 + "\n",
    "brackets that stay open": "x = " + "[" * 100_000,
    "many keys": "".join(f"a{index} = 1\n" for index in range(100_000)),
    "many tables": "".join(f"a{index} = {{}}\n" for index in range(50_000)),
    "many tables in a list": "[[a]]\n" * 100_000,
    "a long list": "x = [" + "1," * 200_000 + "]\n",
    "strings that stay open": '"""\\' * 250_000,
    "apostrophes": "'" * 1_000_000,
    "blanks": "a" + " " * 1_000_000 + "= 1\n",
    "a large file": "# " + "x" * 1_100_000 + "\n",
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The three files that are parsed, in a checkout where the test stands."""
    found = {"config.toml": tmp_path / "config.toml", "models.toml": tmp_path / "models.toml"}
    monkeypatch.setenv("LOCALQ_CONFIG", str(found["config.toml"]))
    monkeypatch.setenv("LOCALQ_MODELS", str(found["models.toml"]))
    monkeypatch.delenv("LOCALQ_NOPROJECT", raising=False)
    (tmp_path / ".git").mkdir()
    monkeypatch.chdir(tmp_path)
    return {**found, places.PROJECT_FILE: tmp_path / places.PROJECT_FILE}


READERS = {
    "config.toml": lambda: settings.load({}),
    places.PROJECT_FILE: lambda: settings.load({}),
    "models.toml": catalog.load_catalogue,
}


@pytest.mark.parametrize("name", READERS)
def test_a_hostile_text_is_refused_in_one_short_line(files, name):
    for text in HOSTILE.values():
        files[name].write_text(text)
        with pytest.raises(LocalqError) as caught:
            READERS[name]()
        assert caught.value.exit_code in (ExitCode.BAD_FILE, ExitCode.USAGE)
        assert len(str(caught.value)) < 700
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_text_takes_little_time_and_memory(name, tmp_path):
    """In a process of its own, whose memory and processor time have limits."""
    path = tmp_path / "hostile.toml"
    path.write_text(HOSTILE[name])
    program = f"""
import resource
resource.setrlimit(resource.RLIMIT_CPU, (3, 3))
from localq import toml_files
from localq.errors import LocalqError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    text = open({str(path)!r}, encoding="utf-8").read()
    toml_files.parse(text, "f")
except LocalqError:
    pass
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    assert int(done.stdout) < 60_000  # kB


@pytest.mark.parametrize(
    ("inside", "outside"),
    [
        (".".join(["a"] * toml_files.MOST_PARTS) + " = 1", ".".join(["a"] * (toml_files.MOST_PARTS + 1)) + " = 1"),
        ("a = " + "9" * toml_files.MOST_DIGITS, "a = " + "9" * (toml_files.MOST_DIGITS + 1)),
        (
            "a = " + "[" * toml_files.MOST_DEPTH + "]" * toml_files.MOST_DEPTH,
            "a = " + "[" * (toml_files.MOST_DEPTH + 1) + "]" * (toml_files.MOST_DEPTH + 1),
        ),
        (
            "".join(f"a{index}=1\n" for index in range(toml_files.MOST_CHARACTERS["="])),
            "".join(f"a{index}=1\n" for index in range(toml_files.MOST_CHARACTERS["="] + 1)),
        ),
        ("#" * toml_files.MOST_BYTES, "#" * (toml_files.MOST_BYTES + 1)),
    ],
)
def test_a_limit_is_met_and_exceeded(inside, outside):
    toml_files.parse(inside, "f")
    with pytest.raises(LocalqError):
        toml_files.parse(outside, "f")


def test_what_looks_hostile_in_comments_and_strings_is_text():
    body = f"{DOTTED} [[[[[[[[[[[[[[[[[[[[[[ 0x{'f' * 5_000} ==== "
    for quote in ('"', "'", '"""', "'''"):
        assert toml_files.parse(f"a = {quote}{body}{quote} # {body}\n", "f") == {"a": body}


def test_the_line_of_a_long_key_is_named_behind_strings_of_several_lines():
    with pytest.raises(LocalqError, match=r"a key has more than 8 parts \(line 5\)"):
        toml_files.parse(f'a = """\n\n\n"""\n{DOTTED} = 1\n', "f")


def test_the_shipped_catalogue_is_far_from_the_limits():
    text = toml_files.read(places.PACKAGE_DATA / "models.toml")
    assert text is not None
    assert 4 * len(text) < toml_files.MOST_BYTES
    assert all(4 * text.count(each) < most for each, most in toml_files.MOST_CHARACTERS.items())
    assert catalog_file.read(places.PACKAGE_DATA / "models.toml")


@pytest.mark.parametrize("name", ["config.toml", "models.toml"])
@pytest.mark.parametrize("kind", ["folder", "pipe", "endless device", "loop", "below a file", "not UTF-8"])
def test_what_is_no_file_is_refused_and_not_waited_for(files, name, kind, monkeypatch, tmp_path):
    path = files[name]
    variable = "LOCALQ_CONFIG" if name == "config.toml" else "LOCALQ_MODELS"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless device":
        monkeypatch.setenv(variable, "/dev/zero")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "below a file":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(variable, str(tmp_path / "file" / name))
    else:
        path.write_bytes(b"a = '\xff'\n")
    with pytest.raises(LocalqError) as caught:
        READERS[name]()
    assert caught.value.exit_code == ExitCode.BAD_FILE
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["config.toml", "models.toml"])
def test_no_file_and_an_empty_device_have_no_settings(files, name, monkeypatch):
    shipped = READERS[name]()
    monkeypatch.setenv("LOCALQ_CONFIG" if name == "config.toml" else "LOCALQ_MODELS", os.devnull)
    assert READERS[name]() == shipped
    monkeypatch.setenv("LOCALQ_CONFIG", os.devnull)
    with pytest.raises(LocalqError, match="not a regular file"):
        settings_file.write("top_k", "4")
    assert not os.path.isfile(os.devnull)


def test_a_byte_order_mark_is_skipped(files):
    files["config.toml"].write_bytes(b"\xef\xbb\xbftop_k = 4\r\n")
    assert settings.load({}).top_k == 4


def test_a_wrong_catalogue_is_named_in_one_short_line(files):
    arch, source = "{layers = 1, hidden = 1}", '{format = "nf4"}'
    for text in (
        f'[[model]]\nname = "{"x" * 100_000}"\nwrong = 1\n',
        f'[[model]]\nname = "a\\nb\\u001b"\nyear = "{"y" * 100_000}"\n',
        f"[[model]]\n{'k' * 100_000} = 1\n",
        f'[[model]]\nname = "a"\nyear = {"9" * 400}\narch = {arch}\nsource = []\n',
        f'[[model]]\nname = "a"\naliases = [{", ".join(["[]"] * 1000)}]\narch = {arch}\nsource = [{source}]\n',
        '[[model]]\nname = "a"\nyear = 1e999\n',
        "model = 1\n",
        "[[other]]\n",
    ):
        files["models.toml"].write_text(text)
        with pytest.raises(LocalqError) as caught:
            catalog.load_catalogue()
        assert caught.value.exit_code == ExitCode.BAD_FILE
        assert len(str(caught.value)) < 1_100
        assert "\n" not in str(caught.value)


def test_no_other_module_parses_toml():
    """Except for packaged data, and for the source tree during a build."""
    parse = "tomllib.load"
    found = {
        str(path.relative_to(places.PACKAGE_PARENT / "localq"))
        for path in (places.PACKAGE_PARENT / "localq").rglob("*.py")
        if parse in path.read_text(encoding="utf-8")
    }
    assert found == {
        "toml_files.py",
        "planner/speed/measurements.py",
        "bench/quality/tasks.py",
        "kernels/setup/steps.py",
    }
