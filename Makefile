# `make` lists the targets. Override with: make test PYTHON=python3.12 TORCH=2.12.0 PYTEST_ARGS="-x -k format"
PYTHON ?= python3
TORCH ?= 2.13.0
OLDEST_TRANSFORMERS ?= 5.17.0
PYTEST_ARGS ?=

VENV := .venv
OLDEST := .venv-oldest
PIP_INSTALL := bin/python -m pip install --quiet --disable-pip-version-check
# A process per core and a thread per process; tests of a file share its fixtures.
PYTEST := bin/python -m pytest --timeout=900 --numprocesses=auto --dist=loadfile
test test-oldest: export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-oldest docs lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## quantize all-MiniLM-L6-v2 to 5, 4, 3 and 2 bits, compare, save and reload
	$(VENV)/bin/python examples/demo.py

test: $(VENV)/.test lint ## ruff, then the whole test suite with doctests and notebooks
	$(VENV)/$(PYTEST) --nbmake --nbmake-timeout=600 $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.test ## the test suite on the oldest supported Transformers, without slow tests and notebooks
	$(OLDEST)/$(PYTEST) -m "not slow" $(PYTEST_ARGS)

docs: $(VENV)/.docs ## build the documentation into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

lint: $(VENV)/.test ## ruff check and ruff format --check
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

format: $(VENV)/.test ## let ruff mend what it can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean: ## remove the virtual environments and everything built or cached
	rm -rf $(VENV) $(OLDEST) site build dist .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An empty stamp file in the environment says what is installed in it; a change of pyproject.toml installs again.
.SECONDEXPANSION:
$(OLDEST)/.test: PINS := transformers==$(OLDEST_TRANSFORMERS)
$(VENV)/.demo $(VENV)/.test $(VENV)/.docs $(OLDEST)/.test: $$(@D)/.torch-$(TORCH) pyproject.toml
	@echo "Installing hf_kbit and its $(@F:.%=%) extra into $(@D) ..."
	@$(@D)/$(PIP_INSTALL) --editable ".[$(@F:.%=%)]" $(PINS)
	@touch $@

# pip prefers the wheel of the CPU index to PyPI's CUDA build, which is many times larger. --no-deps asks that index for torch
# alone, and waits only once where it cannot be reached (pip then takes what the others have); the rule above adds the rest.
$(VENV)/.torch-$(TORCH) $(OLDEST)/.torch-$(TORCH):
	@command -v $(PYTHON) >/dev/null || { \
	    echo "$(PYTHON) was not found; name a Python >= 3.10 with: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "hf_kbit needs Python >= 3.10, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	        "name another with: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(@D)
	@echo "Installing torch $(TORCH) into $(@D) ..."
	@$(@D)/$(PIP_INSTALL) --retries 1 --no-deps "torch==$(TORCH)" --extra-index-url https://download.pytorch.org/whl/cpu
	@touch $@
