"""`mansio pipeline backfill` killed at random, MANSIO_NIGHTLY_PIPELINE_KILLS times."""

from __future__ import annotations

import json
import random
import time
from typing import TYPE_CHECKING

import pytest
from pyiceberg.exceptions import NoSuchTableError

from nightly.spark.test_kills import NIGHTLY_KILLS, NIGHTLY_TIMEOUT_S
from support.iceberg import checksum
from support.machine import scaled
from support.pipeline_process import PipelineProcess
from support.seeds import chosen_seed
from support.waiting import wait_until
from system.spark.test_backfill import EVEN, at, numbers, publish_numbers
from system.spark.topics import create

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from support.process import ServedBroker

pytestmark = pytest.mark.spark

RANGE = 40
"""Records of a time range; a killed one is repeated until it is in the table."""
RANGES = 30
COMMAND_S = 180.0


class Backfills:
    """Backfills of one table, range by range, each with files of its own."""

    def __init__(self, broker: ServedBroker, topic: str, place: Path) -> None:
        self.place, self.lake = place, place / "lake"
        self._broker, self._topic = broker, topic
        self._started: list[PipelineProcess] = []
        (place / "even.py").write_text(EVEN)

    def start(self, number: int) -> PipelineProcess:
        begin, end = at(number * RANGE), at((number + 1) * RANGE)
        words = ["backfill", "even.py", "--topic", self._topic, "--to-table", "even", "--master", "local[2]"]
        words += ["--warehouse", str(self.lake), "--from-time", str(begin), "--to-time", str(end)]
        words += ["--bootstrap-servers", self._broker.bootstrap_servers, "--output", "json"]
        self._started.append(PipelineProcess(self.place, words))
        return self._started[-1]

    def files(self) -> int:
        return len(list(self.lake.rglob("*.parquet")))

    def rows(self) -> list[int]:
        try:
            return numbers(self.lake) if (self.lake / "catalog.db").exists() else []
        except NoSuchTableError:
            return []

    def close(self) -> None:
        for process in self._started:
            process.kill()


def even_numbers(ranges: int) -> list[int]:
    """What the table holds when the first ranges are in it."""
    return list(range(0, ranges * RANGE, 2))


@pytest.mark.timeout(NIGHTLY_TIMEOUT_S)
def test_backfill_killed_twenty_times_leaves_a_range_out_or_complete(
    broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path
) -> None:
    servers = broker_process.bootstrap_servers
    topic = create(servers, topic_name("in"), 2, retention_ms="-1")
    publish_numbers(servers, topic, 0, RANGES * RANGE)
    dice = random.Random(chosen_seed())
    backfills = Backfills(broker_process, topic, tmp_path)
    completed = with_files = 0
    try:
        for number in range(NIGHTLY_KILLS):
            current, before = completed % RANGES, backfills.files()
            process = backfills.start(current)
            if dice.random() < 0.8:
                wait_until(
                    lambda before=before, process=process: (
                        backfills.files() > before or process.process.poll() is not None
                    ),
                    COMMAND_S,
                    "its tasks write",
                )
            time.sleep(dice.uniform(0, 0.8))  # the point of the kill
            process.kill()
            rows = backfills.rows()
            assert rows in (even_numbers(completed), even_numbers(completed + 1)), process.printed
            is_complete = len(rows) > len(even_numbers(completed))
            with_files += backfills.files() > before and not is_complete
            completed += is_complete
            print(f"kill {number + 1}: range {current}, {'complete' if is_complete else 'left out'}")
        for number in (0, completed):
            last = backfills.start(number)
            assert last.wait(scaled(COMMAND_S)) == 0, last.printed
            assert json.loads(last.output.read_text())["rows"] == RANGE // 2
        assert backfills.rows() == even_numbers(completed + 1), "a repeated range is replaced"
    finally:
        backfills.close()
    print(
        f"{NIGHTLY_KILLS} kills, {with_files} of them after files were written, {completed + 1} ranges,"
        f" {len(backfills.rows())} rows, {checksum(backfills.rows())}"
    )
