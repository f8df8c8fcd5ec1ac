"""Mirrors between two real brokers: each record once and in order, groups continue, nothing goes in circles."""

from __future__ import annotations

import itertools
import json
import signal
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer

import mansio
from component.test_compaction import QUIET, World, broker_in
from mansio.cli.main import main
from mansio.client.types import OutgoingRecord, TopicPartition
from mansio.errors import DataLoss, InvalidRequest, ProducerFenced, Unavailable, UnknownTopicOrPartition
from mansio.net.offsets import commit_offsets, list_offsets
from mansio.pipelines.mirroring import group_offsets, offset_map, state_topic
from mansio.pipelines.mirroring import mirror as mirroring
from mansio.pipelines.mirroring.mirror import MirrorJob, mirror, run_mirror, translate_offsets
from mansio.pipelines.mirroring.passed_clusters import CLUSTER_HEADER
from mansio.pipelines.mirroring.state_topic import STATE_TOPIC_PREFIX, load_states
from mansio.pipelines.pipeline_metrics import PipelineMetrics
from mansio.spark.sink.task_sender import TaskSender
from mansio.spark.sync_client import close_sync_clients, find_topic, sync_client
from mansio.wire.field_values import LATEST_TIMESTAMP, READ_COMMITTED, READ_UNCOMMITTED
from support.machine import scaled
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.client.types import Message

PARTITIONS = 3
FIRST_MS = 1_600_000_000_000
FOREVER = {"retention.ms": "-1"}
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[mansio.Broker, mansio.Broker]]:
    with (
        broker_in(tmp_path_factory.mktemp("a"), retention_hold_disk_free_bytes_min=0) as a,
        broker_in(tmp_path_factory.mktemp("b")) as b,
    ):
        yield a, b


@pytest.fixture(autouse=True)
def _clients() -> Iterator[None]:
    yield
    close_sync_clients()


class Pair:
    """A topic of its own on the source, and a mirror of it."""

    def __init__(self, brokers: tuple[mansio.Broker, mansio.Broker], **config: str) -> None:
        number = next(_numbers)
        self.a, self.b = (broker.address for broker in brokers)
        self.topic, self.group = f"orders-{number}", f"billing-{number}"
        self.job = MirrorJob(
            (self.topic,), self.a, self.b, name=f"mirror-{number}", stops_when_caught_up=True, trigger_s=0.05
        )
        with mansio.blocking.connect(self.a) as client:
            client.admin.create_topic(
                self.topic,
                partitions=PARTITIONS,
                config={**FOREVER, **{name.replace("_", "."): value for name, value in config.items()}},
            )

    def publish(self, count: int, servers: str | None = None, name: str = "value") -> None:
        """Records of every kind, null and empty keys, values and headers among them."""
        records = [
            OutgoingRecord(
                (None, b"", b"%s %d" % (name.encode(), index), b"x" * 3000)[index % 4],
                key=(None, b"", b"key %d" % index)[index % 3],
                headers=((), (("a", None),), (("a", b""), ("a", b"twice"), ("\u00e4", b"\xff")))[
                    index % 5 % 3
                ],
                partition=index % PARTITIONS,
                timestamp_ms=FIRST_MS + index * 1001 - (index % 7) * 5000,
            )
            for index in range(count)
        ]
        with mansio.blocking.connect(servers or self.a) as client:
            client.publish_many(self.topic, records)

    def publish_transactions(self, *outcomes: bool, size: int = 5) -> None:
        """One transaction for each outcome, committed or not; keys count all of them."""
        producer = Producer(
            {"bootstrap.servers": self.a, "transactional.id": f"writer-{self.topic}", **QUIET}
        )
        producer.init_transactions(scaled(20))
        for turn, is_committed in enumerate(outcomes):
            producer.begin_transaction()
            for number in range(size):
                producer.produce(self.topic, b"%d.%d" % (turn, number), b"t", partition=number % PARTITIONS)
            assert producer.flush(scaled(20)) == 0
            if is_committed:
                producer.commit_transaction(scaled(20))
            else:
                producer.abort_transaction(scaled(20))
        self.wait_for_markers(self.a)

    def wait_for_markers(self, servers: str, topic: str | None = None) -> None:
        """Wait until the markers of all transactions are written: a commit is answered before."""
        client = sync_client(servers)
        view = find_topic(client, topic or self.topic)
        places = dict.fromkeys(
            (TopicPartition(view.name, one.index) for one in view.partitions), LATEST_TIMESTAMP
        )

        def has_settled() -> bool:
            ends, stable = (
                client.run(list_offsets(client.cluster, places, isolation_level=level))
                for level in (READ_UNCOMMITTED, READ_COMMITTED)
            )
            return ends == stable

        wait_until(has_settled, what="transactions that have ended")

    def read(self, servers: str, topic: str | None = None) -> list[Message]:
        """All committed records, by partition and offset."""
        self.wait_for_markers(servers, topic)
        with (
            mansio.blocking.connect(servers) as client,
            client.consume(topic or self.topic, to_end=True) as found,
        ):
            return sorted(found, key=lambda message: (message.partition, message.offset))

    def assert_copied(self, target_topic: str | None = None) -> None:
        assert what(self.read(self.b, target_topic)) == what(self.read(self.a))


