# `make setup` needs Python 3.11+, make and a package registry; everything else follows from it. Where there is a C compiler,
# large copies get faster (docs/transfer.md).
PYTHON ?= python3
BIN := .venv/bin

# Where there is no GPU, torch's CPU build saves gigabytes. It comes from the registry or PIP_FIND_LINKS where they have it,
# else from TORCH_INDEX. A torch that the environment has already stays.
TORCH_CPU ?= torch==2.13.0+cpu
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
PIP = $(BIN)/python -m pip --quiet --disable-pip-version-check

# Its chat templates are what the tests render; none of it runs, so it comes without what it needs to run.
TRL := trl==1.16.0

.PHONY: setup quickstart check format test test-fast figures real gpu clean

setup: .venv/.installed

.venv/.installed: pyproject.toml src/ductile/fabric/boxes.c
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	nvidia-smi >/dev/null 2>&1 || test -e /dev/nvidiactl || $(PIP) show torch >/dev/null 2>&1 \
		|| $(PIP) install --no-deps '$(TORCH_CPU)' 2>/dev/null \
		|| $(PIP) install --no-deps --retries 1 --timeout 15 --index-url '$(TORCH_INDEX)' '$(TORCH_CPU)' \
		|| echo "There is no $(TORCH_CPU) at $(TORCH_INDEX) or in the registry; the torch that the registry has is installed."
	$(PIP) install -e '.[dev]'
	$(PIP) install --no-deps '$(TRL)'
	touch $@

quickstart: setup
	$(BIN)/ductile rl @ examples/quickstart/rl.toml --cluster.auto-scheduler

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --warnings

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Most tests wait for processes of their own for half of the time: two a core. Each needs some two GiB (`make test JOBS=2`).
JOBS ?= 4
PYTEST_FLAGS ?=
# A thousand processes import ductile in the tests, and each would compile it.
unexport PYTHONDONTWRITEBYTECODE
PYTEST = $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadscope --no-loadscope-reorder $(PYTEST_FLAGS)

test: setup
	$(PYTEST)

test-fast: setup
	$(PYTEST) -m "not slow and not nightly and not fleet"

# The tests that need a GPU, and a short benchmark of each part; without one it says what it would do (docs/gpu.md). Where no
# .venv can be made, `make gpu GPU_PYTHON=python3` takes a Python that has torch and finds what ductile imports.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))

gpu:
	$(GPU_PYTHON) benchmarks/gpu.py

# What `make test` has a part of, whole: commands, each of which also stands alone, with the time that it may take here.
# What fails is told at the end, and does not keep the others from running.
NIGHTLY = parity:20m resize-parity:20m knobs-parity:20m endings:30m resumes:10m chaos:50m layouts:25m equivalences:20m perturbed:15m floods:5m \
	properties:20m nightly-tests:25m \
	drains:20m cold-starts:10m fleet-test:10m fleet-mutations:30m fleet-chaos:30m fleet-run:20m router-trials:15m provenance:10m \
	lm-eval-test:10m lora:15m cluster-test:15m node-trials:30m
PARTS = $(foreach part,$(NIGHTLY),$(firstword $(subst :, ,$(part))))

.PHONY: nightly $(PARTS)

nightly: setup
	MAKE="$(MAKE)" tests/nightly.sh $(NIGHTLY)

# Tests marked `nightly`: `equivalences`, `perturbed` and `floods` have those of these folders, `nightly-tests` all others.
EQUIVALENCES = tests/parallel tests/resharding tests/trainer tests/end_to_end/test_scheduled_equivalence.py
PERTURBED = tests/sim
FLOODS = tests/generator

equivalences: setup
	$(PYTEST) -m nightly --timeout 600 $(EQUIVALENCES)

# Decisions of runs whose measurements are off by a last bit, and on processors that round otherwise.
perturbed: setup
	PERTURBED_RUNS=200 $(PYTEST) -m nightly $(PERTURBED)

# More connections than the HTTP server may have open, and what else is hard on it.
floods: setup
	$(PYTEST) -m nightly $(FLOODS)

# Sixteen times as many examples of hypothesis as in `make test`, and others each time.
properties: setup
	$(PYTEST) -m hypothesis --hypothesis-profile nightly --timeout 900

# Tests whose processes start as a user's do; in `make test` most are forked from one that has imported torch.
cold-starts: setup
	$(PYTEST) --cold tests/cluster tests/generator/test_serve.py tests/end_to_end/test_commands.py \
		tests/end_to_end/test_deaths.py tests/end_to_end/test_rl.py tests/end_to_end/test_scheduled_equivalence.py

nightly-tests: setup
	$(PYTEST) -m nightly --timeout 600 $(foreach path,$(EQUIVALENCES) $(PERTURBED) $(FLOODS) \
		tests/end_to_end/test_layouts.py tests/router,--ignore=$(path))

# Every mesh of tests/parity/meshes.py against one device, and pairs of them: resized in the middle of a batch, saved on one
# and loaded on the other. A table each, of which the suite has a part; `make parity ONLY="qwen3 tp=2"` takes the rows that
# have all of these words.
ONLY ?=

parity: setup
	PYTHONWARNINGS=ignore $(BIN)/python -m tests.parity meshes $(ONLY)

resize-parity: setup
	PYTHONWARNINGS=ignore $(BIN)/python -m tests.parity resizes $(ONLY)

# Each knob of memory and combinations of them over meshes, against one device without any; and resized with each.
knobs-parity: setup
	PYTHONWARNINGS=ignore $(BIN)/python -m tests.parity knobs $(ONLY)

