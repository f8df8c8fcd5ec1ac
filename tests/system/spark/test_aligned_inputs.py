"""Inputs that advance together in time: the readers of two topics, driven as Spark drives them, without a JVM."""

from __future__ import annotations

import json
import random
import re
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import ConfigError
from mansio.pipelines.progress_listener import offsets_in
from mansio.spark.options import SourceOptions, format_aligned_inputs
from mansio.spark.source.offsets import OTHER_INPUTS, offsets_from_json
from mansio.spark.spark_versions import ReadMaxRows
from mansio.spark.sync_client import close_sync_clients
from support.process import ServedBroker
from support.spark_source import Topic, read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mansio.spark.source.readers import StreamReader

FIRST_MS = 1_700_000_000_000
LATENESS_MS = 5_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    served = ServedBroker(tmp_path_factory.mktemp("aligned") / "data", http=False)
    try:
        yield served.start()
    finally:
        close_sync_clients()
        served.kill()


@pytest.fixture
def topic(broker: ServedBroker, request: pytest.FixtureRequest) -> Callable[..., Topic]:
    def make(suffix: str, partitions: int = 1) -> Topic:
        return Topic(broker, re.sub(r"[^\w.-]", "-", request.node.name[:80]) + suffix, partitions)

    return make


class Query:
    """A query over several topics as Spark runs it: the offsets of each batch go through JSON."""

    def __init__(self, topics: Sequence[Topic], **options: str) -> None:
        self.topics = topics
        self.options = {"startingOffsets": "earliest", **options}
        self.stored: list[dict[str, Any]] | None = None
        self.readers: list[StreamReader] = []
        self.rows: list[list[tuple[str, int, int, int]]] = []
        """(topic, partition, offset, milliseconds) of the rows of each batch."""

    def start(self, limit: int) -> None:
        """Start or restart the query. The limit may be another one than before."""
        inputs = [{"subscribe": one.name, **self.options} for one in self.topics]
        for one in inputs:
            one["kafka.bootstrap.servers"] = self.topics[0].bootstrap_servers
        self.readers = [
            one.stream(
                maxOffsetsPerTrigger=str(limit),
                alignedInputs=format_aligned_inputs(number, inputs),
                **self.options,
            )
            for number, one in enumerate(self.topics)
        ]

    def trigger(self) -> bool:
        """Plan a batch, and read it. False if Spark would not run one."""
        if self.stored is None:
            self.stored = [reader.initialOffset() for reader in self.readers]
        ends = []
        for reader, start in zip(self.readers, self.stored, strict=True):
            limit = reader.getDefaultReadLimit()
            assert isinstance(limit, ReadMaxRows)
            ends.append(json.loads(json.dumps(reader.latestOffset(start, limit))))
        if ends == self.stored:
            return False
        batch = []
        for reader, start, end in zip(self.readers, self.stored, ends, strict=True):
            for row in read_all(reader, reader.partitions(start, end)):
                at_ms = round(row["timestamp"].timestamp() * 1000)
                batch.append((row["topic"], row["partition"], row["offset"], at_ms))
        self.rows.append(batch)
        self.stored = ends
        return True


def fill(topic: Topic, times: Sequence[int], partition: int = 0) -> None:
    topic.fill(len(times), times=[FIRST_MS + one for one in times], partition=partition)


def test_batches_of_two_topics_end_at_one_time_whatever_the_limits_and_restarts(
    topic: Callable[..., Topic],
) -> None:
    """A large and a small topic of the same hour; more of both arrives while the query is stopped."""
    chance = random.Random(7)
    large, small = topic("-large", 2), topic("-small")
    for partition in (0, 1):
        fill(large, sorted(chance.randrange(1_800_000) for _ in range(400)), partition)
    fill(small, sorted(chance.randrange(1_800_000) for _ in range(40)))
    query = Query((large, small), stopAtLatest="true")
    for limit in (150, 50, 150):
        query.start(limit)
        for _ in range(2):
            assert query.trigger()
            assert 0 < len(query.rows[-1]) <= limit
    fill(large, sorted(chance.randrange(1_800_000, 3_600_000) for _ in range(300)), 1)
    fill(small, sorted(chance.randrange(1_800_000, 3_600_000) for _ in range(30)))
    query.start(100)
    while query.trigger():
        assert len(query.rows[-1]) <= 100
    rows = [row for batch in query.rows for row in batch]
    assert len(rows) == len(set(rows)) == 400 + 400 + 40 + 300 + 30
    newest_ms = 0
    for batch in query.rows:
        assert all(at_ms >= newest_ms for *_, at_ms in batch), "no row is older than those of earlier batches"
        newest_ms = max(at_ms for *_, at_ms in batch)
    assert all(query.rows), "no batch without records"


