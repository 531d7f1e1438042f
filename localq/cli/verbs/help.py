"""`localq help`: help pages of verbs, topics, and a search over all options."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any

import typer

from localq import keymap, settings
from localq.cli.output import print_json, print_line, stdout_table
from localq.cli.pager import page_output
from localq.errors import EXIT_CODE_MEANINGS, usage_error

Table = list[tuple[str, ...]]  # the headers first

LINE_KEYS = (
    ("Enter", "send"),
    ("Alt-Enter, Ctrl-J", "new line (also Shift-Enter, if the terminal reports it)"),
    ('\\ at line end, or """text"""', "multi-line message, in any terminal"),
    ("Tab", "complete a /command or an @file"),
    ("Up, Down, Ctrl-R", "previous message, next message, search the input history"),
    ("Ctrl-G", "edit the message in $VISUAL or $EDITOR"),
    ("Ctrl-A, Ctrl-E, Alt-B, Alt-F", "move to the start, to the end, back one word, forward one word"),
    ("Ctrl-U, Ctrl-K, Ctrl-W, Ctrl-Y", "cut to the start, cut to the end, cut one word, paste"),
    ("Ctrl-L", "clear the screen"),
    ("Ctrl-C", "stop the reply but keep its text; press twice at an empty prompt to quit"),
    ("Ctrl-D", "quit (at an empty prompt)"),
)
NAMES = (
    ("qwen3-8b, llama3.1:8b", "a catalogue name or alias; the format is chosen to fit"),
    ("NAME@FORMAT", "the same in a specific format, such as qwen3-8b@nf4"),
    (
        "ORG/REPO, ORG/REPO@REVISION",
        "a Hugging Face repository; a leading hf.co/ or https://huggingface.co/ is optional",
    ),
    ("ORG/REPO:TAG", "a GGUF model in a repository, by quantization type (case-insensitive), such as ORG/REPO:Q4_K_M"),
    ("ORG/REPO/FILE.gguf", "the same, by its URL or its path in the repository"),
    ("ORG/REPO@REVISION:TAG", "a GGUF model from a specific branch, tag or commit"),
    ("ollama/NAME:TAG", "a GGUF model in ollama's store (read-only), by its name in `ollama list`"),
    ("lm-studio/PUBLISHER/REPO/FILE", "a GGUF model downloaded with LM Studio (read-only)"),
    ("./FOLDER, FILE.gguf", "a model folder, or a .gguf file"),
)
# Variables of other tools that localq honours. Every setting and option also has LOCALQ_<NAME>.
VARIABLES = (
    ("LOCALQ_<SETTING>, LOCALQ_<OPTION>", "any setting or option, such as LOCALQ_CTX=8k or LOCALQ_THINK_OUT=FILE"),
    ("LOCALQ_CONFIG, LOCALQ_MODELS", "paths of your config.toml and models.toml"),
    ("LOCALQ_DATA, LOCALQ_CACHE", "folder for conversations and quantized models; folder for caches"),
    ("LOCALQ_NOHISTORY", "do not save typed messages to the input history"),
    ("LOCALQ_NOPROJECT", "ignore a project's localq.toml"),
    ("HF_HOME, HF_HUB_CACHE, XDG_CACHE_HOME", "folder for downloaded models"),
    (
        "HF_TOKEN, HF_TOKEN_PATH",
        "token for gated models and uploads; overrides `hf auth login` and is overridden by --token",
    ),
    ("HF_ENDPOINT", "URL of the hub to use instead of huggingface.co"),
    ("OLLAMA_MODELS", "folder with ollama's models (default: ~/.ollama/models)"),
    ("HF_HUB_OFFLINE, TRANSFORMERS_OFFLINE", "never use the network"),
    ("HF_HUB_DISABLE_PROGRESS_BARS", "hide download progress bars"),
    ("HF_HUB_DISABLE_XET, HF_XET_HIGH_PERFORMANCE", "no effect: files are sent over plain HTTPS"),
    ("HTTPS_PROXY, NO_PROXY, SSL_CERT_FILE", "proxy and certificates for connections to the hub"),
    ("CUDA_VISIBLE_DEVICES, CUDA_DEVICE_ORDER", "the GPU to use"),
    ("NO_COLOR, CLICOLOR_FORCE, TERM=dumb, COLUMNS", "control colours, escape sequences and line width"),
    ("ESCDELAY", "milliseconds to wait after ESC for the rest of a key sequence in full-screen mode (default 50)"),
    ("VISUAL, EDITOR", "the editor to use"),
    ("PAGER, LESS", "the pager for long tables, and its options; PAGER=cat prints tables directly"),
    ("DO_NOT_TRACK", "no effect: localq sends no telemetry"),
)


def _exit_codes() -> tuple[dict[str, Any], list[Table]]:
    body = {str(int(code)): meaning for code, meaning in EXIT_CODE_MEANINGS.items()}
    return {"exit_codes": body}, [[("code", "meaning"), *body.items()]]


def _keys() -> tuple[dict[str, Any], list[Table]]:
    screen = keymap.bindings(settings.load().keys)
    rows = [(key.keys, key.where, name, key.what) for name, key in screen.items()]
    named = {name: {"keys": key.keys, "where": key.where, "what": key.what} for name, key in screen.items()}
    body = {"line_chat": dict(LINE_KEYS), "screen": named}
    return body, [
        [("line mode", "action"), *LINE_KEYS],
        [("full-screen mode", "where", "name in [keys]", "action"), *rows],
    ]


def _commands() -> tuple[dict[str, Any], list[Table]]:
    from localq.chat.commands import completion  # start-up cost

    rows = list(completion.command_usages().values())
    return {"commands": dict(rows)}, [[("command", "action"), *rows]]


def _names() -> tuple[dict[str, Any], list[Table]]:
    return {"names": dict(NAMES)}, [[("name", "model"), *NAMES]]


def _environment() -> tuple[dict[str, Any], list[Table]]:
    return {"environment": dict(VARIABLES)}, [[("variable", "meaning"), *VARIABLES]]


def _search(word: str) -> tuple[dict[str, Any], list[Table]]:
    """The options and settings with `word` in their name or description."""
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
    "names": _names,
    "exit-codes": _exit_codes,
    "keys": _keys,
    "commands": _commands,
    "environment": _environment,
}
MEANINGS = {
    "names": "ways to name a model",
    "exit-codes": "meanings of the exit codes",
    "keys": "keys in line mode and full-screen mode",
    "commands": "/commands in a chat",
    "environment": "environment variables",
    "WORD": "options and settings that mention a word, such as vram",
}


def _overview() -> tuple[dict[str, Any], list[Table]]:
    """The verbs and the topics, for `localq help` alone."""
    from localq.cli.registry import VERBS, Verbs  # they import this file

    commands = Verbs(name="localq").commands
    verbs = {verb: (commands[verb].help or "").partition("\n")[0] for verb in VERBS}
    body = {"verbs": verbs, "topics": {name: MEANINGS[name] for name in TOPICS}}
    return body, [
        [("verb", "description"), *verbs.items()],
        [("topic", "description"), *MEANINGS.items()],
    ]


def _verb_page(name: str, context: typer.Context) -> str | None:
    from localq.cli.registry import ALIASES, VERBS, Verbs  # as above

    if name not in (*VERBS, *ALIASES):
        return None
    command = Verbs(name="localq").commands[name]
    return command.get_help(command.context_class(command, parent=context.parent, info_name=name))


def help(
    context: typer.Context,
    topic: Annotated[
        str,
        typer.Argument(metavar="TOPIC", help=f"Verb, word to find (such as vram), or topic: {', '.join(TOPICS)}."),
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Explain a verb or topic, or search all options."""
    if not json and topic and (page := _verb_page(topic, context)) is not None:
        with page_output():
            print_line(page)
        return
    body, tables = TOPICS.get(topic, _overview if not topic else partial(_search, topic))()
    if not tables:
        why = "no matching help topic, verb, option or setting"
        raise usage_error(topic[:80], why, f"Topics: {', '.join(TOPICS)}. To list the verbs, run `localq --help`.")
    if json:
        print_json(body)
        return
    with page_output():
        for number, (headers, *rows) in enumerate(tables):
            if number:
                print_line()
            stdout_table(headers, rows)
