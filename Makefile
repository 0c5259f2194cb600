# From a bare clone with python3 (3.10 or newer) and g++, no root:
#   make tune    set up .venv, then tune the forward kernels of head dim 128 for an A100
#   make test    set up .venv, then run the tests that need no GPU
#
# PYTHON=python3.12 picks the interpreter, VENV=path the environment, TUNE_ARGS and PYTEST_ARGS are passed on.

PYTHON ?= python3
VENV ?= .venv
GPU ?= a100
HEADDIM ?= 128
TUNE_ARGS ?=
PYTEST_ARGS ?=
# Two processes, each with whole files: kernels are compiled once for a file.
TEST_JOBS ?= 2

BIN = $(VENV)/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: tune test test-full sanitize lint format clean

tune: $(VENV)/.install
	$(BIN)/fa2gen tune --headdim $(HEADDIM) --gpu $(GPU) $(TUNE_ARGS)

test: $(VENV)/.install
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile -m "not slow" $(PYTEST_ARGS)

test-full: $(VENV)/.install
	FA2GEN_TEST_FULL=1 $(BIN)/python -m pytest $(PYTEST_ARGS)

# With a GPU, PyCUDA and a CUDA toolkit.
sanitize: $(VENV)/.install
	$(BIN)/python tests/gpu/sanitize.py

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	find templates fa2gen -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run --Werror

format: $(VENV)/.lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find templates fa2gen -name '*.cuh' -o -name '*.h' -o -name '*.cpp' | xargs $(BIN)/clang-format -i

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

# Debian ships venv without ensurepip: a python3 with pip but without python3-venv can still fill the environment.
$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || \
	    { echo 'error: $(PYTHON) is missing or older than 3.10; try make PYTHON=python3.11 ...' >&2; exit 1; }
	@if $(PYTHON) -c 'import ensurepip' 2>/dev/null; then \
	    $(PYTHON) -m venv $(VENV); \
	elif $(PYTHON) -m pip --version >/dev/null 2>&1 && $(PYTHON) -m venv --without-pip $(VENV); then \
	    $(PYTHON) -m pip --quiet --python $(BIN)/python install pip; \
	else \
	    echo 'error: $(PYTHON) has neither ensurepip nor pip, so no environment can be made;' \
	         'install python3-venv (Debian, Ubuntu), or give an interpreter that has it: make PYTHON=...' >&2; \
	    rm -rf $(VENV); exit 1; \
	fi
	@touch $@

# torch by itself and first: with it in place, pip keeps this build and does not look at newer, larger ones. It brings
# all that looking for nvcc needs, but for tomli.
$(VENV)/.torch: constraints.txt | $(VENV)/.venv
	@echo 'installing torch (a few minutes on a slow line) ...'
	$(PIP_INSTALL) torch 'tomli; python_version < "3.11"'
	@touch $@

$(VENV)/.install: pyproject.toml $(VENV)/.torch
	@if $(BIN)/python -c 'from fa2gen.compile.nvcc import find_nvcc; print("nvcc:", find_nvcc().path)' 2>/dev/null; then \
	    extras=test; \
	else \
	    echo 'nvcc: none found, installing one into $(VENV) (105 MB)'; extras=nvcc,test; \
	fi; \
	echo 'installing fa2gen ...'; \
	$(PIP_INSTALL) -e ".[$$extras]"
	@touch $@

$(VENV)/.lint: $(VENV)/.install
	$(PIP_INSTALL) -e '.[lint,test]'
	@touch $@
