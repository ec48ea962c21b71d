# Every target makes .venv by itself. `make help` lists them.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := $(VENV)/.clients
NATIVE := CMakeLists.txt $(wildcard native/* native/kernels/* native/simd/*)
MODEL ?= smollm2-135m
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help serve test check bench bits soak fmt clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

# The package in editable mode, with its native module built: again when a native source or the dependencies change.
$(STAMP): pyproject.toml $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing headrace and building its native module (a few minutes) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check 'scikit-build-core>=0.11' 'nanobind>=2.8' ninja cmake
	@$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -e '.[dev]'
	@cp $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("platlib"))')/headrace/_native.pyi src/headrace/
	@touch $@

# Other people's clients, for the tests on real models.
$(CLIENTS): tests/clients/requirements.txt | $(STAMP)
	@echo "installing the clients that the tests use (a minute) ..."
	@$(BIN)/python -m pip install -q --disable-pip-version-check -r $<
	@touch $@

serve: $(STAMP) ## fetch MODEL (default smollm2-135m) and serve it on 127.0.0.1:8000; more flags: ARGS="--port 8001"
	$(BIN)/headrace serve $(MODEL) $(ARGS)

test: check $(CLIENTS) ## everything that `check` does, and the tests on real models
	$(BIN)/headrace pull smollm2-135m
	@if [ -n "$$HEADRACE_ALL_MODELS" ]; then $(BIN)/headrace pull qwen2.5-coder-0.5b && $(BIN)/headrace pull gemma-3-270m; fi
	$(BIN)/python -m pytest -m 'not soak and not quick' $(ARGS)

check: $(STAMP) ## style, types, floors, and the tests that need no model
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror native/*.h native/*.cpp native/simd/*.h native/kernels/*.inl native/kernels/*.cpp tests/native/cross/*.cpp
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -m quick -n auto --dist worksteal $(ARGS)

bench: $(STAMP) ## a short set of measurements of MODEL; writes bench/results/
	$(BIN)/headrace bench step $(MODEL) --sequences 1 8 32 64 --profile --json bench/results/step.json $(ARGS)
	$(BIN)/headrace bench throughput $(MODEL) --json bench/results/throughput.json $(ARGS)
	$(BIN)/headrace bench latency $(MODEL) --json bench/results/latency.json $(ARGS)
	$(BIN)/headrace bench startup $(MODEL) --json bench/results/startup.json $(ARGS)
	$(BIN)/headrace bench serve $(MODEL) --max-concurrency 16 --json bench/results/serve.json $(ARGS)

bits: $(STAMP) ## write tests/golden/bits.json anew, after a change of arithmetic that is meant
	HEADRACE_RENEW_BITS=1 $(BIN)/python -m pytest -q tests/golden/test_bits.py

soak: $(STAMP) $(CLIENTS) ## an hour of mixed load (HEADRACE_SOAK_SECONDS), and other long tests
	$(BIN)/python -m pytest -m soak -s --timeout 7200 $(ARGS)

fmt: $(STAMP) ## format Python and C++
	$(BIN)/ruff check --fix -q src tests bench
	$(BIN)/ruff format -q src tests bench
	$(BIN)/clang-format -i native/*.h native/*.cpp native/simd/*.h native/kernels/*.inl native/kernels/*.cpp tests/native/cross/*.cpp

clean: ## remove what was built
	rm -rf build $(VENV)
