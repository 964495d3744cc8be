# Python 3.11 and make are all that must be there before.
PYTHON ?= python3.11
VENV := .venv
SGLANG_VENV := .venv-sglang
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
SGLANG_PIP := $(SGLANG_VENV)/bin/python -m pip --disable-pip-version-check --quiet
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
CONFIG ?= configs/calculator_smollm2_cpu.yaml
ARGS ?=
SANDBOX_IMAGE ?= agentrl-sandbox:test
DEBIAN ?= bookworm
LAUNCH := $(BIN)/accelerate launch --quiet --cpu --num_processes 1 --num_machines 1 \
	--num_cpu_threads_per_process $(shell nproc) --mixed_precision no --dynamo_backend no

.DEFAULT_GOAL := help
.PHONY: help demo test check bench sglang-cpu sandbox-image

help: ## show this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-13s  %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## train a small model to use a calculator, on this CPU (about 12 minutes)
	$(LAUNCH) train.py --config $(CONFIG) $(ARGS)

test: $(VENV)/dev.stamp ## run the tests
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/dev.stamp ## check format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(VENV)/dev.stamp ## run every benchmark, one after the other
	@set -e; for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file; done

sglang-cpu: $(SGLANG_VENV)/stamp ## install a real SGLang for this CPU, which the tests then use too (2.2 GB)

# From Debian's own packages, because it then takes no registry; where there is one, tests can use
# AGENTRL_TEST_IMAGE=python:3.11-slim.
sandbox-image: ## make the Docker image of the tests, as root on Debian (about a minute)
	@echo "Making $(SANDBOX_IMAGE) of Debian $(DEBIAN) …"
	@set -e; root=$$(mktemp -d); trap 'rm -rf "$$root"' EXIT; \
	debootstrap --variant=minbase --include=python3 $(DEBIAN) "$$root" >"$$root.log" 2>&1 \
		|| { tail -n 20 "$$root.log"; exit 1; }; \
	rm "$$root.log"; \
	tar -C "$$root" -c --exclude=./var/cache --exclude=./var/lib/apt --exclude=./usr/share/doc \
		--exclude=./usr/share/locale . | docker import - $(SANDBOX_IMAGE)

# torch comes first and alone, from the index that has its builds without CUDA.
$(VENV)/torch.stamp: constraints-cpu.txt
	@echo "Installing PyTorch for CPU into $(VENV) …"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --retries 1 -c constraints-cpu.txt --extra-index-url $(TORCH_INDEX) torch
	@touch $@

$(VENV)/demo.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo "Installing agentrl and what it needs into $(VENV) …"
	@$(PIP) install -c constraints-cpu.txt -e '.[demo]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/torch.stamp pyproject.toml
	@echo "Installing agentrl, its tests and checks into $(VENV) …"
	@$(PIP) install -c constraints-cpu.txt -e '.[demo,dev]'
	@touch $@ $(VENV)/demo.stamp

$(SGLANG_VENV)/stamp: requirements-sglang-cpu.txt
	@echo "Installing SGLang for CPU into $(SGLANG_VENV) …"
	@$(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_PIP) install --no-deps --retries 1 -c $< --extra-index-url $(TORCH_INDEX) torch
	@$(SGLANG_PIP) install --no-deps -r $<
	@touch $@
