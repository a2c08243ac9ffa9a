# make train   sets up .venv once, then trains the default job on two ranks
# make test    sets up .venv once, then runs every check
# make check   the checks alone, with the Python that is active

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The interpreter that `make check` uses: .venv where it exists, else the active one.
CHECK_PYTHON = $(shell test -x $(BIN)/python && echo $(BIN)/python || echo $(PYTHON))

export HF_HUB_OFFLINE = 1

.PHONY: train test check setup clean

train: setup
	$(BIN)/lrmoe train --nproc 2

test: setup check

check:
	$(CHECK_PYTHON) -m ruff check .
	$(CHECK_PYTHON) -m ruff format --check .
	$(CHECK_PYTHON) -m mypy
	$(CHECK_PYTHON) -m pytest

setup: $(STAMP)

# Set-up is done once: again only when what is installed would change.
$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[train,dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache runs
