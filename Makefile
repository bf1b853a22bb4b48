# make demo | test | test-all | test-space | test-gpu | recording | clean — each does all it needs on a fresh machine.
PYTHON ?= python3
VENV ?= .venv
# Interpreters of the version matrix: the one on the path if it runs, else the newest that pyenv has.
find_python = $(shell for p in python$(1) $$(ls -d $$HOME/.pyenv/versions/$(1).*/bin/python 2>/dev/null | sort -rV); do \
	$$p -c '' 2>/dev/null && echo $$p && break; done)
PYTHON311 ?= $(call find_python,3.11)
PYTHON312 ?= $(call find_python,3.12)

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Python sources are not here: an editable install sees their changes.
INSTALL_SOURCES := pyproject.toml CMakeLists.txt $(wildcard build_backend/*.py \
	mosaic_gpu/runtime/native/*.cc mosaic_gpu/runtime/native/*.h)

.PHONY: demo test test-all test-space test-gpu recording install lint clean
.DEFAULT_GOAL := test

# The import hook of an editable install knows the packages of the time: reinstall when one comes or goes.
PACKAGES := $(sort $(shell find mosaic_gpu kernels -name __init__.py))
ifneq ($(PACKAGES),$(shell cat $(VENV)/.packages 2>/dev/null))
$(shell rm -f $(STAMP))
endif

$(STAMP): $(INSTALL_SOURCES)
	@test -n "$(PYTHON)" || { echo "no Python interpreter for $(VENV)"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test,dev]' $(if $(JAX),'$(JAX)')
	echo '$(PACKAGES)' > $(VENV)/.packages
	touch $@

install: $(STAMP)

demo: $(STAMP)
	$(BIN)/mosaic-gpu demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest --numprocesses auto

# Every supported JAX, tests marked slow included; those compile all kernels with the NVRTC of both CUDA versions.
test-all:
	$(MAKE) matrix VENV=.venv-jax0.10 PYTHON='$(PYTHON311)' JAX='jax==0.10.2'
	$(MAKE) matrix VENV=.venv-jax0.11 PYTHON='$(PYTHON312)' JAX='jax==0.11.2'
	$(MAKE) matrix VENV=.venv-jax0.12 PYTHON='$(PYTHON312)' JAX='jax>=0.12,<0.13'

.PHONY: matrix
matrix: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'nvidia-cuda-nvrtc-cu12>=12.9'
	$(BIN)/pytest --numprocesses auto -m 'not gpu and not space'

# Every config of the Blackwell kernels' search spaces compiled for both chips: hours, and the same with every JAX.
test-space: $(STAMP)
	$(BIN)/pytest --numprocesses auto -m space

test-gpu: $(STAMP)
	$(BIN)/pytest -m gpu

# What these tests simulate, compiled for `python -m tests.gpu.replay recording.zip` on a Hopper GPU; also where a test fails, as
# does the target then.
TESTS ?= $(addprefix tests/,ops pallas frontend layouts examples host_gpu codegen simulator)
recording: $(STAMP)
	rm -rf build/recording
	status=0; $(BIN)/python -m pytest -p tests.gpu.recording --record build/recording --numprocesses auto $(TESTS) || status=$$?; \
	$(BIN)/python -m tests.gpu.recording build/recording recording.zip && exit $$status

clean:
	rm -rf build dist .venv-jax* .mypy_cache .pytest_cache .ruff_cache