def what(messages: list[Message]) -> list[Any]:
    """All there is to a record but its offset and the clusters that it has passed."""
    return [
        (
            one.partition,
            one.timestamp_ms,
            one.key,
            one.value,
            tuple(header for header in one.headers if header[0] != CLUSTER_HEADER),
        )
        for one in messages
    ]


def read_in_group(pair: Pair, servers: str, count: int) -> list[Any]:
    """That many records, as a member of the pair's group, which commits and leaves."""
    with (
        mansio.blocking.connect(servers) as client,
        client.consume(pair.topic, group=pair.group, max_records=count) as consumer,
    ):
        return what(list(consumer))


def passed(message: Message) -> int:
    """The number of clusters that a record has passed."""
    return sum(name == CLUSTER_HEADER for name, _ in message.headers)


@pytest.fixture
def pair(brokers: tuple[mansio.Broker, mansio.Broker]) -> Pair:
    return Pair(brokers)


@pytest.mark.row("S10", "C7")
def test_a_mirror_copies_each_record_once_and_its_groups_continue_on_the_other_side(pair: Pair) -> None:
    pair.publish(300)
    had = read_in_group(pair, pair.a, 120)
    result = mirror(pair.job)
    assert (result.records, result.skipped, result.lag) == (300, 0, 0)
    pair.assert_copied()
    assert {passed(message) for message in pair.read(pair.b)} == {1}
    rest = read_in_group(pair, pair.b, 180)
    assert sorted(map(repr, had + rest)) == sorted(map(repr, what(pair.read(pair.a))))
    again = mirror(pair.job)
    assert (again.records, again.batches) == (0, 0)
    pair.assert_copied()


@pytest.mark.full
def test_gaps_of_aborted_transactions_change_neither_the_copy_nor_what_a_group_reads(pair: Pair) -> None:
    pair.publish_transactions(True, False, True, False, False, True, True, False)
    mirror(pair.job)
    pair.publish_transactions(True, False, True)
    assert mirror(pair.job).records == 10
    pair.assert_copied()
    assert_translation_is_exact(pair)


def assert_translation_is_exact(pair: Pair) -> None:
    """For each offset of the source, the translated one has exactly the records behind it that were not read."""
    source, copies = pair.read(pair.a), pair.read(pair.b)
    with mansio.blocking.connect(pair.a) as client:
        places = [
            TopicPartition(pair.topic, partition.index)
            for partition in client.admin.describe_topic(pair.topic).partitions
        ]
        ends = client.admin.list_offsets(places)
    for place in places:
        for offset in range(ends[place].offset + 1):
            found = translate_offsets(pair.job, {place: offset})[place]
            here = [one for one in source if one.partition == place.partition]
            unread = [one for one in here if one.offset >= offset]
            there = [one for one in copies if one.partition == place.partition and one.offset >= (found or 0)]
            assert what(there) == what(unread), (place, offset, found)


@pytest.mark.full
def test_a_mirror_waits_for_the_end_of_a_transaction(pair: Pair) -> None:
    pair.publish(30)
    producer = Producer({"bootstrap.servers": pair.a, "transactional.id": f"open-{pair.topic}", **QUIET})
    producer.init_transactions(scaled(20))
    producer.begin_transaction()
    producer.produce(pair.topic, b"late", partition=0)
    assert producer.flush(scaled(20)) == 0
    pair.publish(30)
    result = mirror(pair.job)
    assert result.records == 30 + 20
    assert result.positions[TopicPartition(pair.topic, 0)] == 10
    producer.commit_transaction(scaled(20))
    pair.wait_for_markers(pair.a)
    assert mirror(pair.job).records == 1 + 10
    pair.assert_copied()


