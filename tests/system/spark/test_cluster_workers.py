"""Pipelines of share groups on a cluster, with speculation, whose executors, drivers and broker are killed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

import mansio
from mansio.iceberg.result_table.table import open_existing_table
from mansio.wire.internal_records.dead_letter_headers import GROUP_HEADER, REASON_HEADER
from mansio.wire.topic_partition import TopicPartition
from support.machine import scaled
from support.waiting import wait_until
from system.spark.streams import DEADLINE_S
from system.spark.test_cluster import BATCH, DRIVER_S, PARTITIONS, ClusterJob, KilledJobs
from system.spark.topics import contents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mansio.client.admin.shares import ShareLeases
    from support.process import ServedBroker
    from support.spark_cluster import SparkCluster

pytestmark = [pytest.mark.full, pytest.mark.spark, pytest.mark.timeout(1_800)]

FUNCTION = """
import os, random, time
from mansio.spark import work

def number_of(row):
    number = int(row.value.split()[1])
    time.sleep(random.expovariate(400))
    if number % 50 == 7:
        raise ValueError("seven")
    if number % 1000 == 13:
        os._exit(9)
    return b"%d" % number

def transform(frame):
    return work.apply(frame, number_of, schema="value binary", on_error="reject")
"""
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.minTaskRuntime": "50ms",
    "spark.speculation.multiplier": "1.01",
    "spark.speculation.quantile": "0.1",
}
"""A task that runs a little longer than the first ones of its stage runs twice."""
DELIVERIES_MAX = 100
"""More than kills, each of which may count as a delivery."""
RUNS_MAX = 10
RECORDS = 3 * BATCH
"""Published between two kills."""


def has_result(number: int) -> bool:
    """Whether `FUNCTION` succeeds."""
    return number % 50 != 7 and number % 1000 != 13


class KilledWorkers(KilledJobs):
    """`KilledJobs` of share groups of one topic: the results of one group are in a table, those of the other one in a
    topic. `targets`: one of these, or both.
    """

    def __init__(
        self,
        cluster: SparkCluster,
        broker: ServedBroker,
        topic: str,
        place: Path,
        targets: tuple[str, ...] = ("table", "topic"),
    ) -> None:
        self.groups = {target: f"{topic}-{target}" for target in targets}
        super().__init__(cluster, broker, topic, place, self.make, self.assert_once)

    def make(
        self, cluster: SparkCluster, broker: ServedBroker, topic: str, place: Path
    ) -> tuple[ClusterJob, ...]:
        """Create the groups and the target topic, and return the jobs."""
        (place / "workers.py").write_text(FUNCTION)
        settings = {
            "share.auto.offset.reset": "earliest",
            "share.delivery.count.limit": str(DELIVERIES_MAX),
            "mansio.retry.backoff.ms": "0",
        }
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            client.admin.create_topic(f"{topic}-out", partitions=PARTITIONS)
            for group in self.groups.values():
                client.admin.alter_group_config(group, settings)
        options = {
            "table": ["--to-table", "ns.numbers", "--warehouse", str(place / "lake")],
            "topic": ["--to", f"{topic}-out"],
        }
        jobs = []
        for target, group in self.groups.items():
            words = [
                "run",
                str(place / "workers.py"),
                "--topic",
                topic,
                "--share-group",
                group,
                "--name",
                group,
            ]
            words += [*options[target], "--checkpoint", str(place / f"checkpoint-{target}")]
            for name, value in SPECULATION.items():
                words += ["--conf", f"{name}={value}"]
            jobs.append(ClusterJob(cluster, broker, place / f"job-{target}", words))
        return tuple(jobs)

    def kill_broker(self, dice: random.Random) -> None:  # the signature of all kills
        """Kill the broker, and start it again."""
        self._broker.kill()
        self._broker.start()

    def states(self, group: str) -> list[ShareLeases]:
        """The state of the group in each partition."""
        places = [TopicPartition(self._topic, partition) for partition in range(PARTITIONS)]
        with mansio.blocking.connect(self._broker.bootstrap_servers) as client:
            return [one for one in client.admin.shares.leases(group, places).values() if one is not None]

    def lag(self) -> int:
        """The number of records that the groups have not finished."""
        return sum(one.lag for group in self.groups.values() for one in self.states(group))

    def finish(self) -> int:
        """Run the jobs until nothing is left: leases of a killed driver may last for a minute."""
        for one in self.running:
            one.kill()
        for _ in range(RUNS_MAX):
            self.start("--once", records_max=10_000)
            for one in self.running:
                assert one.wait(scaled(DRIVER_S)) == 0, one.printed
            if not self.lag():
                break
        self._check(self._broker, self._topic, self._place)
        return self._published

    def assert_once(self, broker: ServedBroker, topic: str, place: Path) -> None:
        """Each record has its result once in each target, or is a dead letter of each group once."""
        expected = [number for number in range(self._published) if has_result(number)]
        if "table" in self.groups:
            rows = open_existing_table("ns.numbers", str(place / "lake"), {}).iceberg.scan().to_arrow()
            assert sorted(map(int, rows["value"].to_pylist())) == expected
        if "topic" in self.groups:
            results = contents(broker.bootstrap_servers, f"{topic}-out")
            assert sorted(int(one.value or b"") for one in results) == expected
        failed = sorted(number for number in range(self._published) if not has_result(number))
        for group in self.groups.values():

            def are_dead(group: str = group) -> bool:
                return sum(one.dead for one in self.states(group)) == len(failed)

            wait_until(are_dead, DEADLINE_S, "dead letters")
        dead_letters = contents(broker.bootstrap_servers, f"dlq.{topic}")
        for group in self.groups.values():
            own = [one for one in dead_letters if dict(one.headers)[GROUP_HEADER] == group.encode()]
            assert sorted(int((one.value or b"").split()[1]) for one in own) == failed
        assert {dict(one.headers)[REASON_HEADER] for one in dead_letters} == {
            b"ValueError: seven",
            b"ProcessDied: the process ended with status 9",
        }


@pytest.mark.row("S13")
def test_workers_have_each_result_once_when_executor_broker_and_driver_are_killed(
    spark_cluster: SparkCluster,
    broker_process: ServedBroker,
    topic_name: Callable[[str], str],
    tmp_path: Path,
) -> None:
    dice = random.Random(1)
    jobs = KilledWorkers(spark_cluster, broker_process, topic_name("in"), tmp_path, ("table",))
    try:
        jobs.start("--trigger", "0.1")
        jobs.publish_and_wait(RECORDS)
        for kill in (jobs.kill_executor, jobs.kill_broker):
            kill(dice)
            jobs.publish_and_wait(RECORDS)
        assert jobs.finish() == 3 * RECORDS, "finish has killed the driver"
    finally:
        jobs.close()
