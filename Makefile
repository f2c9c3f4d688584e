# A newcomer needs two of these: `make up` and `make test`. Each does its own set-up.
# PYTHONSAFEPATH: with this folder on sys.path, `import kernels` would find ours, not another package's.
export PYTHONSAFEPATH = 1
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help up down test test-fast test-installed newcomer test-clients test-ray check format docs metrics screenshots pictures bench soak fuzz fuzz-streams simulate mutate nightly gpu-check gpu-compile bench-peers release clean
up: .venv/installed ## start the daemon with the built-in model (sets itself up)
	$(BIN)/llmbox up builtin

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1 \2/p' $(MAKEFILE_LIST) | awk '{name = $$1; $$1 = ""; printf "  %-15s%s\n", name, $$0}'

down: .venv/installed ## stop the daemon
	$(BIN)/llmbox down

# One more process than two cores: tests wait for daemons, engines and sockets.
test: .venv/dev ## the whole suite, on three processes
	$(BIN)/pytest -n 3 --dist worksteal

# Which files those are: tests/support/lanes.py.
test-fast: .venv/dev ## unit tests without processes, whole engines and screens: at every save
	LLMBOX_TEST_LANE=fast $(BIN)/pytest -q -n 3 --dist worksteal $(ARGS)

# A wheel in new environments, of the pinned and of the lowest versions: every command, every dialect, every page.
test-installed: .venv/dev ## wheels in new environments: every command, dialect and page
	$(BIN)/pytest tests/installed/lane.py $(ARGS)

# What the suite leaves out for its length, then property tests with examples that no run before had; ROUNDS of
# them, each with a seed that it prints.
ROUNDS ?= 10
nightly: .venv/dev ## long tests, then property tests with new examples; ROUNDS=10
	LLMBOX_TEST_PROFILE=nightly $(BIN)/pytest -q -n 2 --dist worksteal -m nightly
	@for round in $$(seq $(ROUNDS)); do seed=$$(od -An -N4 -tu4 /dev/urandom | tr -d ' '); \
	  echo "round $$round of $(ROUNDS): LLMBOX_TEST_PROFILE=nightly $(BIN)/pytest -m property --hypothesis-seed=$$seed"; \
	  LLMBOX_TEST_PROFILE=nightly $(BIN)/pytest -q -n 2 --dist worksteal -m property --hypothesis-seed=$$seed || exit 1; \
	done

# ARGS="--wheel dist/llmbox-….whl" takes a built one.
newcomer: .venv/dev ## from a wheel and an empty home to a chat, in a terminal and a browser, timed
	PYTHONPATH=packaging/tree:tests $(BIN)/python -P -m installed.newcomer $(ARGS)

# The suite leaves these out where Ray is not installed: it takes 240 MB.
test-ray: .venv/dev ## replicas under a real local Ray, which is installed first
	$(BIN)/pip install --quiet --constraint packaging/constraints.txt 'ray[serve]'
	$(BIN)/pytest tests/app/ray $(ARGS)

# Other people's programs from npm against this daemon; what is not in the cache folder yet is installed there.
test-clients: .venv/dev ## programs of other people from npm against this daemon
	LLMBOX_TEST_CLIENTS=1 $(BIN)/pytest tests/clients

check: .venv/dev ## ruff, mypy, import contracts: before every commit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: .venv/dev ## fix what ruff can fix, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: .venv/dev ## renew the generated parts of docs/
	$(BIN)/python packaging/render_docs.py

metrics: .venv/dev ## size and shape of the code, and what one streamed chat passes
	$(BIN)/python -P packaging/code_metrics.py $(ARGS)

screenshots: .venv/dev ## renew the picture of the panel in README.md
	$(BIN)/python packaging/panel_pictures.py --readme

pictures: .venv/dev ## llmbox top into docs/images, every page of the panel into build/pictures
	$(BIN)/python packaging/top_pictures.py
	$(BIN)/python packaging/panel_pictures.py $(ARGS)

bench: .venv/dev ## benchmarks of this tree; takes long, writes docs/notes
	$(BIN)/python tests/bench/scenarios.py
	$(BIN)/python -P tests/bench/all_layers.py
	$(BIN)/python tests/bench/burst.py --write
	$(BIN)/python tests/bench/key_flood.py --write
	$(BIN)/python tests/bench/panel_pages.py --write

# A daemon, clients and a fault a minute; every parser. ARGS="--minutes 60" and ARGS="--seconds 3600"; results: docs/reliability.md.
soak: .venv/dev ## a daemon, clients and a fault a minute; ARGS="--minutes 60"
	PYTHONPATH=packaging/tree:tests $(BIN)/python -P -m soak.run $(ARGS)

fuzz: .venv/dev ## random input for every parser; ARGS="--seconds 3600"
	PYTHONPATH=packaging/tree:tests $(BIN)/python -P -m fuzz.run $(ARGS)

fuzz-streams: .venv/dev ## random answers in every output format, in any pieces; ARGS="--streams 1000000"
	PYTHONPATH=packaging/tree:tests $(BIN)/python -P -m fuzz.output_streams $(ARGS)

# The whole daemon in virtual time: a seed is a run. ARGS="--seed N" prints one; results: docs/reliability.md.
simulate: .venv/dev ## the daemon in virtual time, accidents by seed; ARGS="--seeds 100000"
	PYTHONPATH=packaging/tree:tests $(BIN)/python -P -m simulate.run $(ARGS)

mutate: .venv/dev ## plant small mistakes; the simulator or a test must notice each
	PYTHONPATH=packaging/tree:tests $(BIN)/python -P -m simulate.mutate $(ARGS)

# PEERS says what is installed where: PEERS="--model DIR --vllm PYTHON --llama BIN --ik BIN --gguf DIR".
bench-peers: .venv/dev ## the same load on vLLM, llama.cpp and ik_llama.cpp; PEERS says where they are
	$(BIN)/python -P tests/bench/peers.py $(PEERS)

# Wherever torch and triton are: no environment is made. ARGS="--only smoke,correctness", ARGS="--only tune".
gpu-check: ## tokens, kernels and speed on a GPU; writes gpu-check.md
	PYTHONPATH=packaging/tree:tests $(PYTHON) -m gpu.check $(ARGS)

# The kernels' machine code for GPUs that are not here. ARGS="--targets 89 --group attention" and the like.
gpu-compile: ## the kernels' machine code for GPUs that are not here
	PYTHONPATH=packaging/tree:tests $(PYTHON) -m gpu.compile $(ARGS)

# Wheel, .deb, .rpm, man pages, SBOM, checksums: into dist/. LLMBOX_WHEEL_KERNELS=none skips compiling kernels.
release: .venv/dev ## build what a release consists of into dist/
	$(BIN)/pip install --quiet --constraint packaging/constraints.txt --requirement packaging/release-requirements.txt
	$(BIN)/python packaging/release.py $(ARGS)

clean: ## remove the environment and builds
	rm -rf .venv build dist

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: .venv/bin/python pyproject.toml packaging/constraints.txt
	$(BIN)/pip install --quiet --constraint packaging/constraints.txt --editable .
	touch $@

.venv/dev: .venv/installed
	$(BIN)/pip install --quiet --constraint packaging/constraints.txt --requirement packaging/dev-requirements.txt
	touch $@
