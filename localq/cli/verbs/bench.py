"""`localq bench`: how fast, against what, and against which limit. The measuring is `localq/bench/`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from localq.cli import options, progress
from localq.cli.output import note, print_json
from localq.cli.verbs import bench_formats
from localq.errors import LocalqError, usage_error
from localq.planner import budget

if TYPE_CHECKING:
    from localq.bench.models.model_bench import Request
    from localq.bench.models.plan import Plan
    from localq.settings import Settings

_MODEL_HELP = "As for chat; with --synthetic a catalogue name; with --kernels also shapes: 4096x4096,28672x8192."
_SYNTHETIC = "Random weights of MODEL's architecture, nothing fetched."
_ONLY = (
    "With --kernels: some of nf4, gemm, dequantize, dense, int8, int4, rowlut, gather, vq, experts, bcq, attention, "
    "search, step."
)
_AGAINST = "transformers (the default), bitsandbytes, both with a comma, or none."
Model = Annotated[str | None, typer.Argument(help=_MODEL_HELP, autocompletion=options.known_names)]
Prompt = Annotated[str, typer.Option("-p", "--n-prompt", metavar="LIST", help="Prefill tests, in tokens; 0 = none.")]
Generate = Annotated[str, typer.Option("-n", "--n-gen", metavar="LIST", help="Decode tests, in tokens; 0 = none.")]
Depth = Annotated[str, typer.Option("-d", "--n-depth", metavar="LIST", help="Tokens in the cache before each test.")]
Repetitions = Annotated[int, typer.Option("-r", "--repetitions", min=1, help="Timed runs a test; medians count.")]
Output = Annotated[str, typer.Option("-o", "--output", help="table, md, csv, json or jsonl.")]
Against = Annotated[list[str] | None, typer.Option("--against", metavar="NAME", help=_AGAINST)]
Plot = Annotated[str | None, typer.Option("--plot", metavar="FILE|-", help="Shares of the roof: NAME.png, - = here.")]
MODES = ("kernels", "profile", "crossover", "patched", "quantize", "bcq", "formats")
# Parameters that a mode takes besides the output; profile: those that it does not take.
TAKEN = {"kernels": ("model", "plot", "only"), "crossover": (), "patched": (), "bcq": ("model", "plot"),
         "quantize": ("model", "device", "vram", "seed"),
         "formats": ("model", "plot", "prompt", "generate", "depth", "repetitions", "synthetic", "make", "max_windows",
                     "ctx", "kv", "embed", "head", "vram", "reserve", "force", "device", "dtype", "seed", "offline",
                     "token")}  # fmt: skip
OWNERS = {"make": "formats", "max_windows": "formats", "only": "kernels"}  # parameters of one mode alone
WITHOUT_MEANING = ("plot", "against", "no_baseline", "repetitions", *OWNERS)  # to a profile
ALWAYS = (*MODES, "output", "json", "quiet")
SPELLINGS = {"model": "MODEL", "prompt": "-p", "generate": "-n", "depth": "-d", "repetitions": "-r"}


@dataclass(frozen=True)
class _Asked:
    """What the command line says, less the tests and the memory."""

    model: str | None
    synthetic: bool
    output: str
    plot: str | None
    force: bool
    quiet: bool


def bench(
    context: typer.Context,
    model: Model = None,
    prompt: Prompt = "512",
    generate: Generate = "128",
    depth: Depth = "0",
    repetitions: Repetitions = 5,
    output: Output = "table",
    synthetic: Annotated[bool, typer.Option("--synthetic", help=_SYNTHETIC)] = False,
    against: Against = None,
    no_baseline: Annotated[bool, typer.Option("--no-baseline", help="Only localq, and what --against names.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Time every CUDA kernel instead.")] = False,
    only: Annotated[str, typer.Option("--only", metavar="LIST", help=_ONLY)] = "",
    profile: Annotated[bool, typer.Option("--profile", help="Time one decode step, part by part.")] = False,
    crossover: Annotated[bool, typer.Option("--crossover", help="Where NF4 prefill changes its way.")] = False,
    patched: Annotated[bool, typer.Option("--patched", help="Our kernels under a transformers model.")] = False,
    quantize: Annotated[bool, typer.Option("--quantize", help="Time one layer of MODEL on its way to vq2.")] = False,
    bcq: Annotated[bool, typer.Option("--bcq", help="Binary codes: time and size by planes and groups.")] = False,
    formats: Annotated[bool, typer.Option("--formats", help="Every format of MODEL in one table.")] = False,
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
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of random prompts and weights.")] = 0,
    offline: options.Offline = None,
    token: options.Token = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Measure MODEL's speed against fp16, transformers and what the memory allows.

    The last line on stdout is one JSON object; errors go to stderr.
    """
    flags = dict(zip(MODES, (kernels, profile, crossover, patched, quantize, bcq, formats), strict=True))
    asked = _Asked(model, synthetic, "json" if json else output, plot, force, quiet)
    mode = _mode(flags, asked, context)
    ctx = options.given("ctx", ctx)
    settings = options.effective(
        device=device, dtype=dtype, offline=offline, vram=vram, kv=kv, embed=embed, head=head, reserve=reserve
    )
    if mode in PARTS:
        PARTS[mode](mode, asked, settings, seed, only)
        return
    from localq.bench.models import plan as plans  # torch-free, as is all before `_request`

    plan = plans.make(prompt, generate, depth, repetitions, seed)
    if mode == "formats":
        bench_formats.run(bench_formats.Asked(**vars(asked), ctx=ctx, make=make, windows=max_windows), plan, settings)
        return
    rivals = plans.rivals(against or (), () if no_baseline else ("transformers",))
    request = _request(asked, settings, plan, rivals, not no_baseline, ctx)
    _measure(request, mode, asked)


