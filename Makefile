# Works with GNU make 3.81 and later (the one of macOS included) and a POSIX shell.

VENV = .venv
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
PYTHON =
PYTEST_ARGS =
FAULTS_ARGS =
# Where pip looks for torch beside its own index. On Linux that one has CUDA builds of several GB; name an index of
# CPU builds here to do without.
TORCH_INDEX_URL =

.DEFAULT_GOAL = help
.PHONY: help setup demo test test-fast test-faults lint format bench-ingest bench-record bench-engine clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv with everything in it

$(STAMP): pyproject.toml constraints.txt
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
	  for candidate in python3 python3.11 python3.12 python3.13; do \
	    if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then \
	      python=$$candidate; break; \
	    fi; \
	  done; \
	fi; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.11, 3.12 or 3.13 is needed; install one or name it: make setup PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi; \
	echo "making $(VENV) with `$$python --version`; this takes several minutes, most of them for torch"; \
	$$python -m venv $(VENV)
	@echo "installing torch"
	@set --; \
	if [ -n "$(TORCH_INDEX_URL)" ]; then \
	  set -- --extra-index-url "$(TORCH_INDEX_URL)"; \
	fi; \
	$(BIN)/python -m pip install -qq --disable-pip-version-check --retries 1 --no-deps -c constraints.txt "$$@" torch
	@echo "installing the project and what it needs"
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(STAMP)
	@echo "Done. Next: make demo, or . $(BIN)/activate and blend --help (without activating: $(BIN)/blend)"

demo: $(STAMP) ## run a real mixed batch on this machine, from S3 and Postgres to answers in SQL
	@$(BIN)/blend demo

test: $(STAMP) ## run every test; PYTEST_ARGS adds options
	$(BIN)/pytest -m "not bench" $(PYTEST_ARGS)

test-fast: $(STAMP) ## run the tests that start no service
	$(BIN)/pytest -m "not bench and not slow" tests/unit $(PYTEST_ARGS)

test-faults: $(STAMP) ## kill every component 50 times in all while jobs run; FAULTS_ARGS="--seed 7" repeats a run
	@PYTHONPATH=tests $(BIN)/python -m faults $(FAULTS_ARGS)

lint: $(STAMP) ## check format, lint, types and import rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the code in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench-ingest: $(STAMP) ## measure how fast request files are read
	@$(BIN)/blend bench ingest

bench-record: $(STAMP) ## measure how fast results are recorded
	@$(BIN)/blend bench record

bench-engine: $(STAMP) ## measure the engine under each admission policy
	@$(BIN)/blend bench engine

clean: ## remove .venv and caches; the state of the services in .blend stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
