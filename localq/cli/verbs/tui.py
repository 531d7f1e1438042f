"""`localq tui`: the full-screen chat; also what `localq chat` and bare `localq` open at a terminal."""

from __future__ import annotations

import contextlib
import gc
import signal
from typing import TYPE_CHECKING

from localq.cli import options
from localq.cli.output import has_screen, note
from localq.errors import ExitCode, usage_error

if TYPE_CHECKING:
    from localq.chat.open_conversation import Start
    from localq.chat.open_options import Wanted
    from localq.settings import Settings


def tui(model: options.Model = None) -> int:
    """Chat on the full screen; without MODEL choose one first."""
    if not has_screen():
        why = "this is no terminal that can show it in UTF-8"
        raise usage_error("tui", why, "`localq chat --plain` goes line by line.")
    from localq.chat import open_conversation  # start-up cost, not for --help
    from localq.files import catalog

    settings = options.effective(model=model)
    options.tell_project({"model": model})
    if model is not None:
        catalog.resolve(model)  # a wrong name is answered before the screen is taken
    return shown(settings, open_conversation.start(None, settings, None, note), pick=model is None)


def shown(settings: Settings, start: Start, wanted: Wanted | None = None, pick: bool = False) -> int:
    """Run the app; afterwards the terminal is as it was, and says where the conversation is kept."""
    gc.disable()  # until there is a frame (`tui.beforehand`): nearly all that is made before it stays
    from localq.chat import open_conversation  # start-up cost, not for --help
    from localq.tui.app import LocalqApp

    app = LocalqApp(settings, start, wanted, pick=pick)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    code = None
    try:
        code = app.run()
    finally:
        gc.enable()
        for number, handler in handlers.items():  # the app's loop has taken them
            signal.signal(number, handler)
        saved = app.model is None or open_conversation.saved_at_last(app.model.session, note)
        if code == ExitCode.OK and app.model is not None:
            with contextlib.suppress(KeyboardInterrupt):  # which leaves without it
                app.model.session.leave()
        with contextlib.suppress(KeyboardInterrupt):
            app.close()
    if code is None:  # it failed, and has said so
        return ExitCode.FAILURE
    if app.error is not None and code != ExitCode.TERMINATED:
        note(f"localq: {app.error}")
        return app.error.exit_code
    session = None if app.model is None else app.model.session
    if saved and session is not None and session.store is not None and (id := session.record.id) is not None:
        with contextlib.suppress(OSError):  # the terminal may be gone
            note(f"kept as {id}: `localq chat --resume {id}` or `localq chat --continue` goes on")
    return code
