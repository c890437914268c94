# Two commands for users: `make serve` and `make test`. They set up .venv themselves.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help serve tools training-tools test test-training check format proto clean

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

serve: $(VENV)/.serve ## serve the bundled ensemble on http://127.0.0.1:8000 until Ctrl-C
	@exec $(BIN)/tandem serve

tools: $(VENV)/.tools ## add what tandem quantize and evaluate need

training-tools: $(VENV)/.train ## add torch, for tandem models fetch and for training

test: $(VENV)/.test ## all tests but those of the training (which need torch)
	$(BIN)/python -m pytest

test-training: $(VENV)/.train ## the tests of training and conversion; installs torch
	$(BIN)/python -m pytest tests/training

check: $(VENV)/.test ## lint, format, types, and which way imports go
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(VENV)/.test ## write the format that check asks for
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(VENV)/.test ## make app/grpc/tandem_pb2*.py* from tandem.proto
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. \
		app/grpc/tandem.proto

clean: ## remove what the targets above made
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "setting up $(VENV): about two minutes, once"
	$(INSTALL) -e .
	@touch $@

$(VENV)/.tools: $(VENV)/.serve
	$(INSTALL) -e '.[calibrate]'
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	$(INSTALL) -e '.[test]'
	@command -v chromium >/dev/null || [ -n "$$TANDEM_CHROMIUM" ] || tests/e2e/install_chromium.sh
	@command -v prometheus >/dev/null || tests/e2e/install_prometheus.sh $(BIN)
	@touch $@

$(VENV)/.train: $(VENV)/.test
	$(INSTALL) -e '.[test,train]'
	@touch $@
