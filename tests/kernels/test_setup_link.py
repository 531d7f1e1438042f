"""`make install` and `make uninstall`: the link to localq in a folder of PATH."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from localq.kernels.setup.link import LinkError, make_link, remove_link


@pytest.fixture
def program(tmp_path) -> Path:
    path = tmp_path / "clone/.venv/bin/localq"
    path.parent.mkdir(parents=True)
    path.write_text("")
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "home/.local/bin"


def test_the_link_is_made_once_and_removed(program, folder, monkeypatch):
    monkeypatch.setenv("PATH", f"/usr/bin{os.pathsep}{folder}")
    assert make_link(program, folder) == [f"{folder}/localq is linked to {program}."]
    assert (folder / "localq").resolve() == program
    assert "already" in make_link(program, folder)[0]
    assert "Removed" in remove_link(program, folder)[0]
    assert not os.path.lexists(folder / "localq")
    assert remove_link(program, folder) == [f"{folder}/localq does not exist."]


def test_a_folder_outside_path_is_said_with_the_line_that_adds_it(program, folder, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin")
    said = "\n".join(make_link(program, folder))
    assert "not on your PATH" in said
    assert f'export PATH="{folder}:$PATH"' in said


def foreign_file(link: Path) -> None:
    link.write_text("another program")


def foreign_link(link: Path) -> None:
    (link.parent / "other").write_text("")
    link.symlink_to(link.parent / "other")


def dangling_link(link: Path) -> None:
    link.symlink_to("/nowhere/localq")


@pytest.mark.parametrize("make", [foreign_file, foreign_link, dangling_link])
def test_what_is_not_of_this_clone_stays(program, folder, make):
    folder.mkdir(parents=True)
    link = folder / "localq"
    make(link)
    before = os.lstat(link)
    with pytest.raises(LinkError, match="does not belong to this clone"):
        make_link(program, folder)
    with pytest.raises(LinkError, match="leaving it unchanged"):
        remove_link(program, folder)
    assert os.lstat(link) == before


def test_a_folder_that_cannot_be_made_is_an_error(program, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LinkError, match="BIN_DIR"):
        make_link(program, tmp_path / "file/bin")
