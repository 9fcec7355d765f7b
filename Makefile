# `make demo` and `make test` need Python 3.11 or newer, make, and nothing else: each makes .venv and installs into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := runs/demo

# Let Python cache bytecode, because the tests and the demo start many processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test ci test-all test-lowest test-newest attack lint references docs package lock clean

demo: $(VENV)/.installed
	demo/run.sh $(BIN) $(DEMO)

# Start the test files in collection order, not those with the most tests first.
PYTEST = $(BIN)/python -m pytest -q -n auto --dist loadfile --no-loadscope-reorder

# Most tests run on one device, because programs for one device compile faster than those for eight.
# To run only some files, with their tests marked `ci`: make test TESTS="tests/metrics tests/tasks/test_glue_task.py"
TESTS ?=
UNUSED = not slow and not beam and not notebooks
test: lint
	BERTJAX_TEST_DEVICES=1 $(PYTEST) -m "not devices $(if $(TESTS),,and not ci) and $(UNUSED)" $(TESTS)

# What a pull request must pass: also the tests that take over two seconds, and those that need eight devices.
ci: lint
	BERTJAX_TEST_DEVICES=1 $(PYTEST) -m "not devices and $(UNUSED)"
	$(PYTEST) -m "devices and $(UNUSED)" $$(grep -rl --include='*.py' mark.devices tests)

test-all: lint $(VENV)/.installed-parity
	$(PYTEST)

# Takes hours; the same command resumes it. For a different seed: make attack SEED=1
SEED ?= 0
attack: $(VENV)/.installed-dev
	$(BIN)/python tests/attack/run.py --seed $(SEED) --log runs/attack-$(SEED).jsonl

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

# The pages that are generated from the parser and from the config classes.
references: $(VENV)/.installed-dev
	$(BIN)/python tests/references.py

# Strict: a dead link, a page outside of the navigation or a wrong name fails. `mkdocs serve` shows pages while you write.
docs: $(VENV)/.installed-docs
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(BIN)/mkdocs build --strict

# Builds wheel and sdist, checks them, and runs the installed wheel in an empty environment.
package: $(VENV)/.installed-release
	rm -rf build/package && $(BIN)/python -m build --outdir build/package .
	$(BIN)/twine check --strict build/package/*
	$(PYTHON) -m venv build/package/venv
	build/package/venv/bin/pip install -qq --disable-pip-version-check --constraint constraints.txt build/package/*.whl
	cd build && package/venv/bin/bertjax describe --config pretrain:size=tiny

# The tests with the lowest and with the newest versions that pyproject.toml admits, in environments of their own.
test-lowest: $(VENV)/.installed-release
	$(MAKE) test-versions NAME=lowest RESOLUTION=lowest-direct

test-newest: $(VENV)/.installed-release
	$(MAKE) test-versions NAME=newest RESOLUTION=highest

.PHONY: test-versions
test-versions:
	$(BIN)/uv venv --quiet --clear --seed --python $(PYTHON) build/$(NAME)
	$(BIN)/uv pip install --quiet --python build/$(NAME)/bin/python --resolution $(RESOLUTION) --editable '.[dev]'
	BERTJAX_TEST_DEVICES=1 build/$(NAME)/bin/python -m pytest -q -n auto --dist loadfile \
	  -m "not devices and $(UNUSED)"

# Writes the newest versions that pyproject.toml allows to constraints.txt, for all extras, platforms and Pythons.
lock: $(VENV)/.installed-release
	$(BIN)/uv pip compile --quiet --universal --upgrade --all-extras --no-annotate --no-header \
	  --output-file constraints.txt pyproject.toml

clean:
	rm -rf $(VENV) $(DEMO) build *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "bertjax needs Python 3.11 or newer, $(PYTHON) is older; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)

# --no-compile, because Python compiles modules when it imports them, and most are never imported.
INSTALL = $(BIN)/pip install -qq --disable-pip-version-check --no-compile --constraint constraints.txt --editable

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(INSTALL) .
	@touch $@

$(VENV)/.installed-parity: $(VENV)/.installed-dev
	$(INSTALL) ".[dev,parity,onnx,beam,notebooks]"
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) ".[dev]"
	@touch $@

$(VENV)/.installed-%: $(VENV)/.installed
	$(INSTALL) ".[$*]"
	@touch $@
