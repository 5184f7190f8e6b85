# Every target does its own set-up. Another interpreter or place: make PYTHON=python3.12 VENV=/tmp/venv test
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_DIR ?= runs/demo

.PHONY: help setup demo test test-real test-browser lint format check clean

help:  ## What there is
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

setup: $(VENV)/installed  ## Make the virtual environment

# The constraints pin what the ranges in pyproject.toml leave open.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: setup  ## Train, generate, bench and eval on the embedded default, in a few minutes on two CPU cores
	$(BIN)/python -m marscli.demo --output-dir $(DEMO_DIR) --force

# One torch thread a process: tests run side by side.
test: setup  ## All fast tests; no network
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto

test-real: setup  ## The second tier, on a real model: MARS_TEST_MODEL=DIR make test-real
	@test -n "$(MARS_TEST_MODEL)" || { echo "error: MARS_TEST_MODEL is not set"; echo "hint: MARS_TEST_MODEL=DIR make test-real"; exit 2; }
	MARS_TEST_MODEL="$(abspath $(MARS_TEST_MODEL))" $(BIN)/python -m pytest -m real tests/real

test-browser: setup  ## The pages in a headless Chromium, from the PATH or MARS_BROWSER=PROGRAM
	$(BIN)/python -m pytest -m browser -rs tests/generation

lint: setup  ## Lint, format check, types
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks
	$(BIN)/mypy

format: setup  ## Format the code
	$(BIN)/ruff check --fix src tests examples benchmarks
	$(BIN)/ruff format src tests examples benchmarks

check: test lint  ## What CI runs

clean:  ## Remove the environment and all runs
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
