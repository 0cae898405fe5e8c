# Every target does its own set-up: a virtual environment in .venv with this project, editable.
#
#   PYTHON       the interpreter to make it with, 3.11 or later
#   TORCH_SPEC   what pip installs first. Keep it within the bounds of pyproject.toml
#   TORCH_INDEX  index that torch comes from. Empty: pip's own. PyPI's wheels for Linux bring gigabytes of CUDA, so
#                without an NVIDIA GPU set this to the index of CPU wheels that PyTorch's "Get started" page names
#   ARGS         passed on: make test ARGS="-k radix", make demo ARGS="--seed 7"
#   JOBS         processes that share the tests of `make test`; 0: all in one, as `pytest` alone does

PYTHON ?= python3
TORCH_SPEC ?= torch==2.13.0
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed-for-$(shell cksum < pyproject.toml | cut -d ' ' -f 1)
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --no-input

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint typecheck verify verify-parity verify-expansion verify-properties verify-cluster verify-transport verify-engine verify-media proto clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 20

setup: $(STAMP)  ## make the virtual environment

$(STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or later is needed; set PYTHON=python3.11")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@if [ -z "$(TORCH_INDEX)" ] && ! [ -e /dev/nvidiactl ]; then \
	  echo "no NVIDIA GPU here: if the download below is large, set TORCH_INDEX to PyTorch's CPU wheels (see Makefile)"; fi
	@echo "installing $(TORCH_SPEC), then the project, into $(VENV) ..."
	@$(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) "$(TORCH_SPEC)"
	@$(PIP) -e ".[dev]"
	@rm -f $(VENV)/.installed-for-*
	@touch $@

demo: $(STAMP)  ## start a cluster, ask it about pictures drawn now, check the answers
	@$(BIN)/python -m scripts.demo $(ARGS)

test: $(STAMP)  ## all tests that are meant for every change
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) --no-loadscope-reorder $(ARGS)

lint: $(STAMP)  ## ruff: rules and format, and the import rules of docs/architecture.md
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo 'error: not formatted; run: $(BIN)/ruff format .' >&2; exit 1; }
	@$(BIN)/lint-imports

typecheck: $(STAMP)  ## mypy, strict
	@$(BIN)/mypy

verify: verify-parity verify-expansion verify-properties verify-cluster verify-transport verify-engine verify-media  ## what is too long for `make test`; reports go to benchmarks/results
	@mkdir -p benchmarks/results
	@$(BIN)/python -m scripts.eval_demo_model --json benchmarks/results/eval_demo_model.json --seed 1 --per-type 500

verify-parity: $(STAMP)  ## every parity case against transformers
	@$(BIN)/python -m scripts.verify_parity $(ARGS)

verify-expansion: $(STAMP)  ## 5,000 sizes of pictures a family: rows counted, processed and encoded
	@TRIPTYCH_VERIFY=full $(BIN)/python -m pytest tests/unit/test_model_expansion.py $(ARGS)

verify-properties: $(STAMP)  ## many more examples, and every pair of requests in every order
	@TRIPTYCH_VERIFY=full $(BIN)/python -m pytest tests/property --timeout 3600 $(ARGS)

verify-cluster: $(STAMP)  ## workers killed under load in every topology, frozen, with far too little memory; one figure of the benchmarks
	@TRIPTYCH_VERIFY=full $(BIN)/python -m pytest tests/integration/test_cluster.py tests/integration/test_frozen_peer.py tests/integration/test_retraction.py tests/integration/test_benchmarks_run.py tests/chaos $(ARGS)

verify-transport: $(STAMP)  ## a million checksum rounds between processes, connections cut after every byte, 1,000 requests cancelled in every topology, a wire cut between two hosts
	@TRIPTYCH_VERIFY=full $(BIN)/python -m pytest tests/integration/test_shm_rounds.py tests/integration/test_cancellation.py tests/integration/test_cluster_cancellation.py tests/integration/test_stopped_writer.py tests/unit/test_transport_cut_anywhere.py tests/unit/test_transport_zmq_frames.py tests/integration/test_two_hosts.py $(ARGS)

verify-engine: $(STAMP)  ## 1,000 storms over the engine, and memory over 20,000 unique pictures
	@$(BIN)/python -m scripts.verify_engine --json benchmarks/results/engine_storm.json $(ARGS)

verify-media: $(STAMP)  ## the whole corpus of media by every way, and 10,000 pictures that are changed at random
	@TRIPTYCH_VERIFY=full $(BIN)/python -m pytest tests/unit/test_media_corpus.py tests/integration/test_media_cluster.py $(ARGS)

proto: $(STAMP)  ## write the gRPC stubs again
	@PYTHON=$(BIN)/python scripts/gen_proto.sh

clean:  ## remove the virtual environment and all caches
	@rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
