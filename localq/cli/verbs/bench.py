"""`localq bench`: speed of a model, against rivals and the memory bandwidth. `localq/bench/` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq import processes
from localq.cli import agree, help_page, option_values, options, progress
from localq.cli.output import note, print_json, stderr, stdout
from localq.cli.verbs import bench_drafts, bench_formats, bench_write
from localq.errors import LocalqError, usage_error
from localq.planner import budget

if TYPE_CHECKING:
    from localq.bench.models.model_bench import BenchRequest
    from localq.bench.models.plan import BenchPlan
    from localq.settings import Settings

_MODEL_HELP = (
    "Any model that `chat` accepts. --synthetic requires a catalogue name; --kernels also accepts a shape such as "
    "4096x4096."
)
_SYNTHETIC = "Use random weights with the same shapes as MODEL."
_ONLY = (
    "Kernel families: nf4, gemm, dequantize, dense, int8, int4, scaled, gguf, rowlut, gather, vq, experts, "
    "bcq, attention, search, step."
)
_AGAINST = "Baselines: transformers, bitsandbytes or none."
_PLOT = "Plot bandwidth use to a .png file (- = terminal)."
Model = Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, autocompletion=options.complete_names)]
Prompt = Annotated[
    str,
    typer.Option(
        "-p",
        "--n-prompt",
        metavar="LIST",
        help="Prompt tokens to prefill; 0 = skip.",
        rich_help_panel=help_page.TESTS,
    ),
]
Generate = Annotated[
    str,
    typer.Option(
        "-n",
        "--n-gen",
        metavar="LIST",
        help="Tokens to decode; 0 = skip.",
        rich_help_panel=help_page.TESTS,
    ),
]
Depth = Annotated[
    str,
    typer.Option(
        "-d",
        "--n-depth",
        metavar="LIST",
        help="Tokens in the KV cache before each test.",
        rich_help_panel=help_page.TESTS,
    ),
]
Repetitions = Annotated[
    int,
    typer.Option(
        "-r",
        "--repetitions",
        min=1,
        max=option_values.MOST_REPETITIONS,
        help="Runs per test; the median is reported.",
        rich_help_panel=help_page.TESTS,
    ),
]
Output = Annotated[
    str,
    typer.Option(
        "-o",
        "--output",
        metavar="FORMAT",
        help="table, md, csv, json or jsonl.",
        rich_help_panel=help_page.OUTPUT,
    ),
]
Against = Annotated[
    list[str] | None,
    typer.Option("--against", metavar="LIST", help=_AGAINST, rich_help_panel=help_page.TESTS),
]
Plot = Annotated[
    str | None,
    typer.Option("--plot", metavar="FILE|-", help=_PLOT, rich_help_panel=help_page.OUTPUT),
]


def _mode_option(name: str, help: str) -> Any:
    return typer.Option(name, help=help, rich_help_panel=help_page.MODES)


Synthetic = Annotated[bool, typer.Option("--synthetic", help=_SYNTHETIC, rich_help_panel=help_page.TESTS)]
NoBaseline = Annotated[
    bool,
    typer.Option("--no-baseline", help="Skip the 16-bit and transformers runs.", rich_help_panel=help_page.TESTS),
]
Kernels = Annotated[bool, _mode_option("--kernels", "Time every CUDA kernel.")]
Only = Annotated[str, typer.Option("--only", metavar="LIST", help=_ONLY, rich_help_panel=help_page.MODES)]
Profile = Annotated[bool, _mode_option("--profile", "Time the kernels in one decode step.")]
Crossover = Annotated[bool, _mode_option("--crossover", "Find where NF4 prefill should switch kernels.")]
Patched = Annotated[bool, _mode_option("--patched", "Time a transformers model with localq's kernels.")]
Quantize = Annotated[bool, _mode_option("--quantize", "Time the quantization of one layer to vq2.")]
Bcq = Annotated[bool, _mode_option("--bcq", "Time bcq kernels by bit width and group size.")]
Formats = Annotated[bool, _mode_option("--formats", "Compare all formats of MODEL in a table.")]
Drafts = Annotated[bool, _mode_option("--drafts", "Measure speculative decoding on built-in prompts.")]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        min=0,
        max=option_values.LARGEST_SEED,
        help="Seed for random prompts and weights.",
        show_default=False,
        rich_help_panel=help_page.TESTS,
    ),
]
MODES = ("kernels", "profile", "crossover", "patched", "quantize", "bcq", "formats", "drafts", "write")
# Parameters that a mode accepts, without those of the output.
TAKEN = {"drafts": ("model", "draft", "repetitions", "synthetic", "ctx", "kv", "embed", "head", "vram", "reserve",
                    "force", "device", "dtype", "seed", "offline", "token"),
         "kernels": ("model", "plot", "only"), "crossover": (), "patched": (), "bcq": ("model", "plot"),
         "quantize": ("model", "device", "vram", "seed"), "write": ("model", "synthetic", "device", "seed", "offline"),
         "formats": ("model", "plot", "prompt", "generate", "depth", "repetitions", "synthetic", "make", "max_windows",
                     "ctx", "kv", "embed", "head", "vram", "reserve", "force", "device", "dtype", "seed", "offline",
                     "token")}  # fmt: skip
OWNERS = {
    "draft": "drafts",
    "make": "formats",
    "max_windows": "formats",
    "only": "kernels",
}  # parameters of a single mode
NOT_FOR_PROFILE = ("plot", "against", "no_baseline", "repetitions", *OWNERS)
ALWAYS = (*MODES, "output", "json", "quiet", "yes")
SPELLINGS = {"model": "MODEL", "prompt": "-p", "generate": "-n", "depth": "-d", "repetitions": "-r"}


@dataclass(frozen=True)
class _CommonArguments:
    """Arguments that every mode reads."""

    model: str | None
    synthetic: bool
    output: str
    plot: str | None
    force: bool
    quiet: bool
    yes: bool
    ctx: int | None


def bench(
    context: typer.Context,
    model: Model = None,
    prompt: Prompt = "512",
    generate: Generate = "128",
    depth: Depth = "0",
    repetitions: Repetitions = 5,
    output: Output = "table",
    synthetic: Synthetic = False,
    write: bench_write.Write = None,
    against: Against = None,
    no_baseline: NoBaseline = False,
    kernels: Kernels = False,
    only: Only = "",
    profile: Profile = False,
    crossover: Crossover = False,
    patched: Patched = False,
    quantize: Quantize = False,
    bcq: Bcq = False,
    formats: Formats = False,
    drafts: Drafts = False,
    draft: bench_drafts.Draft = None,
    make: bench_formats.Make = "",
    max_windows: bench_formats.Windows = None,
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
    seed: Seed = 0,
    offline: options.Offline = None,
    token: options.Token = None,
    yes: agree.Yes = False,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Measure the speed of a model or of the CUDA kernels.

    Compares the results with fp16, transformers and the bandwidth limit. The last line of stdout is a JSON object.
    """
    ctx = options.flag_or_environment("ctx", ctx)
    arguments = _CommonArguments(model, synthetic, "json" if json else output, plot, force, quiet, yes, ctx)
    mode = _mode((kernels, profile, crossover, patched, quantize, bcq, formats, drafts, write), arguments, context)
    settings = options.load_settings(
        device=device, dtype=dtype, offline=offline, vram=vram, kv=kv, embed=embed, head=head, reserve=reserve
    )
    if mode in PARTS:
        return PARTS[mode](mode, arguments, settings, seed, only)
    if write is not None:
        return bench_write.run(model, write, settings, seed, quiet, as_json=arguments.output == "json")
    plan = _plan(prompt, generate, depth, repetitions, seed)
    if mode == "formats":
        return bench_formats.run(bench_formats.of(arguments, make, max_windows), plan, settings)
    request = _request(arguments, settings, plan, against or (), not no_baseline)
    return _measure(bench_drafts.with_draft(request, draft, settings, arguments), mode, arguments)


