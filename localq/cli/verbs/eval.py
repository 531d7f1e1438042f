"""`localq eval`: perplexity of a model, and its distance from a reference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq import disk, kv_bits, places, processes
from localq.cli import agree, help_page, option_values, options, piped_input
from localq.cli import progress as progress_lines
from localq.cli.output import is_rich_terminal, note, print_json, stderr, stderr_console, stdout_table
from localq.errors import LocalqError, usage_error
from localq.planner import budget
from localq.text.tokenizer import MAX_TEXT_BYTES
from localq.wording import OnProgress

if TYPE_CHECKING:
    from localq.files.model_folder import ModelFiles
    from localq.settings import Settings

DEFAULT_TEXT = places.PACKAGE_DATA / "wikitext-2-valid-slice.txt"
UNQUANTIZED = 16  # bits, as in `bench.quality.bits`
_MODELS = "NAME, NAME@FORMAT, ORG/REPO, folder or .gguf file. With several models, the first is the reference."
_PLOT = "Plot perplexity vs. size to a .png (- = terminal)."
_AGAINST = "Compare with MODEL; `reference` = dequantized."
_DECODE = "Compare N single-token decode steps with prefill."
_TASKS = "Score N tasks per kind: code, arithmetic, facts."
MOST_TASKS = 40  # of each kind, in `data/tasks.toml`
Models = Annotated[
    list[str],
    typer.Argument(metavar="MODEL", help=_MODELS, autocompletion=options.complete_names),
]
Text = Annotated[
    str | None,
    typer.Option("--text", metavar="FILE|-", help="Text to evaluate on; - = stdin.", rich_help_panel=help_page.TESTS),
]
Window = Annotated[
    int,
    typer.Option(
        "--window", min=4, max=option_values.MOST_TOKENS, help="Tokens per window.", rich_help_panel=help_page.TESTS
    ),
]
MaxWindows = Annotated[
    int | None,
    typer.Option(
        "--max-windows",
        min=1,
        max=option_values.MOST_WINDOWS,
        help="Evaluate at most N windows.",
        rich_help_panel=help_page.TESTS,
    ),
]
Against = Annotated[
    str | None, typer.Option("--against", metavar="MODEL", help=_AGAINST, rich_help_panel=help_page.TESTS)
]
Decode = Annotated[
    int,
    typer.Option(
        "--decode",
        min=0,
        max=option_values.MOST_TOKENS,
        metavar="N",
        help=_DECODE,
        show_default=False,
        rich_help_panel=help_page.TESTS,
    ),
]
Speed = Annotated[bool, typer.Option("--speed", help="Also time a 128-token reply.", rich_help_panel=help_page.TESTS)]
Tasks = Annotated[
    int,
    typer.Option(
        "--tasks",
        min=0,
        max=MOST_TASKS,
        metavar="N",
        help=_TASKS,
        show_default=False,
        rich_help_panel=help_page.TESTS,
    ),
]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE|-", help=_PLOT, rich_help_panel=help_page.OUTPUT)]


def eval(
    models: Models,
    text: Text = None,
    window: Window = 2048,
    max_windows: MaxWindows = None,
    against: Against = None,
    decode: Decode = 0,
    speed: Speed = False,
    tasks: Tasks = 0,
    plot: Plot = None,
    ctx: options.Context = None,
    kv: options.KvBits = None,
    embed: options.Embed = None,
    head: options.Head = None,
    vram: options.Vram = None,
    reserve: options.Reserve = None,
    force: options.Force = False,
    device: options.Device = None,
    dtype: options.Dtype = None,
    offline: options.Offline = None,
    token: options.Token = None,
    yes: agree.Yes = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Measure perplexity and KL divergence from a reference."""
    ctx = options.flag_or_environment("ctx", ctx)
    settings = options.load_settings(
        device=device, dtype=dtype, offline=offline, vram=vram, kv=kv, embed=embed, head=head, reserve=reserve
    )
    processes.check_torch()
    raw, name = _read_text(text)
    loading = replace(budget.load_options(settings, "", force=force), ctx=ctx)
    from localq.bench import plot as plots  # start-up cost: not for --help

    plots.check_target(plot)
    files, rival = _open_models(models, against, settings, quiet, yes)
    with _progress(quiet) as on_progress:
        from localq.bench.models.speed import speed_test  # torch loads only now
        from localq.bench.quality import comparison
        from localq.bench.quality.evaluation import EvaluationRequest

        wanted = (raw, name, window, max_windows, against, rival, decode, speed_test() if speed else None, tasks)
        requests = [
            EvaluationRequest(each, replace(loading, name=model), *wanted)
            for model, each in zip(models, files, strict=True)
        ]
        results, failed = comparison.run_all(requests, on_progress or (lambda stage, done, total: None))
    _tell(results, failed, len(models), json, plot)


def _tell(results: list[dict[str, Any]], failed: list[LocalqError], models: int, json: bool, plot: str | None) -> None:
    """Print notes, figures and plot; raise the first failure at the end."""
    for line in dict.fromkeys(line for each in results for line in each["notes"]):
        note(line)
    _report(results, failed, models, json)
    if plot is not None and results:
        from localq.bench.quality import comparison  # start-up cost: torch is loaded by now

        comparison.draw(results, plot, stderr())
    for error in failed[1:]:
        note(str(error))
    if failed:
        raise failed[0]


