# make demo    watch an agent learn CartPole in environments behind gRPC
# make test    run the tests, but for those that take long
# make test-ci      run those too: what .ci/run does
# make test-all      run all of them, also those that repeat others with further parameters
# make coverage     run them with their branches measured, and print the lines that none reaches; twice the time
# make test-core     run the core tests, which need few packages
# make test-versions     run the core tests and both ends together on other versions of Python, Gymnasium, NumPy and Protobuf
# make test-without FEATURE=recording     delete a feature from a clone, and run the core tests on what is left
# make test-pins     train with RLlib and play zoos that pin an older Gymnasium, each installed beside this package
# make test-old-peer   play with an older version of this package, in an interpreter of its own
# make dist    build the packages, check them, and run the demo from them
# make check   format, lint, types, generated code
# make bench   steps per second, side by side with peers
# make chaos   step for 20 minutes, twice, while servers and links fail; make fuzz   a million random requests and frames
# make attacks   known attacks on servers, against ours, grpcio's and gymnasium-bridge web
# make mutants break the protocol in many ways, and see a test fail for each
# make zoo     play third-party environments on a server beside local ones, and write the table of benchmarks/zoo.md
# make proto   generate bridge/pb from proto
# make pictures   draw docs/readme.png
# make docs    build the documentation as a site in build/site; a broken link is an error, and so is a search that misses the reference
# make test-trainers     run the tests that need PyTorch, with the trainers themselves
# make test-peers        run the tests against servers of other packages, which need older versions of what we use
# make test-openenv      run the tests with the client, the server and the validator of OpenEnv
# make test-ray          run the tests of fleets, on a Ray cluster of this machine
# make test-network      run the tests on networks of several machines, made of namespaces: Linux, as root
# make test-standalone     run the standalone server in old Pythons, of PYTHONS: .venv-versions
# make notebooks         execute the notebooks in place, at full length
# make notebooks-short   execute them with short trainings, and leave them as they are
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Trainers bring PyTorch, which nothing else needs.
TRAINERS ?= .venv-trainers
TORCH ?= torch==2.13.0

# Other packages that speak dm_env_rpc, with the versions of Gymnasium, NumPy and Protobuf that they need.
PEERS ?= .venv-peers
PEERS_PACKAGES = remote-gym==0.7.3 gymnasium==0.29.1 numpy==1.26.4 "protobuf<5" dm-env-rpc==1.1.6 openpi-client==0.1.2

# OpenEnv, for whose client, server and validator tests/openenv/test_openenv_peer.py has an environment of its own.
OPENENV ?= .venv-openenv
OPENENV_PACKAGES = openenv==0.10.0

# MkDocs and its plugins.
DOCS ?= .venv-docs

# An older version of this package, which tests/ends/test_old_peer.py plays with: the wheel says which.
OLD ?= .venv-old
OLD_WHEEL = $(wildcard tests/old_peer/*.whl)

# Third-party environments, one after the other: one that cannot be installed is said to be so in the table. The versions
# of mujoco and dm_control are those that all packages with robots in them get along with.
ZOO ?= .venv-zoo
ZOO_PACKAGES = highway-env mo-gymnasium minigrid gymnasium-robotics shimmy flappy-bird-gymnasium gym-pusht miniworld vizdoom \
	tetris-gymnasium popgym gym-anytrading crafter stable-retro mpe2 pettingzoo[classic] panda-gym metaworld lbforaging rware \
	mujoco==3.3.0 dm_control==1.0.28

# Interpreters from Python 3.7 on, in any order: pyenv's, and those on the path.
PYTHONS ?= $(wildcard $(HOME)/.pyenv/versions/*/bin/python) $(foreach minor,7 8 9 10 11 12 13 14,$(shell command -v python3.$(minor)))

# Every process that the tests start would compile the package anew: 0.2 s of each import.
unexport PYTHONDONTWRITEBYTECODE
# Python compiles what is imported when it is imported first. To compile all that is installed took a third of the time of
# an installation.
export PIP_COMPILE = 0

# Tests that need nothing but the core and the extra `test-core`.
CORE_TESTS = -k "not Pong and not MiniGrid" @tests/core.txt

# Tests run side by side, in more processes than two processors: most of them wait, for processes that start and for time
# that passes. Four left a third of the processors' time unused.
WORKERS ?= 6
PYTEST = $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal

.PHONY: demo test test-ci test-all coverage test-core test-versions test-without test-pins test-old-peer test-standalone test-trainers test-network test-peers test-openenv test-ray notebooks notebooks-short check check-python check-web check-calls bench chaos fuzz attacks mutants zoo proto docs pictures dist clean
.PHONY: FORCE compiled-tests env-old env-peers env-trainers env-notebooks env-openenv

