"""Building and installing localq from a clone: what `make chat`, `make test` and `make install` run.

Here: what to build for this machine (`machine`), the steps (`steps`), running them side by side (`run`), what is shown
meanwhile (`progress`), the link in ~/.local/bin (`link`).
Not here: the build itself (pyproject.toml, csrc/CMakeLists.txt).
Called by: the Makefile, with the Python that makes the environment. Standard library only, and nothing else of localq.
Open first: steps.py.
"""