def _open_models(
    models: list[str], against: str | None, settings: Settings, quiet: bool, yes: bool
) -> tuple[list[ModelFiles], ModelFiles | None]:
    """The files of all models, and those of the model to compare with."""
    from localq.files import catalog
    from localq.files.model_folder import open_model
    from localq.planner import prepare  # start-up cost, as above

    rivals = [] if against in (None, "reference") else [against]
    found = []
    agree.check([catalog.resolve(each) for each in (*models, *filter(None, rivals))], settings, yes)
    for each in (*models, *filter(None, rivals)):
        with progress_lines.fetch_bar(each, quiet) as show:
            found.append(open_model(prepare.source_path(each, note, show, settings.offline)))
    return found[: len(models)], found[-1] if rivals else None


def _report(results: list[dict[str, Any]], failed: list[LocalqError], models: int, json: bool) -> None:
    """Print one model in detail, or several as a table, on stdout."""
    if json:
        print_json(results[0] if models == 1 else {"models": results, "failed": [str(each) for each in failed]})
    elif models == 1:
        _print(results[0])
    elif results:
        from localq.bench.quality import comparison  # start-up cost: torch is loaded by now

        headers, rows = comparison.table(results)
        stdout_table(headers, rows, right=frozenset(range(2, len(headers))))


def _read_text(text: str | None) -> tuple[bytes, str]:
    """The bytes of `--text` and their name. Raises LocalqError (exit 2) for an unreadable or too large file."""
    if text == "-":
        return piped_input.read_bytes(), "stdin"
    path = DEFAULT_TEXT if text is None else Path(text)
    try:
        raw, name = disk.read_start(path, MAX_TEXT_BYTES + 1, devices=True), path.name if text is None else text
    except OSError as error:
        raise usage_error(text or path.name, f"cannot be read ({error.strerror})", "Check the path.") from None
    if len(raw) > MAX_TEXT_BYTES:
        raise usage_error(name, f"too large (limit: {MAX_TEXT_BYTES:,} bytes)", "Use a smaller file.")
    return raw, name


def _print(result: dict[str, Any]) -> None:
    """Print the figures of one model as a table."""
    windows = "1 window" if result["n_windows"] == 1 else f"{result['n_windows']} windows"
    counts = f"{windows} of {result['window']} tokens from {result['text']}"
    rows = [
        ("perplexity", f"{result['perplexity']:.4f}", counts),
        ("perplexity, llama.cpp", f"{result['perplexity_llamacpp']:.4f}", "second half of each window, after BOS"),
    ]
    if result["against"] is not None:
        against = f"{result['against']} in {result['against_dtype']}"
        rows += [
            ("perplexity, reference", f"{result['perplexity_reference']:.4f}", against),
            ("KL from the reference", f"{result['kl']:.3e}", "mean, in nats per token"),
            ("same top token", f"{result['top1']:.2%}", ""),
        ]
    if result["decode_tokens"]:
        steps = f"{result['decode_tokens']} single-token steps vs. prefill"
        rows += [
            ("KL of decode", f"{result['decode_kl']:.3e}", steps),
            ("same top token", f"{result['decode_top1']:.2%}", ""),
        ]
    counted = "all quantized matrices" if result["bits_per_weight"] < UNQUANTIZED else "not quantized"
    rows.append(("bits per weight", f"{result['bits_per_weight']:.3f}", counted))
    rows.append(("weights", f"{result['weights_bytes'] / 1e6:.1f} MB", "unquantized parts count as 16-bit"))
    if timed := result["speed"]:
        spread = f"{timed['tok_per_s_min']:.1f} to {timed['tok_per_s_max']:.1f}"
        rate = f"{timed['test']}, {spread} over {timed['repetitions']} runs"
        rows.append(("tok/s", f"{timed['tok_per_s']:.1f}", rate))
        rows.append(("peak memory", f"{timed['peak_bytes'] / 2**30:.2f} GiB", "all allocations"))
    if scored := result["tasks"]:
        kinds = ", ".join(f"{kind} {scored[kind]['correct']}" for kind in scored if isinstance(scored[kind], dict))
        rows.append(("tasks solved", f"{scored['correct']} of {scored['n']}", kinds))
    facts = result["conditions"]
    cache = kv_bits.text(result["kv_bits"])
    where = f"{facts['device']}, {result['dtype']}, KV cache {cache}, head {result['head']}"
    rows.append(("conditions", result["format"], where))
    stdout_table((result["model"], "", ""), rows, right=frozenset({1}))


@contextmanager
def _progress(quiet: bool) -> Iterator[OnProgress | None]:
    """A progress bar on stderr, if it is a terminal."""
    if quiet or not is_rich_terminal(stderr()):
        yield None
        return
    from rich import progress  # rich costs start-up time

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TimeElapsedColumn())
    with progress.Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task("", total=None)

        def update(what: str, done: int, total: int) -> None:
            count = f" {done} of {total}" if 0 < total < 10_000 else ""  # of windows, not of bytes
            bar.update(task, description=what + count, completed=done, total=total or None)

        yield update
