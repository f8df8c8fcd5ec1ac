"""Damaged segments and the Spark source: a job that needs a damaged record fails and names it, and every intact range
is read as it was written."""

from __future__ import annotations

import json
import random
from itertools import groupby
from typing import TYPE_CHECKING

import pytest

import mansio
from support.damage import partitions_of, value_of
from support.process import ServedBroker
from support.seeds import chosen_seed
from system.interop.test_damage_at_random import TOPIC, write

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.full

RECORDS = 300
DAMAGES = 6
RANGES_READ = 4


def test_job_fails_at_a_damaged_record_and_reads_every_intact_range(
    spark: SparkSession, tmp_path: Path
) -> None:
    broker = ServedBroker(tmp_path / "data")
    try:
        broker.start()
        with mansio.blocking.connect(broker.bootstrap_servers) as client:
            write(broker.bootstrap_servers, client, partitions=1, records=RECORDS)
        broker.stop()
        replica = partitions_of(broker.data, TOPIC)[0]
        chance = random.Random(chosen_seed())
        assert replica.damage(chance, DAMAGES // 2) == DAMAGES // 2
        broker.start()
        assert replica.damage(chance, DAMAGES // 2) == DAMAGES // 2

        def read(first: int, end: int) -> DataFrame:
            options = {
                "kafka.bootstrap.servers": broker.bootstrap_servers,
                "subscribe": TOPIC,
                "startingOffsets": json.dumps({TOPIC: {"0": first}}),
                "endingOffsets": json.dumps({TOPIC: {"0": end}}),
            }
            return spark.read.format("mansio").options(**options).load()

        runs = [
            (offsets[0], offsets[-1] + 1)
            for lost, run in groupby(range(RECORDS), replica.lost.__contains__)
            if not lost and (offsets := list(run))
        ]
        assert len(runs) > 2
        for first, end in runs[:RANGES_READ]:
            rows = read(first, end).select("offset", "value").collect()
            found = sorted((row.offset, bytes(row.value)) for row in rows)
            assert found == [(offset, value_of(0, offset)) for offset in range(first, end)]
        lost = min(replica.lost)
        with pytest.raises(Exception, match=rf"offset {lost}\b|offsets {lost}\b"):
            read(0, RECORDS).collect()
    finally:
        broker.kill()
