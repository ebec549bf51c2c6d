# make demo   the main job once, on this machine, without a GPU
# make test   ruff, mypy --strict, import-linter, pytest
# make bench NAME=fault_to_step
# make clean

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# `make demo ARGS="--base-port 7000"` hands options on.
ARGS   ?=

.PHONY: demo test lint bench clean

demo: $(STAMP)
	$(BIN)/tidegate demo $(ARGS)

test: $(STAMP) lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(NAME)

# torch first and by pip: where a CPU build lies on the machine, `torch==2.13.0` takes it; otherwise PyPI's is fetched.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $$($(PYTHON) --version) is too old, tidegate needs 3.11 or newer"; \
	       echo "hint: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[demo,dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) demo-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
