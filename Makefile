# One command each: serve, test, test-changed, test-benchmarks, test-real, test-build, corpus-check, mutations, check, check-style, install-wheel, try-wheel, try-pythons, trace, check-native, gpu-check, bench, bench-prefix, bench-cpu, bench-real, chaos, soak, hostile, fuzz, fuzz-schedules, flood, clients, page-check, demo-model, clean. CI calls the same ones (.ci/run).

PYTHON ?= python3
# Which torch: the package index's, which on Linux is the build for CUDA; or, with TORCH=cpu, the build for CPUs from torch's own index.
TORCH :=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check

TORCH_VERSION = $(shell sed -n 's/^torch==//p' constraints.txt)
CPU_TORCH = --no-deps --index-url https://download.pytorch.org/whl/cpu 'torch==$(TORCH_VERSION)+cpu'
TORCH_STAMP = $(if $(TORCH),$(VENV)/.torch-cpu)
TORCH_NOTE = $(if $(TORCH)$(wildcard $(VENV)/.torch-cpu),; torch for CPUs from its own index,; torch from the package index: on Linux its build for CUDA, 5.1 GB in all. TORCH=cpu takes 1.1 GB)
ifeq ($(TORCH) $(shell uname -s),cpu Darwin)
$(error TORCH=cpu is for Linux: for macOS the package index has no other build than the one for CPUs. Leave TORCH=cpu out)
endif
ifneq ($(filter-out cpu,$(TORCH)),)
$(error TORCH=$(TORCH) is not known: TORCH=cpu takes torch's build for CPUs, without it torch comes from the package index)
endif

.PHONY: serve test test-changed test-benchmarks test-real test-build corpus-check mutations check check-style install-torch install-wheel try-wheel try-pythons trace check-native gpu-check bench bench-prefix bench-cpu bench-real chaos soak hostile fuzz fuzz-schedules flood clients page-check demo-model clean

MODEL :=
serve: $(VENV)/.installed  ## serve the embedded model, or MODEL=smollm2; ARGS="--port 8001" goes to `quire serve`
	@$(BIN)/quire serve $(MODEL) $(ARGS)

test: $(VENV)/.installed-dev  ## ARGS="tests/demo_model -x" goes to pytest
	@$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder --long-files-first $(ARGS)

test-changed: $(VENV)/.installed-dev  ## the tests of what differs from the last commit, in a minute; BASE=main takes another commit
	@$(BIN)/python -m tools.changed_tests $(if $(BASE),--base $(BASE)) $(ARGS)

test-benchmarks: $(VENV)/.installed-dev  ## small runs of the benchmarks
	@$(BIN)/python -m pytest -n auto --dist loadfile tests/benchmarks $(ARGS)

test-real: $(VENV)/.installed-dev  ## tests on SmolLM2-135M-Instruct, fetched if QUIRE_SMOLLM2 has no path of its .gguf file
	@[ -n "$$QUIRE_SMOLLM2" ] || $(BIN)/quire pull smollm2
	@$(BIN)/python -m pytest tests/real $(ARGS)

bench-real: $(VENV)/.installed-dev  ## figures on the same model; ARGS="--only drafts --json FILE"
	@[ -n "$$QUIRE_SMOLLM2" ] || $(BIN)/quire pull smollm2
	@$(BIN)/python -m benchmarks.real $(ARGS)

check: check-style  ## style, types, layers
	@$(BIN)/python -m pytest -q tests/repository/test_import_layers.py tests/repository/test_source_rules.py

check-style: $(VENV)/.installed-dev  ## style and types: what `make test` does not check
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy

WHEEL_VENV := build/wheel/venv
WHEEL_PIP = $(WHEEL_VENV)/bin/python -m pip --quiet --disable-pip-version-check
install-torch:  # a layer of its own in the Containerfile
	@$(PYTHON) -m venv $(WHEEL_VENV)
	@$(WHEEL_PIP) install $(if $(TORCH),$(CPU_TORCH),-c constraints.txt torch)

install-wheel: install-torch  ## build the wheel, install it in WHEEL_VENV=build/wheel/venv; the Containerfile calls it
	@rm -rf build/lib* build/temp.* build/bdist* build/wheel/*.whl
	@$(WHEEL_PIP) wheel --no-deps --wheel-dir build/wheel .
	@$(WHEEL_PIP) install -c constraints.txt build/wheel/quire-*.whl

MOST_BYTES := 15000000
try-wheel:  ## build the wheel, install it in an empty environment, and generate from it in an empty folder
	@rm -rf build/wheel && mkdir -p build/wheel/empty
	@$(MAKE) --no-print-directory install-wheel WHEEL_VENV=build/wheel/venv
	@bytes=$$(cat build/wheel/quire-*.whl | wc -c) && echo "the wheel has $$bytes bytes" && if [ $$bytes -ge $(MOST_BYTES) ]; then echo "the wheel must be below $(MOST_BYTES) bytes" >&2; exit 1; fi
	@cd build/wheel/empty && ../venv/bin/quire --version
	@cd build/wheel/empty && ../venv/bin/python -c "import quire; from quire.kernels.cpu import EXTENSION; assert '/wheel/venv/' in quire.__file__ and EXTENSION is None, (quire.__file__, EXTENSION)"
	@cd build/wheel/empty && ../venv/bin/quire generate --temperature 0 --max-tokens 12 "One Tuesday Mira went to the" > answer && cat answer && test -s answer

try-pythons:  ## README's two commands in a fresh clone, on each Python found; ARGS="--pythons 3.12 --no-tests --json FILE"
	@$(PYTHON) benchmarks/installation.py $(ARGS)

test-build: $(VENV)/.installed-dev  ## the tests of the last commit with CPU kernels for one instruction set alone; BUILD=avx2
	@rm -rf build/only && git clone --quiet . build/only
	@cd build/only && QUIRE_BUILDS=$(BUILD) $(abspath $(BIN))/python setup.py -q build_ext --inplace
	@cd build/only && PYTHONPATH=$$PWD $(abspath $(BIN))/python -c "from quire.kernels.cpu import _C; print('builds:', _C.builds())"
	@cd build/only && PYTHONPATH=$$PWD $(abspath $(BIN))/python -m pytest -n auto --dist loadfile $(ARGS)

trace: $(VENV)/.installed-dev  ## files and functions that one request passes; ARGS="--scenes http --json FILE"
	@$(BIN)/python -m tools.trace $(ARGS)

corpus-check: $(VENV)/.installed-dev  ## schedules, greedy outputs and HTTP responses beside those that were recorded
	@$(BIN)/python -m pytest --hypothesis-profile thorough tests/repository/test_corpus_replay.py $(ARGS)

mutations: $(VENV)/.installed-dev  ## faults of one line, and which tests catch each; ARGS="--folder quire/cache", "--list"
	@nice -n 10 $(BIN)/python -m tools.mutations $(ARGS)

# A copy of quire whose kernels are compiled with the sanitizers of GCC for addresses and undefined behaviour. Tile registers
# are emulated as well, because sanitizers do not see the memory that AMX instructions read and write.
NATIVE := build/native
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1 -g1
RUNTIMES = $(foreach name,libasan.so libubsan.so libstdc++.so,$(shell $(or $(CXX),g++) -print-file-name=$(name)))

check-native: $(VENV)/.installed-dev  ## the tests of the CPU kernels, watched by sanitizers; ARGS="-k rowwise -x"
	@rm -rf $(NATIVE) && mkdir -p $(NATIVE) && cp -r quire $(NATIVE)/ && rm -f $(NATIVE)/quire/kernels/cpu/_C*.so
	@QUIRE_BUILDS=all QUIRE_CXXFLAGS="$(SANITIZERS)" $(BIN)/python setup.py -q build_ext --build-temp $(NATIVE)/temp --build-lib $(NATIVE)
	@ls $(NATIVE)/quire/kernels/cpu/_C*.so
	@LD_PRELOAD="$(RUNTIMES)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 $(BIN)/python -m pytest --capture=sys \
		-o pythonpath="$(NATIVE) tests/rigs" --hypothesis-profile native tests/kernels/cpu $(ARGS)

gpu-check:  ## on a machine with a GPU; PYTHON has torch for CUDA and quire's dependencies; ARGS="--run speed", "--dry-run"
	@$(PYTHON) -m benchmarks.gpu.check $(ARGS)

bench: $(VENV)/.installed-dev
	@$(BIN)/python -m benchmarks.scheduling_time $(ARGS)

bench-prefix: $(VENV)/.installed-dev  ## ARGS="--only gain --plots FOLDER"; pictures need the extra `plots`
	@$(BIN)/python -m benchmarks.prefix $(ARGS)

bench-cpu: $(VENV)/.installed-dev  ## ARGS="--shapes 0.5b --peer vllm=VENV/bin/python"; peers have venvs of their own
	@$(BIN)/python -m benchmarks.cpu $(ARGS)

chaos: $(VENV)/.installed-dev  ## streams while engines are killed; ARGS="--streams 200 --kills 20"
	@$(BIN)/python -m benchmarks.trust --only chaos $(ARGS)

soak: $(VENV)/.installed-dev  ## ten minutes of all that can go wrong; ARGS="--seconds 3600"
	@$(BIN)/python -m benchmarks.trust --only soak --seconds 600 $(ARGS)

hostile: $(VENV)/.installed-dev  ## a quiet tenant beside hostile bodies, readers, connections, schemas; ARGS="--seconds 4 --only large"
	@$(BIN)/python -m benchmarks.hostile $(ARGS)

fuzz: $(VENV)/.installed-dev  ## all routes by what the OpenAPI document says; ARGS="--examples 1000 --seed 2"
	@$(BIN)/python -m tools.schema_fuzz $(ARGS)

fuzz-schedules: $(VENV)/.installed-dev  ## random schedules of the scheduler; ARGS="--seeds 20000" or "--first SEED --save FOLDER"
	@$(BIN)/python -m tools.fuzz_schedules $(ARGS)

flood: $(VENV)/.installed-dev  ## streams beside a flood of bad schemas; ARGS="--seconds 10 --rounds 1"
	@$(BIN)/python -m benchmarks.structured.flood $(ARGS)

clients: $(VENV)/.installed-dev  ## real clients against a server; ARGS="--only litellm --vllm VENV/bin/python --json FILE"
	@$(BIN)/python -m benchmarks.clients $(ARGS)

AXE := axe-core-4.14.1
PAGE := build/page
page-check: $(VENV)/.installed-page $(PAGE)/$(AXE)  ## the page in headless Chromium; ARGS="--short", ARGS="--pictures FOLDER"
	@$(BIN)/python -m tools.page_check $(if $(findstring --short,$(ARGS)),,--json benchmarks/results/page.json) $(ARGS)

# axe-core (MPL-2.0) finds faults of accessibility. It is a tool of this check: no file of it is part of quire.
$(PAGE)/$(AXE):
	@mkdir -p $(PAGE)
	@command -v npm > /dev/null || { echo "page-check needs npm to get axe-core. On Debian: apt-get install -y npm" >&2; exit 1; }
	@cd $(PAGE) && npm pack --silent $(subst core-,core@,$(AXE)) > /dev/null && tar xzf $(AXE).tgz && rm -rf $(AXE) && mv package $(AXE)

demo-model: $(VENV)/.installed-dev  ## train the embedded model, its draft and its adapters from scratch
	@$(BIN)/python -m tools.demo_model.make $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps say which set was installed; a change of these files installs again.
INSTALLED_FROM := pyproject.toml constraints.txt setup.py $(wildcard quire/kernels/cpu/csrc/*)
$(VENV)/.installed: $(INSTALLED_FROM) | $(BIN)/python $(TORCH_STAMP)
	@echo "installing quire (first time: a few minutes)$(TORCH_NOTE)"
	@$(PIP) install -c constraints.txt -e .
	@$(SAY_TORCH)
	@touch $@

$(VENV)/.installed-dev: $(INSTALLED_FROM) | $(BIN)/python $(TORCH_STAMP)
	@echo "installing quire with its development tools (first time: a few minutes)$(TORCH_NOTE)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@$(SAY_TORCH)
	@touch $(VENV)/.installed $@

# What the extra `page` has; naming the extra would compile quire once more.
$(VENV)/.installed-page: $(VENV)/.installed-dev
	@$(PIP) install -c constraints.txt playwright
	@touch $@

SAY_TORCH = $(BIN)/python -c "from importlib.metadata import version; print('installed, with torch', version('torch'))"
$(VENV)/.torch-cpu: constraints.txt | $(BIN)/python
	@if [ -e $(VENV)/.installed ] && [ ! -e $@ ]; then echo "$(VENV) has torch from the package index. Run make clean first, then again with TORCH=cpu." >&2; exit 1; fi
	@echo "installing torch $(TORCH_VERSION) for CPUs from torch's own index"
	@$(PIP) install $(CPU_TORCH) || { echo "torch's build for CPUs could not be installed: pip's message above says why. Is download.pytorch.org reachable from here? Without TORCH=cpu torch comes from the package index: on Linux that is the build for CUDA, which runs on CPUs too, and the environment takes 5.1 GB in place of 1.1 GB." >&2; exit 1; }
	@touch $@

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)
