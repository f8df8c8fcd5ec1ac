"""Delayed records with consumers in other languages: Apache Kafka's Java client, sarama and franz-go.

Nightly: needs a JDK and Maven, or Go. A reader prints the values of a topic up to a given one, and commits.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

from nightly.interop.java_client import compiled
from support.machine import scaled
from system.interop.clients import CODECS, confluent_write
from system.interop.test_delayed_records import (
    CONTROL_BATCHES,
    DELAY_MS,
    PARTITION,
    TOPIC,
    append_control_batches,
    broker,
    items_of,
)

if TYPE_CHECKING:
    from mansio.testing import TestBroker

__all__ = ["broker"]

GO_SOURCE: Final = Path(__file__).parent / "go_readers"
BUILD_DEADLINE_S: Final = 600
READ_DEADLINE_S: Final = 120
RECORDS_BEHIND: Final = 3

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module", params=["java", "sarama", "franz-go"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that starts a reader: it gets bootstrap servers, topic, group and the last value."""
    target = tmp_path_factory.mktemp("reader")
    if request.param == "java":
        return compiled("JavaReader", target)
    if shutil.which("go") is None:
        pytest.skip("go missing: install Go")
    command = ["go", "build", "-mod=readonly", "-o", str(target / "readers"), "."]
    environment = {**os.environ, "CGO_ENABLED": "0", "GOTOOLCHAIN": "local"}
    subprocess.run(command, cwd=GO_SOURCE, env=environment, check=True, timeout=scaled(BUILD_DEADLINE_S))
    return [str(target / "readers"), str(request.param)]


def values(command: list[str], broker: TestBroker, group: str, last: str) -> list[bytes]:
    given = [*command, broker.bootstrap_servers, TOPIC, group, last]
    return subprocess.check_output(
        given, stderr=subprocess.DEVNULL, timeout=scaled(READ_DEADLINE_S)
    ).splitlines()


def lag(broker: TestBroker, group: str) -> int | None:
    return broker.client().admin.group_lag(group)[PARTITION].lag


def test_records_of_mixed_batches_are_read_when_they_are_due(broker: TestBroker, reader: list[str]) -> None:
    now: list[bytes] = []
    later: list[bytes] = []
    for codec in CODECS:
        items = items_of(codec, broker)
        confluent_write(broker.bootstrap_servers, TOPIC, items, codec=codec, **{"enable.idempotence": True})
        now += [item.value or b"" for item in items if not item.headers]
        later += [item.value or b"" for item in items if item.headers]
    broker.client().publish(TOPIC, b"last")
    assert values(reader, broker, "early", "last") == [*now, b"last"]
    broker.clock.advance(seconds=DELAY_MS / 1000 + 10)
    broker.client().publish(TOPIC, b"last of all")
    *found, last = values(reader, broker, "late", "last of all")
    assert (found[: len(now) + 1], last) == ([*now, b"last"], b"last of all")
    assert sorted(found[len(now) + 1 :]) == sorted(later)


def test_100000_control_batches_are_passed(broker: TestBroker, reader: list[str]) -> None:
    append_control_batches(broker, CONTROL_BATCHES)
    broker.client().publish(TOPIC, b"last")
    assert values(reader, broker, "g", "last") == [b"last"]
    assert lag(broker, "g") == 0


def test_the_lag_of_a_group_behind_control_batches(broker: TestBroker, reader: list[str]) -> None:
    """Java's client commits its position, the others the offset after the last record."""
    client = broker.client()
    client.publish(TOPIC, b"last")
    for _ in range(RECORDS_BEHIND):
        client.publish(TOPIC, b"pending", delay=86_400)
    assert values(reader, broker, "g", "last") == [b"last"]
    assert lag(broker, "g") == (0 if reader[0] == "java" else RECORDS_BEHIND)