@pytest.mark.full
def test_gaps_of_compaction_change_neither_the_copy_nor_what_a_group_reads(
    brokers: tuple[mansio.Broker, mansio.Broker], pair: Pair
) -> None:
    world = World(brokers[0])
    world.write(world.producer(), [(b"%d" % (number % 7), b"%d" % number * 50) for number in range(60)])
    world.roll()
    world.write(world.producer(), [(b"3", b"last"), (b"5", None), (b"new", b"1")])
    world.wait_compacted()
    pair.topic = world.topic
    pair.job = replace(pair.job, topics=(world.topic,))
    assert mirror(pair.job).records == len(pair.read(pair.a)) < 63
    pair.assert_copied()
    assert_translation_is_exact(pair)


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.full
@pytest.mark.parametrize("step", range(1, 7))
def test_a_mirror_killed_between_two_writes_neither_loses_nor_doubles(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Each step is a call that writes records, map and position, or commits them; nothing is aborted after a kill."""
    monkeypatch.setattr(mirroring, "ROWS_PER_ROUND", 20)
    pair.publish(150)
    left = iter(range(step, -1, -1))

    def dies(call: Any) -> Any:
        def first(sender: TaskSender, *args: Any) -> Any:
            if next(left) == 0:
                raise Killed
            return call(sender, *args)

        return first

    with monkeypatch.context() as patch:
        patch.setattr(TaskSender, "send", dies(TaskSender.send))
        patch.setattr(TaskSender, "commit", dies(TaskSender.commit))
        patch.setattr(TaskSender, "abort", lambda _: None)
        with pytest.raises(Killed):
            mirror(pair.job)
    close_sync_clients()
    mirror(pair.job)
    pair.assert_copied()
    assert_translation_is_exact(pair)


def test_an_error_that_passes_repeats_the_transaction_and_doubles_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.publish(90)
    monkeypatch.setattr(mirroring, "RESTART_PAUSE_S", 0.01)
    commit, failures = TaskSender.commit, iter((False, True, True))

    def fails(sender: TaskSender) -> None:
        if next(failures, False):
            raise Unavailable("for now")
        commit(sender)

    monkeypatch.setattr(TaskSender, "commit", fails)
    metrics = PipelineMetrics(pair.job.name)
    assert run_mirror(pair.job, None, lambda: False, metrics).records == 90
    pair.assert_copied()
    values = {sample.name: sample.value for family in metrics.collect() for sample in family.samples}
    names = ("records_total", "restarts_total", "offset_commit_failures_total", "lag_records")
    assert [values[f"mansio_pipeline_{name}"] for name in names] == [90, 2, 0, 0]


def test_a_second_mirror_of_a_topic_fences_the_first_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one would go on just when the second one has read the positions."""
    monkeypatch.setattr(mirroring, "ROWS_PER_ROUND", 10)
    pair.publish(120)
    main_thread = threading.current_thread()
    waits, may_send = threading.Event(), threading.Event()
    send, load_states = TaskSender.send, state_topic.load_states
    sent = itertools.count()
    errors: list[BaseException] = []

    def first() -> None:
        try:
            mirror(pair.job)
        except ProducerFenced as error:
            errors.append(error)
        finally:
            close_sync_clients()

    def send_late(sender: TaskSender, *args: Any) -> None:
        if (
            threading.current_thread() is not main_thread and next(sent) == 5
        ):  # the third transaction with copies
            waits.set()
            assert may_send.wait(scaled(60))
        send(sender, *args)

    def load_and_wait(*args: Any) -> Any:
        found = load_states(*args)
        if threading.current_thread() is main_thread:
            may_send.set()
            thread.join(scaled(60))
        return found

    monkeypatch.setattr(TaskSender, "send", send_late)
    monkeypatch.setattr(mirroring, "load_states", load_and_wait)
    thread = threading.Thread(target=first)
    thread.start()
    assert waits.wait(scaled(60))
    assert mirror(replace(pair.job, name="second", source_name="other")).records == 60
    assert "another mirror" in str(errors[0])
    pair.assert_copied()


@pytest.mark.parametrize("pattern", ["{topic}", pytest.param("{source}.{topic}", marks=pytest.mark.full)])
@pytest.mark.row("S10", "C7")
def test_mirrors_in_both_directions_copy_each_record_once(pair: Pair, pattern: str) -> None:
    """With one name for the topic on both sides, and with a prefix on the copies."""
    prefix = pattern.removesuffix("{topic}")
    there = replace(pair.job, topic_pattern=pattern, source_name="a")
    back = replace(
        pair.job,
        source_servers=pair.b,
        target_servers=pair.a,
        topic_pattern=pattern,
        source_name="b",
        name="back",
    )
    if prefix:
        with mansio.blocking.connect(pair.b) as client:
            client.admin.create_topic(pair.topic, partitions=PARTITIONS, config=FOREVER)
        back = replace(back, topics=(pair.topic, f"a.{pair.topic}"))
    pair.publish(60, name="of a")
    mirror(there)
    pair.publish(30, servers=pair.b, name="of b")
    for _ in range(3):
        mirror(back)
        mirror(there)
    copies = (f"b.{pair.topic}", f"a.{pair.topic}") if prefix else (pair.topic, pair.topic)
    on_a, on_b = pair.read(pair.a, copies[0]), pair.read(pair.b, copies[1])
    assert (len(on_a), len(on_b)) == ((30, 60) if prefix else (90, 90))
    assert {passed(message) for message in (*on_a, *on_b)} <= {0, 1}
    assert mirror(back).batches == 0
    if prefix:
        assert pair.read(pair.a, f"b.a.{pair.topic}") == [], "they come from there"
    else:
        assert sorted(map(repr, what(on_a))) == sorted(map(repr, what(on_b)))


def test_partitions_and_settings_of_the_source_are_those_of_the_copy(
    brokers: tuple[mansio.Broker, mansio.Broker],
) -> None:
    pair = Pair(brokers, segment_bytes="1048576", message_timestamp_type="LogAppendTime")
    pair.publish(30)
    mirror(pair.job)
    with mansio.blocking.connect(pair.a) as client:
        client.admin.create_partitions(pair.topic, PARTITIONS + 2)
        client.admin.alter_topic_config(pair.topic, {"segment.bytes": "2097152"})
        client.publish_many(pair.topic, [OutgoingRecord(b"new", partition=PARTITIONS + 1)] * 4)
    with mansio.blocking.connect(pair.b) as client:
        client.admin.alter_topic_config(pair.topic, {"max.compaction.lag.ms": "123456789"})
    assert mirror(replace(pair.job, starts_at_end=True)).records == 4
    with mansio.blocking.connect(pair.b) as client:
        config = client.admin.describe_config(pair.topic)
    wanted = {
        "retention.ms": "-1",
        "segment.bytes": "2097152",
        "message.timestamp.type": "CreateTime",
        "max.compaction.lag.ms": "123456789",
    }
    assert {name: config[name].value for name in wanted} == wanted
    pair.assert_copied()


@pytest.mark.full
def test_partitions_that_are_added_while_it_runs_are_mirrored(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "REFRESH_INTERVAL_S", 0.1)
    job = replace(pair.job, stops_when_caught_up=False)
    stop, results = threading.Event(), []

    def run() -> None:
        try:
            results.append(mirror(job, should_stop=stop.is_set))
        finally:
            close_sync_clients()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        pair.publish(30)
        with mansio.blocking.connect(pair.a) as client:
            client.admin.create_partitions(pair.topic, PARTITIONS + 1)
            client.publish_many(pair.topic, [OutgoingRecord(b"new", partition=PARTITIONS)] * 4)
        with mansio.blocking.connect(pair.b) as client:
            wait_until(
                lambda: pair.topic in client.admin.list_topics() and len(pair.read(pair.b)) == 34,
                what="copied",
            )
    finally:
        stop.set()
        thread.join(scaled(30))
    assert results[0].records == 34
    pair.assert_copied()


def test_offsets_of_a_group_only_go_forward_and_never_under_its_members(pair: Pair) -> None:
    pair.publish(90)
    place = TopicPartition(pair.topic, 0)

    def set_offset(servers: str, offset: int) -> None:
        with mansio.blocking.connect(servers) as client:
            client.admin.reset_offsets(pair.group, [place], to=offset)

    def found() -> int:
        with mansio.blocking.connect(pair.b) as client:
            return client.admin.group_offsets(pair.group)[place].offset

    set_offset(pair.a, 10)
    mirror(pair.job)
    assert found() == 10
    set_offset(pair.b, 20)
    set_offset(pair.a, 15)
    mirror(pair.job)
    assert found() == 20, "it has read further there"
    set_offset(pair.a, 25)
    with (
        mansio.blocking.connect(pair.b) as client,
        client.consume(pair.topic, group=pair.group, auto_commit=False) as member,
    ):
        assert member.poll(timeout_ms=scaled(20) * 1000)
        assert mirror(pair.job).group_offsets == 0
    assert found() == 20, "it had a member"
    assert mirror(pair.job).group_offsets == 1
    assert found() == 25
    assert mirror(replace(pair.job, groups=("another",))).group_offsets == 0
    assert mirror(replace(pair.job, translates_groups=False)).group_offsets == 0


def test_offsets_that_do_not_change_are_renewed_because_the_target_deletes_those_of_idle_groups(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_offsets, "RENEWAL_INTERVAL_S", 0.1)
    renewals: list[Any] = []
    commit = commit_offsets

    async def recorded(cluster: Any, group: str, offsets: Any, **options: Any) -> None:
        await commit(cluster, group, offsets, **options)
        renewals.append(offsets)

    monkeypatch.setattr(group_offsets, "commit_offsets", recorded)
    pair.publish(30)
    place = TopicPartition(pair.topic, 0)
    stop = threading.Event()
    job = replace(pair.job, stops_when_caught_up=False, groups=(pair.group,), groups_interval_s=0.05)
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(mirror(job, should_stop=stop.is_set)))
    with mansio.blocking.connect(pair.a) as source, mansio.blocking.connect(pair.b) as target:
        source.admin.reset_offsets(pair.group, [place], to=7)

        def is_committed() -> bool:
            found = target.admin.group_offsets(pair.group)
            return place in found and found[place].offset == 7

        thread.start()
        try:
            wait_until(is_committed, what="translated")
            wait_until(lambda: len(renewals) >= 3, what="renewals")
            target.admin.delete_group(pair.group)
            wait_until(is_committed, what="committed again")
        finally:
            stop.set()
            thread.join(scaled(30))
    assert results[0].group_offsets == 2, "renewals are not counted"


