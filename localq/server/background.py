"""The background process of the setting `keep_alive`: an engine that outlives the front end which started it.

`python -m localq.server.background NAME FORMAT` serves the socket of its user and no HTTP. The first front end that
connects has the model loaded; where nothing has come for `keep_alive`, the process ends. `chat.background` starts it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from localq import settings as settings_module
from localq.chat.open_options import OpenOptions
from localq.errors import LocalqError
from localq.server.model import ModelRequest
from localq.server.slot import Slot
from localq.server.user_socket import UserSocket
from localq.wording import OnProgress, parse_duration
from localq.worker.messages import Event

FIRST_S = 60.0  # for the first front end, whose own start has not come so far
LOOK_S = 0.5
DRAIN_S = 10.0


class SocketWatcher:
    """Sends the progress of a load to the front ends that wait for it; notices go to the log."""

    def __init__(self) -> None:
        self.socket: UserSocket | None = None

    def say(self, text: str) -> None:
        """Log a line."""
        print(text, file=sys.stderr, flush=True)

    def agree(self, cost: object) -> bool:
        """Refuse: the front end has fetched the files."""
        return False

    @contextlib.contextmanager
    def fetching(self, name: str) -> Iterator[OnProgress]:
        """Show nothing: the front end has fetched the files."""
        yield lambda stage, done, total: None

    def loading(self, event: Event) -> None:
        """Send the progress."""
        if self.socket is not None:
            self.socket.show_loading(event)


def serve(request: ModelRequest, keep_alive_s: float | None, stop: threading.Event, first_s: float = FIRST_S) -> None:
    """Serve the socket until `stop`, or until nothing has come for `keep_alive_s` (None: for ever)."""
    watcher = SocketWatcher()
    slot = Slot(watcher, keep_alive_s)
    watcher.socket = user_socket = UserSocket(slot, request, stop.set)
    try:
        slot.start()
        user_socket.open()
        waited = 0.0
        while not stop.wait(LOOK_S):
            waited += LOOK_S
            state = slot.state()
            has_run = slot.request is not None
            if state.loaded is None and not (state.busy or state.queued) and (has_run or waited > first_s):
                return
    finally:
        slot.close(DRAIN_S if stop.is_set() else 0.0)
        user_socket.close()  # last: `localq stop` waits for it


def main(arguments: list[str]) -> int:
    """Serve the model NAME in FORMAT ("" = as the name says) by the settings of the environment."""
    name, format = arguments
    settings = settings_module.load()
    stop = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, lambda *_: stop.set())
    os.chdir("/")
    wanted = OpenOptions(format or None, agreed=True, fresh=True)
    try:
        serve(ModelRequest(name, settings, wanted), parse_duration(settings.keep_alive or "0"), stop)
    except LocalqError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
