# `make demo` and `make test` are all that is needed in a fresh clone; the environment is made on first use.

VENV ?= .venv
BIN := $(VENV)/bin
SHELL_SCRIPTS := .ci/run $(wildcard tools/*.sh examples/*.sh docker/*.sh docker/slurm/*.sbatch tests/cluster/*.sh)
PYTEST_ARGS ?=
# Test processes: three for two cores, since some wait for what they started; `TEST_WORKERS=0` runs everything in one.
TEST_WORKERS ?= 3
WORKERS = -n $(TEST_WORKERS) --dist loadgroup --no-loadscope-reorder
export VENV
# Where this is set, every process compiles Megatron-Core, vLLM and torch's Python anew: minutes of a demo or a test run.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-full lint format constraints clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | column -t -s "$$(printf '\t')"

setup: ## make the virtual environment (the other targets do it themselves)
	@bash tools/setup_venv.sh

demo: setup ## train a tiny mixture-of-experts model by DPPO, end to end, on two CPU cores
	@PYTHON=$(BIN)/python bash examples/run_tiny_moe_dppo.sh

test: setup lint ## linters and tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "not full" $(WORKERS) $(PYTEST_ARGS)

test-full: setup lint ## the same with the whole test matrix
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) $(PYTEST_ARGS)

lint: setup ## ruff, mypy, import-linter, shellcheck, hadolint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/shellcheck $(SHELL_SCRIPTS)
	$(BIN)/hadolint $(wildcard docker/*Dockerfile)

format: setup ## rewrite the sources the way `make lint` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pins that still fit stay; `rm constraints/cpu.txt constraints/gpu.txt` first to move everything to its newest version.
COMPILE = $(BIN)/uv pip compile --quiet --python-version 3.12 --no-annotate --no-header --extra dev
constraints: setup ## resolve the pinned versions anew after a change of pyproject.toml
	$(COMPILE) --extra cpu --override constraints/cpu-overrides.txt pyproject.toml -o constraints/cpu.txt
	$(COMPILE) --extra gpu pyproject.toml -o constraints/gpu.txt

clean: ## remove caches; the environment and the runs stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +
