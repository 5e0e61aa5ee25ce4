# One virtual environment, .venv, made on first use and again when the requirements change.
# PYTHON names the interpreter to make it with, such as `make course PYTHON=python3.12`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXTRAS := course,test,kernels,evaluate

# mamba-ssm without its compiled extensions, which SSD does not use: no compiler, no GPU. Its Triton
# kernels are plain Python files. --no-deps leaves out what only the extensions need.
MAMBA := MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE
MAMBA_SSM := -c constraints.txt --no-build-isolation --no-deps mamba-ssm

# A PYTHON that is named must not be ignored because there is a .venv already.
ifeq ($(origin PYTHON)$(filter clean,$(MAKECMDGOALS)),command line)
ifneq ($(wildcard $(READY)),)
VERSION_OF = $(shell $(1) -c 'import sys; print(*sys.version_info[:2], sep=".")')
ifneq ($(call VERSION_OF,$(PYTHON)),$(call VERSION_OF,$(BIN)/python))
$(error $(VENV) was made with Python $(call VERSION_OF,$(BIN)/python), not $(call VERSION_OF,$(PYTHON)); run `make clean` first)
endif
endif
endif

# The sites and the slides, and what they are made from. Each edition has its own folder.
EDITION ?= students
STUDENTS := book/_build/site/index.html
SITE := $(if $(filter students,$(EDITION)),$(STUDENTS),book/_build/site-$(EDITION)/index.html)
SLIDES := book/_build/slides/index.html
ROOMS := notebooks site slides editions guide manual
DECKS := $(wildcard notebooks/*.ipynb book/*.py book/*/*.py book/slides/theme/*)
PAGES := $(wildcard README.md CONTRIBUTING.md LICENSE notebooks/* notebooks/labs/* notebooks/reference/* cheems_ref/*.* cheems_lab/*.* cheems_lab/*/*.* figures/* \
	book/*.* $(ROOMS:%=book/%/*.*) book/site/static/* book/site/play/* \
	book/site/extensions/*.py book/site/templates/*/* book/slides/theme/* tests/*.py tests/planted/*.py)
PORT ?= 8000

.DEFAULT_GOAL := help
.PHONY: help course test mutants lab book slides serve student test-book bench kernels-report gpu clean

help:  ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

course: $(READY)  ## run every notebook and redraw every figure
	$(BIN)/python -m book.notebooks
	@echo "Chapter 07 trained a small Cheems; what it wrote is in runs/chapter_07/written.txt."

# ALL=1 adds unchanged notebooks and slow programs, as CI does.
# TYPES=1 checks what the packages' signatures say at every call.
TYPE_CHECKS := --jaxtyping-packages=cheems_ref,cheems_lab,beartype.beartype
TEST_OPTIONS := $(if $(ALL),--all) $(if $(TYPES),$(TYPE_CHECKS))
# One thread each. It saves nothing on two idle cores (96 s and 99 s), but CPU time on busy ones.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

test: $(READY)  ## check the style, run the tests, and run changed notebooks against their stored output
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) $(TEST_OPTIONS)

mutants: $(READY)  ## make small mistakes in every lesson, which the tests must catch (hours; MODULES=rope)
	$(BIN)/python tests/mutate.py $(MODULES) $(if $(SAMPLE),--sample $(SAMPLE))

student: $(READY)  ## make the student edition and the instructor's copy, in build/
	$(BIN)/python -m book.editions

lab: $(READY)  ## open the notebooks in JupyterLab
	$(BIN)/jupyter lab --notebook-dir notebooks

book: $(SITE)  ## make the students' web site (installs Sphinx; EDITION=instructor has solutions and guide)

slides: $(SLIDES)  ## make a deck of slides of each chapter, for a browser and for paper

serve: $(SITE)  ## show the site on this machine; PORT=8000 says where, EDITION which
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(dir $(SITE)) $(PORT)

test-book: $(STUDENTS) $(SLIDES) $(VENV)/.browser $(VENV)/.grading  ## test site, slides (in a Chromium where there is one), editions
	$(PYTEST) tests/book

$(STUDENTS): $(VENV)/.book $(PAGES)
	$(BIN)/python -m book.site --edition students

book/_build/site-%/index.html: $(VENV)/.book $(PAGES)
	$(BIN)/python -m book.site --edition $*

$(SLIDES): $(VENV)/.book $(DECKS)
	$(BIN)/python -m book.slides

$(VENV)/.book $(VENV)/.browser $(VENV)/.grading: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .[$(subst .,,$(notdir $@))]
	@touch $@

bench: $(READY)  ## print the comparison tables and the missed targets (ten minutes; FULL=1 measures all)
	@echo "pip may remark on what mamba-ssm lacks: that is for extensions which SSD does not use."
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .[bench]
	$(BIN)/python tests/bench/run.py $(if $(FULL),--full)

kernels-report: $(READY)  ## compile our kernels for five GPUs that need not be there: registers, spills, occupancy
	$(BIN)/python tests/bench/report_kernels.py

# Without the network, too: where .venv is not there, PYTHON is taken, with what it has.
gpu:  ## tests and measurements for a machine with a CUDA GPU (45 minutes at most; else a rehearsal)
	$(if $(wildcard $(READY)),$(BIN)/python,$(PYTHON)) tests/bench/on_gpu.py

clean:  ## remove the virtual environment and every cache
	rm -rf $(VENV) build book/_build runs/chapter_07 *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -name .ipynb_checkpoints -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed; name one: make course PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip  # Python 3.11's is slow
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt -e .[$(EXTRAS)]
	@$(BIN)/python -W ignore -m compileall -qq -j 0 -x '/tests?/' $(VENV)/lib || true  # pip does it on one core
ifeq ($(shell uname -s),Linux)
	$(MAMBA) $(BIN)/python -m pip install --quiet $(MAMBA_SSM)
endif
	@touch $@
