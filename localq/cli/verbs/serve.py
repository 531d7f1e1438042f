"""`localq serve`: the model for other programs, over the APIs of OpenAI and Anthropic."""

from __future__ import annotations

import contextlib
import re
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from localq import wording
from localq.chat.open_options import OpenOptions
from localq.cli import agree, default_model, gguf_list, help_page, options, reply_options
from localq.cli.option_values import Command as Command
from localq.cli.output import note
from localq.errors import usage_error
from localq.files import catalog
from localq.settings import Settings

if TYPE_CHECKING:
    from localq.server.guard import Access
    from localq.wording import OnProgress
    from localq.worker.messages import Event, Loaded

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]{1,40}://[A-Za-z0-9._\[\]:-]{1,200}")


Host = Annotated[
    str | None,
    typer.Option("--host", metavar="ADDRESS", help="Address to listen on; needs --key if not local.",
                 rich_help_panel=help_page.SERVER),
]  # fmt: skip
Port = Annotated[
    int | None,
    typer.Option("--port", metavar="PORT", help="Port; 0 = any free port.", rich_help_panel=help_page.SERVER),
]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="FILE", help="Require the API key in FILE (auto = create one).",
                 rich_help_panel=help_page.SERVER),
]  # fmt: skip
Origins = Annotated[
    list[str] | None,
    typer.Option("--origin", metavar="URL", help="Allow web pages from this origin (repeatable).",
                 rich_help_panel=help_page.SERVER),
]  # fmt: skip
HostNames = Annotated[
    list[str] | None,
    typer.Option("--name", metavar="HOST", help="Another name for this machine (repeatable).",
                 rich_help_panel=help_page.SERVER),
]  # fmt: skip
Aliases = Annotated[
    list[str] | None,
    typer.Option("--alias", metavar="NAME", help="Another name for MODEL in requests (repeatable).",
                 rich_help_panel=help_page.MODEL),
]  # fmt: skip
Switch = Annotated[
    bool,
    typer.Option("--switch", help="Let requests use other models on this machine.",
                 rich_help_panel=help_page.MODEL),
]  # fmt: skip
KeepAlive = Annotated[
    str | None,
    typer.Option("--keep-alive", metavar="TIME", help="Idle time before unloading: 10m, 0 or never.",
                 rich_help_panel=help_page.MEMORY),
]  # fmt: skip

Log = Annotated[bool, typer.Option("--log", help="Print a line for each request.", rich_help_panel=help_page.OUTPUT)]


def serve(
    model: options.Model = None,
    model_named: options.ModelOption = None,
    alias: Aliases = None,
    switch: Switch = False,
    host: Host = None,
    port: Port = None,
    key: Key = None,
    origin: Origins = None,
    name: HostNames = None,
    keep_alive: KeepAlive = None,
    ctx: options.Context = None,
    max_tokens: options.MaxTokens = None,
    think_budget: reply_options.ThinkBudget = None,
    loop_guard: reply_options.LoopGuard = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    vram: options.Vram = None,
    kv: options.KvBits = None,
    embed: options.Embed = None,
    head: options.Head = None,
    draft: reply_options.Draft = None,
    draft_max: reply_options.DraftMax = None,
    format: options.Format = None,
    reserve: options.Reserve = None,
    checkpoints: options.Checkpoints = None,
    desktop: options.Desktop = None,
    force: options.Force = False,
    dry_run: options.DryRun = False,
    offline: options.Offline = None,
    token: options.Token = None,
    yes: agree.Yes = False,
    log: Log = False,
    quiet: options.Quiet = False,
) -> int:
    """Serve MODEL to other programs (OpenAI and Anthropic APIs)."""
    named = (model := options.single_model(model, model_named)) is not None
    settings, _ = options.load_reply_settings(options.setting_flags(locals()))
    wanted = OpenOptions(format, force, agreed=yes, fresh=True)
    if dry_run:
        return _plan(settings, named, format, force)
    catalog.resolve(settings.model)  # a wrong name fails before the rest is imported
    binding = _bind(settings, key, tuple(origin or ()), tuple(name or ()))
    with contextlib.closing(binding.listening):
        return _serve(settings, wanted, named, binding, _Behaviour(tuple(alias or ()), switch, log, quiet))


def _plan(settings: Settings, named: bool, format: str | None, force: bool) -> int:
    from localq.cli.plan_report import print_plan  # start-up cost: only --dry-run needs it

    settings, best = default_model.planned(settings, named=named)
    with gguf_list.explain(settings, "serve"):
        return print_plan(settings.model, format or best, settings, False, force)