# A step says its name and how long it took, and shows what its command wrote only where that fails.
STEP = @PYTHONWARNINGS=ignore $(PYTHON) .ci/step

# `$(CACHED) STAMP FILE… -- COMMAND…` runs a command unless the stamp holds a hash of it and of the files' contents. Make
# asks it each time (FORCE); where the stamp stays as it is, what needs it is not made anew.
CACHED = @PYTHONWARNINGS=ignore $(PYTHON) .ci/cached
FORCE:

# Lists the targets: what `make` alone does.
.DEFAULT_GOAL := help
.PHONY: help
help:
	@sed -n 's/^# \(make .*\)/\1/p' $(firstword $(MAKEFILE_LIST))

# Written for any Python, also for those that cannot run this package.
CHECK_VERSION = import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	"Gymnasium Bridge needs Python 3.10 or newer, and " + sys.executable + " is Python " + sys.version.split()[0] + \
	". Name a newer one: make demo PYTHON=python3.12")
# Not empty where an older Python made the environment: it is made anew.
OUTDATED := $(shell test ! -x $(BIN)/python || $(BIN)/python -c '$(CHECK_VERSION)' 2> /dev/null || echo outdated)

# The other environments have no pip of their own, which would take 6 s each: this one installs into them.
PIP = $(BIN)/python -m pip
$(BIN)/pip: $(if $(OUTDATED),FORCE)
	@$(PYTHON) -c '$(CHECK_VERSION)'
	$(if $(OUTDATED),rm -rf $(VENV))
	$(STEP) "Making the Python environment $(VENV)" $(PYTHON) -m venv $(VENV)
	$(STEP) "Updating pip" $(PIP) install --upgrade pip

# `$(call install,FOLDER,WHAT)` installs into an environment, which it makes where there is none.
install = sh -ec 'test -x $(1)/bin/python || $(PYTHON) -m venv --without-pip $(1); $(PIP) --python $(1)/bin/python install $(2)'
SAY = $(PYTHON) .ci/step

# One stamp a set of extras, such as `test` or `test,trainers`; what pyproject.toml says of them installs again.
$(VENV)/.installed-%: FORCE | $(BIN)/pip
	$(CACHED) $@ pyproject.toml -- $(SAY) "Installing this package with its extra '$*' into $(VENV)" \
		$(PIP) install --editable ".[$*]"

$(TRAINERS)/.installed-%: FORCE | $(BIN)/pip
	$(CACHED) $(TRAINERS)/.torch -- $(SAY) "Installing $(TORCH) into $(TRAINERS)" $(call install,$(TRAINERS),"$(TORCH)")
	$(CACHED) $@ pyproject.toml $(TRAINERS)/.torch -- $(SAY) "Installing this package with its extra '$*' into $(TRAINERS)" \
		$(call install,$(TRAINERS),--editable ".[$*]")

# After `build/installed`, where make runs several jobs: both write gymnasium_bridge.egg-info.
$(DOCS)/.installed-%: FORCE | build/installed
	$(CACHED) $@ pyproject.toml -- $(SAY) "Installing this package with its extra '$*' into $(DOCS)" \
		$(call install,$(DOCS),--editable ".[$*]")

$(OLD)/.installed: FORCE | $(BIN)/pip
	$(CACHED) $@ $(OLD_WHEEL) tests/old_peer/requirements.txt -- $(SAY) "Installing an older version into $(OLD)" \
		$(call install,$(OLD),--force-reinstall $(OLD_WHEEL) --requirement tests/old_peer/requirements.txt)

# A target, and how long it took: where several run side by side.
timed-%: FORCE
	@began=$$(date +%s); code=0; $(MAKE) --no-print-directory '$*' || code=$$?; \
		echo "== make $*: $$(($$(date +%s) - began)) s"; exit $$code

# What pytest makes of the test files, once: else each of its processes would do it at the beginning, 20 s of processor
# time. It makes files that have changed anew by itself.
$(VENV)/.compiled: | $(VENV)/.installed-test
	-@$(BIN)/python -m pytest --quiet --collect-only -p no:cacheprovider > /dev/null && touch $@
compiled-tests: $(VENV)/.compiled

# Environments by names without a folder, as `timed-%` takes them.
env-old: $(OLD)/.installed
env-peers: $(PEERS)/.installed
env-trainers: $(TRAINERS)/.installed-test,trainers
env-notebooks: env-trainers # into the same environment: one after the other
	@$(MAKE) --no-print-directory $(TRAINERS)/.installed-notebooks
env-openenv:
	@$(MAKE) --no-print-directory $(OPENENV)/.installed || echo "OpenEnv could not be installed: its tests are skipped"

demo: $(VENV)/.installed-demo
	@$(BIN)/gymnasium-bridge demo

