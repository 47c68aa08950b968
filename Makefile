# `make run` and `make test` are all a newcomer needs; both make .venv first.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
# on a machine without a GPU: make run TORCH_INDEX=https://download.pytorch.org/whl/cpu spares some gigabytes
TORCH_INDEX ?=

.PHONY: run test install smol lint clean
run: install
	$(BIN)/ratchet run

test: install
	$(BIN)/python -m pytest

smol: install
	$(BIN)/ratchet fetch smol

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "ratchet needs Python 3.11, 3.12 or 3.13; give make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt -e ".[dev,s3,smol]"
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