@dataclass(frozen=True)
class _Binding:
    """A listening socket of the server, with its URL and access rules."""

    listening: socket.socket
    access: Access
    url: str
    key_file: str = ""


@dataclass(frozen=True)
class _Behaviour:
    """Names that a server answers to, and what it says."""

    aliases: tuple[str, ...]
    switch: bool
    log: bool
    quiet: bool


def _bind(settings: Settings, key: str | None, origins: tuple[str, ...], names: tuple[str, ...]) -> _Binding:
    """Listen, before the model is loaded. Raises LocalqError (exit 2) for an open address without a key."""
    from localq.server import key_file
    from localq.server import serve as serving
    from localq.server.guard import Access

    host = settings.host
    if host not in LOOPBACK and key is None:
        why = "programs on other machines could use the model without a key"
        raise usage_error(f"--host {host}", why, "Add --key auto.")
    for each in origins:
        if not _ORIGIN.fullmatch(each):
            raise usage_error(f"--origin {each[:80]}", "not a valid origin", "Example: --origin http://localhost:3000.")
    secret, path = (None, None) if key is None else key_file.read(key)
    listening = serving.listen(host, settings.port)
    port: int = listening.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    everywhere = host in ("0.0.0.0", "::")
    own = (socket.gethostname(),) if everywhere else () if host in LOOPBACK else (shown,)
    known = tuple(each.lower() for each in (*own, *names))
    access = Access(port, known, everywhere, origins, secret)
    url = f"http://{'127.0.0.1' if everywhere else shown}:{port}"
    return _Binding(listening, access, url, "" if path is None else str(path))


def _serve(settings: Settings, wanted: OpenOptions, named: bool, binding: _Binding, behaviour: _Behaviour) -> int:
    from localq.cli.line.session import TerminalWatcher
    from localq.server import app
    from localq.server import serve as serving
    from localq.server.metrics import Metrics
    from localq.server.model import ModelRequest
    from localq.server.names import ModelNames
    from localq.server.service import Service
    from localq.server.slot import Slot
    from localq.server.user_socket import UserSocket

    opening = default_model.choose(settings, wanted, named=named, on_screen=False, quiet=behaviour.quiet)
    request = ModelRequest(opening.settings.model, opening.settings, opening.wanted)
    slot = Slot(ServeWatcher(behaviour.quiet), wording.parse_duration(settings.keep_alive or "never"))
    try:
        with gguf_list.explain(opening.settings, "serve"), TerminalWatcher(behaviour.quiet) as watcher:
            loaded = slot.open(request, watcher)
        names = ModelNames(request, loaded.name, behaviour.aliases, behaviour.switch)
        service = Service(slot, names, Metrics())
        application = app.make(service, binding.access, note if behaviour.log else None)
        server = serving.make(application, slot, note)
        with contextlib.closing(UserSocket(slot, request, server.stop, binding.url)) as user_socket:
            user_socket.open()
            _tell(loaded, binding, behaviour)
            try:
                return serving.run(server, binding.listening)
            finally:
                slot.close(0)  # before the socket, whose end `localq stop` waits for
    finally:
        slot.close(0)


def _tell(loaded: Loaded, binding: _Binding, behaviour: _Behaviour) -> None:
    """The lines at the start: where the server is, and how to try it."""
    key = f"key in {binding.key_file}" if binding.key_file else "no key, this machine only"
    where = f"{loaded.device_name}, {loaded.format}, context {loaded.context_size}"
    note(f"serving {loaded.name} ({where}) at {binding.url}/v1 ({key})")
    if behaviour.quiet:
        return
    header = f' -H "Authorization: Bearer $(cat {shlex.quote(binding.key_file)})"' if binding.key_file else ""
    body = '{"messages": [{"role": "user", "content": "Hello"}]}'
    note(f"try: curl {binding.url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d '{body}'")
    note("press Ctrl-C to stop the server")


class ServeWatcher:
    """Shows loads that a request causes, one line each. It downloads nothing, because nobody can be asked."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet

    def say(self, text: str) -> None:
        """Print a line."""
        if not self._quiet:
            note(text)

    def agree(self, cost: object) -> bool:
        """Refuse: nobody can be asked."""
        return False

    @contextlib.contextmanager
    def fetching(self, name: str) -> Iterator[OnProgress]:
        """No progress is shown."""
        yield lambda stage, done, total: None

    def loading(self, event: Event) -> None:
        """No progress is shown."""
