"""Messages of a thread that fetches or loads: which are posted, and how it is stopped."""

from __future__ import annotations

import pytest
from textual.message import Message

from localq.errors import ExitCode
from localq.tui.jobs.thread_messages import Fetching, LoadingStage, PostingWatcher, StoppedError, WatcherNotice
from localq.worker.messages import Loading, Ready


def watched(every_s: float = 0.0) -> tuple[PostingWatcher, list[Message]]:
    posted: list[Message] = []
    return PostingWatcher(posted.append, every_s), posted


def test_lines_and_stages_are_posted_sanitized():
    watcher, posted = watched()
    watcher.say("made\x1b]0;x\x07 here")
    watcher.loading(Ready(pid=1))
    watcher.loading(Loading("loading\x1b weights", 3, 7))
    said, stage = posted
    assert isinstance(said, WatcherNotice)
    assert said.text == "made]0;x here"
    assert isinstance(stage, LoadingStage)
    assert (stage.stage, stage.done, stage.total) == ("loading weights", 3, 7)


def test_bytes_are_posted_file_by_file():
    watcher, posted = watched(every_s=3600)
    with watcher.fetching("a-model") as show:
        show("config.json", 0, 100)
        show("config.json", 1, 100)
        show("model\x9b.safetensors, 2 of 9 MB", 5, 100)
        show("model\x9b.safetensors, 3 of 9 MB", 6, 100)
        show("model\x9b.safetensors, 9 of 9 MB", 100, 100)
    found = [(each.what, each.done) for each in posted if isinstance(each, Fetching)]
    # Between the first and the last of a file nothing but what the clock lets through, which here is nothing.
    assert found == [
        ("config.json", 0), ("model.safetensors, 2 of 9 MB", 5), ("model.safetensors, 9 of 9 MB", 100),
    ]  # fmt: skip


def test_without_a_pause_every_piece_is_posted():
    watcher, posted = watched()
    with watcher.fetching("a-model") as show:
        for done in range(5):
            show("f", done, 100)
    assert len(posted) == 5


@pytest.mark.parametrize("where", ["before", "within", "after", "loading"])
def test_stopping_ends_the_thread_at_its_next_progress(where):
    watcher, _ = watched()

    def work() -> None:
        if where == "before":
            watcher.stop()
        with watcher.fetching("a-model") as show:
            show("f", 1, 2)
            if where == "within":
                watcher.stop()
                show("f", 2, 2)
            if where == "after":
                watcher.stop()
        watcher.stop()
        watcher.loading(Loading("loading weights"))

    with pytest.raises(StoppedError) as caught:
        work()
    assert watcher.stopped
    assert caught.value.exit_code == ExitCode.INTERRUPTED
    assert str(caught.value) == "a-model: stopped. Open the model again to resume."
