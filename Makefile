# Everything below works from a bare clone: the first target to run sets up .venv, later ones reuse it.
# .venv serves on the CPU. It is this folder's own; to serve on a GPU see README.md.
#
#   PYTHON=...        the Python 3.11+ to build .venv with
#   TORCH_INDEX=...   a package index with torch's CPU build; without one, pip may choose the CUDA
#                     build, which works but is several GB larger
#   PYTEST_ARGS=...   appended to pytest by `make test` and `make test-slow`
#   ARGS=...          appended to `sglang-hvd demo`, `sglang-hvd serve` and the benchmarks

VENV := .venv
BIN := $(VENV)/bin
SGLANG := $(shell sed -n 's/^cuda = \["\(.*\)"\]$$/\1/p' pyproject.toml)
PATCHES := $(patsubst %/pyproject.toml,%,$(wildcard patches/*/pyproject.toml))
NATIVE := CMakeLists.txt $(wildcard sglang_hvd/native/* sglang_hvd/*/native/* sglang_hvd/*/*/native/*)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# What the caller lets this see, for gpu-check.
GPUS := $(CUDA_VISIBLE_DEVICES)

# SGLang chooses its device by these. Dynamo would compile for 10 s and more inside the first request.
export SGLANG_USE_CPU_ENGINE := 1
export TORCHDYNAMO_DISABLE := 1
export CUDA_VISIBLE_DEVICES :=

.PHONY: demo test test-slow serve bench gpu-check lint docs venv clean
.DELETE_ON_ERROR:

demo: venv
	$(BIN)/sglang-hvd demo $(ARGS)

# Two processes. Files whose tests can share a server form a group, and a group runs in one process
# (tests/conftest.py). The groups start in the order in which they are collected.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

test: venv
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

# What a release needs and a change rarely does.
test-slow: venv
	$(PYTEST) -m slow $(PYTEST_ARGS)

serve: venv
	$(BIN)/sglang-hvd serve $(ARGS)

bench: venv
	$(BIN)/python -m benchmarks.suffix_cache $(ARGS)

# In the environment that serves on the GPU, not in .venv: PYTHON=... names its interpreter.
gpu-check:
	env -u SGLANG_USE_CPU_ENGINE -u TORCHDYNAMO_DISABLE -u CUDA_VISIBLE_DEVICES \
		$(if $(GPUS),CUDA_VISIBLE_DEVICES=$(GPUS)) $(or $(PYTHON),python3) -m benchmarks.gpu_check $(ARGS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Stamps: each names what it installed, so a changed pin, patch or native source is installed again
# and nothing else is. The installs are editable: Python changes need no install at all, and the
# native module is rebuilt here, once, rather than by every importing process.
PROJECT_STAMP := $(VENV)/.project
SGLANG_STAMP := $(VENV)/.$(SGLANG)
PATCHES_STAMP := $(VENV)/.patches
DOCS_STAMP := $(VENV)/.docs

venv: $(PATCHES_STAMP)

$(PROJECT_STAMP): pyproject.toml sglang_hvd/__init__.py $(NATIVE)
	@python=$$(scripts/preflight.sh) && { [ -x $(BIN)/python ] || "$$python" -m venv $(VENV); }
	@echo "Installing sglang_hvd, torch and what SGLang needs on the CPU (minutes the first time)"
	@$(PIP) install --no-warn-conflicts $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable '.[cpu,train,dev]'
	@touch $@

# --no-deps: SGLang's metadata demands the CUDA kernels. What it imports on the CPU is the cpu extra.
$(SGLANG_STAMP): $(PROJECT_STAMP)
	@echo "Installing $(SGLANG)"
	@$(PIP) install --no-warn-conflicts --no-deps $(SGLANG)
	@touch $@

$(PATCHES_STAMP): $(SGLANG_STAMP) $(PATCHES:=/pyproject.toml)
	@echo "Installing $(PATCHES)"
	@$(PIP) install --no-warn-conflicts --no-deps $(addprefix --editable ./,$(PATCHES))
	@touch $@

# The site, by the extra `docs` alone. A warning, such as a link that leads nowhere, ends the build.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is built: open build/site/index.html"

DOCS_NEEDS := import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")

$(DOCS_STAMP): pyproject.toml
	@python=$$(scripts/preflight.sh) && { [ -x $(BIN)/python ] || "$$python" -m venv $(VENV); }
	@$(BIN)/python -c '$(DOCS_NEEDS)' | $(PIP) install --requirement /dev/stdin
	@touch $@
