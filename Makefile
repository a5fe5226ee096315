# The front door: `make help` lists what there is. Every target prepares what it needs itself.

MODEL ?= smollm2-135m-instruct
INSTANCES ?= 2
KV_BLOCKS ?= 96
PORT ?= 8000
# Builds an image and brings it to where it is needed: $(IMAGE_BUILD) NAME:TAG CONTEXT -f DOCKERFILE
IMAGE_BUILD ?= deploy/build-image
TAG ?= 0.1.0
# The release that the tests run with; other releases that pyproject.toml admits work too.
TORCH ?= torch==2.13.0

IS_SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	$$python -c '$(IS_SUPPORTED)' 2>/dev/null && { echo $$python; break; }; done)

VENV := .venv
PY := $(VENV)/bin/python
SETUP := $(VENV)/setup.stamp
PROTOS := $(wildcard protos/infinite_llm/v1/*.proto)
# One of the generated files stands for all of them.
STUBS := protos/infinite_llm/v1/types_pb2.py
# Twice quiet: no progress, no warnings; errors still show.
PIP := $(PY) -m pip install -qq --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help setup protos lint type test soak chaos run demo status bench images e2e kind-up clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(SETUP) ## create .venv and install everything (once; again when pyproject.toml changes)

protos: $(STUBS) ## generate the gRPC stubs (when a .proto has changed)

lint: $(STUBS) ## style, formatting and who may import whom
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/lint-imports

type: $(STUBS) ## mypy --strict
	$(PY) -m mypy benchmarks kernels services tests

test: $(STUBS) ## all tests; ARGS="-k merge" passes options to pytest
	$(PY) -m pytest $(ARGS)

soak: $(STUBS) ## half an hour of random use; one JSON object at the end; ARGS="--minutes 5 --seed 7"
	@$(PY) -m tests.soak $(ARGS)

chaos: $(STUBS) ## five minutes of random faults under 20 streams; one JSON object; ARGS="--minutes 1 --seed 7"
	@$(PY) -m tests.chaos $(ARGS)

run: $(STUBS) ## a cluster on this machine until Ctrl-C; MODEL= INSTANCES= KV_BLOCKS= PORT=
	@$(PY) -m services.local up --model $(MODEL) --instances $(INSTANCES) --kv-blocks $(KV_BLOCKS) --port $(PORT) $(ARGS)

demo: $(STUBS) ## pooled KV memory against one big instance; one JSON object at the end
	@$(PY) -m services.local demo --model $(MODEL) --instances $(INSTANCES) --kv-blocks $(KV_BLOCKS) $(ARGS)

status: $(STUBS) ## the Request Placement Map of the cluster on PORT; ARGS=--watch follows it
	@$(PY) -m services.local status --port $(PORT) $(ARGS)

bench: $(STUBS) ## one benchmark: B=decode, ARGS=--quick
	@$(PY) -m benchmarks.$(or $(B),$(error name a benchmark, for example: make bench B=decode)) $(ARGS)

images: ## build the images of all services; TAG=0.1.0 IMAGE_BUILD="how to build one"
	@for service in router gmanager operator worker; do \
		$(IMAGE_BUILD) infinite-llm-$$service:$(TAG) . -f deploy/$$service.Dockerfile || exit 1; done

e2e: $(STUBS) ## the chart on the cluster of KUBECONFIG; ARGS=--short takes five minutes
	@IMAGE_BUILD="$(IMAGE_BUILD)" $(PY) -m tests.e2e $(ARGS)

kind-up: ## a cluster of two nodes (needs Docker and kind) with Infinite-LLM on it
	@kind get clusters | grep -qx infinite-llm || kind create cluster --config deploy/kind.yaml
	@$(MAKE) --no-print-directory images
	helm upgrade --install infinite-llm charts/infinite-llm --wait --timeout 10m

clean: ## remove .venv, generated stubs and caches; the models in the user's cache stay
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f protos/infinite_llm/v1/*_pb2.py protos/infinite_llm/v1/*_pb2.pyi
	rm -f protos/infinite_llm/v1/*_pb2_grpc.py protos/infinite_llm/v1/*_pb2_grpc.pyi
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(SETUP): pyproject.toml
	@test -n "$(PYTHON)" && "$(PYTHON)" -c '$(IS_SUPPORTED)' 2>/dev/null \
		|| { echo "Infinite-LLM needs Python 3.11, 3.12 or 3.13: make PYTHON=/path/to/python3.11"; exit 2; }
	@echo "Creating $(VENV) with $(PYTHON)"
	@"$(PYTHON)" -m venv $(VENV) \
		|| { echo "$(PYTHON) cannot create environments: install its venv module (python3-venv)"; exit 2; }
	@echo "Installing torch (some minutes the first time)"
	@$(PIP) "$(TORCH)"
	@echo "Installing everything else"
	@$(PIP) --editable ".[dev]"
	@touch $@

$(STUBS): $(SETUP) $(PROTOS)
	@echo "Generating the gRPC stubs"
	@PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(PY) -m grpc_tools.protoc -I. --python_out=. --grpc_python_out=. \
		--mypy_out=quiet:. --mypy_grpc_out=quiet:. $(PROTOS)
	@touch $@
