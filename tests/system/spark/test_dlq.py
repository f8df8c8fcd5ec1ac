"""`mansio pipeline dlq` over a real broker: planted causes are counted exactly, and each record is redriven once."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.pipelines.dlq import DeadLetterAnalysis, UnknownCause
from support.machine import scaled
from support.pipeline_process import PipelineProcess
from support.waiting import wait_until
from system.spark.topics import contents, create, publish

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from pyspark.sql import SparkSession

    from support.process import ServedBroker

PLANTED: dict[str, tuple[str, int]] = {
    "amount": ("no amount: {n}.50 EUR", 31),
    "customer": ("customer c0ffee{n:06d} is unknown", 23),
    "date": ("2013-01-{day:02d}T10:00:00Z is in the past", 17),
    "field": ("KeyError: 'carrier'", 11),
    "none": ("", 5),
}
"""Cause: the reason of record `n`, and the number of records that fail for it."""
TEMPLATES = {
    "amount": "no amount: <n> EUR",
    "customer": "customer <hex> is unknown",
    "date": "<time> is in the past",
    "field": "KeyError: 'carrier'",
    "none": "",
}
GOOD = 13
DEADLINE_S = 60.0


def reason(cause: str, number: int) -> str:
    return PLANTED[cause][0].format(n=number, day=1 + number % 28)


async def reject_all(bootstrap_servers: str, topic: str, group: str, count: int) -> None:
    """Receive that many records, and reject each for the cause that its value names."""
    async with (
        mansio.connect(bootstrap_servers) as client,
        client.receive(topic, group=group) as receiver,
    ):
        settled = 0
        async for message in receiver:
            cause, _, number = (message.value or b"").decode().partition(" ")
            if cause in PLANTED:
                await message.reject(reason(cause, int(number)))
            else:
                await message.ack()
            settled += 1
            if settled == count:
                break


async def receive_again(bootstrap_servers: str, topic: str, group: str, count: int) -> list[bytes]:
    """Receive and accept that many records."""
    values: list[bytes] = []
    async with (
        mansio.connect(bootstrap_servers) as client,
        client.receive(topic, group=group) as receiver,
    ):
        async for message in receiver:
            values.append(message.value or b"")
            await message.ack()
            if len(values) == count:
                break
    return values


def plant(bootstrap_servers: str, topic: str, group: str, counts: Mapping[str, int]) -> list[bytes]:
    """Publish records that fail for the causes, and a few good ones; reject the former. Returns their values."""
    values = [b"%s %d" % (cause.encode(), n) for cause, count in counts.items() for n in range(count)]
    good = [b"good %d" % n for n in range(GOOD)]
    publish(bootstrap_servers, topic, [(b"k%d" % (n % 7), value) for n, value in enumerate([*values, *good])])
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.admin.alter_group_config(group, {"share.auto.offset.reset": "earliest"})
    asyncio.run(reject_all(bootstrap_servers, topic, group, len(values) + GOOD))
    wait_until(lambda: len(contents(bootstrap_servers, f"dlq.{topic}")) >= len(values), DEADLINE_S)
    return values


@pytest.mark.full
@pytest.mark.row("S6")
def test_five_planted_causes_are_counted_exactly_and_chosen_ones_redriven_once(
    spark: SparkSession, broker_process: ServedBroker, topic_name: Callable[[str], str]
) -> None:
    servers = broker_process.bootstrap_servers
    topic, group = create(servers, topic_name("in"), 3), topic_name("group")
    counts = {cause: count for cause, (_, count) in PLANTED.items()}
    plant(servers, topic, group, counts)
    publish(servers, f"dlq.{topic}", [(None, b"of another program")] * 2)

    with DeadLetterAnalysis(spark, [f"dlq.{topic}"], servers) as analysis:
        report = analysis.report(samples=2)
    assert (report.dead_letters, report.unrecognized, report.other_causes) == (sum(counts.values()), 2, 0)
    by_template = {one.template: one for one in report.causes}
    assert {TEMPLATES[cause]: count for cause, count in counts.items()} == {
        template: one.dead_letters for template, one in by_template.items()
    }
    for one in report.causes:
        assert (one.group, one.topic, one.deliveries_max) == (group, topic, 1)
        assert one.first_ms <= one.last_ms
        assert len(one.samples) == 2
        assert one.first_ms == one.samples[0].dead_lettered_ms
    amount = by_template[TEMPLATES["amount"]]
    assert all((sample.value or b"").startswith(b"amount ") for sample in amount.samples)

    def redrive(*causes: str, redrive_id: str, limit: int | None = None) -> Counter[str]:
        chosen = [by_template[TEMPLATES[cause]].cause for cause in causes]
        with DeadLetterAnalysis(spark, [f"dlq.{topic}"], servers, group=group, causes=chosen) as analysis:
            total: Counter[str] = Counter()
            for one in analysis.redrive(redrive_id, limit=limit):
                assert (one.group, one.topic, one.error) == (group, topic, None)
                total.update(
                    records=one.records,
                    redriven=one.redriven,
                    repeated=one.repeated,
                    not_dead_lettered=one.not_dead_lettered,
                )
        return +total

    assert redrive("date", redrive_id="dates", limit=10) == Counter(records=10, redriven=10)
    assert redrive("date", redrive_id="dates") == Counter(records=17, redriven=7, repeated=10)
    assert redrive("date", redrive_id="dates") == Counter(records=17, repeated=17)
    assert redrive("date", redrive_id="again") == Counter(records=17, not_dead_lettered=17)
    assert redrive("none", redrive_id="none") == Counter(records=5, redriven=5)
    values = asyncio.run(receive_again(servers, topic, group, 22))
    assert Counter(value.split()[0] for value in values) == {b"date": 17, b"none": 5}
    assert len(set(values)) == 22
    with (
        DeadLetterAnalysis(spark, [f"dlq.{topic}"], servers, causes=["0123456789"]) as analysis,
        pytest.raises(UnknownCause, match="0123456789"),
    ):
        analysis.report()


@pytest.mark.full
def test_redrive_that_was_killed_in_the_middle_is_completed_under_its_id(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers = broker_process.bootstrap_servers
    topic, group, count = create(servers, topic_name("in"), 2), topic_name("group"), 300
    values = plant(servers, topic, group, {"amount": count})
    words = ["dlq", topic, "--redrive", "--id", "once", "--bootstrap-servers", servers, "--output", "json"]
    words += ["--master", "local[2]"]
    partitions = [mansio.TopicPartition(topic, index) for index in range(2)]

    def dead() -> int:
        with mansio.blocking.connect(servers) as client:
            leases = client.admin.shares.leases(group, partitions)
        return sum(one.dead for one in leases.values() if one is not None)

    assert dead() == count
    first = PipelineProcess(tmp_path, [*words, "--rate", "10"])
    try:
        wait_until(lambda: first.process.poll() is not None or dead() < count, DEADLINE_S * 3)
        assert first.process.poll() is None, first.printed
    finally:
        first.kill()
    done = count - dead()
    assert 0 < done < count, "killed in the middle"
    second = PipelineProcess(tmp_path, words)
    try:
        assert second.wait(scaled(DEADLINE_S) * 3) == 0, second.printed
    finally:
        second.kill()
    result: dict[str, Any] = json.loads(second.output.read_text())
    (cause,) = result["causes"]
    assert (cause["dead_letters"], cause["reason"]) == (count, TEMPLATES["amount"])
    rows = result["redrive"]["rows"]
    assert sum(row["repeated"] for row in rows) == done
    assert sum(row["redriven"] for row in rows) == count - done
    assert dead() == 0
    again = asyncio.run(receive_again(servers, topic, group, count))
    assert Counter(again) == Counter(values), "each once"
