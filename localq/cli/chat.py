"""`localq chat`: a conversation in the terminal, line by line."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING

from localq import catalog
from localq.cli import options
from localq.cli.optional_values import Command as Command
from localq.cli.output import has_screen, note
from localq.errors import ExitCode, LocalqError
from localq.prompt_files import system_text
from localq.settings import Settings

if TYPE_CHECKING:
    from localq.chat import Replies
    from localq.cli.session import TerminalWatcher
    from localq.opening import Opened
    from localq.resuming import Start

LEAVE_WITHIN_S = 2.0  # a second Ctrl-C at the empty prompt within this time leaves


def chat(
    model: options.Model = None,
    system: options.System = None,
    ctx: options.Context = None,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    dry_multiplier: options.DryMultiplier = None,
    dry_base: options.DryBase = None,
    dry_allowed_length: options.DryAllowedLength = None,
    xtc_probability: options.XtcProbability = None,
    xtc_threshold: options.XtcThreshold = None,
    seed: options.Seed = None,
    think: options.Think = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    grammar: options.GrammarText = None,
    regex: options.Regex = None,
    continue_: options.Continue = False,
    resume: options.Resume = None,
    save: options.Save = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    vram: options.Vram = None,
    kv: options.KvBits = None,
    embed: options.Embed = None,
    head: options.Head = None,
    format: options.Format = None,
    reserve: options.Reserve = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    offline: options.Offline = None,
    stats: options.ShowStats = None,
    plain: options.Plain = False,
    quiet: options.Quiet = False,
) -> int:
    """Hold a conversation with MODEL."""
    flags = {
        "model": model, "system": system_text(system), "ctx": ctx, "max_tokens": max_tokens,
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "repeat_penalty": repeat_penalty,
        "dry_multiplier": dry_multiplier, "dry_base": dry_base, "dry_allowed_length": dry_allowed_length,
        "xtc_probability": xtc_probability, "xtc_threshold": xtc_threshold,
        "seed": seed, "device": device, "dtype": dtype, "vram": vram, "kv": kv, "embed": embed, "head": head,
        "reserve": reserve, "offline": offline, "stats": stats, "save": save, "think": think,
    }  # fmt: skip
    settings = options.effective(**flags)
    if dry_run:
        from localq.cli.dry_run import print_plan  # start-up cost: only asked for here

        print_plan(settings.model, format, settings)
        return ExitCode.OK
    wanted = options.checked_grammar(json_schema, grammar, regex)
    if not continue_ and resume is None:
        catalog.resolve(settings.model)  # a wrong name is answered before the rest is imported
    from localq import resuming  # start-up cost, not for --help
    from localq.cli.resume import wanted_session

    record = wanted_session(continue_, resume)
    if record is not None:
        settings = resuming.settings_of(record, settings, flags)
    start = resuming.start(record, settings, stop, note, wanted)
    if not plain and not quiet and _on_full_screen(settings):
        from localq.cli.tui import shown
        from localq.opening import Wanted

        return shown(settings, start, Wanted(format, force))
    return converse(settings, start, quiet, format, force)


def _on_full_screen(settings: Settings) -> bool:
    if settings.ui == "auto":
        return has_screen()
    return settings.ui == "tui" and sys.stdin.isatty() and sys.stdout.isatty()


def converse(settings: Settings, start: Start, quiet: bool, format: str | None = None, force: bool = False) -> int:
    """Open the model and read messages until the user leaves."""
    from localq import opening, resuming  # start-up cost, not for --help
    from localq.cli.session import TerminalWatcher, memory_line
    from localq.commands.sessions import taken_up

    watcher = TerminalWatcher(quiet)
    with watcher, opening.open_session(settings.model, settings, watcher, opening.Wanted(format, force)) as opened:
        opening.check_converses(opened, settings.model)
        loaded = watcher.load(opened)
        if settings.stats and not quiet and (line := memory_line(loaded)):
            note(line)
        at_terminal = sys.stdin.isatty() and not quiet
        if at_terminal:
            note(
                f"{loaded.name} ({loaded.format}) on {loaded.device_name}, context {loaded.context_size}. /help, Ctrl-D"
            )
        record = start.take_up(opened.session)
        if record is not None and not quiet:
            note(taken_up(record))
        try:
            code = _Loop(opened, watcher, settings.stats and not quiet).run()
        finally:  # a signal leaves too
            saved = resuming.saved_at_last(opened.session, note)
        record = opened.session.record
        if at_terminal and saved and opened.session.store is not None and record.id is not None:
            note(f"kept as {record.id}: `localq chat --resume {record.id}` or `localq chat --continue` goes on")
        _leave(opened, watcher, settings.stats and not quiet)
        return code


def _leave(opened: Opened, watcher: TerminalWatcher, show_stats: bool) -> None:
    """Keep what the model has read, for the next time; Ctrl-C leaves without it."""
    watcher.status.show("keeping what the model has read")
    with contextlib.suppress(KeyboardInterrupt):
        opened.session.leave()
    watcher.status.clear()
    keeper = opened.session.keeper
    if show_stats and keeper is not None and (why := keeper.told()):
        note(f"[{why}]")


class _Loop:
    """Read a line, do what it says, until the end of input."""

    def __init__(self, opened: Opened, watcher: TerminalWatcher, show_stats: bool) -> None:
        from localq.cli.command_host import TerminalHost
        from localq.cli.line_input import reader

        self.opened, self.session, self.watcher, self.show_stats = opened, opened.session, watcher, show_stats
        self.host = TerminalHost()
        self.read = reader(remember=self.session.store is not None)
        self.interrupted_at = -LEAVE_WITHIN_S

    def run(self) -> int:
        while True:
            try:
                line = self.read()
            except EOFError:
                return ExitCode.OK
            except KeyboardInterrupt:
                if time.monotonic() - self.interrupted_at < LEAVE_WITHIN_S or not sys.stdin.isatty():
                    return ExitCode.INTERRUPTED
                self.interrupted_at = time.monotonic()
                note("Ctrl-C again or Ctrl-D leaves")
                continue
            self.interrupted_at = -LEAVE_WITHIN_S  # what stops the next reply is no second Ctrl-C here
            try:
                if not self.handle(line):
                    return ExitCode.OK
            except LocalqError as error:  # the conversation goes on; a closed pipe or Ctrl-C ends it
                self.watcher.status.clear()
                note(f"localq: {error}")

    def handle(self, line: str) -> bool:
        """Act on one message or command; False means leave."""
        from localq import commands

        if not line.strip():
            return True
        if line.startswith("/") and not line.startswith("//"):
            name, argument = commands.parse(line.strip())
            if name == "/exit":
                return False
            result = commands.COMMANDS[name](self.session, argument, self.host)
            if isinstance(result, str):
                note(result)
            else:
                self.stream(result)
            return True
        self.stream(self.session.ask(line.removeprefix("/")))
        return True

    def stream(self, parts: Replies) -> None:
        """Print a reply as it arrives; Ctrl-C stops it and keeps it."""
        from localq.cli.session import interruptible, print_reply
        from localq.cli.thoughts import shown
        from localq.wording import stats_line

        self.watcher.load(self.opened)
        with shown(self.watcher.quiet) as thoughts, interruptible(self.session), contextlib.closing(parts):
            reply = print_reply(parts, self.watcher.status, thoughts)  # closed: what came of it is kept
        if reply is not None:
            for line in reply.notices:
                note(f"({line})")
            if self.show_stats:
                note(stats_line(reply.stats))
                if self.session.keeper is not None and (why := self.session.keeper.told()):
                    note(f"[{why}]")
