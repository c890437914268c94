# Two commands for users: `make serve` and `make test`. They set up .venv themselves.
# The oldest supported Python that runs here.
RUNS = $(shell python3.$(1) -c '' 2>/dev/null && echo python3.$(1))
PYTHON ?= $(firstword $(foreach version,11 12 13 14,$(call RUNS,$(version))) python3.11)
VENV := .venv
BIN := $(VENV)/bin
# What pip does goes to a log. A terminal shows how many packages it has, and an error is shown whole.
pip_install = { $(BIN)/pip install --disable-pip-version-check $(1) 2>&1 && echo "pip: done"; } \
	| tee $(VENV)/pip.log | awk -v shown="$$(test -t 2 && echo yes)" '$(COUNT_PACKAGES)' \
	|| { cat $(VENV)/pip.log; exit 1; }
COUNT_PACKAGES := function show(text) { if (shown) { printf "\r  %d packages %s", n, text > "/dev/stderr" } } \
	/^ *(Downloading|Using cached|Processing) / && !/[.]metadata/ { n++; show("fetched") } \
	/^Installing collected/ { show("fetched, installing: a minute or less") } \
	/^pip: done/ { ok = 1 } END { if (shown && n) print "" > "/dev/stderr"; exit !ok }
INSTALL = $(call pip_install,-c constraints.txt -e '$(WHAT)')
INSTALL_DEV = $(call pip_install,-c tests/constraints.txt -e '$(WHAT)')
PYTEST := $(BIN)/python -m pytest
RESULTS := build/tests
# make test RAY=2.59.0: with another Ray, in an environment that has all else from .venv.
RAY_VENV = .venv-ray-$(RAY)
OTHER_RAY := 2.59.0
# The extras that constraints.txt covers; tests/constraints.txt covers all.
SERVING := calibrate redis heif onnxruntime parquet ray-data torch timm ladder s3 gcs azure b3 xray
PURELIB := "import sysconfig; print(sysconfig.get_path('purelib'))"
# What needs Ray. The rest is the same with every Ray.
OF_RAY_NAMES := tests/unit/serve/test_ray_compatibility.py
OF_RAY := tests/unit/serve tests/unit/grpc tests/unit/launch tests/integration tests/e2e
OF_RAY_IN_SHORT := $(filter-out $(OF_RAY_NAMES),$(wildcard tests/unit/serve/test_*.py)) \
	tests/unit/launch tests/integration/test_graph.py tests/integration/test_haproxy_grpc.py \
	tests/e2e/shipped/test_http.py

.DEFAULT_GOAL := help
.NOTPARALLEL: # durations: one target after the other
# Containers often set it. Each of the tests' many processes would then compile the modules anew.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help serve imagenet tools training-tools test test-ray test-all test-training \
	other-environments durations check format coverage mutations reference docs docs-serve \
	readability lock release proto clean

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

serve: $(VENV)/.serve ## serve the bundled ensemble on http://127.0.0.1:8000 until Ctrl-C; or SET=imagenet, PLAN=fast
	@exec $(BIN)/tandem serve $(if $(SET),--model-set $(SET)) $(if $(PLAN),--plan $(PLAN))

imagenet: $(VENV)/.tools ## make the set of ImageNet's 1,000 classes, without torch: some minutes, 75 MB
	@exec $(BIN)/tandem models fetch imagenet

tools: $(VENV)/.tools ## add what tandem quantize and evaluate need

training-tools: $(VENV)/.train ## add torch and timm, for tandem models fetch and for training

# $(1) are further arguments of pytest, $(2) a last step. The integration tests share one Ray, so they
# have one process, and mostly wait. The unit tests fill the gaps, and give way to all others: with
# $(3), the fast ones, in one process beside the whole command too. Without it they are two, and the
# whole command comes after: three busy processes on two cores would make some of the slow ones late.
# Each part runs whatever the others say. Without the trap, Ctrl-C would end a part and not the
# target. A process that died is not replaced: pytest-xdist 3.8 with loadfile then waits for ever for
# the rest of its file.
define run_tests
	@trap 'wait; exit 130' INT; failed=0; \
	rm -f $(RESULTS)/$@-of-*.xml; mkdir -p $(RESULTS); \
	{ $(call run_part,integration,$(1),$(NO_SCHEMAS)); exit $$failed; } > $(RESULTS)/integration.log 2>&1 & \
	integration=$$!; \
	{ $(call run_part,unit,$(1),$(if $(3),,$(IN_TWO)),nice); exit $$failed; } \
		> $(RESULTS)/unit.log 2>&1 & unit=$$!; \
	$(if $(3),,$(call both_ended)) \
	$(call run_part,e2e,$(1),$(IN_TWO) --no-loadscope-reorder $(NO_SCHEMAS)); \
	$(if $(3),$(call both_ended)) \
	$(BIN)/python -m tests.support.durations $@ || failed=1; \
	$(2) exit $$failed
