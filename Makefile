PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
	--no-loadscope-reorder
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: demo test test-more lint format wheel clean help

demo: $(VENV)/.base ## run the main job on a tiny bundled model
	$(BIN)/dakrun demo

test: lint ## lint, then run the tests (the gpu ones where there is a GPU)
	$(PYTEST) -m "not full"

test-more: $(VENV)/.dev ## run what test leaves out: all kernels and combinations, random examples
	HYPOTHESIS_PROFILE=full $(PYTEST) -m "full or hypothesis"

lint: $(VENV)/.dev ## ruff and mypy, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(VENV)/.dev ## format the code and apply ruff's safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

wheel: $(BIN)/pip ## build the wheel into dist/
	$(BIN)/python -m pip wheel --no-deps --wheel-dir dist .

clean: ## remove the virtual environment, caches and build outputs
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find dakrun tests -name __pycache__ -type d -prune -exec rm -rf {} +

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BIN)/pip:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.base: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install -e .
	touch $@

$(VENV)/.dev: pyproject.toml | $(BIN)/pip
	$(BIN)/python -m pip install -e '.[dev,plot,compile]'
	touch $(VENV)/.base $@