def _plan(prompt: str, generate: str, depth: str, repetitions: int, seed: int) -> BenchPlan:
    from localq.bench.models import plan as plans  # torch-free, as is all before `_request`

    return plans.make(prompt, generate, depth, repetitions, seed)


def _mode(flags: Sequence[object], arguments: _CommonArguments, context: Any) -> str:
    """The one of `MODES` whose flag is true, "" for a whole model.

    Raises LocalqError (exit 2) for options that clash, and as `check_torch` does.
    """
    processes.check_torch()
    from localq.bench import plot
    from localq.bench.models import report

    chosen = [name for name, is_chosen in zip(MODES, flags, strict=True) if is_chosen]
    if len(chosen) > 1:
        raise usage_error("bench", f"--{chosen[0]} and --{chosen[1]} are separate benchmarks", "Run them separately.")
    if arguments.output not in report.FORMATS:
        raise usage_error(
            "-o", f"{arguments.output!r} is not a supported output format", f"Use one of {', '.join(report.FORMATS)}."
        )
    if chosen not in ([], ["formats"]) and arguments.output not in ("table", "json"):
        raise usage_error("-o", f"--{chosen[0]} results cannot be written as {arguments.output}", "Use table or json.")
    if chosen == ["write"] and not arguments.synthetic:
        raise usage_error("--write", "only random weights can be written", "Add --synthetic.")
    if arguments.synthetic and chosen not in ([], ["profile"], ["formats"], ["drafts"], ["write"]):
        raise usage_error("--synthetic", f"--{chosen[0]} always uses random weights", "Remove the option.")
    plot.check_target(arguments.plot)
    mode = chosen[0] if chosen else ""
    _refuse_ignored(mode, context)
    return mode


