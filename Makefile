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

# What the caller lets this see, for gpu-check.
GPUS := $(CUDA_VISIBLE_DEVICES)

# SGLang chooses its device by these. Dynamo would compile for 10 s and more inside the first request.
export SGLANG_USE_CPU_ENGINE := 1
export TORCHDYNAMO_DISABLE := 1
export CUDA_VISIBLE_DEVICES :=

PAPER_SMALL := build/paper-small

DEPS_STAMP := $(VENV)/.deps
PROJECT_STAMP := $(VENV)/.project
EXTRAS_STAMP := $(VENV)/.extras
DOCS_STAMP := $(VENV)/.docs

# Quiet. If it fails it says why in one line, and the rest is in the log.
PIP_LOG := $(VENV)/pip.log
INSTALL := rm -f $(PIP_LOG); > /dev/null 2>&1 $(BIN)/python -m pip \
	--disable-pip-version-check --log $(PIP_LOG) install --no-warn-conflicts
OR_WHY := || { echo "cannot install: $$(sed -n 's/^[^ ]* *ERROR: //p' $(PIP_LOG) | head -n 1):" \
	"see $(PIP_LOG), and check that the package index is in reach" >&2; exit 1; }

.PHONY: demo test test-slow serve bench paper-small gpu-check lint docs venv clean
.DELETE_ON_ERROR:

demo: $(PROJECT_STAMP)
	@$(BIN)/sglang-hvd demo $(ARGS)

# Two processes. Files whose tests can share a server form a group, and a group runs in one process
# (tests/conftest.py). The groups start in the order in which they are collected.
PYTEST := $(BIN)/python -m pytest --numprocesses 2 --dist loadscope --no-loadscope-reorder

# A second thread of torch or BLAS would spin for the core on which the other process runs.
test test-slow: export OMP_NUM_THREADS := 1

test: venv
	$(PYTEST) -m 'not slow' $(PYTEST_ARGS)

# What a release needs and a change rarely does.
test-slow: venv
	$(PYTEST) -m slow $(PYTEST_ARGS)

serve: $(PROJECT_STAMP)
	$(BIN)/sglang-hvd serve $(ARGS)

bench: venv
	$(BIN)/python -m benchmarks.suffix_cache $(ARGS)

# The paper's evaluation in small: the demo models, with samples in place of the data sets.
paper-small: export OMP_NUM_THREADS := 1
paper-small: venv
	rm -rf $(PAPER_SMALL)
	$(BIN)/python -m benchmarks.paper --model demo --out $(PAPER_SMALL) \
		--prompts 4 --warm-up-prompts 8 --concurrency 1,8 --rounds 2 $(ARGS)
	$(BIN)/sglang-hvd report $(PAPER_SMALL)/result.json -o $(PAPER_SMALL)/report.html
	@echo "The report is written: open $(PAPER_SMALL)/report.html"

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

venv: $(EXTRAS_STAMP)

# Stamps: each names what it installed, so a changed pin, patch or native source is installed again
# and nothing else is. The installs are editable: Python changes need no install at all, and the
# native module is rebuilt here, once, rather than by every importing process.
# SGLang's metadata demands the CUDA kernels, hence --no-deps. The cpu extra is what it imports here.
$(DEPS_STAMP): pyproject.toml
	@python=$$(scripts/preflight.sh) && { [ -x $(BIN)/python ] || "$$python" -m venv $(VENV); }
	@echo "Installing torch, $(SGLANG) and what it needs on the CPU (a minute or more)"
	@$(BIN)/python scripts/requirements.py project cpu > $(VENV)/requirements.txt
	@$(INSTALL) --no-compile $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) \
		--requirement $(VENV)/requirements.txt $(OR_WHY)
	@$(INSTALL) --no-compile --no-deps $(SGLANG) $(OR_WHY)
	@touch $@

# Python's bytecode is compiled while the native modules are: pip would do it on one core.
$(PROJECT_STAMP): $(DEPS_STAMP) sglang_hvd/__init__.py $(NATIVE) $(PATCHES:=/pyproject.toml)
	@echo "Building the native modules of sglang_hvd"
	@$(BIN)/python -m compileall -q -j 2 $(VENV)/lib > /dev/null & { \
		$(INSTALL) --no-deps $(addprefix --editable ./,. $(PATCHES)) $(OR_WHY); \
		} && wait
	@touch $@

# What training, the tests and the linters need, and the demo does not. The name without a path is
# the project as it is installed, so its native modules are not built again.
$(EXTRAS_STAMP): $(PROJECT_STAMP)
	@echo "Installing what training and the tests need"
	@$(INSTALL) 'sglang-hvd[train,dev]' $(OR_WHY)
	@touch $@

# The site, by the extra `docs` alone. A warning, such as a link that leads nowhere, ends the build.
docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "The site is built: open build/site/index.html"

$(DOCS_STAMP): pyproject.toml
	@python=$$(scripts/preflight.sh) && { [ -x $(BIN)/python ] || "$$python" -m venv $(VENV); }
	@$(BIN)/python scripts/requirements.py docs > $(VENV)/docs.txt
	@$(INSTALL) --requirement $(VENV)/docs.txt $(OR_WHY)
	@touch $@
