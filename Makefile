# On a fresh machine:
#   make chat      make .venv, build and install localq for this machine, fetch the embedded model, answer a question
#   make install   the same without the question; links localq into BIN_DIR (make uninstall removes the link)
#   make test      build for all cards, then every check that CI runs
# LOCALQ_NO_CUDA=1 before any of them builds without CUDA kernels, for machines without nvcc.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BIN_DIR ?= $(HOME)/.local/bin
QUESTION ?= What is the capital of France?

# An NVIDIA driver shows itself here (the second is WSL's). Without one there is no use for CUDA builds of torch: the
# pinned release is the one that CPU-only package indexes and wheel folders carry.
DRIVER_FILES ?= /proc/driver/nvidia/version /usr/lib/wsl/lib/libcuda.so.1
DRIVER := $(wildcard $(DRIVER_FILES))
TORCH ?= $(if $(DRIVER),torch>=2.8,torch==2.13.0)
TORCH_INDEX ?= $(if $(DRIVER),,https://download.pytorch.org/whl/cpu)
# NVCC=pip takes the compiler from pip even where one is installed; NVIDIA_SMI names another program that lists the cards.
NVCC ?=
NVIDIA_SMI ?=

export LOCALQ_NO_CUDA
SETUP = $(PYTHON) -c 'import sys; sys.exit("localq needs Python 3.11 or newer: make PYTHON=python3.12 $(MAKECMDGOALS)" if sys.version_info < (3, 11) else 0)' \
	&& $(PYTHON) -m localq.kernels.setup --venv '$(VENV)' --torch '$(TORCH)' --torch-index '$(TORCH_INDEX)' \
	--driver '$(DRIVER)' --nvidia-smi '$(NVIDIA_SMI)' --nvcc '$(NVCC)' --bin-dir '$(BIN_DIR)'
CLANG_SOURCES := $(wildcard $(addprefix csrc/*/*.,cu cuh h cpp))

# As many tests at a time as there are processors, each in one thread; one after the other beside a GPU, because some
# measure its memory.
WORKERS ?= $(if $(DRIVER),0,logical)
ONE_THREAD := $(if $(filter-out 0,$(WORKERS)),OMP_NUM_THREADS=1)

# Tests wait for the disk thousands of times, where a file is to outlive a power cut: their files are in memory, where
# that has 6 GB and may hold programs. TEST_FOLDER names another place.
IN_MEMORY := import os; at = os.statvfs("/dev/shm"); print("/dev/shm" * (at.f_bavail * at.f_frsize > 6e9 and not at.f_flag & os.ST_NOEXEC))
TEST_FOLDER ?= $(or $(shell $(PYTHON) -c '$(IN_MEMORY)' 2>/dev/null),/tmp)

# `make uninstall clean` cleans even where the link is another program's, and still fails.
ifneq (,$(filter uninstall,$(MAKECMDGOALS)))
MAKEFLAGS += -k
endif

# Tests start hundreds of processes, each of which would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: chat install uninstall test lint checks compiled-tests wheel readme clean setup-test

chat:
	@$(SETUP) chat
	$(BIN)/localq run smollm2-135m "$(QUESTION)"
	@$(SETUP) next

install:
	@$(SETUP) install

uninstall:
	@$(SETUP) uninstall

# Editable, like `chat`: the checkout is what runs, with the compiled module beside it in the environment.
setup-test:
	@$(SETUP) test

# mypy keeps one processor busy for most of a minute.
test: setup-test
	@$(MAKE) --no-print-directory -j 2 checks compiled-tests
	folder=$$(mktemp -d '$(TEST_FOLDER)/localq-tests-XXXXXX') && trap 'rm -rf "$$folder"' EXIT INT TERM \
		&& $(ONE_THREAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile --basetemp "$$folder"

lint: setup-test checks

checks:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/clang-format --dry-run --Werror $(CLANG_SOURCES)

# Once for all workers of pytest, which keeps what it compiles.
compiled-tests:
	@$(BIN)/python -m pytest -q --collect-only >/dev/null 2>&1 || true

wheel:
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip wheel --no-deps --wheel-dir dist .

readme:
	@$(SETUP) build
	$(BIN)/python -m tests.tools.readme_blocks

clean:
	rm -rf $(VENV) build dist
