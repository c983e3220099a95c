# Everything below needs Python 3.11 or newer, pip and make; the first target that needs it installs into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP = $(BIN)/python -m pip
# The engine runs one thread per service, so that timings do not depend on the machine's other work.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow protos lint bench-lossless bench-drafting bench-speed clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMP) ## Create .venv with everything (again after pyproject.toml changed)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=...")'
	@echo "installing Foveate with its engine and tools into $(VENV); the first time this takes some minutes"
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --disable-pip-version-check -e '.[engine,dev]'
	@touch $@

demo: $(STAMP) ## Start a stack with the tiny models and ask three questions about a sample video
	@$(BIN)/python -m bench.demo

test: $(STAMP) ## Run all tests that need no GPU and no patience
	$(BIN)/python -m pytest -q

test-slow: $(STAMP) ## Run the longer checks
	$(BIN)/python -m pytest -q -m slow

protos: $(STAMP) ## Generate foveate/v1 from protos/
	PYTHON=$(BIN)/python scripts/generate_protos.sh

lint: $(STAMP) ## Check style, types, protos and imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/buf lint protos
	$(BIN)/lint-imports
	@fresh=$$(mktemp -d) && trap 'rm -rf "$$fresh"' EXIT && mkdir -p "$$fresh/foveate/v1" && \
	  PYTHON=$(BIN)/python scripts/generate_protos.sh "$$fresh" && \
	  diff -r -x __pycache__ foveate/v1 "$$fresh/foveate/v1" && echo "stubs are fresh" || \
	  { echo "foveate/v1 is not what protos/ gives: run make protos"; exit 1; }

bench-lossless: $(STAMP) ## Compare drafted answers with plain decoding and with transformers
	$(BIN)/python -m bench.lossless

bench-drafting: $(STAMP) ## Measure acceptance by budget, draft length and selection
	$(BIN)/python -m bench.drafting

bench-speed: $(STAMP) ## Measure decoding speed against plain decoding and transformers
	$(BIN)/python -m bench.speed

clean: ## Remove caches and build products; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
