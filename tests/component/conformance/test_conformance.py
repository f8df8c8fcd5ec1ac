"""One behaviour behind every protocol: each scenario, played by a client of each protocol, has the same result.

`docs/reference/protocols.md` has the table, with what a protocol cannot express.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from component.conformance.cli import Cli
from component.conformance.grpc_api import GrpcApi
from component.conformance.http import Http
from component.conformance.kafka import Kafka
from component.conformance.python import PythonAsync, PythonBlocking
from component.conformance.scenarios import SCENARIOS
from component.conformance.sqs import Sqs
from mansio.testing.broker import TestBroker
from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from component.conformance.protocol import Protocol
    from component.conformance.scenarios import Scenario

PROTOCOLS = (Kafka, Http, GrpcApi, Sqs, Cli, PythonAsync, PythonBlocking)
QUICK = (
    "a late acknowledgement is refused",
    "delayed records",
    "a group with read_committed",
    "a hanging transaction: find, abort",
)
"""Scenarios of `make test`, for the protocols that need no process and no second."""


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(auto_create_topics_enable=False) as started:
        yield started


def cases() -> Iterator[object]:
    for kind in PROTOCOLS:
        for scenario in SCENARIOS:
            if set(scenario.needs) & set(kind.cannot):
                continue
            is_quick = scenario.name in QUICK and kind is not Kafka and kind is not Cli
            name = f"{kind.name}-{scenario.name}"
            yield pytest.param(kind, scenario, id=name, marks=() if is_quick else pytest.mark.full)


@pytest.mark.row("A1", "A2", "A3", "A4", "A6", "P2")
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("kind", "scenario"), [*cases()])
def test_every_protocol_has_the_same_behaviour(
    broker: TestBroker, kind: type[Protocol], scenario: Scenario
) -> None:
    one = kind(broker)
    topic = re.sub(r"[^a-z]+", "-", f"{kind.name}-{scenario.name}")
    try:
        assert scenario.play(one, topic) == list(scenario.expected)
    finally:
        one.close()


def test_the_document_has_the_scenarios_and_what_each_protocol_cannot_express() -> None:
    text = (ROOT / "docs/reference/protocols.md").read_text()
    assert table() in text, f"docs/reference/protocols.md should have:\n{table()}"


def table() -> str:
    """The table of the document."""
    reasons: dict[str, int] = {}
    lines = [
        f"| | {' | '.join(kind.name for kind in PROTOCOLS)} |",
        f"|---{'|---' * len(PROTOCOLS)}|",
    ]
    for scenario in SCENARIOS:
        cells = []
        for kind in PROTOCOLS:
            missing = [kind.cannot[need] for need in scenario.needs if need in kind.cannot]
            for reason in missing:
                reasons.setdefault(reason, len(reasons) + 1)
            cells.append(", ".join(f"no ({reasons[reason]})" for reason in missing[:1]) or "yes")
        lines.append(f"| {scenario.name} | {' | '.join(cells)} |")
    notes = [f"{number}. {reason}." for reason, number in reasons.items()]
    return "\n".join([*lines, "", *notes])
