"""Files asked for before they are read."""

from __future__ import annotations

import os

from localq import disk


def test_files_are_asked_for_up_to_a_limit(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(os, "posix_fadvise", lambda _, first, size, advice: calls.append((first, size, advice)))
    files = [tmp_path / "missing", *(tmp_path / name for name in "abc")]
    for each in files[1:]:
        each.write_bytes(bytes(100))
    disk.read_ahead(files, 150)
    assert calls == [(0, 100, os.POSIX_FADV_WILLNEED), (0, 50, os.POSIX_FADV_WILLNEED)]
    assert all(each.read_bytes() == bytes(100) for each in files[1:])
