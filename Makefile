# Needs Python 3.11 or newer and, on Linux, a C++ compiler; everything else is installed into .venv.
#
## make quickstart   set up, and train the shipped model: a few minutes the first time, one after that
## make test         set up, and run the tests, on up to four cores
## make test-fast    set up, and run the tests of the mathematics, the learner and the sampler: under a minute
## make test-gpu     set up, and run the tests that a GPU computes: for changes of what computes on one
## make campaigns    set up, and run what takes longer: benchmarks in small, kills, made-up files, many examples
## make lint         ruff, pyright, import-linter, the limits of tests/density_check.py, and phrases that are not plain English
## make docs         the manual, as a website in build/manual
## make bench        all measurements, about an hour, into benchmarks/README.md
## make evidence     the runs of docs/evidence.md: hours on two cores
## make setup        set up only: .venv with the package and its tools
## make constraints  take the newest versions that pyproject.toml allows into constraints.txt
## make clean        remove .venv, caches and builds; outputs/ stays
##
## ARGS='...'        handed on: make quickstart ARGS='--set run.seed=1', make test ARGS='-k loss'
## PYTHON=...        the Python that .venv is made from; found if left out
## EXTRA=...         MLX's Linux backend: cpu, cuda12 or cuda13; found if left out (after make clean)

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
# A process a core; each takes about a gigabyte. Each begins with its own stretch of the files, so that what a file's
# tests share is made once, and takes from the others when it is done.
SIDE_BY_SIDE := --numprocesses auto --maxprocesses 4 --dist worksteal
FAST := tests/grpo_fn/algorithm tests/grpo_fn/rollout tests/grpo_fn/learner/test_update.py tests/grpo_fn/learner/test_state.py
# The core, and what of the shell asks for the device.
ON_GPU := tests/grpo_fn $(addprefix tests/runners/,machine/test_gpu_programs.py machine/test_startup.py \
	engines/test_local_engine.py inference/test_inference_model.py models/test_loaded_model.py training/test_gradients.py)
# Files of properties: with HYPOTHESIS_PROFILE=campaign each is tried on some hundred to some thousand examples.
PROPERTIES := tests/grpo_fn/algorithm tests/grpo_fn/learner/test_packing.py tests/grpo_fn/learner/test_splits.py \
	tests/grpo_fn/test_compiled.py tests/grpo_fn/test_trees.py tests/runners/config/test_config_junk.py
EXTRA ?=
# Python keeps what it has compiled, also where the environment says otherwise: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=
PYTHON ?= $(shell for name in python3 python3.14 python3.13 python3.12 python3.11; do \
	if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then echo $$name; break; fi; done)
# The versions that the tests run with.
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
# constraints.txt is made with the oldest Python: what supports it supports the newer ones as well.
OLDEST ?= python3.11
TORCH ?= torch==2.13.0
# What exists on one platform alone, in a wheel of its own, is not constrained: its owner names the version.
ONE_PLATFORM := mlx-(cpu|cuda|metal)|nvidia-|cuda-|triton
BENCHMARKS := first_update rollout serving http_serving learner peers real_quant memory ranks mechanisms quickstart
EVIDENCE := real_model staleness

# Exit code 1 where a BLAS is wanted and there is none.
HAS_BLAS = $(BIN)/python -c 'from runners.machine.startup import load_blas; import sys; \
	sys.exit(load_blas().reason == "no OpenBLAS or MKL was found")'

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-fast test-gpu campaigns lint docs bench evidence setup constraints clean

help:
	@sed -n 's/^## \{0,1\}//p' $(firstword $(MAKEFILE_LIST))

quickstart: $(VENV)/.ready
	$(BIN)/grpo-run quickstart $(ARGS)

test: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(ARGS)

test-fast: $(VENV)/.ready-dev
	$(BIN)/python -m pytest $(SIDE_BY_SIDE) $(FAST) $(ARGS)

# Each file in a process of its own: a fault of a GPU ends all that its process computes later.
test-gpu: $(VENV)/.ready-dev
	$(BIN)/python -m tests.file_by_file $(ON_GPU) $(ARGS)