def test_the_state_topic_has_small_segments_because_the_newest_one_is_not_compacted(pair: Pair) -> None:
    mirror(pair.job)
    with mansio.blocking.connect(pair.b) as client:
        (name,) = (one for one in client.admin.list_topics() if one.startswith(STATE_TOPIC_PREFIX))
        config = client.admin.describe_config(name)
    assert config["cleanup.policy"].value == "compact"
    assert int(config["segment.bytes"].value or 0) <= 32 << 20


@pytest.mark.full
def test_a_group_ahead_of_the_mirror_is_never_beyond_the_copies(pair: Pair) -> None:
    pair.publish(30)
    place = TopicPartition(pair.topic, 0)
    mirror(pair.job)
    pair.publish(30)
    with mansio.blocking.connect(pair.a) as client:
        end = client.admin.list_offsets([place])[place].offset
    behind = translate_offsets(pair.job, {place: end})[place]
    mirror(pair.job)
    assert behind is not None
    assert [one.offset >= behind for one in pair.read(pair.b) if one.partition == 0].count(True) == 10
    assert_translation_is_exact(pair)


@pytest.mark.full
def test_a_map_stays_small_and_its_removed_runs_skip_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirroring, "ROWS_PER_ROUND", 2)
    monkeypatch.setattr(offset_map, "RUNS_MAX", 8)
    pair.publish(180)
    mirror(pair.job)
    pair.publish(6)
    mirror(pair.job)  # writes what the last transaction has removed
    place = TopicPartition(pair.topic, 0)
    source, copies = (
        [message for message in pair.read(servers) if message.partition == 0] for servers in (pair.a, pair.b)
    )

    def runs() -> int:
        client = sync_client(pair.b)
        (view,) = (
            find_topic(client, name)
            for name in client.run(client.cluster.topics())
            if name.startswith("mansio-mirror.")
        )
        states = load_states(client, view, [(pair.topic, pair.topic)])
        return max(len(state.map) for state in states.values())

    assert 4 <= runs() <= 9
    exact = 0
    for offset in range(len(source)):
        found = translate_offsets(pair.job, {place: offset})[place]
        assert found is not None
        left = what([message for message in copies if message.offset >= found])
        assert what(source[offset:]) == left[-len(source[offset:]) :], "nothing is skipped"
        exact += len(left) == len(source) - offset
    assert exact >= 8
    job = replace(pair.job, commits_on_source=False)
    with mansio.blocking.connect(pair.a) as client:
        client.admin.alter_topic_config(pair.topic, {"mansio.hold.enable": "false"})
        client.admin.delete_records([pair.topic], before=60)
    pair.publish(3)
    mirror(job)
    mirror(job)
    assert runs() <= 4, "of the records that the source still has"
    assert translate_offsets(job, {place: 62})[place] == copies[-1].offset + 2, "behind the marker"


