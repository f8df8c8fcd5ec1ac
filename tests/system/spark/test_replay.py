"""Replay of deleted records from an archive: each record once, however often the replay is interrupted and repeated."""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import mansio
from mansio.cli.main import main
from mansio.client.types import OutgoingRecord, TopicPartition
from mansio.errors import ConcurrentTransactions, InvalidRequest, PolicyViolation
from mansio.iceberg.archive.rewrite_data_files import rewrite_data_files
from mansio.iceberg.archive.table_scan import Selection
from mansio.iceberg.archive.time_travel import TableVersion, version_at
from mansio.pipelines import replay as replaying
from mansio.pipelines.replay import count_present, replay
from mansio.spark.options import SinkOptions
from mansio.spark.sink.sink_transaction import DirectTransaction
from mansio.spark.sink.task_sender import TaskSender
from mansio.spark.sync_client import sync_client
from support.archive_tables import Archive, archived, row
from system.spark.topics import contents

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mansio.client.types import Message
    from mansio.iceberg.archive.table import ArchiveTable
    from support.process import ServedBroker

PARTITIONS = 3
FIRST_MS = 1_600_000_000_000


def records() -> Iterator[OutgoingRecord]:
    """Keys, values and headers of every kind, null and empty among them, with timestamps that go back at times."""
    for index in range(300):
        yield OutgoingRecord(
            (None, b"", b"value %d" % index, b"x" * 3000)[index % 4],
            key=(None, b"", b"key %d" % index)[index % 3],
            headers=((), (("a", None),), (("a", b""), ("a", b"twice"), ("\u00e4", b"\xff")))[index % 5 % 3],
            partition=index % PARTITIONS,
            timestamp_ms=FIRST_MS + index * 1001 - (index % 7) * 5000,
        )


def what(messages: list[Message]) -> list[Any]:
    """All there is to a record but its offset."""
    return [
        (one.partition, one.timestamp_ms, one.key, one.value, one.headers)
        for one in sorted(messages, key=lambda one: (one.partition, one.offset))
    ]


@pytest.fixture
def bootstrap_servers(broker_process: ServedBroker) -> str:
    return broker_process.bootstrap_servers


@pytest.fixture
def source(bootstrap_servers: str, topic_name: Callable[[str], str]) -> str:
    topic = topic_name("source")
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.admin.create_topic(topic, partitions=PARTITIONS, config={"retention.ms": "-1"})
        client.publish_many(topic, list(records()))
    return topic


@pytest.fixture
def archive(bootstrap_servers: str, source: str, tmp_path: Path) -> Archive:
    """The whole topic, archived in batches of 20 records of each partition."""
    with mansio.blocking.connect(bootstrap_servers) as client:
        topic_id = client.admin.describe_topic(source).topic_id.hex()
    made = Archive(tmp_path / "warehouse", source, topic_id)
    table = made.open()
    messages = {
        partition: list(group)
        for partition, group in itertools.groupby(
            contents(bootstrap_servers, source), key=lambda one: one.partition
        )
    }
    for begin in range(0, 100, 20):
        batch = {partition: some[begin : begin + 20] for partition, some in messages.items()}
        made.add(table, {partition: [archived(one) for one in some] for partition, some in batch.items()})
    return made


@pytest.fixture
def table(archive: Archive) -> ArchiveTable:
    return archive.open()


def delete_everything(bootstrap_servers: str, topic: str) -> None:
    with mansio.blocking.connect(bootstrap_servers) as client:
        every = [TopicPartition(topic, one.index) for one in client.admin.describe_topic(topic).partitions]
        client.admin.delete_records(every, before="end")


def test_everything_that_expired_comes_back_identical_and_a_second_run_adds_nothing(
    bootstrap_servers: str, source: str, table: ArchiveTable, topic_name: Callable[[str], str]
) -> None:
    target = topic_name("target")
    before = what(contents(bootstrap_servers, source))
    delete_everything(bootstrap_servers, source)
    assert contents(bootstrap_servers, source) == []
    first = replay(table, bootstrap_servers, target)
    assert (first.already_present, first.written) == (0, 300)
    assert what(contents(bootstrap_servers, target)) == before
    second = replay(table, bootstrap_servers, target)
    assert (second.already_present, second.written) == (300, 0)
    assert what(contents(bootstrap_servers, target)) == before


