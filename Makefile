# Needs Python 3.11 or newer, git and make. Everything is installed into .venv, at the versions in constraints.txt.
PYTHON ?= python3
# Parallel test processes: one per core of a small machine; 0 for none.
WORKERS ?= 2
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# One thread per process: the tests' tensors are tiny, and threads of several workers would fight over the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: demo test test-slow test-all lint bench soak browser dist docs clean
.NOTPARALLEL:

demo: $(VENV)/.installed
	$(BIN)/holdfast demo

test: lint
	$(PYTEST)

# What .ci/run runs after `make test`: all slow tests but those that take minutes each.
test-slow: $(VENV)/.installed-dev
	$(PYTEST) -m "slow and not long"

# Every test there is, for a nightly run.
test-all: lint
	$(PYTEST) -m "slow or not slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

bench: $(VENV)/.installed
	$(BIN)/holdfast bench

# Kills, freezes, cut connections, full disks and restarts of a run, a sweep and a federation: docs/reliability.md. Under an hour on two
# quiet cores. SOAK="--seed 3 --kills 20 --only run" changes what is done; full disks need root, and are left out otherwise.
SOAK ?=
soak: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.soak $(SOAK)

# For screenshots and for the tests of the page in a browser; without it those tests are skipped.
browser:
	@if command -v chromium || command -v chromium-browser || command -v google-chrome; then echo "there is a browser already"; \
	elif command -v apt-get >/dev/null 2>&1; then \
		if [ "$$(id -u)" = 0 ]; then apt-get update && apt-get install -y --no-install-recommends chromium; \
		else sudo apt-get update && sudo apt-get install -y --no-install-recommends chromium; fi; \
	else echo "install Chromium or Chrome by your system's own means, or name the program in HOLDFAST_CHROMIUM"; exit 1; fi

# A wheel and a source archive in dist/, both checked. Built with the pinned setuptools of .venv, so nothing is downloaded.
dist: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*

# The documentation site, in site/. A broken link or anchor, or a notebook that fails, fails the build.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 OMP_NUM_THREADS=1 $(BIN)/python -m mkdocs build --strict

# Leaves runs/ alone: results are not ours to throw away.
clean:
	rm -rf $(VENV) build dist site holdfast.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("holdfast needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing holdfast into $(VENV); the first time takes a few minutes."
	$(PIP) -e .
	@touch $@

# With the development tools; this contains the plain install, so it satisfies both stamps.
$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "Installing holdfast and its development tools into $(VENV); the first time takes a few minutes."
	$(PIP) -e '.[dev]'
	@touch $(VENV)/.installed $@
