# Everything a fresh machine with Python >= 3.11 and make needs. `make serve` and `make test` do all the set-up themselves.
PYTHON ?= python3
VENV   ?= .venv
MODEL  ?=
ARGS   ?=

BIN := $(VENV)/bin

.PHONY: serve test slow check bench clients router clean
.DEFAULT_GOAL := serve

# Without MODEL: the small model that comes with the package.
serve: $(VENV)/.ready
	$(BIN)/ds4jax serve $(if $(MODEL),--model-path $(MODEL)) $(ARGS)

test: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not slow" $(ARGS)

# What `make test` leaves out: the oracle's models of few bits in an engine, steps on kernels, the small model's replies, notebooks.
slow: $(VENV)/.ready-test
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m slow $(ARGS)

check: $(VENV)/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layering.py

# A first look; `ds4jax bench --help` lists what else can be measured.
bench: $(VENV)/.ready
	$(BIN)/ds4jax bench decode $(if $(MODEL),--model $(MODEL)) --buckets 1,4,16 --ctx 1024 --steps 50
	$(BIN)/ds4jax bench serve $(if $(MODEL),--model $(MODEL)) --clients 1,16 --ctx 1024 $(ARGS)

# Real agents (docs/clients), which npm installs, each against a scripted model. A server that runs already: URL=http://…
clients: $(VENV)/.ready-test .clients/.ready
	$(BIN)/python -m tools.clients --programs .clients $(if $(URL),--url $(URL)) $(ARGS)

# vllm-router in front of two such servers.
router: $(VENV)/.ready-test .clients/router/.ready
	$(BIN)/python -m tools.clients.router --program .clients/router/bin/vllm-router

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .clients ds4jax.egg-info
	rm -rf $(VENV) .venv-newest

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "ds4jax needs Python 3.11 or newer, got " + sys.version.split()[0] + "; name one: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

# Stamps: an environment is set up once, and again when the dependencies change.
$(VENV)/.ready: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.ready-test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ $(VENV)/.ready

.clients/.ready: tools/clients/package.json
	@mkdir -p .clients
	cp tools/clients/package.json .clients/
	npm install --prefix .clients --no-audit --no-fund --loglevel=error
	@touch $@

.clients/router/.ready:
	$(BIN)/python -m venv .clients/router
	.clients/router/bin/pip install --quiet vllm-router==0.1.17
	@touch $@
