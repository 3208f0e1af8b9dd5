# `make help` lists what there is. Every target that needs the environment makes it first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RECIPE ?= quickstart
ARGS ?=
# Sixty processes of the tests import the package: where an image forbids bytecode, each would compile it for 0.6 s.
COMPILED := $(BIN)/python -m compileall -q lightning_llm callbacks && PYTHONDONTWRITEBYTECODE=

.DEFAULT_GOAL := help
.PHONY: help setup hashes release train sweep compare plan test test-full chaos golden frozen frozen-record lint format bench gpu-check docs ui clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(STAMP)  ## create or update .venv (uses a torch that $(PYTHON) already has)

# A torch that the machine brings (a GPU image's, say) is used as it is; otherwise the one that development is pinned to.
# Everything else is checked against requirements/hashes.txt (a build of torch's has a hash of its own, and brings what it
# needs); `make setup HASHES=` leaves that out, for a mirror whose files are others.
HASHES ?= requirements/hashes.txt
PIP := $(BIN)/python -m pip install --quiet
$(STAMP): pyproject.toml requirements/dev.txt requirements/hashes.txt requirements/build.txt requirements/transformer_engine.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python >= 3.11 is needed: make PYTHON=python3.12"; exit 1; }
	@if $(PYTHON) -c 'import torch; assert (2, 11) <= tuple(map(int, torch.__version__.split(".")[:2])) < (2, 16)' 2>/dev/null; then \
	  $(PYTHON) -m venv --system-site-packages $(VENV) && grep -v '^torch==' requirements/dev.txt > $(VENV)/constraints.txt && \
	  $(PYTHON) -c 'import torch; print("torch==" + torch.__version__)' >> $(VENV)/constraints.txt; \
	else $(PYTHON) -m venv $(VENV) && cp requirements/dev.txt $(VENV)/constraints.txt; fi
	@echo "installing into $(VENV): about two minutes"
	$(PIP) --require-hashes --no-deps -r requirements/build.txt
	$(if $(HASHES),$(PIP) --require-hashes --no-deps --no-build-isolation -r $(HASHES))
	$(PIP) -c $(VENV)/constraints.txt torch
	$(PIP) -c $(VENV)/constraints.txt --no-build-isolation -e '.[dev]'
	$(PIP) --require-hashes --no-deps --no-compile --upgrade --target $(VENV)/transformer_engine -r requirements/transformer_engine.txt
	@touch $(STAMP)

# uv (https://docs.astral.sh/uv) asks the index for the hashes of every file of a version: those of all platforms.
hashes:  ## write requirements/hashes.txt and build.txt for the versions of requirements/dev.txt (needs uv)
	grep -v '^torch==' requirements/dev.txt | uv pip compile --quiet --no-deps --generate-hashes --no-annotate --no-header - -o build.hashes
	{ echo '# By `make hashes`: the versions of dev.txt with the hashes of their files, on all platforms, but for torch.'; \
	  cat build.hashes; } > requirements/hashes.txt
	{ echo '# By `make hashes`: what builds the package, which is installed first.'; \
	  awk '/^[a-zA-Z]/ {wanted = /^(setuptools|wheel)==/} wanted' build.hashes; } > requirements/build.txt
	rm build.hashes

train: setup  ## train the quickstart, or RECIPE=name (more in ARGS="key=value ...")
	$(BIN)/lightning-llm train recipe=$(RECIPE) $(ARGS)

sweep: setup  ## run every combination of the sweep RECIPE=sweep/name
	$(BIN)/lightning-llm train -m recipe=$(RECIPE) $(ARGS)

compare: setup  ## the verdict over the newest sweep, or over ARGS="RUN ..."
	$(BIN)/lightning-llm compare $(ARGS)

plan: setup  ## what RECIPE would do, without running it
	$(BIN)/lightning-llm plan $(if $(filter sweep/%,$(RECIPE)),-m) recipe=$(RECIPE) $(ARGS)

ui: setup  ## print the pages of the newest experiments, and run the MLflow UI on the local database
	@$(BIN)/python -m lightning_llm.tracking.mlflow.ui $(ARGS)

test: setup  ## the covering tests, CPU only: about 12 minutes on 2 quiet cores
	$(COMPILED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not full and not gpu" $(ARGS)

test-full: setup  ## all tests
	$(COMPILED) LAYOUT_STEPS=5 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu" $(ARGS)

chaos: setup  ## a hundred random faults, and a table of what came of them (ARGS="--seed 2 --faults 20")
	$(BIN)/python -m tests.chaos.campaign $(ARGS)

golden: setup  ## record the golden curves in tests/golden anew (ARGS="mxfp8 ...": some of them)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.golden.record $(ARGS)

frozen: setup  ## golden curves, hashes, plans, verdicts, keys of files, verbs and flags are the recorded ones: half a minute
	$(COMPILED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist load tests/golden/test_golden.py tests/frozen $(ARGS)

frozen-record: setup  ## record in tests/frozen what a change is meant to alter; the commit says why
	$(BIN)/python -m tests.frozen.record

# mypy cannot see through the package map of an editable install, so it checks the package as it would be installed.
lint: setup  ## ruff, hadolint and mypy
	$(BIN)/hadolint Dockerfile
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build && $(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --target build/types .
	cp -r benchmarks gpu_check build/types/
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p lightning_llm -p benchmarks -p gpu_check

format: setup  ## let ruff reformat and mend what it can
	$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

# Sphinx is not part of `make setup`: only this target needs it.
$(VENV)/.docs: $(STAMP) pyproject.toml
	$(PIP) -c $(VENV)/constraints.txt --no-build-isolation -e '.[docs]'
	@touch $@

docs: setup $(VENV)/.docs  ## build the documentation as HTML in build/docs, with warnings as errors
	$(BIN)/python -m sphinx -b html -W --keep-going -j auto -d build/doctrees docs build/docs $(ARGS)

bench: setup  ## the benchmark suite (ARGS="startup loader ...": some of it); results go to benchmarks/results/
	$(BIN)/python -m benchmarks $(ARGS)

# Offline, on a machine without .venv, the Python that has torch does; what else it lacks comes from wheels in carry/.
gpu-check:  ## what needs a GPU, under eleven minutes; a second call goes on (ARGS="speed ...": some of it)
	$(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m gpu_check $(ARGS)

release: setup  ## build wheel and sdist into dist/, with an SBOM (CycloneDX) and SHA256SUMS
	$(BIN)/python requirements/release.py dist

clean:  ## remove .venv and caches (outputs/ stays)
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache
