# Two commands: `make demo` and `make test`. They need Python 3.11 or newer, make and a package index.

VENV := .venv
BIN := $(VENV)/bin
DOCS := $(VENV)/docs
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
OLD := import sys; sys.exit(sys.version_info < (3, 11))

# The first interpreter that is new enough; set PYTHON to choose another.
PYTHON ?= $(shell for name in python3.11 python3.12 python3.13 python3 python; do \
	if $$name -c '$(OLD)' >/dev/null 2>&1; then echo $$name; break; fi; done)

# One thread per process: tests and workers run side by side, and results do not depend on the count.
export OMP_NUM_THREADS := 1
# Bytecode is kept whatever the environment says: the tests start many processes.
export PYTHONDONTWRITEBYTECODE :=

# One process more than the two cores that this was tuned for: the longest tests mostly wait. A
# file's tests share their fixtures, so they stay together.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -rs -m "not slow" \
	-p no:anyio -p no:benchmark  # which no test uses

.PHONY: help demo test alltests coverage check docs lock clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.pliant ## run the main job on the embedded digits
	@$(BIN)/pliant demo

# Side by side, as the checks use one core.
test: $(VENV)/.pliant $(VENV)/.dev ## run the checks and every test that is not marked slow
	@$(MAKE) --no-print-directory -j 2 check alltests

alltests: $(VENV)/.pliant $(VENV)/.dev
	@echo "· tests"
	@$(PYTEST)

coverage: $(VENV)/.pliant $(VENV)/.dev ## run the same tests; fail if they cover too little
	@$(PYTEST) --cov --cov-report=term

check: $(VENV)/.pliant $(VENV)/.dev ## format, lint, types and layers
	@echo "· ruff, mypy, import-linter"
	@$(BIN)/ruff format --quiet --check . || { echo "run \`$(BIN)/ruff format\`" >&2; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-logo

docs: $(DOCS)/.made ## build the site of docs/ into site/
	@$(DOCS)/bin/zensical build --clean --strict

lock: $(VENV)/.pliant $(VENV)/.dev ## write the lock files anew from what .venv holds
	@$(BIN)/python requirements/lock.py

clean: ## remove .venv and caches; runs and data stay
	@rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage* dist site
	@find src tests requirements -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is touched when its step is done, so that a second run installs nothing.
$(VENV)/.made:
	@if ! $(or $(PYTHON),false) -c '$(OLD)' 2>/dev/null; then \
		echo "pliant needs Python 3.11 or newer: install it, or name it with \`make PYTHON=…\`" >&2; exit 1; fi
	@echo "· $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# torch first and alone: the index decides which build fits this machine (see docs/adr/0002).
$(VENV)/.torch: requirements/torch.txt $(VENV)/.made
	@echo "· torch (the largest part; this can take minutes)"
	@$(PIP) -r $<
	@touch $@

$(VENV)/.lock: requirements/lock.txt $(VENV)/.torch
	@echo "· libraries of $<"
	@$(PIP) --no-deps --require-hashes -r $<
	@touch $@

$(VENV)/.pliant: pyproject.toml $(VENV)/.lock
	@echo "· pliant itself"
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

$(VENV)/.dev: requirements/lock-dev.txt $(VENV)/.lock
	@echo "· tools of $<"
	@$(PIP) --no-deps --require-hashes -r $<
	@touch $@

# An environment of its own: what builds the site has nothing to do with what trains.
$(DOCS)/.made: requirements/lock-docs.txt $(VENV)/.made
	@echo "· zensical, of $<"
	@$(BIN)/python -m venv $(DOCS)
	@$(DOCS)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --require-hashes -r $<
	@touch $@