def _mode(flags: dict[str, bool], asked: _Asked, context: Any) -> str:
    """The one of `MODES` that was asked for, "" for a whole model. Raises LocalqError (exit 2) for what it has not."""
    from localq.bench import plot
    from localq.bench.models import report

    chosen = [name for name, wanted in flags.items() if wanted]
    if len(chosen) > 1:
        raise usage_error("bench", f"--{chosen[0]} and --{chosen[1]} are two benchmarks", "Run one after the other.")
    if asked.output not in report.FORMATS:
        raise usage_error("-o", f"{asked.output!r} is not a format", f"Use one of {', '.join(report.FORMATS)}.")
    if chosen not in ([], ["formats"]) and asked.output not in ("table", "json"):
        raise usage_error("-o", f"--{chosen[0]} is not written as {asked.output}", "Use table or json.")
    if asked.synthetic and chosen not in ([], ["profile"], ["formats"]):
        raise usage_error("--synthetic", f"--{chosen[0]} has random weights anyway", "Leave it out.")
    plot.check_target(asked.plot)
    mode = chosen[0] if chosen else ""
    _refuse_ignored(mode, context)
    return mode


def _refuse_ignored(mode: str, context: Any) -> None:
    """No option is taken and not obeyed. Raises LocalqError (exit 2)."""
    given = [name for name in context.params if context.get_parameter_source(name).name == "COMMANDLINE"]
    for name in given:
        taken = name not in OWNERS
        if mode:
            taken = name not in WITHOUT_MEANING if mode == "profile" else name in TAKEN[mode]
        if not taken and name not in ALWAYS:
            word = SPELLINGS.get(name, f"--{name.replace('_', '-')}")
            where = f"with --{mode}" if mode else f"without --{OWNERS[name]}"
            raise usage_error("bench", f"{word} has no meaning {where}", "Leave it out.")


def _run_part(mode: str, asked: _Asked, settings: Settings, seed: int, only: str) -> None:
    """A benchmark that is no whole model; its module prints a table and one line of JSON."""
    out = sys.stderr if asked.output == "json" else sys.stdout
    if mode == "kernels":
        from localq.bench.kernels import kernel_bench as kernels  # torch loads only now, as below

        shown = progress.case_bar(asked.quiet)
        families = [name.strip() for name in only.split(",")] if only else None
        result = kernels.run(out, asked.model, families, plot_to=asked.plot, on_case=shown)
    elif mode == "bcq":
        from localq.bench.kernels import kernel_bench as kernels
        from localq.bench.kernels.rows import bcq as bcq_rows

        shown = progress.case_bar(asked.quiet)
        asked_for = asked.model or bcq_rows.SQUARES
        result = kernels.run(out, asked_for, list(kernels.BY_NAME), plot_to=asked.plot, on_case=shown)
    elif mode == "crossover":
        from localq.bench.kernels import crossover

        result = crossover.run(out)
    else:
        from localq.bench.models import patched

        result = patched.run(out)
    if asked.output == "json":
        print_json(result)
    if failures := result.get("failures"):
        why = f"{len(failures)} measurements failed, the first: {failures[0]}"
        raise LocalqError(f"bench --{mode}", why, "Report this as a bug.")


