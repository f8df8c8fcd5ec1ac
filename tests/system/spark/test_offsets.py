"""Which offsets a query means, asked of a real broker; and a stream's reader driven as Spark drives it."""

from __future__ import annotations

import json
import re
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import ConfigError, DataLoss, MansioError, TopicRecreated
from mansio.net.offsets import commit_offsets, delete_records
from mansio.pipelines.lag import pipeline_lag
from mansio.pipelines.pipeline_progress import PipelineProgress
from mansio.pipelines.progress_listener import OffsetPublisher
from mansio.spark.options import SourceOptions
from mansio.spark.source import readers
from mansio.spark.source.offsets import offsets_from_json, offsets_to_json, resolve_ranges
from mansio.spark.spark_versions import ReadAllAvailable, ReadLimit, ReadMaxRows, ReadMinRows
from mansio.spark.sync_client import close_sync_clients, sync_client
from mansio.wire.topic_partition import TopicPartition
from support.machine import scaled
from support.process import ServedBroker
from support.spark_source import Topic, numbers_of, read_all

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mansio.spark.source.readers import StreamReader

ALL = ReadAllAvailable()
BEGAN_MS = 1_700_000_000_000


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    served = ServedBroker(tmp_path_factory.mktemp("offsets") / "data", http=False)
    try:
        yield served.start()
    finally:
        close_sync_clients()
        served.kill()


@pytest.fixture
def topic(broker: ServedBroker, request: pytest.FixtureRequest) -> Callable[..., Topic]:
    def make(suffix: str = "", partitions: int = 1) -> Topic:
        return Topic(broker, re.sub(r"[^\w.-]", "-", request.node.name[:80]) + suffix, partitions)

    return make


@pytest.fixture(scope="module")
def ten(broker: ServedBroker) -> Topic:
    """Two partitions: 0 has offsets 2 to 9, one a second; 1 is empty."""
    here = Topic(broker, "ten", 2)
    here.fill(10, times=[BEGAN_MS + 1_000 * number for number in range(10)])
    with_two_gone = TopicPartition("ten", 0)

    client = sync_client(here.bootstrap_servers)
    client.run(delete_records(client.cluster, {with_two_gone: 2}, timeout_ms=10_000))
    return here


def json_of(topic: Topic, **by_partition: int) -> str:
    return json.dumps({topic.name: {name.removeprefix("p"): offset for name, offset in by_partition.items()}})


# -- words, moments, JSON --------

MEANINGS: list[tuple[dict[str, str], tuple[int, int], tuple[int, int]]] = [
    ({}, (2, 10), (0, 0)),
    (
        {"startingOffsets": '{"ten": {"0": 4, "1": -2}}', "endingOffsets": '{"ten": {"0": 7, "1": -1}}'},
        (4, 7),
        (0, 0),
    ),
    (
        {"startingTimestamp": str(BEGAN_MS + 3_500), "startingOffsetsByTimestampStrategy": "latest"},
        (4, 10),
        (0, 0),
    ),
    ({"endingTimestamp": str(BEGAN_MS + 3_000)}, (2, 3), (0, 0)),
    (
        {"endingOffsetsByTimestamp": json.dumps({"ten": {"0": BEGAN_MS + 99_000, "1": 5}})},
        (2, 10),
        (0, 0),
    ),
    # A moment wins over moments by partition, and those over offsets.
    (
        {
            "endingTimestamp": str(BEGAN_MS + 5_000),
            "endingOffsetsByTimestamp": "{}",
            "endingOffsets": '{"ten": {"0": 3, "1": 0}}',
        },
        (2, 5),
        (0, 0),
    ),
    ({"failOnDataLoss": "false", "startingOffsets": '{"ten": {"0": 0, "1": 9}}'}, (2, 10), (0, 0)),
    (
        {"startingTimestamp": str(BEGAN_MS + 8_000), "endingTimestamp": str(BEGAN_MS + 3_000)}
        | {"startingOffsetsByTimestampStrategy": "latest"},
        (8, 8),
        (0, 0),
    ),
]


