# `make setup` needs Python 3.11+, make and a package registry; everything else follows from it. Where there is a C compiler,
# large copies get faster (docs/transfer.md).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: setup quickstart check format test test-fast endings clean

setup: .venv/.installed

.venv/.installed: pyproject.toml src/ductile/fabric/boxes.c
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

quickstart: setup
	$(BIN)/ductile rl @ examples/quickstart/rl.toml --cluster.auto-scheduler

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --warnings

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test: setup
	$(BIN)/python -m pytest

test-fast: setup
	$(BIN)/python -m pytest -m "not slow"

# 500 endings in virtual time and 40 with real processes and signals; about a quarter of an hour on two cores.
endings: setup
	ENDINGS_VIRTUAL=500 ENDINGS_REAL=40 $(BIN)/python -m pytest tests/end_to_end/test_endings.py -q -s

clean:
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis build dist
