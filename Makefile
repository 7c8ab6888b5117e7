# Command one: `make demo`. Command two: `make test`. Both make .venv and install what they need, once: the demo what users
# need, the tests also what developers need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
INSTALLED_DEV := $(VENV)/installed-dev
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Each rank imports the tests and the package anew: it should not compile them anew, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast check install clean

demo: $(INSTALLED)
	$(BIN)/shardwise demo

test: $(INSTALLED_DEV) check
	$(BIN)/python -m pytest -q

test-fast: $(INSTALLED_DEV)
	$(BIN)/python -m pytest -q -m "not slow"

check: $(INSTALLED_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(INSTALLED_DEV)

# Installed again only when what is installed changes, so that everything works offline afterwards. The build tools come
# from the same pip, without the isolated environment that would be downloaded for every build.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "Shardwise needs Python 3.11 or newer; try: make PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP_INSTALL) "setuptools>=77"
	$(PIP_INSTALL) --no-build-isolation -e ".[plots]"
	@touch $@

$(INSTALLED_DEV): $(INSTALLED)
	$(PIP_INSTALL) --no-build-isolation -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