def _refuse_ignored(mode: str, context: Any) -> None:
    """Raises LocalqError (exit 2) for an option that the mode would ignore."""
    given = [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]
    for name in given:
        taken = name not in OWNERS
        if mode:
            taken = name not in NOT_FOR_PROFILE if mode == "profile" else name in TAKEN[mode]
        if not taken and name not in ALWAYS:
            word = SPELLINGS.get(name, f"--{name.replace('_', '-')}")
            where = f"with --{mode}" if mode else f"without --{OWNERS[name]}"
            raise usage_error("bench", f"{word} has no effect {where}", "Remove the option.")


def _run_part(mode: str, arguments: _CommonArguments, settings: Settings, seed: int, only: str) -> None:
    """Run a benchmark other than a whole model; its module prints a table and one line of JSON."""
    out = stderr() if arguments.output == "json" else stdout()
    if mode == "kernels":
        from localq.bench.kernels import kernel_bench  # torch loads only now, as below

        shown = progress.case_bar(arguments.quiet)
        families = [name.strip() for name in only.split(",")] if only else None
        result = kernel_bench.run(out, arguments.model, families, plot_to=arguments.plot, on_case=shown)
    elif mode == "bcq":
        from localq.bench.kernels import formats as format_rows
        from localq.bench.kernels import kernel_bench

        shown = progress.case_bar(arguments.quiet)
        shapes = arguments.model or format_rows.SQUARES
        result = kernel_bench.run(out, shapes, list(kernel_bench.BY_NAME), plot_to=arguments.plot, on_case=shown)
    elif mode == "crossover":
        from localq.bench.kernels import crossover

        result = crossover.run(out)
    else:
        from localq.bench.models import patched

        result = patched.run(out)
    if arguments.output == "json":
        print_json(result)
    _name_plot(arguments.plot)
    if failures := result.get("failures"):
        why = f"{len(failures)} measurements failed; first failure: {failures[0]}"
        raise LocalqError(f"bench --{mode}", why, "Report this as a bug.")


def _run_quantize(mode: str, arguments: _CommonArguments, settings: Settings, seed: int, only: str) -> None:
    """Time the presets of `localq quantize` on one layer of a catalogue model."""
    from localq.cli.verbs import quantize_calibrated
    from localq.files import catalog
    from localq.planner import prepare
    from localq.quantize import calibration

    if arguments.model is None:
        raise usage_error("bench --quantize", "no model given", "Specify a MODEL, such as llama-3.3-70b.")
    tokens = min(calibration.WINDOW, catalog.find(arguments.model).arch.max_context)
    prepare.check_can_make("vq2")
    from localq.bench.models import quantizing  # torch loads only now

    windows = {"quick": quantize_calibrated.QUICK_WINDOWS, "best": quantizing.ALL_WINDOWS}
    ways = {
        name: quantizing.Method(*quantize_calibrated.effort(best=name == "best"), count, tokens)
        for name, count in windows.items()
    }
    out = stderr() if arguments.output == "json" else stdout()
    wanted = quantizing.QuantizingRequest(arguments.model, settings.device, budget.vram_limit(settings), seed)
    result = quantizing.run(out, wanted, ways)
    if arguments.output == "json":
        print_json(result)


def _name_plot(target: str | None) -> None:
    """Name the PNG that was drawn on stderr: stdout ends with JSON."""
    from localq.bench import plot

    if target not in (None, plot.TERMINAL):
        note(plot.file_line(target))


PARTS = {**dict.fromkeys(("kernels", "crossover", "patched", "bcq"), _run_part), "quantize": _run_quantize}


def _request(
    arguments: _CommonArguments,
    settings: Settings,
    plan: BenchPlan,
    against: Sequence[str],
    baseline: bool,
) -> BenchRequest:
    """The benchmark of the model: its files, found or fetched, or random weights."""
    from localq.bench.models import plan as plans

    rivals = plans.rivals(against, ("transformers",) if baseline else ())
    vram, reserved = budget.vram_limit(settings), budget.reserve_bytes(settings)
    name, synthetic, path = arguments.model, arguments.synthetic, None
    if name is None:
        from localq.bench.models import choose

        choice = choose.choose(plan.ctx, settings.device, vram, synthetic, reserved)
        name, synthetic, path = choice.name, choice.synthetic, Path(choice.path) if choice.path else None
        if choice.note:
            note(choice.note)
    from localq.bench.models.model_bench import BenchRequest
    from localq.bench.synthetic.sources import from_files, random  # torch loads only now

    if synthetic:
        files, opened = random(name, plan.seed)
    else:
        from localq.files import catalog
        from localq.planner import prepare

        if path is None:
            agree.check([catalog.resolve(name)], settings, arguments.yes)
        with progress.fetch_bar(name, arguments.quiet) as show:
            path = path or prepare.source_path(name, note, show, settings.offline)
        files, opened = from_files(path)
        if not Path(name).exists():
            files = replace(files, name=name)  # the name given, not that of the file
    loading = replace(budget.load_options(settings, files.name, force=arguments.force), ctx=arguments.ctx)
    return BenchRequest(files, opened, loading, plan, rivals, baseline)


def _measure(request: BenchRequest, mode: str, arguments: _CommonArguments) -> None:
    from localq.bench import plot
    from localq.bench.models import drafts, model_bench, report, step

    with progress.run_bar(request.plan.repetitions + 1, arguments.quiet) as count_run:
        if mode in ("profile", "drafts"):
            out = stderr() if arguments.output == "json" else stdout()
            if mode == "profile":
                result = step.run(request, out, count_run)
            else:
                result = drafts.run(request, out, count_run, arguments.synthetic)
            if arguments.output == "json":
                print_json(result)
            return
        measured = model_bench.run(request, count_run)
    report.write(measured, arguments.output, stdout(), stderr())
    if arguments.plot is not None:
        bars = [
            (f"{row.engine} {row.case.name}", row.share_of_roof)
            for row in measured.rows
            if row.share_of_roof is not None
        ]
        plot.draw(bars, f"{measured.model}: share of memory read bandwidth used", arguments.plot, stderr())
        _name_plot(arguments.plot)