endef
both_ended = wait $$unit || failed=1; cat $(RESULTS)/unit.log; \
	wait $$integration || failed=1; cat $(RESULTS)/integration.log;
NO_SCHEMAS := -p no:schemathesis  # which only unit tests use: a second of each process
IN_TWO := -n 2 --dist loadfile --max-worker-restart 0
run_part = $(4) $(PYTEST) $(2) $(3) $(CACHE) --cache-clear --junitxml=$(RESULTS)/$@-of-$(1).xml \
	tests/$(1) || $(call again,$(2) $(CACHE) tests/$(1)) || failed=1
CACHE = -o cache_dir=$(RESULTS)/cache-$(1) # its own: parts run at a time
# A test that fails (1; not: all else that ends pytest) runs once more, alone, since a busy machine
# may have stopped it. The log has both outcomes: who passes only then is unsteady, and to be mended.
again = { [ $$? = 1 ] && echo "Run once more; a test that passes now is unsteady:" \
	&& $(PYTEST) $(1) -v -x --last-failed --last-failed-no-failures none; }

ifdef RAY
test: $(RAY_VENV)/.ray
	$(RAY_VENV)/bin/python -m pytest -m "not slow" $(OF_RAY)
else
test: $(VENV)/.test ## the fast tests, 5 minutes on two cores; with RAY=2.59.0 those that need Ray
	$(call run_tests,-m "not slow and not long",,beside)
endif

# The short form, for test-all: RAY says which. The rest leaves a core for the names.
test-ray: $(RAY_VENV)/.ray
	@mkdir -p $(RESULTS); trap 'wait; exit 130' INT; failed=0; \
	$(call run_ray_part,names,$(OF_RAY_NAMES)) > $(RESULTS)/ray-names.log 2>&1 & \
	beside=$$!; $(call run_ray_part,rest,-m "not slow" $(OF_RAY_IN_SHORT)) || failed=1; \
	wait $$beside || failed=1; cat $(RESULTS)/ray-names.log; exit $$failed
run_ray_part = $(RAY_VENV)/bin/python -m pytest -o cache_dir=$(RESULTS)/cache-ray-$(1) \
	--junitxml=$(RESULTS)/$@-of-$(1).xml $(2)

other-environments: $(VENV)/.kserve $(VENV)/.neighbours # what test-all makes for itself, but torch
	$(MAKE) .venv-ray-$(OTHER_RAY)/.ray RAY=$(OTHER_RAY)

test-all: $(VENV)/.all ## every test but those of the training, 48 minutes; installs torch
	$(call run_tests,,make test-ray RAY=$(OTHER_RAY) || failed=1;)

test-training: $(VENV)/.train ## the tests of training and conversion; installs torch
	$(PYTEST) $(IN_TWO) --cache-clear tests/training || $(call again,tests/training)

durations: test test-all ## run the tests, write tests/durations.md and which tests are long
	$(BIN)/python -m tests.support.durations

check: $(VENV)/.test ## lint, format, types, which way imports go, and the budgets of the code's size
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/python -m tests.support.tree --check

format: $(VENV)/.test ## write the format that check asks for
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

reference: $(VENV)/.test ## write docs/reference from the code, and the table of decisions
	$(BIN)/python -m tests.support.reference
	$(BIN)/python -m tests.support.decisions

docs: $(VENV)/.docs ## build the site of docs/ into build/site; a link that leads nowhere fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -f .mkdocs.yml

docs-serve: $(VENV)/.docs ## serve the site on http://127.0.0.1:8001 while you write
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve -f .mkdocs.yml -a 127.0.0.1:8001

readability: $(VENV)/.test ## print the length of sentences, by page
	$(BIN)/python -m tests.support.readability

coverage: $(VENV)/.all ## lines and branches that the unit tests run, by package; fails below tests/coverage.json
	$(PYTEST) -m "not slow" -n 2 --dist loadfile --max-worker-restart 0 -q \
		--cov --cov-report=json:build/coverage/report.json tests/unit
	$(BIN)/python -m tests.support.coverage_table

