"""Single kernels measured: `localq bench --kernels`, `--crossover`, `--bcq`.

`kernel_bench.py` runs the cases of `shapes.py`; rows per family are in `formats.py`, `attention.py`, `experts.py`,
`search.py` and `step.py`; `roofline.py` measures the bandwidth and times with a cold cache, `timing.py` checks against
fp64, `table.py` prints. Every row is checked before it is timed. The kernels are in `localq.kernels` and
`localq.formats`. Called by the verb `bench`. Open `kernel_bench.py` first.
"""
