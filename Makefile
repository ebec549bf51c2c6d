# make demo   the main job once, on this machine, without a GPU
# make test   ruff, mypy --strict, import-linter, pytest
# make bench NAME=fault_to_step
# make soak   half an hour of faults under load; `make soak ARGS="--minutes 5 --seed 2"`
# make load   five minutes of requests while all GPUs and the provider come and go; `make load ARGS="--haproxy"`
# make clean

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
# `make demo ARGS="--base-port 7000"` hands options on.
ARGS   ?=

.PHONY: demo test redis lint bench soak load clean

demo: $(STAMP)
	$(BIN)/tidegate demo $(ARGS)

test: $(STAMP) lint redis
	$(BIN)/python tests $(ARGS)

# The loss of the head is tested with a real Redis. It is installed where that may be; elsewhere pytest skips that test
# by name, and with CI=true fails. RUNLEVEL=1 keeps Debian from starting it as a service, on Ray's own port.
redis:
	@command -v redis-server > /dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null && apt-get update -qq \
	       && RUNLEVEL=1 apt-get install -qq --yes --no-install-recommends redis-server > /dev/null; } \
	  || echo "note: no redis-server here; the test that kills the head is skipped"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(STAMP)
	$(BIN)/python benchmarks/run.py $(NAME)

soak: $(STAMP)
	$(BIN)/python -m benchmarks.soak $(ARGS)

load: $(STAMP)
	$(BIN)/python -m benchmarks.load $(ARGS)

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
	rm -rf $(VENV) demo-output soak-output load-output .mypy_cache .pytest_cache .ruff_cache .hypothesis
