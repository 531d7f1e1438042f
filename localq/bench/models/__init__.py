"""Whole models measured: `model_bench.py` (`bench MODEL`), `formats.py` (`--formats`), `step.py` (`--profile`),
`quantizing.py` (`--quantize`), `patched.py` (`--patched`).

`plan.py` holds the tests, `measure.py` the timing, `rivals.py` other engines, `report.py` and `format_report.py` the
output, `choose.py` the model without MODEL, `format_list.py` what can be measured. Single kernels are in
`bench/kernels`. Called by the verb `bench`. Open `model_bench.py` first.
"""
