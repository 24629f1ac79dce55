# make demo | test | check | bench | report | drill.  Needs Python 3.11+, make and a C library; everything else goes into .venv.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# a further package index, such as PyTorch's CPU wheels: make demo EXTRA_INDEX=https://...
PIP_FLAGS := $(if $(EXTRA_INDEX),--extra-index-url $(EXTRA_INDEX))
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS)
STUDY ?= mini_sync
WORKERS ?= 2
KILLS ?= 50
JOBS ?= 2
# two OpenMP threads on two shared cores are slower than one: small kernels wait at barriers
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: demo test check bench report drill
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/suite run $(STUDY) --workers $(WORKERS)
	$(BIN)/suite report $(STUDY)

# FAST=1 leaves out the slow tests
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(if $(FAST),-m "not slow")

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

# what the tests do with a few kills, in full: a study whose workers, graders and launcher are killed, and its storage stopped
drill: $(VENV)/.installed-dev
	$(BIN)/python -m tests.drill --kills $(KILLS) --workers $(WORKERS)

report: $(VENV)/.installed
	$(BIN)/suite report $(STUDY)

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): about two minutes, once"
	$(PIP_INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), what tests need too: about three minutes, once"
	$(PIP_INSTALL) --editable ".[dev]"
	touch $(VENV)/.installed $@
