"""Archive and log as one table: whatever is archived already, the read equals the whole log."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest

import mansio
from mansio.client.types import OutgoingRecord, TopicPartition
from mansio.errors import ConfigError, InvalidRequest, TopicRecreated
from mansio.iceberg.archive.rewrite_data_files import rewrite_data_files
from mansio.iceberg.archive.table_scan import Selection, scan
from mansio.spark.options import SourceOptions
from mansio.spark.source.archived_topic import unarchived_ranges
from mansio.spark.sync_client import SyncClient
from mansio.spark.topic_table import read_topic_as_table
from mansio.wire.field_values import LATEST_TIMESTAMP
from support.archive_tables import Archive, archived
from system.spark.test_transactional_source import write_transactions

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from mansio.client.types import Message
    from support.process import ServedBroker

PARTITIONS = 2
RECORDS = 60
FIRST_MS = 1_700_000_000_000


class Case:
    """A topic, its archive, and what both together must hold."""

    def __init__(self, bootstrap_servers: str, topic: str, warehouse: Path) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.topic = topic
        with mansio.blocking.connect(bootstrap_servers) as client:
            client.admin.create_topic(topic, partitions=PARTITIONS, config={"retention.ms": "-1"})
            topic_id = client.admin.describe_topic(topic).topic_id.hex()
        self.archive = Archive(warehouse, topic, topic_id)
        self.table = self.archive.open()
        self.everything: list[Message] = []
        self.publish(RECORDS)

    def publish(self, count: int) -> None:
        """More records, a second apart, in all partitions."""
        first = len(self.everything)
        with mansio.blocking.connect(self.bootstrap_servers) as client:
            client.publish_many(
                self.topic,
                [
                    OutgoingRecord(
                        (b"value %d" % index, None)[index % 4 == 3],
                        key=(b"key %d" % index, None)[index % 3 == 2],
                        headers=((), (("trace", b"%d" % index), ("none", None)))[index % 2],
                        partition=index % PARTITIONS,
                        timestamp_ms=FIRST_MS + index * 1000,
                    )
                    for index in range(first, first + count)
                ],
            )
            every = [TopicPartition(self.topic, index) for index in range(PARTITIONS)]
            with client.consume(every, from_="earliest", to_end=True) as consumer:
                known = {(one.partition, one.offset) for one in self.everything}
                self.everything += [one for one in consumer if (one.partition, one.offset) not in known]

    def archive_up_to(self, ends: dict[int, int]) -> None:
        """One batch, by another process than the reader's."""
        batch = {
            partition: [
                archived(one)
                for one in sorted(self.everything, key=lambda one: one.offset)
                if one.partition == partition and self.archive.offsets.get(partition, 0) <= one.offset < end
            ]
            for partition, end in ends.items()
        }
        self.archive.add(self.archive.open(), batch)

    def delete_before(self, ends: dict[int, int]) -> None:
        with mansio.blocking.connect(self.bootstrap_servers) as client:
            for partition, end in ends.items():
                client.admin.delete_records([TopicPartition(self.topic, partition)], before=end)

    def read(self, spark: SparkSession, selection: Selection | None = None, **options: str) -> DataFrame:
        given = {"kafka.bootstrap.servers": self.bootstrap_servers, "includeHeaders": "true", **options}
        return read_topic_as_table(spark, self.topic, self.table, given, selection or Selection())


def held(rows: DataFrame) -> list[Any]:
    """What a DataFrame holds, in order; a record that is there twice is there twice."""
    return sorted(
        (
            one.partition,
            one.offset,
            one.topic,
            int(one.timestamp.timestamp() * 1000),
            None if one.key is None else bytes(one.key),
            None if one.value is None else bytes(one.value),
            tuple(
                (header.key, None if header.value is None else bytes(header.value))
                for header in one.headers or ()
            ),
        )
        for one in rows.collect()
    )


def expected(messages: list[Message]) -> list[Any]:
    return sorted(
        (one.partition, one.offset, one.topic, one.timestamp_ms, one.key, one.value, one.headers)
        for one in messages
    )


@pytest.fixture
def case(broker_process: ServedBroker, topic_name: Callable[[str], str], tmp_path: Path) -> Case:
    return Case(broker_process.bootstrap_servers, topic_name("union"), tmp_path / "ware{house} 1")


