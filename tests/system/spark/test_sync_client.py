"""Reading offset ranges from a real broker without an event loop, and the errors."""

from __future__ import annotations

import gc
import os
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

import mansio
from mansio.client import ProducerOptions
from mansio.client.types import OutgoingRecord
from mansio.errors import ConnectionLost, DataLoss, TopicRecreated, UnreadableRecords
from mansio.spark.source import fetch
from mansio.spark.source.error_column import parse_error_offsets
from mansio.spark.source.fetch import fetch_range
from mansio.spark.source.read_plan import TaskRange, TaskRanges
from mansio.spark.source.readers import BatchReader
from mansio.spark.source.task_reader import read_range
from mansio.spark.sync_client import close_sync_clients, sync_client
from mansio.wire.batch.record_batch import iterate_batches
from mansio.wire.topic_partition import TopicPartition
from support.machine import scaled
from support.paths import free_port
from support.process import ServedBroker
from support.spark_source import Topic, numbers_of, offsets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    served = ServedBroker(tmp_path_factory.mktemp("door") / "data", http=False)
    try:
        yield served.start()
    finally:
        close_sync_clients()
        served.kill()


@pytest.fixture
def topic(broker: ServedBroker, request: pytest.FixtureRequest) -> Callable[..., Topic]:
    return lambda **more: Topic(broker, request.node.name.split("[")[0][:100], **more)


def offsets_between(answers: list[fetch.FetchedBatches]) -> tuple[int, int]:
    """The first and the last offset of the batches that came."""
    headers = [header for answer in answers for _, header in iterate_batches(answer.records)]
    for before, after in pairwise(headers):
        assert after.base_offset == before.last_offset + 1
    return headers[0].base_offset, headers[-1].last_offset


def test_a_range_comes_in_whole_batches_and_small_answers(topic: Callable[..., Topic]) -> None:
    """None is missing between them, and none comes that lies behind the range."""
    here = topic()
    here.fill(3_000, size=100, together=50)
    way, one = sync_client(here.bootstrap_servers), TopicPartition(here.name, 0)
    answers = list(fetch_range(way, one, 70, 2_020, fetch_bytes=20_000))
    assert len(answers) > 5
    assert all(0 < len(answer.records) <= 20_000 for answer in answers)
    first, last = offsets_between(answers)
    assert first <= 70
    assert 2_019 <= last < 2_019 + 100
    assert list(fetch_range(way, one, 100, 100)) == []


def test_a_batch_larger_than_an_answer_comes_alone(topic: Callable[..., Topic]) -> None:
    here = topic()
    here.fill(3, size=30_000, together=1)
    answers = list(
        fetch_range(
            sync_client(here.bootstrap_servers), TopicPartition(here.name, 0), 0, 3, fetch_bytes=1_024
        )
    )
    assert [offsets_between([answer]) for answer in answers] == [(0, 0), (1, 1), (2, 2)]