# 500 endings in virtual time and 40 with real processes and signals; about a quarter of an hour on two cores.
endings: setup
	ENDINGS_VIRTUAL=500 ENDINGS_REAL=40 $(BIN)/python -m pytest tests/end_to_end/test_endings.py -q -s

# Four pairs of a cut run and a change for each kind of change, in one process, and seven of real processes on the quickstart's
# model: some five minutes on two cores.
resumes: setup
	RESUMES_EACH=4 $(BIN)/python -m pytest tests/end_to_end/test_resumes.py

# 60 runs whose generators and scorers are killed at random moments, and 30 whose slots are killed or stopped while they change
# roles: about half an hour on two cores.
chaos: setup
	KILL_TRIALS=60 CHAOS_TRIALS=10 $(BIN)/python -m pytest tests/end_to_end/test_kills.py tests/end_to_end/test_chaos.py -q -rA

# A run that its scheduler resizes through four meshes in every step, and 30 of its like in which a slot or the orchestrator
# is killed around a resize: about a quarter of an hour on two cores.
layouts: setup
	LAYOUT_TRIALS=30 $(BIN)/python -m pytest tests/end_to_end/test_layouts.py -q -rA -m ''

# Thirty notices of five seconds in runs of the quickstart's model: the slots are empty in time and nothing is lost. And a run takes
# as long as the spot planner predicts under the same schedule of signals: some ten minutes on two cores.
drains: setup
	$(BIN)/python -m pytest tests/end_to_end/drain_run.py -s

# Servers that are killed, stopped, restarted and lied to, real processes all of them: under ten minutes on two cores.
fleet-test: setup
	$(PYTEST) -m fleet --timeout 120 tests/fleet

# Each of the 16 defects of the field's draft of an elastic fleet, put back: a test has to fail of it.
fleet-mutations: setup
	$(BIN)/python -m tests.fleet.mutations

# 200 seeded faults in runs with three servers and two ranks that train.
FAULTS ?=

fleet-chaos: setup
	PYTHONWARNINGS=ignore $(BIN)/python -m tests.fleet.chaos $(FAULTS)

# The quickstart on one train slot and servers that are found, one of which is killed while another one joins; and every token's
# log-prob beside the trainer's.
fleet-run: setup
	$(BIN)/python -m pytest tests/end_to_end/fleet_run.py -q -s

# Four servers of unequal speed behind a router, one killed and one stopped, beside round robin; and prefill apart from decode:
# some five minutes on two cores. It caps processes, which takes root or a delegated control group.
router-trials: setup
	$(BIN)/python -m pytest tests/router/test_trials.py -m '' -rs

# Adapters learn what full training learns, by GRPO and by fine-tuning, three seeds each; one run is resized meanwhile: under ten
# minutes on two cores.
lora: setup
	$(BIN)/python -m pytest tests/end_to_end/lora_run.py -s

# Runs as jobs of a real SLURM with two nodes on this machine, which apt-get installs where it is missing, and on a real Ray cluster
# of several nodes here, beside the same runs on this machine; and how long each took to start. Some ten minutes on two cores, as
# root, where no Ray is at work.
cluster-test: setup
	$(PIP) install -e '.[dev,ray]'
	$(BIN)/python -m pytest tests/cluster/real/slurm_run.py tests/cluster/real/ray_run.py --cold -s

# Forty runs over three machines, network namespaces all of them, that are killed, cut off, drained and joined at random moments:
# under half an hour on two cores, as root. `NODE_TRIALS=80 make node-trials` has more.
node-trials: setup
	$(BIN)/python -m pytest tests/cluster/node_trials.py -s

# Seven faults of weights and sampling, each named right, and a thousand versions without a false alarm.
provenance: setup
	$(BIN)/python -m pytest tests/provenance -q -m ''

# Every benchmark but gpu.py and real.py, each for at most ten minutes, to this machine's file in benchmarks/results, then the
# tables of README and docs: at most 100 minutes, with nothing else at work. The peers come with the extra `bench`.
figures: setup
	$(PIP) install -e '.[dev,bench]'
	$(BIN)/python benchmarks/run_all.py

# lm-eval measures a server of SmolLM2-135M-Instruct, and the same model with transformers: some four minutes on two cores. It has
# an environment of its own, as it brings a hundred packages along.
LM_EVAL = .venv-lm-eval/bin/python

lm-eval-test: setup .venv-lm-eval/.installed
	$(PIP) install -e '.[dev,real]'
	$(BIN)/python -m tests.lm_eval $(LM_EVAL)

.venv-lm-eval/.installed:
	test -x $(LM_EVAL) || $(PYTHON) -m venv .venv-lm-eval
	$(LM_EVAL) -m pip --quiet install --no-deps '$(TORCH_CPU)' 2>/dev/null \
		|| $(LM_EVAL) -m pip --quiet install --no-deps --retries 1 --timeout 15 --index-url '$(TORCH_INDEX)' '$(TORCH_CPU)' \
		|| echo "There is no $(TORCH_CPU) at $(TORCH_INDEX) or in the registry; the torch that the registry has is installed."
	$(LM_EVAL) -m pip --quiet install 'lm_eval[api,hf]==0.4.13' 'transformers==5.24.0' 'datasets>=4,<6'
	touch $@

# SmolLM2-135M-Instruct learns sums while its slots change roles and a generator is killed: some ten minutes on two cores.
# The model is downloaded and converted once (examples/smollm2/make_model.py), to ~/.cache/ductile.
real: setup
	$(PIP) install -e '.[dev,real]'
	$(BIN)/python benchmarks/real.py

clean:
	rm -rf .venv .venv-lm-eval .pytest_cache .ruff_cache .hypothesis build dist