@pytest.mark.full
def test_the_read_equals_the_whole_log_at_every_cut_while_the_archive_moves_on(
    spark: SparkSession, case: Case
) -> None:
    frames = [case.read(spark)]
    for cut in ({0: 7, 1: 0}, {0: 20, 1: 9}, {0: 30, 1: 30}):
        case.archive_up_to(cut)
        frames.append(case.read(spark))
    for frame in frames[::2]:
        assert held(frame) == expected(case.everything)
    # A frame that was planned at the first cut goes on to be whole when the archive has moved past it.
    moved = frames[1]
    case.publish(10)
    case.archive_up_to({0: 33, 1: 32})
    rewrite_data_files(case.archive.open(), 1 << 20)
    assert held(moved) == expected(case.everything)
    # What is archived may be deleted from the log; what is not is still there.
    case.delete_before({0: 33, 1: 32})
    assert held(case.read(spark)) == expected(case.everything)


@pytest.mark.full
def test_the_read_has_the_committed_records_at_cuts_in_and_beside_transactions(
    spark: SparkSession, case: Case
) -> None:
    """Aborted records and markers have offsets, too, and the archive may end at any of them."""
    client = SyncClient(case.bootstrap_servers)
    write_transactions(case.bootstrap_servers, client, case.topic, case.topic)
    client.close()
    case.publish(2)
    committed = sorted(one.offset for one in case.everything if one.partition == 0)
    gaps = [one for one in range(committed[-1]) if one not in committed]
    assert len(gaps) > 50
    for cut in (20, gaps[0], gaps[1], gaps[len(gaps) // 2], gaps[-1], committed[-1] + 1):
        case.archive_up_to({0: cut, 1: 5})
        assert held(case.read(spark)) == expected(case.everything), f"cut {cut}"


def test_the_two_halves_meet_without_a_gap_or_an_overlap_wherever_the_cut_is(case: Case) -> None:
    """On both sides of every border, without Spark: what the chosen files hold, and the offsets asked of the log."""
    chance = random.Random(3)
    every = sorted((one.partition, one.offset) for one in case.everything)
    low = FIRST_MS + 21_000
    selections = [
        (Selection(), every),
        (
            Selection(starts={0: 12}, ends={0: 25, 1: 18}),
            [
                (partition, offset)
                for partition, offset in every
                if offset < (25, 18)[partition] and (partition or offset >= 12)
            ],
        ),
        (
            Selection(from_us=low * 1000),
            sorted((one.partition, one.offset) for one in case.everything if one.timestamp_ms >= low),
        ),
    ]
    options = SourceOptions.parse(
        {"kafka.bootstrap.servers": case.bootstrap_servers, "subscribe": case.topic}
    )
    latest = RECORDS // PARTITIONS
    for cut in (0, 1, 2, 9, 11, 12, 13, 17, 18, 19, 24, 25, 26, 29, 30):
        if cut:
            case.archive_up_to({0: cut, 1: min(latest, cut + chance.randrange(3))} if cut < 20 else {0: cut})
        case.table.refresh()
        for selection, wanted in selections:
            found = [
                (partition, offset)
                for batch in scan(case.table, selection)
                for partition, offset in zip(
                    batch.column("__partition").to_pylist(), batch.column("__offset").to_pylist(), strict=True
                )
            ]
            for partition, part in unarchived_ranges(case.table, options, selection).items():
                end = latest if part.end == LATEST_TIMESTAMP else part.end
                found += [(partition, offset) for offset in range(max(part.start, 0), end)]
            assert sorted(found) == wanted, f"cut {cut}, {selection}"


@pytest.mark.full
def test_a_selection_opens_only_the_files_and_the_log_it_needs(spark: SparkSession, case: Case) -> None:
    for end in (10, 20, 25):
        case.archive_up_to({0: end, 1: end})
    low, high = FIRST_MS + 24_000, FIRST_MS + 36_000
    frame = case.read(spark, Selection(from_us=low * 1000, to_us=high * 1000))
    wanted = [one for one in case.everything if low <= one.timestamp_ms < high]
    assert held(frame) == expected(wanted)
    assert len(frame.inputFiles()) == 2
    chosen = Selection(partitions=frozenset({1}), starts={1: 8}, ends={1: 28})
    frame = case.read(spark, chosen)
    assert held(frame) == expected(
        [one for one in case.everything if one.partition == 1 and 8 <= one.offset < 28]
    )
    assert len(frame.inputFiles()) == 3
    archived_only = case.read(spark, Selection(ends={0: 10, 1: 10}))
    assert held(archived_only) == expected([one for one in case.everything if one.offset < 10])
    assert case.read(spark, Selection(partitions=frozenset({7}))).count() == 0
    values = case.read(spark, Selection(from_us=low * 1000), includeHeaders="false", columns="value")
    assert (values.columns, values.count()) == (["value"], RECORDS - 24)
    assert case.read(spark, Selection(from_us=(FIRST_MS + 10**9) * 1000)).count() == 0


@pytest.mark.full
def test_columns_can_be_chosen_and_filters_come_on_top(spark: SparkSession, case: Case) -> None:
    case.archive_up_to({0: 15, 1: 15})
    frame = case.read(spark, includeHeaders="false", columns="offset,partition,value")
    assert frame.columns == ["offset", "partition", "value"]
    assert frame.where("partition = 1 and offset >= 10").count() == 20
    # The next query of the same frame is not narrowed by what the one before it wanted.
    assert frame.groupBy("partition").count().orderBy("partition").collect() == [(0, 30), (1, 30)]


@pytest.mark.full
def test_records_that_neither_half_has_are_an_error_unless_that_is_wanted(
    spark: SparkSession, case: Case
) -> None:
    case.archive_up_to({0: 15, 1: 15})
    case.delete_before({0: 20})
    with pytest.raises(Exception, match=r"offset 15 of partition 0 of topic .* was deleted"):
        case.read(spark).collect()
    found = held(case.read(spark, failOnDataLoss="false"))
    assert found == expected(
        [one for one in case.everything if one.partition == 1 or not 15 <= one.offset < 20]
    )


def test_what_neither_half_has_is_reported_also_where_times_are_chosen(case: Case) -> None:
    """Its age is unknown, so it may have been wanted. Without Spark: what the log is asked for."""
    case.archive_up_to({0: 15, 1: 15})
    case.delete_before({0: 20})
    case.table.refresh()
    options = SourceOptions.parse(
        {"kafka.bootstrap.servers": case.bootstrap_servers, "subscribe": case.topic}
    )
    for young in (33, 50, 10**6):
        since = Selection(from_us=(FIRST_MS + young * 1000) * 1000)
        ranges = unarchived_ranges(case.table, options, since)
        assert ranges[0].start == 15, "the source finds these gone"
        assert ranges[1].start > 15, "nothing is missing here"


@pytest.mark.full
def test_a_recreated_topic_is_not_taken_for_the_archived_one(spark: SparkSession, case: Case) -> None:
    case.archive_up_to({0: 5, 1: 5})
    with mansio.blocking.connect(case.bootstrap_servers) as client:
        client.admin.delete_topic(case.topic)
        client.admin.create_topic(case.topic, partitions=PARTITIONS)
        client.publish_many(
            case.topic, [OutgoingRecord(b"other", partition=index % 2) for index in range(20)]
        )
    with pytest.raises(TopicRecreated, match="was deleted and recreated"):
        case.read(spark)


def test_a_recreated_topic_does_not_continue_an_archive_even_if_losses_are_accepted(case: Case) -> None:
    case.archive_up_to({0: 5, 1: 5})
    case.table.refresh()
    with mansio.blocking.connect(case.bootstrap_servers) as client:
        client.admin.delete_topic(case.topic)
        client.admin.create_topic(case.topic, partitions=PARTITIONS)
        client.publish_many(
            case.topic, [OutgoingRecord(b"other", partition=index % 2) for index in range(20)]
        )
    options = SourceOptions.parse(
        {
            "kafka.bootstrap.servers": case.bootstrap_servers,
            "subscribe": case.topic,
            "failOnDataLoss": "false",
        }
    )
    with pytest.raises(TopicRecreated, match="does not continue where the table ends"):
        unarchived_ranges(case.table, options, Selection())


@pytest.mark.full
def test_partitions_added_since_the_last_batch_are_read_from_their_beginning(
    spark: SparkSession, case: Case
) -> None:
    case.archive_up_to({0: 15, 1: 15})
    with mansio.blocking.connect(case.bootstrap_servers) as client:
        client.admin.create_partitions(case.topic, 3)
        client.publish_many(case.topic, [OutgoingRecord(b"new", partition=2)] * 3)
    assert case.read(spark).where("partition = 2").count() == 3
    assert case.read(spark).count() == RECORDS + 3


@pytest.mark.full
def test_options_that_choose_records_are_refused(spark: SparkSession, case: Case) -> None:
    for name in ("startingOffsets", "endingTimestamp", "assign"):
        with pytest.raises(ConfigError, match=f"option {name} is not for"):
            case.read(spark, **dict[str, Any]({name: "earliest"}))
    with pytest.raises(InvalidRequest, match="is the archive of"):
        read_topic_as_table(spark, "another", case.table, {"kafka.bootstrap.servers": case.bootstrap_servers})
