# Everything a fresh machine needs: Python 3.11+, its venv module, make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN ?= runs/demo
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: setup setup-dev demo test lint clean

setup: $(VENV)/.installed          ## make .venv and install perilune in it
setup-dev: $(VENV)/.installed-dev  ## the same with linters, type checker and test tools

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "python: expected 3.11 or newer, got $$($(PYTHON) -V 2>&1); install one or say make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "python: expected the venv module; on Debian or Ubuntu do: apt-get install python3-venv"; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[report]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@ $(VENV)/.installed

demo: setup      ## train the nano model on this machine's own Python library and look at it
	$(BIN)/perilune train nano --out $(RUN) --overwrite

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint       ## lint, types, import layers, tests
	$(BIN)/pytest -n 2 -m "not gpu"

clean:
	rm -rf $(VENV) build dist