test: $(VENV)/.installed-test | $(VENV)/.compiled
	$(PYTEST) -m "not slow and not repeat"

test-ci: $(VENV)/.installed-test $(OLD)/.installed | $(VENV)/.compiled
	$(PYTEST) -m "not repeat"

test-all: $(VENV)/.installed-test $(OLD)/.installed | $(VENV)/.compiled
	$(PYTEST)

# Tests fail under it that measure time or memory, or count calls: they say nothing about the lines that are reached.
coverage: $(VENV)/.installed-test $(VENV)/.installed-check $(OLD)/.installed | $(VENV)/.compiled
	rm -rf build/coverage && mkdir -p build/coverage
	-$(BIN)/python -m coverage run -m pytest --numprocesses $(WORKERS) --dist worksteal -m "$(COVERED)"
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report --show-missing --skip-covered --sort cover
COVERED ?= not repeat

test-old-peer: $(VENV)/.installed-test $(OLD)/.installed
	$(BIN)/python -m pytest tests/ends/test_old_peer.py

test-core:
	rm -rf .venv-core && $(PYTHON) -m venv .venv-core
	.venv-core/bin/python -m pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore .venv-core/bin/python -m pip install --quiet --editable ".[test-core]"
	.venv-core/bin/python -m pytest $(CORE_TESTS)

# VERSIONS names some environments; none: all of tests/versions/environments.py, and the table of tests/versions/README.md.
# FEATURE names folders of `bridge`, one or several. CORE says which of the core tests these two run, as pytest's `-m` has
# it: `not repeat` leaves out those that repeat others with further parameters.
CORE ?=
test-without: | $(BIN)/pip
	$(BIN)/python -m tests.without -m "$(CORE)" $(FEATURE)

test-versions: $(VENV)/.installed-test
	$(BIN)/python -m tests.versions.environments $(VERSIONS)
	$(BIN)/python -m tests.versions.run_core -m "$(CORE)" $(VERSIONS)
	$(BIN)/python -m pytest tests/versions --versions="$(VERSIONS)" $(if $(VERSIONS),,--write)

test-pins: $(VENV)/.installed-test
	TORCH="$(TORCH)" $(BIN)/python -m tests.pins.environments
	$(BIN)/python -m pytest tests/pins --write

# STANDALONE names some environments of tests/old_pythons/environments.py; none: all of them, and the table of tests/old_pythons/README.md.
test-standalone: $(VENV)/.installed-test
	$(BIN)/python -m tests.old_pythons.environments $(PYTHONS) --only $(STANDALONE)
	$(PYTEST) tests/old_pythons --only "$(STANDALONE)" $(if $(STANDALONE),,--write)

# SAMPLE says which tests of trainers and of Ray run, as CORE does.
SAMPLE ?=

# The sources of Stable-Baselines3 in its installed version, whose own tests are run too; they are not in its wheel.
$(TRAINERS)/.archives: $(TRAINERS)/.installed-test,trainers
	version=$$($(TRAINERS)/bin/python -c 'from importlib.metadata import version; print(version("stable-baselines3"))') && \
		$(PIP) --python $(TRAINERS)/bin/python download --quiet --no-deps --no-binary :all: \
		--dest $(TRAINERS)/archives "stable-baselines3==$$version" && touch $@

test-trainers: $(TRAINERS)/.installed-test,trainers
	-$(MAKE) $(TRAINERS)/.archives # without them their tests are skipped with a word
	$(TRAINERS)/bin/python -m pytest --numprocesses 2 --dist worksteal tests/trainers -m "$(SAMPLE)"

$(PEERS)/.installed: FORCE | $(BIN)/pip
	$(CACHED) $@ -- $(SAY) "Installing other packages into $(PEERS)" $(call install,$(PEERS),$(PEERS_PACKAGES))

test-peers: $(VENV)/.installed-test $(PEERS)/.installed
	$(BIN)/python -m pytest tests/ends/test_peers.py

$(OPENENV)/.installed: FORCE | $(BIN)/pip
	$(CACHED) $@ -- $(SAY) "Installing OpenEnv into $(OPENENV)" $(call install,$(OPENENV),$(OPENENV_PACKAGES))

test-openenv: $(VENV)/.installed-test $(OPENENV)/.installed
	$(BIN)/python -m pytest tests/openenv/test_openenv_peer.py

test-ray: $(VENV)/.installed-test $(VENV)/.installed-ray
	$(BIN)/python -m pytest tests/ray -m "$(SAMPLE)"

# These wait for lines that are slow.
test-network: $(VENV)/.installed-test
	$(BIN)/python -m pytest --numprocesses 4 --dist worksteal tests/network

