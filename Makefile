# SPDX-License-Identifier: Apache-2.0
# The environment lies in .venv, or where PDMUX_VENV says. ARGS reaches the command: make test ARGS="-k policy"
PYTHON ?= python3
PDMUX_VENV ?= .venv
export PDMUX_VENV
VENV_PYTHON = $(PDMUX_VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help env demo test docs lint bench-cpu clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo '  ARGS="..." is handed to the command; PDMUX_VENV=FOLDER puts the environment elsewhere than .venv'

env:  ## make, repair or reuse the virtual environment (about two minutes the first time)
	@$(PYTHON) .ci/setup_env.py >&2

demo: env  ## see prefill and decode share the CPU on a small model
	@$(VENV_PYTHON) -m vllm_pdmux demo $(ARGS)

test: env  ## run the tests that need no GPU
	@$(VENV_PYTHON) -m pytest tests/cpu $(ARGS)

docs: env  ## build the documentation's site in site/; a dead link or anchor fails it
	@$(VENV_PYTHON) -m mkdocs build $(ARGS)

bench-cpu: env  ## measure the hand-over between the lanes
	@$(VENV_PYTHON) benchmarks/handover.py $(ARGS)

# An environment without the tools still finds what does not compile.
SOURCE = vllm_pdmux tests benchmarks docs .ci
lint: PY = $(if $(wildcard $(VENV_PYTHON)),$(VENV_PYTHON),$(PYTHON))
lint:  ## ruff and mypy where they are installed, else compile every file
	@if $(PY) -c "import mypy, ruff" 2>/dev/null; \
	then $(PY) -m ruff check $(SOURCE) && $(PY) -m ruff format --check $(SOURCE) && $(PY) -m mypy; \
	else echo "ruff and mypy are not installed: compiling only"; $(PY) -m compileall -q $(SOURCE); fi

clean:  ## remove caches and build leftovers; keeps the environment and the demo model
	rm -rf build dist site *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find vllm_pdmux tests benchmarks docs .ci -name __pycache__ -type d -prune -exec rm -rf {} +
