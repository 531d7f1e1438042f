"""`localq tui`: the full-screen chat, which `localq chat` and bare `localq` open at a terminal too."""

from __future__ import annotations

import contextlib
import gc
import signal
from typing import TYPE_CHECKING

from localq.chat.open_options import OpenOptions
from localq.cli import default_model, gguf_list, options
from localq.cli.output import has_screen, note
from localq.errors import ExitCode, usage_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from localq.chat.open_conversation import Start
    from localq.chat.open_options import Opening
    from localq.settings import Settings


def tui(model: options.Model = None) -> int:
    """Chat in full-screen mode."""
    if not has_screen():
        why = "full-screen mode needs a UTF-8 terminal"
        raise usage_error("tui", why, "Use `localq chat --plain` for line mode.")
    from localq.chat import open_conversation  # start-up cost, not for --help
    from localq.files import catalog

    settings, project = options.load_reply_settings({"model": model})
    if model is not None:
        catalog.resolve(model)  # a wrong name fails before the screen is taken
        gguf_list.check(settings, "chat")
    choose = default_model.chooser(settings, OpenOptions(), named=model is not None)
    start = open_conversation.start(None, settings, None, note, origins=project)
    return run_app(settings, start, choose=choose, pick=choose is not None)


def run_app(
    settings: Settings,
    start: Start,
    wanted: OpenOptions | None = None,
    choose: Callable[[], Opening] | None = None,
    pick: bool = False,
) -> int:
    """Run the app, restore the terminal, and name the saved conversation."""
    gc.disable()  # until the first frame: nearly all objects made before it stay
    from localq.chat import open_conversation  # start-up cost, not for --help
    from localq.tui.app import LocalqApp

    app = LocalqApp(settings, start, wanted, choose=choose, pick=pick)
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    code = None
    try:
        code = app.run()
    finally:
        gc.enable()
        for number, handler in handlers.items():  # the app's loop has replaced them
            signal.signal(number, handler)
        lost = None if app.model is None else open_conversation.save_at_exit(app.model.session, note)
        if code == ExitCode.OK and app.model is not None:
            with contextlib.suppress(KeyboardInterrupt):  # a second one quits at once
                app.model.session.save_snapshot()
        with contextlib.suppress(KeyboardInterrupt):
            app.close()
    if app.failure is not None:
        note(f"localq: {app.failure}")
    if code is None or (app.failure is not None and app.model is None and code == ExitCode.OK):  # it could not go on
        return ExitCode.FAILURE
    if app.error is not None and code != ExitCode.TERMINATED:
        note(f"localq: {app.error}")
        return app.error.exit_code
    session = None if app.model is None else app.model.session
    if lost is None and session is not None and session.store is not None and (id := session.record.id) is not None:
        note(f"Saved as conversation {id}. To resume it, run `localq chat --resume {id}`.")
    return lost.exit_code if lost is not None and code == ExitCode.OK else code
