# make demo    watch an agent learn CartPole in environments behind gRPC
# make test    run the tests
# make check   format, lint, types, generated code
# make bench   steps per second, side by side with peers
# make proto   generate bridge/pb from proto
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin

.PHONY: demo test check bench proto clean

# One stamp a set of extras; a changed pyproject.toml installs again.
$(VENV)/.installed-%: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet --editable ".[$*]"
	touch $@

demo: $(VENV)/.installed-demo
	$(BIN)/bridge demo

test: $(VENV)/.installed-test
	$(BIN)/python -m pytest

check: $(VENV)/.installed-test $(VENV)/.installed-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python proto/generate.py --check

bench: $(VENV)/.installed-test
	-$(MAKE) $(VENV)/.installed-bench # a peer that cannot be installed is skipped with a word
	$(BIN)/python -m benchmarks

proto: $(VENV)/.installed-check
	$(BIN)/python proto/generate.py

clean:
	rm -rf $(VENV) build dist *.egg-info
