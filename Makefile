# make demo    the whole conversion on a small model, offline, under four minutes after installation
# make demo-real  a real model of the hub, or MODEL=FOLDER: converted, calibrated, measured, and asked a question, in two minutes
# make test    all tests but those of experiments;  make quick  those of a minute;  make test-experiments  the others
# make test-serving  tests of the vLLM plugin with vLLM for CPUs, in an environment of its own (.venv-vllm)
# make test-quantised  tests of quantised models with the libraries that quantise, in another (.venv-quantised)
# make test-newest  a few tests with the newest transformers, accelerate, peft, tokenizers and torch (.venv-newest)
# make check   lint and types;  make wheel  builds dist/;  make docs  the documentation in site/
# make clean   removes what these made
# Each does its own set-up: a virtual environment in .venv with the versions of constraints.txt.

PYTHON ?=
VENV ?= .venv
SERVING_VENV ?= .venv-vllm
QUANTISED_VENV ?= .venv-quantised
NEWEST_VENV ?= .venv-newest
SERVING_TESTS ?= tests/serving/vllm
WORKERS ?= 2
TESTS ?= tests
# a test for each way through the house: recipe to step, tensor to export, q to kernel, number to page; text to row is in data
WAYS = training/test_pipeline.py::test_a_run_does_everything_once \
	export/test_export.py::test_round_trip_is_equal_to_the_bit \
	'kernels/triton/test_dispatch.py::test_a_layer_trains_on_triton_as_on_torch[paper]' \
	results/test_compare.py::test_a_run_a_checkpoint_and_a_file
QUICK ?= $(addprefix tests/,checkpoints data kernels/torch modeling/window recipe surgery $(WAYS))
PY := $(VENV)/bin/python
export PYTHON VENV

.PHONY: demo demo-real test quick test-experiments test-serving test-quantised test-newest check wheel docs setup clean

demo: setup
	$(PY) demo/run.py

demo-real: setup
	$(PY) -m sse_convert run demo/real.yaml $(if $(MODEL),--set model=$(MODEL))
	echo "What is the capital of France?" | $(PY) -m sse_convert chat out/demo-real/model --temperature 0

PYTEST = OMP_NUM_THREADS=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal

test: setup-dev
	$(PYTEST) -m "not experiment" $(TESTS)

quick: setup-dev
	$(PYTEST) -m "not experiment and not slow" $(QUICK)

test-experiments: setup-dev
	$(PYTEST) -m experiment $(TESTS)

test-serving:
	@$(or $(PYTHON),python3) tools/serving_env.py $(SERVING_VENV)
	PYTHONPATH=. OMP_NUM_THREADS=1 $(SERVING_VENV)/bin/python -m pytest --confcutdir=tests/serving/vllm $(SERVING_TESTS)

test-quantised: setup-dev
	$(PY) tools/quantised_env.py $(QUANTISED_VENV)
	PYTHONPATH=. OMP_NUM_THREADS=1 $(QUANTISED_VENV)/bin/python -m pytest tests/modeling/test_quantised.py \
		'tests/docs/test_pages.py::test_the_page_does_what_it_shows[guide/quantise.md]'

test-newest: setup-dev
	$(PY) tools/newest.py $(NEWEST_VENV)

check: setup-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

wheel: setup-dev
	rm -rf dist
	$(PY) -m build --outdir dist .

docs:
	@tools/setup.sh dev,docs
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict

setup:
	@tools/setup.sh

.PHONY: setup-dev
setup-dev:
	@tools/setup.sh dev,eval

clean:
	rm -rf $(VENV) $(SERVING_VENV) $(QUANTISED_VENV) $(NEWEST_VENV) dist build site .pytest_cache .ruff_cache .mypy_cache