def _run_quantize(mode: str, asked: _Asked, settings: Settings, seed: int, only: str) -> None:
    """The ways of `localq quantize`, on one layer of a catalogued model."""
    from localq.cli.verbs import quantize_calibrated
    from localq.files import catalog
    from localq.planner import prepare
    from localq.quantize import calibration

    if asked.model is None:
        raise usage_error("bench --quantize", "it has the shape of no model", "Give MODEL, such as llama-3.3-70b.")
    tokens = min(calibration.WINDOW, catalog.find(asked.model).arch.max_context)
    prepare.check_can_make("vq2")
    from localq.bench.models import quantizing  # torch loads only now

    windows = {"quick": quantize_calibrated.QUICK_WINDOWS, "best": quantizing.ALL_WINDOWS}
    ways = {
        name: quantizing.Way(*quantize_calibrated.effort(best=name == "best"), count, tokens)
        for name, count in windows.items()
    }
    out = sys.stderr if asked.output == "json" else sys.stdout
    wanted = quantizing.Asked(asked.model, settings.device, budget.allowed(settings), seed)
    result = quantizing.run(out, wanted, ways)
    if asked.output == "json":
        print_json(result)


PARTS = {**dict.fromkeys(("kernels", "crossover", "patched", "bcq"), _run_part), "quantize": _run_quantize}


def _request(
    asked: _Asked, settings: Settings, plan: Plan, against: tuple[str, ...], baseline: bool, ctx: int | None
) -> Request:
    """The model that is meant, found or fetched, or stood for by random weights."""
    vram, reserved = budget.allowed(settings), budget.reserved(settings)
    name, synthetic, path = asked.model, asked.synthetic, None
    if name is None:
        from localq.bench.models import choose

        choice = choose.bare(plan.ctx, settings.device, vram, synthetic, reserved)
        name, synthetic, path = choice.name, choice.synthetic, Path(choice.path) if choice.path else None
        if choice.note:
            note(choice.note)
    from localq.bench.models.model_bench import Request
    from localq.bench.synthetic.sources import from_files, random  # torch loads only now
    from localq.engine.load.load import Options

    if synthetic:
        files, opened = random(name, plan.seed)
    else:
        from localq.planner import prepare

        with progress.fetch_bar(name, asked.quiet) as show:
            path = path or prepare.source_path(name, note, show, settings.offline)
        files, opened = from_files(path)
        if not Path(name).exists():
            files = replace(files, name=name)  # as it was asked for, not as its file is called
    loading = Options(
        files.name, settings.device, settings.dtype, ctx, settings.kv_bits, vram, settings.embed, settings.head,
        reserved, asked.force,
    )  # fmt: skip
    return Request(files, opened, loading, plan, against, baseline)


def _measure(request: Request, mode: str, asked: _Asked) -> None:
    from localq.bench import plot
    from localq.bench.models import model_bench, report, step

    with progress.run_bar(request.plan.repetitions + 1, asked.quiet) as tell:
        if mode == "profile":
            out = sys.stderr if asked.output == "json" else sys.stdout
            result = step.run(request, out, tell)
            if asked.output == "json":
                print_json(result)
            return
        measured = model_bench.run(request, tell)
    report.write(measured, asked.output, sys.stdout, sys.stderr)
    if asked.plot is not None:
        bars = [
            (f"{row.engine} {row.case.name}", row.share_of_roof)
            for row in measured.rows
            if row.share_of_roof is not None
        ]
        plot.draw(bars, f"{measured.model}: share of the read bandwidth", asked.plot, sys.stderr)
