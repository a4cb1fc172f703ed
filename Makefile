# Every target sets up what it needs: .venv is made once, and made again when the constraints change.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
RANKS ?= 2
ARGS ?=
FOLDER ?=

.PHONY: train test demo parity mutants bench lint ideas drill test-gpu clean

$(READY): constraints.txt pyproject.toml
	rm -rf .venv
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

train: $(READY)  ## a GPT on the Python standard library's sources, on 2 ranks; ARGS='--train.steps 20' overrides
	$(BIN)/torchrun --standalone --nproc-per-node $(RANKS) -m nd_mesh train configs/stdlib.toml --mesh.dp $(RANKS) $(ARGS)

test: $(READY)  ## all tests but the long drills
	$(BIN)/python -m pytest --benchmark-disable tests/$(FOLDER)

drill: $(READY)  ## all tests, the long ones too; FOLDER=nd_mesh for one folder
	$(BIN)/python -m pytest --benchmark-disable -m 'not gpu' tests/$(FOLDER)

demo: $(READY)  ## every folder's demo, and every README block marked `sh run`
	$(BIN)/python -m tests.demos $(FOLDER)

parity: $(READY)  ## every mesh against the independent reference, in float64: a table
	$(BIN)/python -m tests.grid $(ARGS)

mutants: $(READY)  ## faults of one line each, and which run of the grid catches each: a table
	$(BIN)/python -m tests.mutants

bench: $(READY)  ## ours beside PyTorch's, in turn on the same ranks: runs/bench.json and a table; FOLDER=ddp for one
	mkdir -p runs
	$(BIN)/python -m pytest --benchmark-only --benchmark-json=runs/bench.json --benchmark-columns=min,median,iqr,rounds \
		tests/bench/$(if $(FOLDER),test_$(FOLDER).py)
	$(BIN)/python -m tests.bench.table runs/bench.json

lint: $(READY)
	$(BIN)/ruff check .

ideas:  ## the one line for which each algorithm file exists
	@git grep -n '# IDEA:' -- '*.py' ':!tests'

test-gpu:  ## on a machine with a GPU, with the python it has: no .venv, no constraints
	$(PYTHON) -m pytest -p no:cacheprovider -m gpu tests/$(FOLDER)

clean:
	rm -rf .venv .pytest_cache .ruff_cache *.egg-info