@pytest.mark.full
def test_a_topic_that_was_created_again_is_copied_from_its_beginning(pair: Pair) -> None:
    places = [TopicPartition(pair.topic, partition) for partition in range(PARTITIONS)]
    pair.publish(30)
    mirror(pair.job)
    with mansio.blocking.connect(pair.b) as client:
        client.admin.delete_topic(pair.topic)
    assert mirror(pair.job).records == 30
    pair.assert_copied()
    with mansio.blocking.connect(pair.a) as client:
        client.admin.delete_topic(pair.topic)
        client.admin.create_topic(pair.topic, partitions=PARTITIONS - 1, config=FOREVER)
        client.publish_many(pair.topic, [OutgoingRecord(b"again", partition=n % 2) for n in range(12)])
    assert mirror(pair.job).records == 12
    assert translate_offsets(pair.job, dict.fromkeys(places, 3)) == {
        places[0]: 3 + 10 + 1,
        places[1]: 14,
        places[2]: None,
    }
    assert len(pair.read(pair.b)) == 42


def test_records_that_were_deleted_before_they_were_copied_end_the_mirror(pair: Pair) -> None:
    job = replace(pair.job, commits_on_source=False)
    pair.publish(30)
    mirror(job)
    pair.publish(30)
    with mansio.blocking.connect(pair.a) as client:
        client.admin.delete_records([pair.topic], before=15)
    with pytest.raises(DataLoss, match=r"offsets 10 to 14 .*--accept-loss"):
        mirror(job)
    assert mirror(replace(job, accept_loss=True)).records == 15


