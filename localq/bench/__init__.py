"""Benchmarks and evaluation behind `localq bench` and `localq eval`.

    models/     whole models: speed beside other engines, all formats of a model, one step, quantizing
    kernels/    single kernels against fp64, the bandwidth and rivals
    quality/    perplexity and divergence
    synthetic/  random weights in the shape of catalogued models
    conditions/ device, clocks, power and energy of a measurement
    plot        bars and spots in the terminal or as PNG; bandwidth: a child process of `planner.card`

Not here: predictions (`localq.planner.speed`), self-tests (`localq.engine.selftest`), the options
(`cli/verbs/bench`, `cli/verbs/eval`), which are the only callers. Open `models/model_bench.py` first.
"""
