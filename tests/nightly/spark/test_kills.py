"""Spark pipelines killed at random, MANSIO_NIGHTLY_PIPELINE_KILLS times."""

from __future__ import annotations

import os
import random
import time
from typing import TYPE_CHECKING

import pytest

from support.iceberg import checksum
from support.present import present
from support.seeds import chosen_seed
from system.spark import test_kills
from system.spark.archives import archived
from system.spark.test_kills import PLACE_AND_VALUE, Archive, Copy, Job
from system.spark.topics import contents

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


jobs = test_kills.jobs

NIGHTLY_KILLS = int(os.environ.get("MANSIO_NIGHTLY_PIPELINE_KILLS", "20"))
NIGHTLY_TIMEOUT_S = 7_200
"""For a process that hangs in a way that its processor time does not show; each wait has its own deadline."""


def kill_at_random(job: Job) -> None:
    """Records come all the time. Some kills hit while Spark starts; some hit Python only, whose JVM may still be at
    work when the next one starts."""
    dice = random.Random(chosen_seed())
    for number in range(NIGHTLY_KILLS):
        job.publish(500)
        job.turn(number).touch()
        process = job.start()
        batches = dice.choice((0, 1, 1, 2, 3))
        process.wait_for_batches(batches)
        time.sleep(dice.uniform(0, 1.5 if batches else 8))  # the point of the kill
        what = dice.choice(("all", "all", "driver", "workers"))
        if what == "driver":
            process.kill_driver()
        elif what == "workers":
            what = f"{process.kill_workers()} workers"
            time.sleep(dice.uniform(0, 3))  # in which the driver aborts the batch, or begins it again
            process.kill()
        else:
            process.kill()
        print(f"kill {number + 1}: {what} after {process.batches} batches")
    for process in job.started:
        process.wait_for_the_rest()


@pytest.mark.timeout(NIGHTLY_TIMEOUT_S)
def test_archive_killed_twenty_times_has_every_record_once(
    spark: SparkSession, jobs: tuple[Archive, Copy]
) -> None:
    archive, _ = jobs
    kill_at_random(archive)
    archive.finish(spark)
    rows = archived(archive.warehouse, archive.source)
    log = contents(archive.broker.bootstrap_servers, archive.source)
    already_present = checksum(zip(*(rows[name].to_pylist() for name in PLACE_AND_VALUE), strict=True))
    assert already_present == checksum((one.partition, one.offset, one.value) for one in log)
    print(f"{NIGHTLY_KILLS} kills, {rows.num_rows} of {archive.published} records, {already_present}")


@pytest.mark.timeout(NIGHTLY_TIMEOUT_S)
def test_run_killed_twenty_times_has_every_record_once(
    spark: SparkSession, jobs: tuple[Archive, Copy], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, copy = jobs
    kill_at_random(copy)
    copy.finish(spark, monkeypatch)
    values = [present(one.value) for one in contents(copy.broker.bootstrap_servers, copy.target)]
    found = checksum(sorted(values))
    assert found == checksum(
        sorted(present(one.value) for one in contents(copy.broker.bootstrap_servers, copy.source))
    )
    print(f"{NIGHTLY_KILLS} kills, {len(values)} of {copy.published} records, {found}")
