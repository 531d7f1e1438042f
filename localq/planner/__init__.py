"""What fits a GPU, in which format, with how much context, and how fast.

Here: the memory of a model by component (`footprint`), the plan of a load (`plan`), what a name means on this machine
(`choose`, `offers`), the rows of `localq fit` (`fit_rows`), what `show`, `pull --dry-run` and `chat --dry-run` print,
and `prepare`, which turns a name into files. Predicted speed is in `speed`.
Not here: bytes of a format (`files.format_facts`), and what a load really took (`engine.load`).
Called by every verb, the screens, and by `engine.load.plan`, which allocates by the same plan. Torch-free.
Open first: plan.py.
"""