@pytest.mark.parametrize(
    ("options", "first", "second"), MEANINGS, ids=[str(given) for given, _, _ in MEANINGS]
)
def test_options_mean_offsets(
    ten: Topic, options: dict[str, Any], first: tuple[int, int], second: tuple[int, int]
) -> None:
    found = resolve_ranges(sync_client(ten.bootstrap_servers), ten.options(**options))
    assert {partition.partition: (one.start, one.end) for partition, one in found.items()} == {
        0: first,
        1: second,
    }


REFUSALS: list[tuple[dict[str, str], type[MansioError], str]] = [
    (
        {"startingOffsets": '{"ten": {"0": 0, "1": 0}}'},
        DataLoss,
        "offset 0 of partition 0 of topic ten was deleted: the log begins at 2",
    ),
    (
        {"endingOffsets": '{"ten": {"0": 11, "1": 0}}'},
        DataLoss,
        "ends at offset 10, but offset 11 was requested",
    ),
    ({"startingOffsets": '{"ten": {"0": 2}}'}, ConfigError, "does not say where partition 1 of topic ten"),
    (
        {"startingOffsets": '{"ten": {"0": 2, "1": 0, "2": 0}}'},
        ConfigError,
        "names partition 2 of topic ten, which is not read",
    ),
    ({"startingTimestamp": str(BEGAN_MS)}, ConfigError, "partition 1 of topic ten has no record at or after"),
    (
        {"startingOffsets": '{"ten": {"0": 7, "1": 0}}', "endingOffsets": '{"ten": {"0": 4, "1": 0}}'},
        ConfigError,
        "from offset 7 to 4",
    ),
    (
        {"topicIds": '{"ten": "00000000-0000-0000-0000-0000000000ff"}'},
        TopicRecreated,
        "deleted and recreated",
    ),
]


