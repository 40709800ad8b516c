# make chat: talk with the demo model.  make lint: ruff, import-linter and mypy.  make bench: measure this machine.
# make test: a sample of the tests, in a few minutes.  make test-all: every test, whole.
# make test-agents: let Claude Code, Codex and opencode do a job (installs them with npm).
# make docs: build the documentation into site/.
# Each makes .venv first, with uv where it is installed, else with venv and pip.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

# On Linux the mlx wheel's own BLAS is about 40 times slower than OpenBLAS: use that when the
# machine has it.
OPENBLAS := $(firstword $(wildcard /usr/lib/*-linux-gnu/libopenblas.so.0 /usr/lib64/libopenblas.so.0))
ifneq ($(OPENBLAS),)
RUN := LD_PRELOAD=$(OPENBLAS) OPENBLAS_NUM_THREADS=1
else ifeq ($(shell uname -s),Linux)
HINT := @echo "note: without OpenBLAS everything is much slower; get it with:" \
  "sudo apt-get install libopenblas0-pthread"
endif

.PHONY: chat test test-all agents test-agents lint docs bench demo clean

chat: $(STAMP)
	$(HINT)
	@$(RUN) $(BIN)/mlxrunner chat

# A process per core, at most 8, and at least 3, since a test often waits for a program that it has
# started. One that has nothing left to do takes tests from another.
WORKERS := $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? 3 : n > 8 ? 8 : n)))
PYTEST = $(RUN) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

test test-all: $(STAMP)
	$(HINT)
	$(PYTEST) $(ARGS)

test-all: ARGS = --everything

# The coding agents themselves, of tests/server/agents/package.json, in build/agents (1 GB).
agents: build/agents/node_modules
build/agents/node_modules: tests/server/agents/package.json
	mkdir -p build/agents
	cp $< build/agents
	npm install --prefix build/agents --no-audit --no-fund
	touch $@

# On Linux they get a network of their own, where nothing but this machine can be reached.
ALONE = $(shell command -v ip >/dev/null && unshare -rn true 2>/dev/null && echo unshare -rn sh -c \'ip link set lo up \&\& exec \"\$$@\"\' --)

test-agents: $(STAMP) agents
	$(ALONE) env $(RUN) AGENTS=1 $(BIN)/python -m pytest --everything tests/server/agents/test_programs.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# The pages are then at site/index.html; a link that leads nowhere is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(STAMP)
	$(HINT)
	$(RUN) $(BIN)/mlxrunner bench --vs mlx-lm

# Train the demo model again (about 40 minutes on two cores) and judge it. It goes on from where it
# was stopped.
demo: $(STAMP)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -e ".[train]"
	$(BIN)/python tools/train_demo.py
	$(RUN) $(BIN)/python tools/eval_demo.py

$(STAMP): pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	  { echo "Python 3.11 or newer is needed, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	    "try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "setting up .venv (once; a minute or two) ..."
	@if command -v uv >/dev/null 2>&1; then \
	  uv venv --quiet --allow-existing --seed --python $(PYTHON) .venv && \
	    uv pip install --quiet --python $(BIN)/python -e ".[dev]"; \
	else \
	  $(PYTHON) -m venv .venv && \
	    $(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"; \
	fi
	@touch $(STAMP)

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .hypothesis
