# make install   environment in .venv        make demo   train with and without compression, compare
# make test      the whole test suite         make lint   style        make types   mypy
# make bench     the measured tables (root)   make clean

PYTHON ?= python3
BIN := .venv/bin

.PHONY: install test demo lint types bench clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt torch
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

test: install
	$(BIN)/python -m pytest

demo: install
	$(BIN)/python examples/demo.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

bench: install
	$(BIN)/python -m benchmarks.codecs --json benchmarks/results/codecs.json
	$(BIN)/python -m benchmarks.allreduce --json benchmarks/results/allreduce.json

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis demo_out
