"""segmentio/kafka-go's tests, against one broker that creates topics, with an open listener and one with users."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from confluent_kafka.admin import ScramMechanism

from nightly.suites.brokers import create_users, one_broker
from nightly.suites.go_tests import go_test, module_copy, tests_in
from nightly.suites.suite import Suite
from support.paths import free_port

if TYPE_CHECKING:
    from pathlib import Path

    from nightly.suites.expected import Expected
    from nightly.suites.suite import Outcomes

VERSION = "0.4.51"
PACKAGES: Final = (".", "sasl")
PORTS: Final = ("9092", "9093")
KAFKA_VERSION = "3.7.0"
"""The newest that its authors test with; it selects the tests that apply."""
LIMIT_S = 1800
SETTINGS: dict[str, Any] = {"auto_create_topics_enable": True, "group_initial_rebalance_delay_ms": 0}
"""As in the broker that its authors test with."""
USERS: Final = (
    ("adminplain", ScramMechanism.SCRAM_SHA_256, b"admin-secret"),
    ("adminscram", ScramMechanism.SCRAM_SHA_256, b"admin-secret-256"),
    ("adminscram", ScramMechanism.SCRAM_SHA_512, b"admin-secret-512"),
)
"""Of the broker that its authors test with. The password of PLAIN is that of a credential."""


def run(directory: Path, expected: Expected, only: frozenset[str] | None) -> Outcomes:
    module = directory / "module"
    if only is None:
        module = module_copy("github.com/segmentio/kafka-go", f"v{VERSION}", directory)
    sasl_port = free_port()
    outcomes: Outcomes = {}
    with one_broker(directory, host="localhost", sasl_port=sasl_port, **SETTINGS) as broker:
        _use_ports(module, broker.kafka_port, sasl_port)
        create_users(broker.bootstrap_servers, USERS)
        for package in PACKAGES:
            names = set(tests_in((module / package).glob("*_test.go")))
            chosen = names - set(expected.skipped) if only is None else names & only
            if not chosen:
                continue
            outcomes |= go_test(
                module / package,
                chosen,
                log=directory / f"tests-{PACKAGES.index(package)}.log",
                limit_s=LIMIT_S,
                flags=("-mod=mod",),  # its go.mod is not tidy
                skipped=expected.skipped,
                environment={"KAFKA_VERSION": KAFKA_VERSION, "KAFKA_SKIP_NETTEST": "1"},
            )
    return outcomes


def _use_ports(module: Path, *ports: int) -> None:
    """The tests have the ports of the two listeners as constants, and some rely on the client's default port."""
    note = module / ".ports"
    old = note.read_text().split() if note.exists() else PORTS
    new = [str(port) for port in ports]
    for package in PACKAGES:
        for file in (module / package).glob("*.go"):
            text = file.read_text()
            for before, after in zip(old, new, strict=True):
                text = text.replace(before, after)
            file.write_text(text)
    note.write_text(" ".join(new))


KAFKA_GO = Suite(
    "kafka-go",
    VERSION,
    ("go",),
    run,
    "one broker, `auto_create_topics_enable`, no initial rebalance delay, a second listener with users; also tests "
    "without a broker",
)