@pytest.mark.parametrize(
    ("options", "kind", "message"), REFUSALS, ids=[message for _, _, message in REFUSALS]
)
def test_offsets_that_cannot_be_meant_are_refused(
    ten: Topic, options: dict[str, Any], kind: type[MansioError], message: str
) -> None:
    with pytest.raises(kind) as refused:
        resolve_ranges(sync_client(ten.bootstrap_servers), ten.options(**options))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_subscriptions_name_topics_match_them_or_assign_partitions(topic: Callable[..., Topic]) -> None:
    one, two = topic("-1", 2), topic("-2", 1)

    def read(**options: str) -> list[TopicPartition]:
        client = sync_client(one.bootstrap_servers)
        return sorted(
            resolve_ranges(
                client, SourceOptions.parse({"kafka.bootstrap.servers": one.bootstrap_servers, **options})
            )
        )

    client = sync_client(one.bootstrap_servers)
    client.run(
        commit_offsets(client.cluster, "any", {TopicPartition(one.name, 0): 0})
    )  # makes the broker's own topic
    both = [TopicPartition(one.name, 0), TopicPartition(one.name, 1), TopicPartition(two.name, 0)]
    assert read(subscribe=f"{two.name},{one.name}") == both
    assert read(subscribePattern=f"{one.name[:-2]}-.") == both
    assert read(assign=json.dumps({one.name: [1]})) == both[1:2]
    for options, message in (
        ({"subscribe": f"{one.name},absent"}, "there is no topic absent"),
        ({"subscribePattern": "ab*sent"}, "no topic matches"),
        ({"subscribePattern": "__.*"}, "no topic matches"),
        ({"assign": json.dumps({one.name: [2]})}, "has 2 partitions: there is no 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            read(**options)


def test_offsets_have_one_text_whatever_order_they_came_in() -> None:
    given = {TopicPartition("b", 10): 1, TopicPartition("a", 0): 2, TopicPartition("b", 9): 3}
    assert json.dumps(offsets_to_json(given)) == '{"a": {"0": 2}, "b": {"9": 3, "10": 1}}'
    assert offsets_from_json(offsets_to_json(given)) == given
    for other in ({"seqNum": 5}, {"t": {"x": 1}}, {"t": {"0": None}}):
        with pytest.raises(ConfigError, match="belongs to another source"):
            offsets_from_json(other)


# -- streams --------


def batch(reader: StreamReader, start: dict[str, Any], limit: Any = ALL) -> tuple[dict[str, Any], list[int]]:
    """One micro-batch: where it ends, and the numbers in the records it read. Offsets go through JSON as in Spark."""
    end = json.loads(json.dumps(reader.latestOffset(start, limit)))
    return end, numbers_of(read_all(reader, reader.partitions(start, end)))


def test_latest_is_found_out_once(topic: Callable[..., Topic]) -> None:
    """Spark asks twice for the beginning of a query; records that come in between must not fall into the gap."""
    here = topic()
    here.fill(5)
    reader = here.stream(startingOffsets="latest")
    first = reader.initialOffset()
    here.fill(3, first=5)
    assert reader.initialOffset() == first == {here.name: {"0": 5}}
    assert batch(reader, first)[1] == [5, 6, 7]


def test_first_batch_that_is_run_again_begins_where_it_began(topic: Callable[..., Topic]) -> None:
    """Spark asks the next process where the query begins, and by then that is elsewhere."""
    for starting, begins in (("latest", 5), ("earliest", 0)):
        here = topic(f"-{starting}")
        here.fill(5)
        reader = here.stream(startingOffsets=starting)
        first = reader.initialOffset()
        here.fill(3, first=5)
        end, seen = batch(reader, first)
        assert seen == list(range(begins, 8))
        here.fill(2, first=8)
        again = here.stream(startingOffsets=starting)
        assert numbers_of(read_all(again, again.partitions(again.initialOffset(), end))) == seen
        assert batch(again, end)[1] == [8, 9]
        client = sync_client(here.bootstrap_servers)
        client.run(delete_records(client.cluster, {TopicPartition(here.name, 0): 7}, timeout_ms=10_000))
        last = here.stream(startingOffsets=starting)
        with pytest.raises(DataLoss):
            read_all(last, last.partitions(last.initialOffset(), end))


def test_nothing_new_is_the_same_offset(topic: Callable[..., Topic]) -> None:
    here = topic(partitions=2)
    here.fill(5)
    reader = here.stream()
    end, seen = batch(reader, reader.initialOffset())
    assert seen == [0, 1, 2, 3, 4]
    assert reader.latestOffset(end, ALL) == end
    assert reader.reportLatestOffset() == {here.name: {"0": 5, "1": 0}}


def test_limits_are_obeyed_and_a_trigger_for_all_overrides_them(topic: Callable[..., Topic]) -> None:
    here = topic()
    here.fill(100)
    reader = here.stream(maxOffsetsPerTrigger="30", minPartitions="3")
    assert reader.getDefaultReadLimit() == ReadMaxRows(30)
    end, seen = batch(reader, reader.initialOffset(), reader.getDefaultReadLimit())
    assert seen == list(range(30))
    assert len(reader.partitions(reader.initialOffset(), end)) == 3
    assert reader.reportLatestOffset() == {here.name: {"0": 100}}
    assert batch(reader, end, ALL)[1] == list(range(30, 100))

    class ReadMaxBytes(ReadLimit):
        """A limit that a topic has not."""

    with pytest.raises(ConfigError, match="ReadMaxBytes is not supported"):
        reader.latestOffset(end, ReadMaxBytes())


def test_few_records_wait_for_more_but_not_for_ever(
    topic: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_000.0
    monkeypatch.setattr(readers, "time", SimpleNamespace(monotonic=lambda: now))
    here = topic()
    here.fill(10)
    reader = here.stream(minOffsetsPerTrigger="10", maxTriggerDelay="60s")
    limit = reader.getDefaultReadLimit()
    assert limit == ReadMinRows(10)
    end, seen = batch(reader, reader.initialOffset(), limit)
    assert len(seen) == 10
    here.fill(9, first=10)
    assert batch(reader, end, limit) == (end, [])
    now += 59
    assert batch(reader, end, limit) == (end, [])
    now += 2
    end, seen = batch(reader, end, limit)
    assert seen == list(range(10, 19))
    here.fill(1, first=19)
    assert batch(reader, end, limit) == (end, [])
    assert batch(reader, end, ALL)[1] == [19], "a trigger that wants all gets all"


@pytest.mark.parametrize("fixed_by", ["trigger", "option"])
def test_available_now_comes_to_its_end_whatever_arrives_meanwhile(
    topic: Callable[..., Topic], fixed_by: str
) -> None:
    here = topic()
    here.fill(50)
    limits = {"maxOffsetsPerTrigger": "20", "minOffsetsPerTrigger": "15", "maxTriggerDelay": "1h"}
    reader = here.stream(**limits, stopAtLatest=str(fixed_by == "option"))
    if fixed_by == "trigger":
        reader.prepareForTriggerAvailableNow()
    else:
        reader.latestOffset(reader.initialOffset(), reader.getDefaultReadLimit())
    end, seen = reader.initialOffset(), []
    for round_ in range(10):
        here.fill(10, first=1_000)
        here.grow(2 + round_)
        before = end
        end, numbers = batch(reader, before, reader.getDefaultReadLimit())
        if end == before:
            break
        seen += numbers
    assert seen == list(range(50))
    assert end == {here.name: {"0": 50}}


def test_new_partitions_are_read_from_their_beginning_and_again_alike_after_a_restart(
    topic: Callable[..., Topic],
) -> None:
    here = topic()
    here.fill(3)
    reader = here.stream()
    first, _ = batch(reader, reader.initialOffset())
    here.grow(2)
    here.fill(4, partition=1, first=100)
    end, seen = batch(reader, first)
    assert seen == [100, 101, 102, 103]
    restarted = here.stream()
    assert numbers_of(read_all(restarted, restarted.partitions(first, end))) == seen
    here.grow(3)
    here.fill(4, partition=2)
    client = sync_client(here.bootstrap_servers)

    client.run(delete_records(client.cluster, {TopicPartition(here.name, 2): 2}, timeout_ms=10_000))
    with pytest.raises(
        DataLoss, match=r"partition 2 of .* is new to this query and already begins at offset 2"
    ):
        reader.latestOffset(end, ALL)
    relaxed = here.stream(failOnDataLoss="false")
    assert batch(relaxed, end)[1] == [2, 3]


def test_a_recreated_topic_ends_a_stream_or_is_read_from_its_beginning(topic: Callable[..., Topic]) -> None:
    """Known by its id while the query runs, even when the new topic is longer than the old one was."""
    here = topic()
    here.fill(5)
    strict, relaxed = here.stream(), here.stream(failOnDataLoss="false")
    end, _ = batch(strict, strict.initialOffset())
    assert batch(relaxed, relaxed.initialOffset())[0] == end
    here.delete()
    again = topic()
    again.fill(8, first=100)
    with pytest.raises(TopicRecreated, match="Use a new checkpoint, or set failOnDataLoss to false"):
        strict.latestOffset(end, ALL)
    turned, nothing = batch(relaxed, end)
    assert (turned, nothing) == ({here.name: {"0": 0}}, [])
    assert batch(relaxed, turned)[1] == list(range(100, 108))


def test_a_checkpoint_that_is_ahead_of_the_topic_is_a_loss(
    topic: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restart the id is not known any more; the offsets still tell, if the new topic is shorter."""
    monkeypatch.setattr(readers, "LATEST_OFFSETS_RETRY_DELAY_S", 0.01)
    here = topic()
    here.fill(8)
    ahead = {here.name: {"0": 500}}
    with pytest.raises(DataLoss, match="ends at offset 8, but offset 500 was requested"):
        here.stream().latestOffset(ahead, ALL)
    relaxed = here.stream(failOnDataLoss="false")
    turned, nothing = batch(relaxed, ahead)
    assert (turned, nothing) == ({here.name: {"0": 0}}, [])
    assert batch(relaxed, turned)[1] == list(range(8))


def test_a_log_that_lost_its_end_is_not_read_from_its_beginning(
    topic: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topic is the same, so what was read was read."""
    monkeypatch.setattr(readers, "LATEST_OFFSETS_RETRY_DELAY_S", 0.01)
    here = topic()
    here.fill(8)
    relaxed = here.stream(failOnDataLoss="false")
    batch(relaxed, relaxed.initialOffset())
    turned, nothing = batch(relaxed, {here.name: {"0": 9}})
    assert (turned, nothing) == ({here.name: {"0": 8}}, [])
    here.fill(2, first=20)
    assert batch(relaxed, turned)[1] == [20, 21]


def test_a_batch_of_another_topics_checkpoint_is_not_run_again(topic: Callable[..., Topic]) -> None:
    """Spark runs a batch again that was not noted as done, before it asks for anything."""
    here, other = topic(), topic("-other")
    other.fill(3)
    noted: tuple[dict[str, Any], dict[str, Any]] = {other.name: {"0": 0}}, {other.name: {"0": 3}}
    with pytest.raises(
        DataLoss, match=r"-other does not exist any more: .* or is not subscribed to any more"
    ):
        here.stream().partitions(*noted)
    assert list(here.stream(failOnDataLoss="false").partitions(*noted)) == []


def test_a_deleted_topic_ends_a_stream_or_is_waited_for(topic: Callable[..., Topic]) -> None:
    here = topic()
    here.fill(5)
    strict, relaxed = here.stream(), here.stream(failOnDataLoss="false")
    end, _ = batch(strict, strict.initialOffset())
    here.delete()
    with pytest.raises(DataLoss, match="was deleted, or is not subscribed to any more"):
        strict.latestOffset(end, ALL)
    assert relaxed.latestOffset(end, ALL) == end


def test_a_topic_deleted_while_it_is_asked_about_is_reported_soon(
    topic: Callable[..., Topic], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the question which partitions there are, and that for their ends."""
    monkeypatch.setattr("mansio.spark.source.offsets.LIST_OFFSETS_TIMEOUT_S", 0.2)
    here = topic()
    here.fill(5)
    reader = here.stream()
    end, _ = batch(reader, reader.initialOffset())
    find, finds = reader._find_partitions, []

    def found_and_deleted(**how: bool) -> Any:
        finds.append(find(**how))
        if len(finds) == 1:
            here.delete()
            sync_client(here.bootstrap_servers).cluster.mark_stale([here.name])
        return finds[-1]

    monkeypatch.setattr(reader, "_find_partitions", found_and_deleted)
    began = time.monotonic()
    with pytest.raises(DataLoss, match="was deleted, or is not subscribed to any more"):
        reader.latestOffset(end, ALL)
    assert len(finds) == 2
    assert time.monotonic() - began < scaled(20)


def test_records_deleted_before_a_batch_reads_them_are_a_loss(topic: Callable[..., Topic]) -> None:
    here = topic()
    here.fill(10)
    strict = here.stream()
    start = strict.initialOffset()
    here.trim(before=4)
    with pytest.raises(DataLoss, match="the log begins at 4"):
        batch(strict, start)
    assert batch(here.stream(failOnDataLoss="false"), start)[1] == list(range(4, 10))


def test_offsets_that_a_source_commits_keep_the_progress_that_the_listener_has_stored(
    topic: Callable[..., Topic],
) -> None:
    here = topic(partitions=2)
    here.fill(10)
    progress = PipelineProgress(3, BEGAN_MS, records=10, late_rows=2)
    publisher = OffsetPublisher(here.name, here.bootstrap_servers)
    publisher.publish({TopicPartition(here.name, index): 0 for index in range(2)}, "query", progress)
    reader = here.stream(pipeline=here.name)
    end = reader.latestOffset(reader.initialOffset(), ALL)
    reader.latestOffset(end, ALL)  # Spark plans the next batch, so the one before is complete
    assert publisher.stored_progress() == progress
    publisher.close()
    found = pipeline_lag(sync_client(here.bootstrap_servers), here.name)
    assert [(one.committed, one.has_retention_hold) for one in found] == [(10, True), (0, True)]
