# `make quickstart` and `make test` are the two commands of the README; both set up what they need.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# One thread per worker, and threads that sleep instead of spinning: spinning threads were seen 15x slower on busy cores.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: quickstart test check format clean

$(BIN)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=24"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@

quickstart: $(BIN)/.installed
	$(BIN)/cohort study run quickstart

test: $(BIN)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(BIN)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache
