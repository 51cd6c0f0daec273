# Needs python3 with pip, and git. Everything else is installed into .uv and .venv, pinned by the hashes in requirements/.
# PYTHON=... names the Python to start from; it also becomes that of .venv if it is 3.12 or newer.

PYTHON_GIVEN := $(PYTHON)
PYTHON ?= python3
UV := .uv/bin/uv

# In this directory pyenv offers only the version that .python-version names. Let it offer all that it has.
PYENV_VERSIONS := $(shell pyenv versions --bare 2>/dev/null | sort -rV | paste -sd: -)
ifneq ($(PYENV_VERSIONS),)
export PYENV_VERSION ?= $(PYENV_VERSIONS)
endif

.PHONY: help
help:
	@echo "make train   train a small GPT-2 with MARS-AdamW on this machine's CPU"
	@echo "make test    the whole test suite"
	@echo "make check   format, lint and types"
	@echo "make compatibility  train with each Levanter that README.md names, in environments of their own"
	@echo "make venv    only the environment, .venv, that the others make too"
	@echo "make lock    pin new dependencies in requirements/ (UPGRADE=--upgrade moves all of them)"
	@echo "make clean   remove .venv, .uv, .sky, .torch, .nox and caches; what was trained stays"

# Without the platform named, JAX would try the libtpu that the tests install, and complain.
.PHONY: train
train: venv
	JAX_PLATFORMS=cpu .venv/bin/python -m levanter_mars.main.quickstart --config config/mars_gpt2_nano.yaml

# Two workers, because most of the time goes into compilation, which uses one core. .torch is large and serves one test, which is skipped
# without it: it is kept up to date here, not made.
.PHONY: test
test: venv .venv/.preflight .venv/.eval .sky/.installed $(wildcard .torch/.installed)
	.venv/bin/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

# Not among the tests: it makes an environment for each Levanter. ONLY='levanter(newest)' runs one of them.
.PHONY: compatibility
compatibility: venv
	.venv/bin/nox $(if $(ONLY),--sessions '$(ONLY)')

.PHONY: check
check: venv
	.venv/bin/ruff format --check
	.venv/bin/ruff check
	.venv/bin/pyrefly check

.PHONY: venv
venv: .venv/.installed

.venv/.installed: .venv/pyvenv.cfg requirements/cpu.txt pyproject.toml src/levanter_optim/levanter_mars.py
	$(UV) pip sync --python .venv --require-hashes requirements/cpu.txt
	$(UV) pip install --python .venv --no-deps --no-build-isolation --editable .
	@touch $@

# What only some tests need: libtpu, by which preflight compiles for TPUs (where it does not exist, outside Linux on x86-64, its tests are
# skipped), and the harness by which models are evaluated.
.venv/.preflight .venv/.eval: .venv/.%: .venv/.installed requirements/%.txt
	$(UV) pip install --python .venv --require-hashes -r requirements/$*.txt
	@touch $@

# SkyPilot, whose parser reads infra/sky, asks for other versions of what Levanter needs. torch, with which transformers loads an exported
# model, would bring its CUDA libraries beside JAX's: 4.4 GB on Linux, since pip's default index has no build for the CPU alone there.
.sky/.installed .torch/.installed: .%/.installed: .venv/.installed requirements/%.txt
	$(UV) venv --quiet --clear --python .venv/bin/python .$*
	$(UV) pip sync --python .$* --require-hashes requirements/$*.txt
	@touch $@

FIND := $(UV) python find --no-project --system --no-python-downloads
IS_NEW := -c 'import sys; sys.version_info >= (3, 12) or sys.exit(1); print(sys.executable)'
NO_PYTHON := Python 3.12 or newer is needed and could be neither found nor downloaded: install it, or name it with make PYTHON=...

.venv/pyvenv.cfg: | $(UV)
	@python=$$({ $(if $(PYTHON_GIVEN),$(PYTHON_GIVEN) $(IS_NEW) ||) $(FIND) 3.12 || $(FIND) '>=3.12'; } 2>/dev/null); \
	if [ -z "$$python" ]; then \
	  echo "Found no Python 3.12 or newer, trying to download one"; \
	  python=$$({ UV_HTTP_TIMEOUT=30 $(UV) python install 3.12 && $(FIND) 3.12; } 2>/dev/null) || { echo "$(NO_PYTHON)" >&2; exit 1; }; \
	fi; \
	$(UV) venv --quiet --clear --python "$$python" .venv

# Not in a virtual environment of its own: Debian's python3 comes without the means to make one.
$(UV): requirements/uv.txt
	@$(PYTHON) -m pip --version >/dev/null 2>&1 || { echo "'$(PYTHON) -m pip' does not run: install Python with pip, or name one that has it with make PYTHON=..." >&2; exit 1; }
	@rm -rf .uv
	PIP_ROOT_USER_ACTION=ignore PIP_REQUIRE_VIRTUALENV=0 PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
	  $(PYTHON) -m pip install --quiet --require-hashes --only-binary :all: --target .uv -r requirements/uv.txt
	@touch $@

COMPILE := .uv/bin/uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-emit-index-url --custom-compile-command "make lock" $(UPGRADE)

.PHONY: lock
lock: $(UV)
	$(COMPILE) pyproject.toml --extra test --extra vision --output-file requirements/cpu.txt
	$(COMPILE) pyproject.toml --extra gpu --extra vision --output-file requirements/gpu.txt
	$(COMPILE) pyproject.toml --extra tpu --extra vision --output-file requirements/tpu.txt
	echo "libtpu; sys_platform == 'linux' and platform_machine == 'x86_64'" | $(COMPILE) - --constraint requirements/tpu.txt --output-file requirements/preflight.txt
	echo "lm-eval>=0.4.13" | $(COMPILE) - --constraint requirements/cpu.txt --output-file requirements/eval.txt
	echo triton | $(COMPILE) requirements/torch.in --constraint requirements/cpu.txt --excludes /dev/stdin --output-file requirements/torch.txt
	echo 'skypilot[gcp]' | $(COMPILE) - --output-file requirements/sky.txt
	echo uv | $(COMPILE) - --constraint requirements/cpu.txt --output-file requirements/uv.txt

.PHONY: clean
clean:
	rm -rf .venv .uv .sky .torch .nox .pytest_cache .ruff_cache .hypothesis
