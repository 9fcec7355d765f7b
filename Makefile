# `make demo` and `make test` need Python 3.11 or newer, make, and nothing else: each makes .venv and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo

# What Python compiles is kept for the next process, of which there are many.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all attack lint clean

demo: $(VENV)/.installed
	demo/run.sh $(BIN) $(DEMO)

# In the order of files, of which those that take longest come first, not those with the most tests.
PYTEST = $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

# Programs for one device compile faster than those for eight.
test: lint
	$(PYTEST) -m "devices and not slow and not beam" $$(grep -rl --include='*.py' mark.devices tests)
	BERTJAX_TEST_DEVICES=1 $(PYTEST) -m "not devices and not slow and not beam"

test-all: lint $(VENV)/.installed-parity
	$(PYTEST)

# Hours; the same command goes on where it was stopped. Another seed: make attack SEED=1
SEED ?= 0
attack: $(VENV)/.installed-dev
	$(BIN)/python tests/attack/run.py --seed $(SEED) --log runs/attack-$(SEED).jsonl

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "bertjax needs Python 3.11 or newer, $(PYTHON) is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# Python compiles what it imports; most of what is installed it never does.
INSTALL = $(BIN)/pip install -qq --disable-pip-version-check --no-compile --constraint constraints.txt --editable

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) .
	@touch $@

$(VENV)/.installed-parity: $(VENV)/.installed-dev
	$(INSTALL) ".[dev,parity,beam]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) ".[dev]"
	@touch $@
