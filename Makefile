# make chat         talk with the demo model (plain `make` does the same)
# make test         run a sample of the tests, in a few minutes
# make test-all     run every test, whole
# make test-agents  let Claude Code, Codex and opencode do a job (installs them with npm)
# make lint         run ruff, import-linter and mypy
# make docs         build the documentation: site/index.html
# make bench        measure this machine
# make clients      compare this server and mlx_lm.server under many clients (ARGS=--help)
# make demo         train a new demo model in place of the package's, and judge it (40 minutes)
# make clean        remove .venv and all that was built
# Each makes .venv first, with uv where it is installed, else with python3: `chat` with what the
# program needs, the others with what development needs, too. PYTHON=... takes another Python.

BIN := .venv/bin
STAMP := .venv/.installed
DEV := .venv/.installed-dev

# On Linux the mlx wheel's own BLAS is 16 times slower than OpenBLAS. Where the system has none, the
# package scipy-openblas32 and a C compiler make one in .venv. The program finds both by itself.
SYSTEM_BLAS := $(firstword $(wildcard /usr/lib/*-linux-gnu/libopenblas.so.0 /usr/lib64/libopenblas.so.0))
OWN_BLAS := .venv/lib/mlxrunner/libopenblas.so
OPENBLAS = $(firstword $(SYSTEM_BLAS) $(wildcard $(CURDIR)/$(OWN_BLAS)))
RUN = $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS) OPENBLAS_NUM_THREADS=1)

.PHONY: chat help test test-all agents test-agents lint docs bench clients demo clean

chat: $(STAMP)
	@$(BIN)/mlxrunner chat

# The head of this file, up to its first empty line.
help:
	@sed -n '/^$$/q; s/^# //p' $(firstword $(MAKEFILE_LIST))

# A process per core, at most 8, and at least 3, since a test often waits for a program that it has
# started. One that has nothing left to do takes tests from another.
WORKERS := $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 3 ? 3 : n > 8 ? 8 : n)))
PYTEST = $(RUN) $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

test test-all: $(DEV)
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

test-agents: $(DEV) agents
	$(ALONE) env $(RUN) AGENTS=1 $(BIN)/python -m pytest --everything tests/server/agents/test_programs.py

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy

# The pages are then at site/index.html; a link that leads nowhere is an error.
docs: $(DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(DEV)
	$(RUN) $(BIN)/mlxrunner bench --vs mlx-lm

clients: $(DEV)
	$(RUN) PYTHONPATH=tests $(BIN)/python benchmarks/clients.py $(ARGS)

# It goes on from where it was stopped. The weights differ from those of the package, which come
# from several runs: see tools/train_demo.py.
demo: $(DEV)
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install -e ".[train]"
	$(BIN)/python tools/train_demo.py
	$(RUN) $(BIN)/python tools/eval_demo.py

define install
	@if command -v uv >/dev/null 2>&1; then \
	  uv pip install --quiet --python $(BIN)/python $(1); \
	else $(BIN)/python -m pip install --quiet --disable-pip-version-check $(1); fi
endef

$(STAMP): pyproject.toml tools/openblas_shim.c
	@echo "setting up .venv (once; a minute or two) ..."
	@if command -v uv >/dev/null 2>&1; then \
	  uv venv --quiet --allow-existing --python "$(or $(PYTHON),>=3.11)" .venv; \
	else \
	  python=$(or $(PYTHON),python3); \
	  $$python -c "import sys; sys.exit(sys.version_info < (3, 11))" || \
	    { echo "Python 3.11 or newer is needed, and $$python is $$($$python --version 2>&1);" \
	      "install uv, or try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }; \
	  $$python -m venv .venv; \
	fi
	$(call install,-e .)
ifeq ($(shell uname -s)$(SYSTEM_BLAS),Linux)
ifneq ($(shell command -v cc),)
	$(call install,scipy-openblas32)
	@mkdir -p $(dir $(OWN_BLAS))
	@folder=$$($(BIN)/python -c "import scipy_openblas32; print(scipy_openblas32.get_lib_dir())") && \
	  cc -O2 -shared -fPIC -o $(OWN_BLAS) tools/openblas_shim.c "-L$$folder" -l:libscipy_openblas.so \
	  "-Wl,-rpath,$$folder"
else
	@echo "note: without OpenBLAS everything is 16 times slower, and to build it takes a C compiler:" \
	  "install cc and run make again, or sudo apt-get install libopenblas0-pthread"
endif
endif
	@touch $(STAMP)

$(DEV): $(STAMP)
	@echo "installing what tests and documentation need (once) ..."
	$(call install,-e ".[dev]")
	@touch $(DEV)

clean:
	rm -rf .venv build dist site .mypy_cache .ruff_cache .hypothesis