def test_the_next_answer_is_asked_for_before_this_one_is_used(
    topic: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = topic()
    here.fill(300, size=1_000, together=10)
    asked: list[int] = []
    attempt = fetch._RangeFetcher.send_fetch

    async def counted(self: fetch._RangeFetcher, offset: int, size: int) -> fetch._FetchResult:
        asked.append(offset)
        return await attempt(self, offset, size)

    monkeypatch.setattr(fetch._RangeFetcher, "send_fetch", counted)
    reading: Any = fetch_range(
        sync_client(here.bootstrap_servers), TopicPartition(here.name, 0), 0, 300, fetch_bytes=50_000
    )
    first = next(reading)
    assert len(asked) == 2
    assert asked[1] == offsets_between([first])[1] + 1
    reading.close()


def test_a_reader_that_stops_early_leaves_a_usable_connection(topic: Callable[..., Topic]) -> None:
    here = topic()
    here.fill(500, size=1_000, together=10)
    reading: Any = fetch_range(
        sync_client(here.bootstrap_servers), TopicPartition(here.name, 0), 0, 500, fetch_bytes=20_000
    )
    next(reading)
    reading.close()
    assert offsets_of(here.rows()) == list(range(500))


def test_a_slow_query_does_not_fail_by_the_answer_that_waited_for_it(
    topic: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was asked ahead is looked at when the query comes back, which may be after any deadline."""
    monkeypatch.setattr("mansio.spark.sync_client.SPARK_TIMEOUT_MS", 1_000)
    here = topic()
    here.fill(300, size=1_000, together=10)
    close_sync_clients()
    way, one = sync_client(here.bootstrap_servers), TopicPartition(here.name, 0)
    answers = []
    for answer in fetch_range(way, one, 0, 300, fetch_bytes=100_000):
        answers.append(answer)
        if len(answers) == 1:
            time.sleep(1.5)
    assert len(answers) > 2
    assert offsets_between(answers) == (0, 299)
    close_sync_clients()


def test_a_forked_process_opens_a_connection_of_its_own(topic: Callable[..., Topic]) -> None:
    """Spark's workers are forked; the parent's sockets are not theirs."""
    here = topic()
    here.fill(10)
    before = sync_client(here.bootstrap_servers)
    child = os.fork()
    if child == 0:
        gc.freeze()  # what other tests threw away is not ours to collect
        mine = sync_client(here.bootstrap_servers)
        right = mine is not before and offsets_of(here.rows()) == list(range(10))
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert sync_client(here.bootstrap_servers) is before
    assert offsets_of(here.rows()) == list(range(10))


def test_records_that_were_deleted_are_a_loss_that_names_the_offset(topic: Callable[..., Topic]) -> None:
    here = topic()
    here.fill(100)
    one = TaskRange(here.name, 0, 20, 90)
    here.trim(before=50)
    with pytest.raises(DataLoss, match=r"offset 20 of partition 0 of .* was deleted: the log begins at 50"):
        list(read_range(here.options(), ("offset",), one))
    rest = list(read_range(here.options(failOnDataLoss="false"), ("offset",), one))
    assert [value for batch in rest for value in batch.column("offset").to_pylist()] == list(range(50, 90))


def test_a_log_that_ends_before_the_range_is_a_loss(
    topic: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "TRUNCATION_CONFIRMATION_S", 0.1)
    here = topic()
    here.fill(10)
    with pytest.raises(DataLoss, match="ends at offset 10, but offset 20 was requested"):
        list(read_range(here.options(), ("offset",), TaskRange(here.name, 0, 5, 20)))
    with pytest.raises(DataLoss, match="ends at offset 10, but offset 15 was requested"):
        list(read_range(here.options(), ("offset",), TaskRange(here.name, 0, 15, 20)))


def test_a_leader_that_knows_less_than_the_one_before_for_a_moment_is_asked_again(
    topic: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end was planned with another leader; here what that one knew comes when it was missed three times: by the
    request that went ahead, by the one in earnest, and once more."""
    here = topic()
    here.fill(10)
    judge = fetch._RangeFetcher._is_log_end_stable
    missed: list[int] = []

    def note(asking: fetch._RangeFetcher, offset: int) -> bool:
        missed.append(offset)
        if len(missed) == 3:
            here.fill(10, first=10)
        return judge(asking, offset)

    monkeypatch.setattr(fetch._RangeFetcher, "_is_log_end_stable", note)
    answers = list(fetch_range(sync_client(here.bootstrap_servers), TopicPartition(here.name, 0), 0, 20))
    assert offsets_between(answers) == (0, 19)
    assert set(missed) == {10}


def test_another_topic_of_the_same_name_is_not_read(topic: Callable[..., Topic]) -> None:
    """The tasks of a plan read the topic that was planned, or none."""
    here = topic()
    here.fill(10)
    reader = BatchReader(here.options(), ("value",))
    tasks = reader.partitions()
    here.delete()
    again = topic()
    again.fill(20, first=1_000)
    with mansio.blocking.connect(here.bootstrap_servers) as client:
        new_id = client.admin.describe_topic(here.name).topic_id
    planned_elsewhere = TaskRanges((TaskRange(here.name, 0, 0, 20, new_id),))
    rows = sum(batch.num_rows for batch in reader.read(planned_elsewhere))
    assert rows == 20, "what this process knew of the old topic was no hindrance"
    with pytest.raises(TopicRecreated, match="deleted and recreated"):
        list(reader.read(tasks[0]))
    again.delete()
    began = time.monotonic()
    with pytest.raises(DataLoss, match="does not exist any more"):
        list(reader.read(tasks[0]))
    assert time.monotonic() - began < scaled(10)


def test_a_partition_is_read_by_a_process_that_knew_the_topic_without_it(topic: Callable[..., Topic]) -> None:
    """Spark's workers are used again: what one of them learned of a topic may be older than the plan."""
    here = topic()
    here.fill(3)
    options = here.options()
    assert (
        sum(batch.num_rows for batch in read_range(options, ("offset",), TaskRange(here.name, 0, 0, 3))) == 3
    )
    here.grow(3)
    here.fill(4, partition=2)
    assert (
        sum(batch.num_rows for batch in read_range(options, ("offset",), TaskRange(here.name, 2, 0, 4))) == 4
    )
    with pytest.raises(DataLoss, match="partition 3 of"):
        list(read_range(options, ("offset",), TaskRange(here.name, 3, 0, 4)))


def test_reading_goes_on_when_the_broker_was_away(tmp_path: Path) -> None:
    """Spark keeps its processes, so a client may have connections that ended unnoticed."""
    served = ServedBroker(tmp_path / "data", http=False).start()
    try:
        here = Topic(served, "t")
        here.fill(2_000, size=500, together=50)
        reading = read_range(
            here.options(fetchBytes="50000", rowsPerBatch="50"), ("offset",), TaskRange("t", 0, 0, 2_000)
        )
        seen = next(reading).column("offset").to_pylist()
        assert served.stop() == 0
        served.start()
        seen += [value for batch in reading for value in batch.column("offset").to_pylist()]
        assert seen == list(range(2_000))
    finally:
        close_sync_clients()
        served.kill()


def test_no_broker_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mansio.spark.sync_client.CONNECT_TIMEOUT_MS", 200)
    with pytest.raises(ConnectionLost, match="cannot connect to"):
        sync_client(f"127.0.0.1:{free_port()}")


def test_batches_handed_on_are_neither_small_nor_large(topic: Callable[..., Topic]) -> None:
    here = topic()
    here.fill(5_000, size=100, together=100)
    batches = list(
        read_range(
            here.options(fetchBytes="20000", rowsPerBatch="1000"),
            ("offset", "value"),
            TaskRange(here.name, 0, 0, 5_000),
        )
    )
    assert all(500 < batch.num_rows <= 1_500 for batch in batches[:-1])
    assert [value for batch in batches for value in batch.column("offset").to_pylist()] == list(range(5_000))
    by_bytes = list(
        read_range(
            here.options(fetchBytes="20000", batchBytes="65536"),
            ("offset", "value"),
            TaskRange(here.name, 0, 0, 5_000),
        )
    )
    assert len(by_bytes) >= 5
    assert max(batch.nbytes for batch in by_bytes) < 2 * 65_536


def test_a_small_answer_that_holds_very_much_is_opened_bit_by_bit(topic: Callable[..., Topic]) -> None:
    """Compressed to a hundredth: one answer is the whole topic, and Spark gets it in batches of the size it wants."""
    here = topic()
    with (
        mansio.blocking.connect(here.bootstrap_servers) as client,
        client.producer(ProducerOptions(codec="zstd")) as producer,
    ):
        producer.publish_many(here.name, [bytes(10_000)] * 1_500)
    assert (
        len(list(fetch_range(sync_client(here.bootstrap_servers), TopicPartition(here.name, 0), 0, 1_500)))
        == 1
    )
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    offsets, highest = [], 0
    for batch in read_range(
        here.options(batchBytes="1MB"), ("value", "offset"), TaskRange(here.name, 0, 0, 1_500)
    ):
        offsets += batch.column("offset").to_pylist()
        highest = max(highest, pool.bytes_allocated() - before)
    assert offsets == list(range(1_500))
    assert highest < 4 << 20


def test_damaged_records_suspend_are_skipped_or_become_rows(topic: Callable[..., Topic]) -> None:
    here = topic()
    for number in range(5):
        here.fill(10, first=7_000 + 10 * number, together=10)
    here.damage(b"7025 ...", b"7025 .X.")
    with pytest.raises(
        UnreadableRecords, match=r"offsets 20 to 29 of partition 0 .* Set onUnreadable to skip"
    ):
        here.rows()
    good = [7_000 + number for number in range(50) if not 20 <= number < 30]
    assert numbers_of(here.rows(onUnreadable="skip")) == good
    assert numbers_of(here.rows(onUnreadable="skip", fetchBytes="1024")) == good
    rows = here.rows(onUnreadable="dead-letter", columns="value,offset,partition")
    assert list(rows[0]) == ["value", "offset", "partition", "error"]
    assert numbers_of(rows) == good
    dead = [row for row in rows if row["error"]]
    assert [(row["offset"], row["partition"]) for row in dead] == [(20, 0)]
    assert dead[0]["error"].startswith("offsets 20 to 29 cannot be read: ")
    assert "CRC" in dead[0]["error"]
    assert b"7025 .X." in dead[0]["value"], "the batch as it is"
    assert offsets_of(rows) == [*range(20), 20, *range(30, 50)]


def test_a_record_that_is_wrong_in_itself_costs_no_other(topic: Callable[..., Topic]) -> None:
    """Its batch is sound; only the name of its header is no text, which not all readers look at."""
    here = topic()
    with mansio.blocking.connect(here.bootstrap_servers) as client:
        names = ["fine"] * 40
        names[3] = names[30] = "bad-name"
        client.publish_many(
            here.name,
            [OutgoingRecord(b"%d" % at, headers=((name, b"x"),)) for at, name in enumerate(names)],
        )
    here.damage(b"bad-name", b"bad-\xff\xfeme", seal=True)
    assert numbers_of(here.rows()) == list(range(40))
    with pytest.raises(UnreadableRecords, match="offsets 3 to 3 of partition 0"):
        here.rows(includeHeaders="true")
    good = [number for number in range(40) if number not in (3, 30)]
    assert numbers_of(here.rows(includeHeaders="true", onUnreadable="skip")) == good
    rows = here.rows(includeHeaders="true", onUnreadable="dead-letter")
    assert offsets_of(rows) == list(range(40))
    dead = {row["offset"]: row for row in rows if row["error"]}
    assert {offset: (row["value"], row["headers"]) for offset, row in dead.items()} == {
        3: (b"3", None),
        30: (b"30", None),
    }
    assert [parse_error_offsets(row["error"]) for row in dead.values()] == [(3, 3), (30, 30)]
