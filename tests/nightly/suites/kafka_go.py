"""segmentio/kafka-go's tests, against one broker that creates topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nightly.suites.brokers import one_broker
from nightly.suites.go_tests import go_test, module_copy, tests_in
from nightly.suites.suite import Suite

if TYPE_CHECKING:
    from pathlib import Path

    from nightly.suites.expected import Expected
    from nightly.suites.suite import Outcomes

VERSION = "0.4.51"
KAFKA_VERSION = "3.7.0"
"""The newest that its authors test with; it selects the tests that apply."""
LIMIT_S = 1800
SETTINGS: dict[str, Any] = {"auto_create_topics_enable": True, "group_initial_rebalance_delay_ms": 0}
"""As in the broker that its authors test with."""


def run(directory: Path, expected: Expected, only: frozenset[str] | None) -> Outcomes:
    module = directory / "module"
    if only is None:
        module = module_copy("github.com/segmentio/kafka-go", f"v{VERSION}", directory)
    names = tests_in(module.glob("*_test.go"))
    with one_broker(directory, host="localhost", **SETTINGS) as broker:
        _use_port(module, broker.kafka_port)
        return go_test(
            module,
            only if only is not None else set(names) - set(expected.skipped),
            log=directory / "tests.log",
            limit_s=LIMIT_S,
            flags=("-mod=mod",),  # its go.mod is not tidy
            skipped=expected.skipped,
            environment={"KAFKA_VERSION": KAFKA_VERSION, "KAFKA_SKIP_NETTEST": "1"},
        )


def _use_port(module: Path, port: int) -> None:
    """The tests have their broker's port as a constant, and some rely on the client's default port."""
    note = module / ".port"
    old = note.read_text() if note.exists() else "9092"
    for file in module.glob("*.go"):
        file.write_text(file.read_text().replace(old, str(port)))
    note.write_text(str(port))


KAFKA_GO = Suite(
    "kafka-go",
    VERSION,
    ("go",),
    run,
    "one broker, `auto_create_topics_enable`, no initial rebalance delay; also tests without a broker",
)
