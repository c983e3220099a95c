# Everything below needs Python 3.11 or newer, pip and make; the first target that needs it installs into .venv.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP = $(BIN)/python -m pip
# The engine runs one thread per service, so that timings do not depend on the machine's other work.
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow protos lint bench-contexts bench-lossless bench-drafting bench-kernels bench-plan bench-sparsity bench-speed bench-load bench-relevance bench-evaluate bench-world bench-telemetry chaos soak audit clean

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

lint: $(STAMP) audit ## Check style, types, protos, imports and known vulnerabilities
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

bench-sparsity: $(STAMP) ## Measure whether questions look at the evidence, and what that gains
	$(BIN)/python -m bench.sparsity

bench-world: $(STAMP) ## Score all tiny models on held-out videos
	$(BIN)/python -m bench.world.report

bench-plan: $(STAMP) ## Predict which way of decoding pays, and check it here
	$(BIN)/python -m bench.plan

bench-kernels: $(STAMP) ## Measure a step of the compiled kernel by rows and context length
	$(BIN)/python -m bench.kernels

bench-load: $(STAMP) ## Measure concurrent answers, and an answer beside a prefill
	$(BIN)/python -m bench.load

bench-speed: $(STAMP) ## Measure decoding speed against plain decoding and transformers
	$(BIN)/python -m bench.speed

bench-relevance: $(STAMP) ## Find the setting of visual relevance that tells fact words from filler best
	$(BIN)/python -m bench.relevance

bench-evaluate: $(STAMP) ## Compare drafters and acceptance policies: accepted length, speed, facts
	$(BIN)/python -m bench.evaluate --suite quick

bench-contexts: $(STAMP) ## Measure time to first token cold, hot and restored from Redis
	$(BIN)/python -m bench.contexts

bench-telemetry: $(STAMP) ## Measure what recording a trace costs
	$(BIN)/python -m bench.telemetry

chaos: $(STAMP) ## Kill, freeze and cut everything under load; every answer is right or may be asked again
	$(BIN)/python -m bench.chaos

soak: $(STAMP) ## Half an hour of mixed load; memory must stay flat
	$(BIN)/python -m bench.soak

audit: $(STAMP) ## Ask PyPI for known vulnerabilities of what is installed
	$(BIN)/pip-audit --skip-editable

clean: ## Remove caches and build products; .venv stays
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