def test_the_source_holds_records_back_until_they_are_mirrored_and_shows_the_lag(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    pair.publish(30)
    mirror(pair.job)
    pair.publish(30)
    with mansio.blocking.connect(pair.a) as client, pytest.raises(mansio.errors.PolicyViolation):
        client.admin.delete_records([pair.topic], before="end")
    with pytest.raises(SystemExit):
        main(["pipeline", "lag", pair.job.name, "--output", "json", "--bootstrap-servers", pair.a])
    rows = json.loads(capsys.readouterr().out)
    assert [row["lag"] for row in rows] == [30]
    assert rows[0]["progress"]["state"] == "stopped"
    assert rows[0]["progress"]["records"] == 30


@pytest.fixture
def handlers() -> Iterator[None]:
    """The command takes SIGINT and SIGTERM for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_the_command_mirrors_and_translates(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    pair.publish(30)
    words = ["pipeline", "mirror", pair.topic, "--from", pair.a, "--to", pair.b, "--output", "json"]
    words += ["--rename", "{source}.{topic}", "--source-name", "dc1"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--once", "--name", pair.job.name])
    assert not end.value.code
    shown = json.loads(capsys.readouterr().out)
    assert (shown["records"], shown["lag"]) == (30, 0)
    pair.assert_copied(f"dc1.{pair.topic}")
    with pytest.raises(SystemExit):
        main([*words, "--translate", f"{pair.topic}:1:4"])
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {
        "topic": pair.topic,
        "partition": 1,
        "offset": 4,
        "target": f"dc1.{pair.topic}",
        "translated": 4,
    }


@pytest.mark.full
def test_what_cannot_be_mirrored_is_refused(pair: Pair) -> None:
    with pytest.raises(InvalidRequest, match="same cluster"):
        mirror(replace(pair.job, target_servers=pair.a))
    with pytest.raises(InvalidRequest, match=r"lacks \{topic\}"):
        mirror(replace(pair.job, topic_pattern="copy"))
    mirror(pair.job)
    with mansio.blocking.connect(pair.b) as client:
        (state_topic,) = (name for name in client.admin.list_topics() if name.startswith("mansio-mirror."))
        client.admin.delete_topic(pair.topic)
    back = replace(pair.job, source_servers=pair.b, target_servers=pair.a, topics=(state_topic,))
    with pytest.raises(InvalidRequest, match="cannot be mirrored"):
        mirror(back)
    with pytest.raises(UnknownTopicOrPartition, match="the source has no topic"):
        mirror(replace(pair.job, topics=("nowhere",)))
    with mansio.blocking.connect(pair.b) as client:
        client.admin.create_topic(pair.topic, config={"message.timestamp.type": "LogAppendTime"})
    with pytest.raises(InvalidRequest, match="its own clock"):
        mirror(pair.job)