notebooks: $(TRAINERS)/.installed-notebooks
	$(TRAINERS)/bin/python notebooks/run.py

notebooks-short: $(TRAINERS)/.installed-notebooks
	BRIDGE_NOTEBOOK_SCALE=0.02 $(TRAINERS)/bin/python notebooks/run.py --check

# Python's checks come first, which take a minute. A check that fails hides none of the others.
NPM := $(shell command -v npm)
check:
	@$(MAKE) --no-print-directory --keep-going check-python $(if $(NPM),check-web check-calls)
	$(if $(NPM),,@echo "npm is not installed: the page's code is not checked")

check-python: $(VENV)/.installed-test $(VENV)/.installed-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python proto/generate.py --check
	$(BIN)/python docs/generate.py --check
	$(BIN)/python docs/drawings.py --check
	$(BIN)/python deploy/grafana.py --check

# ESLint and TypeScript's checker over the page's modules, which are served as they are: nothing is built.
WEB_CHECKS = tests/web_checks/node_modules
check-web: $(WEB_CHECKS)/.installed
	$(WEB_CHECKS)/.bin/eslint --config tests/web_checks/eslint.config.js bridge/web
	$(WEB_CHECKS)/.bin/tsc --project tests/web_checks

# This package without links into the clone, which neither pyright nor MkDocs can follow to `bridge.wrappers`.
.PHONY: build/installed
build/installed: | $(BIN)/pip
	$(CACHED) $@/.installed pyproject.toml bridge wrappers -- sh -ec 'rm -rf $@; $(PIP) install --quiet --no-deps --target $@ .'

check-calls: $(WEB_CHECKS)/.installed $(VENV)/.installed-test build/installed
	$(WEB_CHECKS)/.bin/pyright --pythonpath $(BIN)/python --project tests/web_checks/pyrightconfig.json

$(WEB_CHECKS)/.installed: FORCE
	$(CACHED) $@ tests/web_checks/package.json -- $(SAY) "Installing ESLint, TypeScript and pyright" \
		npm install --no-audit --no-fund --no-package-lock --prefix tests/web_checks

# grpc-js, a peer of tests/core/server/test_proxies.py.
tests/grpcjs/node_modules/.installed: FORCE
	$(CACHED) $@ tests/grpcjs/package.json -- $(SAY) "Installing grpc-js" \
		npm install --no-audit --no-fund --no-package-lock --prefix tests/grpcjs

bench: $(VENV)/.installed-test
	-$(MAKE) $(VENV)/.installed-bench # a peer that cannot be installed is skipped with a word
	$(BIN)/python -m benchmarks

chaos: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.chaos

fuzz: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.fuzz
	$(BIN)/python -m benchmarks.fuzz_http2
	$(BIN)/python -m benchmarks.fuzz_websocket

attacks: $(VENV)/.installed-test
	$(BIN)/python -m benchmarks.attacks

zoo:
	test -x $(ZOO)/bin/python || $(PYTHON) -m venv $(ZOO)
	$(ZOO)/bin/python -m pip install --quiet --upgrade pip
	$(ZOO)/bin/python -m pip install --quiet "$(TORCH)"
	PYTHONWARNINGS=ignore $(ZOO)/bin/python -m pip install --quiet --editable ".[test]"
	-for package in $(ZOO_PACKAGES); do $(ZOO)/bin/python -m pip install --quiet "$$package"; done
	-$(ZOO)/bin/python -m pip uninstall --quiet --yes mujoco-core mujoco-studio # newer parts of mujoco, which hide the older one
	$(ZOO)/bin/python -m pip install --quiet --force-reinstall --no-deps mujoco==3.3.0
	$(ZOO)/bin/python -W ignore -m benchmarks.zoo --write

mutants: $(VENV)/.installed-test
	$(BIN)/python -m tests.mutate

proto: $(VENV)/.installed-check
	$(BIN)/python proto/generate.py

docs: $(DOCS)/.installed-docs build/installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build
	if command -v node > /dev/null; then node docs/check_search.mjs build/site; else echo "node is not installed: the search was not tried"; fi

pictures: $(VENV)/.installed-test
	$(BIN)/python docs/pictures.py

# The wheel is installed into an environment of its own, and its demo runs in a folder that is not the clone.
dist: $(VENV)/.installed-dist
	rm -rf dist build .venv-dist
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --upgrade pip
	.venv-dist/bin/python -m pip install --quiet "$$(ls dist/*.whl)[demo]"
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && cd "$$folder" && "$(CURDIR)/.venv-dist/bin/bridge" demo

clean:
	rm -rf $(VENV) $(TRAINERS) $(PEERS) $(OPENENV) $(ZOO) $(DOCS) $(OLD) .venv-core .venv-versions .venv-dist build dist *.egg-info
