# The front door. Every target makes what it needs first; a second call finds it done.
#   make build   virtual environment and compiled module
#   make test    C++ tests (ctest), then the Python tests (pytest); PYTEST_ARGS="-k ring" narrows them
#   make lint    ruff and clang-format, exactly as in CI
#   make demo    adaptive against fixed draft lengths on real text
#   make bench   host cost of a round; BENCH=benchmarks/bench_verify.py: its device time
#   make gpu-check   everything that needs a GPU: tests, benchmarks, compute-sanitizer; OUT=folder
#
# PYTHON is the interpreter to start from, VENV the environment's folder. torch: TORCH_SPEC if given
# (TORCH_SPEC=torch==2.14.1), else the one that PYTHON can already import, else the version below. A
# PYTHON of a virtual environment counts as one without torch: what that has installed, no other
# environment sees.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH ?= benchmarks/bench_controller.py
DEFAULT_TORCH := torch==2.13.0

BIN := $(VENV)/bin
CTEST_BUILD := build/ctest
# For the tools that pip installs: cmake, ninja, clang-format.
export PATH := $(abspath $(BIN)):$(PATH)
# Python runs from here import the working tree, whatever else is installed.
unexport PYTHONPATH

NATIVE_SOURCES := CMakeLists.txt setup.py $(wildcard cmake/*.cmake csrc/core/*.h csrc/cpu/* csrc/cuda/* csrc/binding/*)
CPP_FILES := $(wildcard csrc/*/*.h csrc/*/*.cpp csrc/*/*.cu csrc/*/*.cuh tests/cpp/*.h tests/cpp/*.cpp tests/shim/*.h tests/shim/*.cpp)

.PHONY: build test ctest pytest lint format demo bench gpu-check clean

build: $(VENV)/.built

$(VENV)/.torch:
ifdef TORCH_SPEC
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH_SPEC)
else
	@if $(PYTHON) -c 'import sys, torch; sys.exit(sys.prefix != sys.base_prefix)' 2>/dev/null; then \
	  echo "using the installed torch"; \
	  $(PYTHON) -m venv --system-site-packages $(VENV); \
	else \
	  $(PYTHON) -m venv $(VENV) && $(BIN)/python -m pip install --quiet $(DEFAULT_TORCH); \
	fi
endif
	@touch $@

# What the build and the checks use besides the package's own dependencies.
$(VENV)/.tools: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet 'setuptools>=77' 'cmake>=3.24' ninja 'pybind11>=2.13' ruff==0.17.6 clang-format==23.1.5
	@touch $@

$(VENV)/.built: $(VENV)/.tools $(NATIVE_SOURCES)
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[demo,test]'
	@touch $@

test: ctest pytest

ctest: $(VENV)/.tools
	@mkdir -p $(CTEST_BUILD)
	cmake -S . -B $(CTEST_BUILD) -G Ninja > $(CTEST_BUILD)/configure.log || (cat $(CTEST_BUILD)/configure.log; exit 1)
	cmake --build $(CTEST_BUILD)
	ctest --test-dir $(CTEST_BUILD) --output-on-failure --parallel $(shell nproc)

pytest: $(VENV)/.built
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CPP_FILES)

format: $(VENV)/.tools
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP_FILES)

demo: $(VENV)/.built
	$(BIN)/adaptive-spec demo

bench: $(VENV)/.built
	$(BIN)/python $(BENCH)

gpu-check: $(VENV)/.built
	PYTHON=$(abspath $(BIN)/python) benchmarks/gpu_check.sh $(OUT)

clean:
	rm -rf build dist *.egg-info csrc/adaptive_spec_ext/*.so
