"""kill -9 while schedules fire: each firing is appended once, never early, and none is missing."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, TopicPartition

import mansio
from support.machine import scaled
from support.process import served
from support.waiting import wait_until
from system.crash.kill_load import QUIET

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from confluent_kafka import Message

TOPIC = "ticks"
PARTITIONS = 2
EVERY_S = 1


def create_schedules(bootstrap_servers: str, count: int) -> dict[str, int]:
    """Create schedules; return the creation time in ms of each."""
    with mansio.blocking.connect(bootstrap_servers) as client:
        schedules = [
            client.admin.schedules.create(
                TOPIC, f"s{number}", b"tick", every=EVERY_S, catch_up="all", partition=number % PARTITIONS
            )
            for number in range(count)
        ]
    return {one.name: round(one.created.timestamp() * 1000) for one in schedules}


def read_all(bootstrap_servers: str, counts: Mapping[str, int], deadline_s: float) -> list[Message]:
    """Every record of the topic, until each schedule has fired so often and the end is reached."""
    consumer = Consumer({"bootstrap.servers": bootstrap_servers, "group.id": "reader", **QUIET})
    consumer.assign([TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)])
    found: list[Message] = []
    missing = dict(counts)
    deadline = time.monotonic() + deadline_s
    while missing and time.monotonic() < deadline:
        for message in consumer.consume(500, 0.5):
            if message.error() is None:
                found.append(message)
                headers: dict[str, Any] = dict(message.headers() or ())
                name = headers["mansio-schedule"].decode()
                if int(headers["mansio-schedule-firing"]) >= missing.get(name, 1 << 62):
                    del missing[name]
    consumer.close()
    assert not missing, f"schedules that do not fire: {missing}"
    return found


def check_fired_once(created_ms: Mapping[str, int], found: list[Message], what: str) -> None:
    """The firings of each schedule are numbered from 1 on without gaps, and due at their times."""
    fired: dict[str, list[tuple[int, int]]] = {name: [] for name in created_ms}
    for message in found:
        headers: dict[str, Any] = dict(message.headers() or ())
        due_ms = int(headers["mansio-schedule-due-ms"])
        fired[headers["mansio-schedule"].decode()].append((int(headers["mansio-schedule-firing"]), due_ms))
        assert message.timestamp()[1] >= due_ms, "a schedule fired early"
    for name, firings in fired.items():
        expected = [
            (number, created_ms[name] + number * EVERY_S * 1000) for number in range(1, len(firings) + 1)
        ]
        assert firings == expected, f"{what}: the firings of {name} are not those of its definition"
    print(f"{what}: {len(found)} firings of {len(fired)} schedules, each once")


def kill_repeatedly(tmp_path: Path, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    with served(tmp_path / "data", http=False) as broker:
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic(TOPIC, partitions=PARTITIONS, config={"mansio.delay.enable": "true"})
        created_ms = create_schedules(broker.bootstrap_servers, 40)
        phases = [moment_ms % 1000 / 1000 for moment_ms in created_ms.values()]
        for _ in range(kills):
            # up to 50 ms after a moment at which one of them fires
            wanted = time.time() + (chance.choice(phases) - time.time()) % EVERY_S
            wait_until(lambda wanted=wanted: time.time() >= wanted, 10, "the moment")
            broker.kill()
            broker.start()
        now_ms = int(time.time() * 1000)
        counts = {name: (now_ms - moment_ms) // (EVERY_S * 1000) for name, moment_ms in created_ms.items()}
        found = read_all(broker.bootstrap_servers, counts, scaled(60))
    check_fired_once(created_ms, found, f"{kills} kills, seed {seed}")


@pytest.mark.full
@pytest.mark.row("D6")
def test_schedules_fire_once_when_the_broker_is_killed_ten_times(tmp_path: Path) -> None:
    kill_repeatedly(tmp_path, 10, seed=5)
