"""`localq help`: topics that belong to no single verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer

from localq import keymap, settings
from localq.cli.output import print_json, stdout_table
from localq.cli.pager import paged
from localq.errors import EXIT_CODE_MEANINGS, usage_error

Table = list[tuple[str, ...]]  # the headers first

LINE_KEYS = (
    ("Enter", "send"),
    ("Alt-Enter, Ctrl-J", "a new line; Shift-Enter too, in terminals that tell it from Enter"),
    ('\\ at the end, or """ around', "more lines, also where nothing is known of the terminal"),
    ("Tab", "complete a /command or the @name of a file"),
    ("Up, Down, Ctrl-R", "what was said before; look for it"),
    ("Ctrl-G", "write the message in $VISUAL or $EDITOR"),
    ("Ctrl-A, Ctrl-E, Alt-B, Alt-F", "to the beginning, the end, a word back, a word on"),
    ("Ctrl-U, Ctrl-K, Ctrl-W, Ctrl-Y", "cut to the beginning, to the end, a word; put it back"),
    ("Ctrl-L", "clear the screen"),
    ("Ctrl-C", "stop the reply and keep it; twice at the prompt: leave"),
    ("Ctrl-D", "leave, where nothing is written"),
)
# What other tools have named, and is honoured here. Settings and options have LOCALQ_<NAME> each.
VARIABLES = (
    ("LOCALQ_<SETTING>, LOCALQ_<OPTION>", "any setting and any option: LOCALQ_CTX=8k, LOCALQ_THINK_OUT=FILE"),
    ("LOCALQ_CONFIG, LOCALQ_MODELS", "the files of settings and of models of your own"),
    ("LOCALQ_DATA, LOCALQ_CACHE", "the folders of conversations, and of what can be made again"),
    ("LOCALQ_NOHISTORY", "keep nothing of what is typed"),
    ("LOCALQ_NOPROJECT", "read no localq.toml of a project"),
    ("HF_HOME, HF_HUB_CACHE, XDG_CACHE_HOME", "where weights lie"),
    ("HF_TOKEN, HF_TOKEN_PATH", "the token for gated models, where --token gives none; else that of `hf auth login`"),
    ("HF_ENDPOINT", "another hub"),
    ("HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE", "never touch the network"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "no bars"),
    ("HF_HUB_DISABLE_XET, HF_XET_HIGH_PERFORMANCE", "nothing to do: files come by plain HTTPS"),
    ("HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE", "the way to the hub"),
    ("CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER", "which GPU is the first"),
    ("NO_COLOR, CLICOLOR_FORCE, TERM=dumb, COLUMNS", "how text is shown"),
    ("ESCDELAY", "milliseconds that the full screen waits after an ESC for the rest of a key; 50"),
    ("VISUAL, EDITOR", "your editor"),
    ("PAGER, LESS", "what shows tables that are longer than the terminal; PAGER=cat prints them"),
    ("DO_NOT_TRACK", "nothing to do: nothing is ever reported"),
)


def _exit_codes() -> tuple[dict[str, Any], list[Table]]:
    body = {str(int(code)): meaning for code, meaning in EXIT_CODE_MEANINGS.items()}
    return {"exit_codes": body}, [[("code", "meaning"), *body.items()]]


def _keys() -> tuple[dict[str, Any], list[Table]]:
    screen = keymap.in_force(settings.load().keys)
    rows = [(key.keys, key.where, name, key.what) for name, key in screen.items()]
    named = {name: {"keys": key.keys, "where": key.where, "what": key.what} for name, key in screen.items()}
    body = {"line_chat": dict(LINE_KEYS), "screen": named}
    return body, [[("line chat", ""), *LINE_KEYS], [("full screen", "where", "name in [keys]", ""), *rows]]


def _commands() -> tuple[dict[str, Any], list[Table]]:
    from localq.chat.commands import completion  # start-up cost

    rows = list(completion.usages().values())
    return {"commands": dict(rows)}, [[("in a conversation", ""), *rows]]


def _environment() -> tuple[dict[str, Any], list[Table]]:
    return {"environment": dict(VARIABLES)}, [[("variable", "meaning"), *VARIABLES]]


def _found(word: str) -> tuple[dict[str, Any], list[Table]]:
    """The options of all verbs, and the settings, that have `word` in their names or in what they do."""
    from localq.cli.registry import VERBS, Verbs  # they import this file

    commands, rows = Verbs(name="localq").commands, list[tuple[str, ...]]()
    for verb in VERBS:
        command = commands[verb]
        for each in command.get_params(command.context_class(command)):
            if each.opts[0].startswith("-"):
                rows.append((verb, ", ".join((*each.opts, *each.secondary_opts)), getattr(each, "help", None) or ""))
    rows += [("config", name, what) for name, what in settings.DESCRIPTIONS.items()]
    rows = [row for row in rows if word.casefold() in " ".join(row[1:]).casefold()]
    body = [dict(zip(("verb", "option", "meaning"), row, strict=True)) for row in rows]
    return {"found": body}, [[("verb", "option or setting", "meaning"), *rows]] if rows else []


TOPICS: dict[str, Callable[[], tuple[dict[str, Any], list[Table]]]] = {
    "exit-codes": _exit_codes,
    "keys": _keys,
    "commands": _commands,
    "environment": _environment,
}


def _of_verb(name: str, context: typer.Context) -> str | None:
    from localq.cli.registry import ALIASES, VERBS, Verbs  # as above

    if name not in (*VERBS, *ALIASES):
        return None
    command = Verbs(name="localq").commands[name]
    return command.get_help(command.context_class(command, parent=context.parent, info_name=name))


def help(
    context: typer.Context,
    topic: Annotated[
        str, typer.Argument(help=f"One of {', '.join(TOPICS)}; a verb; or a word, such as vram.")
    ] = "exit-codes",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain a verb, exit-codes, keys, commands or environment, or find the options that are about a word."""
    if not json and (told := _of_verb(topic, context)) is not None:
        with paged():
            print(told)
        return
    body, tables = TOPICS[topic]() if topic in TOPICS else _found(topic)
    if not tables:
        why = "there is no such help topic, and no option has this word in it"
        raise usage_error(topic[:80], why, f"Topics: {', '.join(TOPICS)}; verbs: localq help VERB.")
    if json:
        print_json(body)
        return
    with paged():
        for number, (headers, *rows) in enumerate(tables):
            if number:
                print()
            stdout_table(headers, rows)
