# Every target works on a fresh clone: it makes .venv, installs what it needs (versions: constraints.txt), and does its work.
# A second run skips the installation.

PYTHON ?= python3
MODEL  ?= $(if $(wildcard folovllm/assets/stories-5m/config.json),stories-5m,smollm2)
WORKERS ?= 2
# PyTorch's ordinary builds for Linux bring CUDA's libraries, several gigabytes. Where there is no NVIDIA GPU, its CPU builds do.
TORCH_INDEX ?= $(if $(filter Linux,$(shell uname -s)),$(if $(shell command -v nvidia-smi 2> /dev/null),,https://download.pytorch.org/whl/cpu))
PROMPT ?= Tell me a story about Lily and a red kite.

BIN     := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PYTEST  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

EXTRAS  := serve dev notebooks docs ray eval

# Ranks, learners' code and commands are tested in hundreds of processes: each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo learn check test lint suite ci course ray release notebooks recordings screenshots docs lab clean

help:
	@echo "make demo       a text from a real model, with its speed"
	@echo "make learn      what the course needs: pytest, JupyterLab; then: source .venv/bin/activate"
	@echo "make check      the main job at each milestone, and one request to the server: a minute"
	@echo "make test       ruff, mypy --strict (make lint), pytest (make suite)"
	@echo "make ci         test, lm-eval, the course's own tests, Ray, notebooks, docs and every command in them"
	@echo "make release    what must hold before a release beside make ci: the Chinese edition is in step, the notebooks run, the embedded model's training runs, all kernels fit on all cards"
	@echo "make notebooks  run the notebooks' sources and write the notebooks"
	@echo "make recordings record the engine for the book's inspector, its pictures and their tests"
	@echo "make screenshots take the pictures of the inspector (needs chromium)"
	@echo "make docs       write the code that the book shows into its pages, and build it into site/"
	@echo "make lab        open the notebooks in JupyterLab, yours in mine/ too"

demo: .venv/.serve
	@if [ $(MODEL) = smollm2 ]; then $(BIN)/folovllm download smollm2; fi
	$(BIN)/folovllm generate "$(PROMPT)" --model $(MODEL) --temperature 0.7 --top-p 0.9 --seed 1 --max-tokens 120

learn: .venv/.serve .venv/.dev .venv/.notebooks
	@echo "Next: source .venv/bin/activate, then python -m milestones start m1"

check: .venv/.serve .venv/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q tests/test_check.py

test: lint suite

lint: .venv/.serve .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

suite: .venv/.serve .venv/.dev
	$(PYTEST) $(SLOW) --ignore tests/course --ignore tests/ray

# mypy has one process, so beside the suite, which here runs what is marked slow, too: such tests often wait for a
# browser or a server, so three share two cores. Ray's tests mostly wait, so they run beside the course's.
ci: .venv/.all
	$(MAKE) --jobs 2 lint suite SLOW=--slow WORKERS=3
	$(MAKE) --jobs 2 course ray
	$(if $(wildcard notebooks/src/*.py),$(BIN)/python -m milestones.notebooks --check)

# They start processes of their own, one for each core, so not under xdist.
course: .venv/.serve .venv/.dev
	nice $(BIN)/python -m pytest -q --slow tests/course

# Ray gives its parts 30 seconds to start, hence the lower priority of what runs beside it.
ray: .venv/.serve .venv/.dev .venv/.ray
	timeout -k 30 900 $(BIN)/python -m pytest -q tests/ray

release: .venv/.serve .venv/.dev .venv/.notebooks
	$(BIN)/python tools/translation.py check --release
	$(BIN)/python -m milestones.notebooks
	$(BIN)/python -m tools.train_tiny.train "$$(mktemp -d)" --smoke
	FOLOVLLM_RELEASE=1 $(PYTEST) tests/m4/test_offline_compile.py

notebooks: .venv/.notebooks
	$(BIN)/python -m milestones.notebooks
	$(BIN)/python tools/translation.py notebooks

recordings: .venv/.serve
	PYTHONPATH=. OMP_NUM_THREADS=1 $(BIN)/python tools/recordings.py
	OMP_NUM_THREADS=1 $(BIN)/python docs/_tools/pictures.py

screenshots: .venv/.dev
	PYTHONPATH=. $(BIN)/python tools/screenshots.py

# Not --quiet: mkdocs would no longer count the warnings that --strict turns into errors.
docs: .venv/.docs
	$(BIN)/python docs/_tools/excerpts.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# JupyterLab shows the SVG pictures of a notebook that nobody has run yet only if it trusts the notebook. Its settings: a
# double click on a chapter shows the page, not its source, and no question about news.
SETTINGS := .venv/share/jupyter/lab/settings
lab: .venv/.notebooks
	@$(BIN)/jupyter trust notebooks/*.ipynb notebooks/zh/*.ipynb > /dev/null
	@mkdir -p $(SETTINGS) && echo '{"@jupyterlab/docmanager-extension:plugin": {"defaultViewers": {"markdown": "Markdown Preview"}},' \
	  '"@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}}' > $(SETTINGS)/overrides.json
	$(BIN)/jupyter lab --LabApp.default_url=/lab/tree/notebooks

clean:
	rm -rf .venv site .mypy_cache .ruff_cache .pytest_cache

# torch first and by its exact version: a range would let pip look at, and fetch, builds of several gigabytes.
.venv/.torch: constraints.txt
	@echo "Installing into .venv: a minute or two the first time"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test -z "$(TORCH_INDEX)" || $(INSTALL) --retries 1 --no-deps --index-url "$(TORCH_INDEX)" torch==2.13.0 || \
		echo "$(TORCH_INDEX) cannot be reached: torch comes from the ordinary index, on Linux with CUDA (5 GB)"
	$(INSTALL) --no-compile torch==2.13.0
	@touch $@

.venv/.engine: pyproject.toml constraints.txt .venv/.torch
	$(INSTALL) -e .
	@touch $@

$(addprefix .venv/.,$(EXTRAS)): .venv/.%: .venv/.engine
	$(INSTALL) -e ".[$*]"
	@touch $@

# By one call of pip: each builds the project, and looks at each requirement of the others again. Of 25,000 files a small
# part is ever imported, and compiled then.
.venv/.all: pyproject.toml constraints.txt .venv/.torch
	$(INSTALL) --no-compile -e ".[$(shell echo $(EXTRAS) | tr ' ' ,)]"
	@touch .venv/.engine $(addprefix .venv/.,$(EXTRAS)) $@