def test_a_replay_that_died_goes_on_where_it_stopped_also_when_others_wrote_meanwhile(
    bootstrap_servers: str,
    source: str,
    table: ArchiveTable,
    topic_name: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = topic_name("target")
    before = what(contents(bootstrap_servers, source))
    monkeypatch.setattr(replaying, "ROWS_PER_ROUND", 16)

    rounds = itertools.count()

    def die(_count: int) -> None:
        if next(rounds) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay(table, bootstrap_servers, target, progress=die)
    written = len(contents(bootstrap_servers, target))
    assert 0 < written < 300
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.publish_many(target, [OutgoingRecord(b"from others", partition=1)] * 5)
    report = replay(table, bootstrap_servers, target)
    assert (report.already_present, report.written) == (written, 300 - written)
    found = [one for one in contents(bootstrap_servers, target) if one.value != b"from others"]
    assert what(found) == before


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended"])
def test_a_round_that_was_not_committed_is_not_visible_and_is_written_again(
    bootstrap_servers: str,
    source: str,
    table: ArchiveTable,
    topic_name: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    is_killed: bool,
) -> None:
    target = topic_name("target")
    before = what(contents(bootstrap_servers, source))
    monkeypatch.setattr(replaying, "ROWS_PER_ROUND", 16)
    commit = TaskSender.commit
    rounds = itertools.count()

    def die(sender: TaskSender) -> None:
        if next(rounds) == 2:
            raise KeyboardInterrupt
        commit(sender)

    monkeypatch.setattr(TaskSender, "commit", die)
    if is_killed:
        monkeypatch.setattr(TaskSender, "abort", lambda _: None)
    with pytest.raises(KeyboardInterrupt):
        replay(table, bootstrap_servers, target)
    monkeypatch.undo()
    report = replay(table, bootstrap_servers, target)
    committed = PARTITIONS * (16 + 4)  # two rounds, of which a file of 20 records ends the second
    assert (report.already_present, report.written) == (committed, 300 - committed)
    assert what(contents(bootstrap_servers, target)) == before
    assert replay(table, bootstrap_servers, target).written == 0


def test_a_replay_waits_for_transactions_of_other_producers_in_its_target(
    bootstrap_servers: str,
    source: str,
    table: ArchiveTable,
    topic_name: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Behind an open transaction, what is there already cannot be seen, and would be written again."""
    target = topic_name("target")
    assert replay(table, bootstrap_servers, target).written == 300
    client = sync_client(bootstrap_servers)
    other = TaskSender(
        client,
        SinkOptions(bootstrap_servers, topic=target),
        transaction=DirectTransaction(client, topic_name("other"), 60_000),
    )
    other.send(target, pa.RecordBatch.from_pydict({"value": [b"x"], "partition": pa.array([0], pa.int32())}))
    monkeypatch.setattr(replaying, "STABLE_END_WAIT_MS", 300)
    with pytest.raises(ConcurrentTransactions, match="of another producer is open"):
        replay(table, bootstrap_servers, target)
    other.abort()
    monkeypatch.undo()
    assert replay(table, bootstrap_servers, target).written == 0


@pytest.mark.full
def test_a_topic_is_replayed_into_itself(
    bootstrap_servers: str, source: str, archive: Archive, table: ArchiveTable
) -> None:
    """The originals, where they are still there, are not taken for copies; nor are copies that were archived taken for
    originals, though one file may hold both."""
    before = what(contents(bootstrap_servers, source))
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.admin.delete_records([TopicPartition(source, 0)], before=50)
    with pytest.raises(InvalidRequest, match="takes in the copies too"):
        replay(table, bootstrap_servers, source)
    then = TableVersion(0, ends={0: 100, 1: 100, 2: 100})
    assert replay(table, bootstrap_servers, source, version=then).written == 300
    assert replay(table, bootstrap_servers, source, version=then).written == 0
    found = contents(bootstrap_servers, source)
    copies = [one for one in found if one.offset >= 100]
    assert what(copies) == before
    archive.add(
        table,
        {
            partition: [archived(one) for one in copies if one.partition == partition]
            for partition in range(3)
        },
    )
    rewrite_data_files(table)
    assert replay(table, bootstrap_servers, source, version=then).written == 0
    with pytest.raises(InvalidRequest, match="takes in the copies too"):
        replay(table, bootstrap_servers, source, version=version_at(table, 2 * FIRST_MS))


@pytest.mark.full
def test_times_partitions_and_moments_choose_what_is_replayed(
    bootstrap_servers: str, source: str, table: ArchiveTable, topic_name: Callable[[str], str]
) -> None:
    before = contents(bootstrap_servers, source)
    low, high = FIRST_MS + 100_000, FIRST_MS + 200_000
    chosen = Selection(partitions=frozenset({0, 2}), from_us=low * 1000, to_us=high * 1000)
    replay(table, bootstrap_servers, topic_name("chosen"), chosen)
    assert what(contents(bootstrap_servers, topic_name("chosen"))) == what(
        [one for one in before if one.partition != 1 and low <= one.timestamp_ms < high]
    )
    replay(table, bootstrap_servers, topic_name("once"), version=TableVersion(0, ends={0: 30, 1: 0, 2: 7}))
    assert what(contents(bootstrap_servers, topic_name("once"))) == what(
        [one for one in before if one.offset < {0: 30, 1: 0, 2: 7}[one.partition]]
    )


def test_without_deleted_records_only_what_the_topic_still_has_is_replayed(
    bootstrap_servers: str, source: str, table: ArchiveTable, topic_name: Callable[[str], str]
) -> None:
    target = topic_name("target")
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.admin.delete_records([TopicPartition(source, 0), TopicPartition(source, 2)], before=60)
    without_deleted = what(contents(bootstrap_servers, source))
    replay(table, bootstrap_servers, target, include_deleted=False)
    assert what(contents(bootstrap_servers, target)) == without_deleted
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.admin.delete_topic(source)
    assert replay(table, bootstrap_servers, topic_name("other"), include_deleted=False).written == 0


def test_a_recreated_topic_counts_all_archived_records_as_deleted(
    bootstrap_servers: str, source: str, archive: Archive, topic_name: Callable[[str], str]
) -> None:
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.admin.delete_topic(source)
        client.admin.create_topic(source, partitions=PARTITIONS, config={"retention.ms": "-1"})
    assert replay(archive.open(), bootstrap_servers, topic_name("target"), include_deleted=False).written == 0
    assert replay(archive.open(), bootstrap_servers, topic_name("target")).written == 300
    then = TableVersion(0, ends={0: 100, 1: 100, 2: 100})
    for _ in range(2):  # back into the topic of the same name, whose offsets are not those of the archive
        replay(archive.open(), bootstrap_servers, source, version=then)
    assert len(contents(bootstrap_servers, source)) == 300


@pytest.mark.parametrize(
    ("config", "partitions", "refused"),
    [
        ({"message.timestamp.type": "LogAppendTime"}, 3, (InvalidRequest, "its own clock")),
        ({"cleanup.policy": "compact"}, 3, (PolicyViolation, "is compacted")),
        ({"retention.ms": "604800000"}, 3, (PolicyViolation, "set retention.ms=-1")),
        ({"retention.ms": "-1", "retention.bytes": "1000"}, 3, (PolicyViolation, "set retention.bytes=-1")),
        ({"retention.ms": "-1"}, 2, (InvalidRequest, "has 2 partitions, but partition 2")),
    ],
)
def test_a_target_that_would_not_keep_the_records_is_refused_before_anything_is_written(
    bootstrap_servers: str,
    archive: Archive,
    table: ArchiveTable,
    topic_name: Callable[[str], str],
    config: dict[str, str],
    partitions: int,
    refused: tuple[type[Exception], str],
) -> None:
    # A record that has no time hides not how old the others are.
    archive.add(table, {0: [row(0, 100, __timestamp=replaying.NO_TIMESTAMP_US)]})
    target = topic_name("target")
    with mansio.blocking.connect(bootstrap_servers) as client:
        client.admin.create_topic(target, partitions=partitions, config=config)
    with pytest.raises(refused[0], match=refused[1]):
        replay(table, bootstrap_servers, target)
    assert contents(bootstrap_servers, target) == []


def test_a_day_is_replayed_from_the_command_line(
    bootstrap_servers: str,
    source: str,
    archive: Archive,
    topic_name: Callable[[str], str],
    capfd: pytest.CaptureFixture[str],
) -> None:
    target = topic_name("target")
    low, high = FIRST_MS + 50_000, FIRST_MS + 150_000
    wanted = [one for one in contents(bootstrap_servers, source) if low <= one.timestamp_ms < high]
    delete_everything(bootstrap_servers, source)

    def run(*arguments: str) -> tuple[object, str, str]:
        given = [
            "pipeline",
            "replay",
            source,
            "-w",
            str(archive.warehouse),
            "--bootstrap-servers",
            bootstrap_servers,
            "--to",
            target,
        ]
        with pytest.raises(SystemExit) as ended:
            main([*given, "-o", "json", *arguments])
        return ended.value.code, *capfd.readouterr()

    day = ("--from-time", str(low), "--to-time", str(high))
    code, out, err = run(*day)
    assert (code, json.loads(out)) == (0, []), err
    for written in (len(wanted), 0):
        code, out, err = run(*day, "--include-deleted")
        assert code == 0, err
        assert sum(one["written"] for one in json.loads(out)) == written
    assert what(contents(bootstrap_servers, target)) == what(wanted)
    assert run("--from-time", str(high), "--to-time", str(low))[0] == 2


def test_what_is_there_is_counted_in_order_and_whatever_lies_between() -> None:
    def rows(text: str) -> Iterator[Any]:
        return iter([(0, None, letter.encode(), ()) for letter in text])

    for wanted, present, already_present in [
        ("abc", "", 0),
        ("abc", "abc", 3),
        ("abc", "xaxxbx", 2),
        ("abc", "bc", 0),
        ("aab", "ab", 1),
        ("", "abc", 0),
        ("ab", "abab", 2),
    ]:
        assert count_present(rows(wanted), rows(present)) == already_present
