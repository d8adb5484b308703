# Everything runs in .venv, which each target makes for itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAGES ?= 2
PEERS ?=
PEER_SCRIPT ?= ../shared/peers/peer.py
MODEL ?=
ARGS ?=
N ?= 100000
ROWS ?= all

# Tests start hundreds of processes that import the same modules: where this is set, each would compile them anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup serve chat test test-all test-other-cpu test-fast check demo clients race chaos histories guarded stubs clean

setup: $(VENV)/.ready

# torch first: the CPU build where it can be had, as any other is gigabytes more.
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m ppserve.supported
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python tools/install_torch.py
	@echo "what ppserve and its tests need besides: 0.4 GB to fetch, 1.5 GB on disk; this takes minutes"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# A model that answers questions: ARGS=--timings, and what else `ppserve chat --help` says.
chat: setup
	$(BIN)/ppserve fetch smollm2
	$(BIN)/python tools/chat.py --stages $(STAGES) $(ARGS)

serve: setup
	$(BIN)/ppserve serve --stages $(STAGES) $(ARGS)

# Tries once: the tests of a real model skip without it, and say so.
$(VENV)/.fetched: $(VENV)/.ready
	-$(BIN)/ppserve fetch smollm2
	touch $@

# Two workers. In the files' order, so that those with long tests are not left to one worker at the end.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder

# One of each kind, for every change. An hour is beyond any machine: what takes longer hangs.
test: setup $(VENV)/.fetched
	$(PYTEST) -m "not thorough" --session-timeout 3600 $(ARGS)

# Also what shows a promise a second time: for every day, by hand.
test-all: setup $(VENV)/.fetched
	$(PYTEST) --session-timeout 10800 $(ARGS)

# The kernels compiled for a weaker CPU than this one: haswell has AVX2 and no more, x86-64-v2 less.
CPU ?= haswell
test-other-cpu: setup
	tools/as_other_cpu.sh $(CPU) $(PYTEST) -m "not thorough" $(ARGS) tests/model/cpu tests/model/test_ladder.py

# For every save: no servers, no ranks, no long computations. A test that reaches the limit is to be marked slow.
test-fast: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup -m "not slow" --timeout 60 $(ARGS)

check: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/generate_stubs.py --check
	$(BIN)/python tools/make_command_line.py --check

demo: setup
	$(BIN)/python demo.py --force-cpu $(ARGS)

# Other people's clients, in environments of their own outside the tree; ARGS=--help says more.
clients: setup
	$(BIN)/python -m benchmarks.clients $(ARGS)

# Ours beside the programs built in PEERS by the script's own instructions; without PEERS ours alone.
race: setup
	$(BIN)/python benchmarks/race.py $(if $(PEERS),--peers $(PEERS) --peer-script $(PEER_SCRIPT)) \
		$(if $(MODEL),--model $(MODEL)) $(ARGS)

# `make chaos ROWS=3,7 ARGS=--short` takes minutes; all of it, hours.
chaos: setup
	$(BIN)/python -m benchmarks.chaos --rows $(ROWS) $(ARGS)

# 250 of them are in `make test`, 2,000 in `make test-all`; `make histories N=100000` takes 1.2 hours of one core.
histories: setup
	PPSERVE_HISTORIES=$(N) $(BIN)/pytest -q tests/head/engine/test_histories.py -k served $(ARGS)

# Kernels in memory whose ends must not be touched: 250 shapes are in `make test`, 100,000 an hour of one core.
guarded: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.model.cpu.guarded $(N) $(ARGS)

stubs: setup
	$(BIN)/python tools/generate_stubs.py

clean:
	rm -rf $(VENV) build *.egg-info