def test_input_that_has_to_wait_does_not_end_the_query(topic: Callable[..., Topic]) -> None:
    old, new = topic("-old"), topic("-new")
    fill(old, list(range(50)))
    fill(new, [10_000])
    query = Query((old, new), stopAtLatest="true")
    query.start(10)
    while query.trigger():
        pass
    assert [len(batch) for batch in query.rows] == [10, 10, 10, 10, 10, 1]
    assert query.rows[-1][0][0] == new.name


def test_simultaneous_records_are_divided_and_partitions_of_one_topic_advance_together(
    topic: Callable[..., Topic],
) -> None:
    one = topic("", 2)
    fill(one, [0] * 30 + [5_000] * 10)
    fill(one, [0] * 60 + [1_000] * 20, 1)
    query = Query((one,), stopAtLatest="true")
    query.start(60)
    while query.trigger():
        pass
    found = [[sum(row[1] == partition for row in batch) for partition in (0, 1)] for batch in query.rows]
    assert found == [[20, 40], [20, 40]]
    assert OTHER_INPUTS not in (query.stored or [])[0]


def test_query_without_stored_positions_of_the_others_continues(topic: Callable[..., Topic]) -> None:
    """The checkpoint of a run without a limit: the positions are those that the pipeline has committed."""
    first, second = topic("-first"), topic("-second")
    fill(first, list(range(20)))
    fill(second, list(range(20)))
    query = Query((first, second), pipeline=first.name)
    query.start(10)
    assert query.trigger()
    assert query.stored is not None
    for offsets in query.stored:
        del offsets[OTHER_INPUTS]
    query.start(30)
    assert query.trigger(), "reading the topics' rest"
    while query.trigger():
        pass
    rows = [row for batch in query.rows for row in batch]
    assert len(rows) == len(set(rows)) == 40


def test_positions_of_other_inputs_are_neither_offsets_of_the_input_nor_committed(
    topic: Callable[..., Topic],
) -> None:
    own, other = topic("-own"), topic("-other")
    fill(own, [1])
    fill(other, [2])
    query = Query((own, other))
    query.start(10)
    assert query.trigger()
    text = json.dumps((query.stored or [])[0])
    assert OTHER_INPUTS in json.loads(text)
    assert {place.topic for place in offsets_from_json(json.loads(text))} == {own.name}
    assert {place.topic for place in offsets_in(text)} == {own.name}


@pytest.mark.parametrize(
    "text",
    ["{}", "[]", '{"own": 2, "inputs": [{}]}', '{"own": 0, "inputs": [7]}', '{"own": true, "inputs": [{}]}'],
)
def test_invalid_description_of_the_inputs_is_refused(text: str) -> None:
    options = {"kafka.bootstrap.servers": "127.0.0.1:9", "subscribe": "t", "maxOffsetsPerTrigger": "5"}
    with pytest.raises(ConfigError, match=r"alignedInputs|kafka\.bootstrap\.servers is missing"):
        SourceOptions.parse({**options, "alignedInputs": text}, streaming=True)


def test_inputs_advance_together_only_with_a_limit() -> None:
    options = {"kafka.bootstrap.servers": "127.0.0.1:9", "subscribe": "t"}
    with pytest.raises(ConfigError, match="alignedInputs needs option maxOffsetsPerTrigger"):
        SourceOptions.parse({**options, "alignedInputs": format_aligned_inputs(0, [options])}, streaming=True)