# One process: benchmarks and kills compare times and sizes.
campaigns: $(VENV)/.ready-dev
	$(BIN)/python -m pytest tests/campaigns $(ARGS)
	HYPOTHESIS_PROFILE=campaign $(BIN)/python -m pytest $(SIDE_BY_SIDE) $(PROPERTIES) $(ARGS)

lint: $(VENV)/.ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.density_check
	$(BIN)/python -m tests.plain_english

# A link that leads nowhere, or a page that the navigation lacks, ends it with an error.
docs: $(VENV)/.ready-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)
	@echo "open build/manual/index.html, or, with the search: $(BIN)/mkdocs serve"

bench: $(VENV)/.ready-bench
	for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name $(ARGS) || exit 1; done
	$(BIN)/python -m benchmarks.report

evidence: $(VENV)/.ready-bench
	for name in $(EVIDENCE); do $(BIN)/python -m benchmarks.evidence.$$name $(ARGS) || exit 1; done

setup: $(VENV)/.ready-dev

constraints:
	@scratch=$$(mktemp -d) && trap 'rm -rf "$$scratch"' EXIT && python="$$scratch/bin/python" && \
	echo "installing the newest versions for $$($(OLDEST) --version): a few minutes" && \
	$(OLDEST) -m venv "$$scratch" && \
	"$$python" -m pip install --quiet --editable '.[cpu,math,tasks,vlm,dashboards,bench,docs,peers,dev]' '$(TORCH)' && \
	"$$python" -m pip freeze --exclude-editable > "$$scratch/all" && \
	{ echo "# What the tests run with, on every platform: made by \`make constraints\`, used by make and CI."; \
		grep -Ev '^($(ONE_PLATFORM))' "$$scratch/all" | sed 's/+.*//'; } > constraints.txt

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The backend that was chosen is kept in .venv/.extra, so that a later set-up cannot mix two of them.
$(VENV)/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer was found; PYTHON=... names one" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip --upgrade
	@extra="$(EXTRA)"; \
	test -n "$$extra" || extra=$$(cat $(VENV)/.extra 2>/dev/null || true); \
	if test -z "$$extra" && test "$$(uname -s)" = Linux; then \
		extra=cpu; \
		cuda=$$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA[A-Za-z ]*Version: *\([0-9][0-9]*\).*/\1/p' | head -n 1); \
		if test "$${cuda:-0}" -ge 13; then extra=cuda13; elif test "$${cuda:-0}" -eq 12; then extra=cuda12; fi; \
	fi; \
	echo "installing grpo_fn$${extra:+ for $$extra} into $(VENV): a minute or two"; \
	$(INSTALL) --editable ".$${extra:+[$$extra]}" && echo "$$extra" > $(VENV)/.extra
	@$(HAS_BLAS) || if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
		echo "installing OpenBLAS: apt-get install libopenblas0-pthread"; \
		apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
			apt-get -qq install -y --no-install-recommends libopenblas0-pthread >/dev/null || true; \
	fi
	@$(HAS_BLAS) || if test "$$(uname -m)" = x86_64; then \
		echo "installing Intel's MKL into $(VENV), as there is no OpenBLAS: pip install mkl"; \
		$(BIN)/python -m pip install --quiet mkl || true; \
	fi
	@$(BIN)/python -c 'from runners.machine.startup import prepare; [print(line) for line in prepare().notices]'
	@touch $@

$(VENV)/.ready-bench: $(VENV)/.ready
	@echo "installing what the measurements are drawn and compared with"
	@$(INSTALL) --editable ".[bench,peers]"
	@touch $@

$(VENV)/.ready-docs: $(VENV)/.ready
	@echo "installing what the manual is built with"
	@$(INSTALL) --editable ".[docs]"
	@touch $@

$(VENV)/.ready-dev: $(VENV)/.ready
	@echo "installing the tools for tests and checks"
	@$(INSTALL) --editable ".[dev]"
	@touch $@