mutations: $(VENV)/.test ## plant faults in the core modules, one by one; print JSON of which tests find
	@$(BIN)/python -m tests.support.planted_faults

# What is pinned stays, unless UPGRADE=1. GPU libraries of torch are left free: a CPU build has none.
LOCK = $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --no-annotate \
	--custom-compile-command "make lock" $(if $(UPGRADE),--upgrade) pyproject.toml
GPU := /^(cuda|nvidia|triton)(-[a-z0-9-]+)?==/d
lock: $(VENV)/.test ## remake constraints.txt and tests/constraints.txt; UPGRADE=1: newer versions
	$(LOCK) $(SERVING:%=--extra %) -o constraints.txt
	$(LOCK) --all-extras -c constraints.txt -o tests/constraints.txt
	sed -i.bak -E '$(GPU)' constraints.txt tests/constraints.txt && rm constraints.txt.bak tests/constraints.txt.bak

release: $(VENV)/.test ## build the distributions into dist/, try them in empty environments, print the tag
	@.ci/release $(PYTHONS)

proto: $(VENV)/.test ## make *_pb2*.py* in app/grpc and client from the .proto files
	$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
		app/grpc/tandem.proto app/grpc/open_inference.proto app/grpc/tensorflow_serving.proto
	$(BIN)/python -m grpc_tools.protoc -I. --grpc_python_out=. app/grpc/tandem.proto
	cp app/grpc/tandem_pb2.py app/grpc/tandem_pb2.pyi client/tandem_client/

clean: ## remove what the targets above made
	rm -rf $(VENV) .venv-* .pytest_cache .ruff_cache .mypy_cache .hypothesis *.egg-info $(RESULTS)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve: WHAT := .
$(VENV)/.serve: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "setting up $(VENV): about two minutes, once"
	@$(INSTALL)
	@touch $@

$(VENV)/.tools: WHAT := .[calibrate]
$(VENV)/.tools: $(VENV)/.serve
	@$(INSTALL)
	@touch $@

$(VENV)/.all: WHAT := .[test,torch]
$(VENV)/.all: $(VENV)/.test $(VENV)/.kserve $(VENV)/.neighbours
	@$(INSTALL_DEV)
	@touch $@

# KServe's clients want other versions of protobuf and psutil than Ray and the tests do.
$(VENV)/.kserve: $(VENV)/.test
	$(PYTHON) -m venv $(VENV)/kserve
	$(VENV)/kserve/bin/pip install --quiet --disable-pip-version-check kserve==0.21.0
	@touch $@

# OpenVINO Model Server's client, and MLServer, which wants an older Starlette than KServe's.
$(VENV)/.neighbours: $(VENV)/.test
	$(PYTHON) -m venv $(VENV)/neighbours
	$(VENV)/neighbours/bin/pip install --quiet --disable-pip-version-check \
		ovmsclient==2023.1 mlserver==1.7.1
	@touch $@

$(VENV)/.test: WHAT := .[test]
$(VENV)/.test: $(VENV)/.serve tests/constraints.txt
	@$(INSTALL_DEV)
	@command -v chromium >/dev/null || [ -n "$$TANDEM_CHROMIUM" ] || tests/e2e/install_chromium.sh
	@command -v prometheus >/dev/null || tests/e2e/install_prometheus.sh $(BIN)
	@touch $@

# The site's packages alone: who writes a page needs no Ray.
$(VENV)/.docs: tests/constraints.txt | $(VENV)/bin/python
	@$(call pip_install,-c tests/constraints.txt mkdocs-material)
	@touch $@

# A Ray of another version beside all that .venv has, at the versions of constraints.txt.
$(RAY_VENV)/.ray: $(VENV)/.test
	$(PYTHON) -m venv $(RAY_VENV)
	@echo "import site; site.addsitedir('$$($(CURDIR)/$(BIN)/python -c $(PURELIB))')" \
		> "$$($(RAY_VENV)/bin/python -c $(PURELIB))/all-else.pth"
	@grep -v '^ray==' constraints.txt > $(RAY_VENV)/constraints.txt
	$(RAY_VENV)/bin/pip install --quiet --disable-pip-version-check \
		-c $(RAY_VENV)/constraints.txt 'ray[serve]==$(RAY)'
	$(RAY_VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

$(VENV)/.train: WHAT := .[test,ladder,timm]
$(VENV)/.train: $(VENV)/.test
	@$(INSTALL_DEV)
	@touch $@
