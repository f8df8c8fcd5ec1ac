"""Check of schemas at publish, over real sockets: what is rejected and how, what passes, and in which order batches are
stored while the schema registry is asked."""

from __future__ import annotations

import asyncio
import itertools
import random
from typing import TYPE_CHECKING, Any
from uuid import UUID

import grpc
import httpx
import pytest
from botocore.exceptions import ClientError
from confluent_kafka import KafkaError, KafkaException, Producer

import mansio
from component.grpc.test_grpc_api import Stub, publish
from component.sqs.sqs_fixtures import queue_of, sqs_client
from mansio.broker.partition.batch_processing import LOOK_UPS_MAX
from mansio.errors import InvalidConfig, InvalidRecord, LeaderNotAvailable, MansioError
from mansio.testing import TestBroker
from mansio.wire.apis import produce
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch
from support.client_fixtures import run
from support.machine import scaled
from support.raw_peer import RawPeer, produce_frame
from support.schema_ids import FakeSchemaIds, framed, use_schema_ids
from support.tiers import smoke_first
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mansio.wire.apis.produce import PartitionResult

    Row = tuple[bytes | None, bytes | None, Sequence[tuple[str, bytes | None]]]

VALUES = {"mansio.value.schema.validation": "true"}
KEYS = {"mansio.key.schema.validation": "true"}
DELAYS = {**VALUES, "mansio.delay.enable": "true"}
INVALID_RECORD, LEADER_NOT_AVAILABLE, OUT_OF_ORDER, TIMED_OUT = 87, 5, 45, 7
ID, OTHER_ID, UNKNOWN_ID = 7, 8, 99
GUID, OTHER_GUID = UUID(int=7), UUID(int=8)
KNOWN, OTHER, UNKNOWN = framed(ID, b"known"), framed(OTHER_ID, b"other"), framed(UNKNOWN_ID, b"unknown")
LARGE_BYTES = 100 << 10
"""So large that a thread inspects the batch."""


class Checked(TestBroker):
    """A broker whose topics may be checked. `ids`: its registry."""

    def __init__(self, ids: FakeSchemaIds) -> None:
        super().__init__()
        self.ids = ids
        self._numbers = itertools.count()

    def new_topic(
        self, config: dict[str, str] | None = None, *, schemas: Sequence[int | UUID] = (ID,)
    ) -> str:
        """Create a topic of one partition, whose subject of values has schemas."""
        name = f"orders-{next(self._numbers)}"
        self.client().admin.create_topic(name, partitions=1, config=VALUES if config is None else config)
        self.ids.register(f"{name}-value", *schemas)
        return name

    def peer(self) -> RawPeer:
        return RawPeer(int(self.bootstrap_servers.rpartition(":")[2]))

    def produce(self, topic: str, *rows: Row | bytes | None, **fields: Any) -> PartitionResult:
        """Produce one batch of rows or of values on a connection of its own."""
        with self.peer() as peer:
            return peer.produce(topic, self.batch(*rows, **fields))

    def batch(self, *rows: Row | bytes | None, **fields: Any) -> bytes:
        whole = [row if isinstance(row, tuple) else (None, row, ()) for row in rows]
        return build_batch([(self.clock.time_ms(), *row) for row in whole], **fields)

    def visible(self, topic: str) -> list[bytes | None]:
        with self.client().consume(mansio.TopicPartition(topic, 0), to_end=True) as consumer:
            return [message.value for message in consumer]


@pytest.fixture(scope="module")
def running() -> Iterator[Checked]:
    with pytest.MonkeyPatch.context() as patch:
        ids = FakeSchemaIds()
        use_schema_ids(patch, ids)
        with Checked(ids) as started:
            yield started


@pytest.fixture
def broker(running: Checked) -> Iterator[Checked]:
    running.ids.error, running.ids.remembers = None, True
    running.ids.asked.clear()
    yield running
    running.ids.release()


def invalid(result: PartitionResult) -> list[int]:
    """The records that a response names, all of them with a reason."""
    assert result.error_code == INVALID_RECORD, result
    assert all(reason for _, reason in result.record_errors)
    return [index for index, _ in result.record_errors]


class TestRules:
    def test_a_value_of_the_subject_is_accepted_and_others_name_their_records(self, broker: Checked) -> None:
        topic = broker.new_topic()
        assert broker.produce(topic, KNOWN, KNOWN).error_code == 0
        rejected = broker.produce(topic, KNOWN, b"plain", KNOWN, b"")
        assert invalid(rejected) == [1, 3]
        assert "no schema id" in (rejected.error_message or "")
        rejected = broker.produce(topic, KNOWN, UNKNOWN, KNOWN, UNKNOWN)
        assert invalid(rejected) == [1, 3]
        assert f"the schema 99 of the value is not in the subject {topic}-value" in (
            rejected.error_message or ""
        )
        assert broker.visible(topic) == [KNOWN, KNOWN], "a batch is accepted or rejected as a whole"

    @pytest.mark.full
    def test_a_schema_of_another_subject_is_rejected(self, broker: Checked) -> None:
        topic, other = broker.new_topic(), broker.new_topic(schemas=[OTHER_ID])
        assert invalid(broker.produce(topic, OTHER)) == [0]
        assert broker.produce(other, OTHER).error_code == 0

    @pytest.mark.full
    @pytest.mark.parametrize(
        "value",
        [b"\0", framed(ID)[:4], b"\1" + GUID.bytes[:15], b"\2" + bytes(30), b"{}"],
    )
    def test_a_value_without_a_whole_frame_is_rejected(self, broker: Checked, value: bytes) -> None:
        topic = broker.new_topic(schemas=[0, ID, GUID])
        assert invalid(broker.produce(topic, KNOWN, value)) == [1]

    @pytest.mark.full
    def test_records_without_a_value_pass(self, broker: Checked) -> None:
        topic = broker.new_topic()
        assert broker.produce(topic, (b"key", None, ()), None).error_code == 0
        assert broker.produce(topic, None, KNOWN, None).error_code == 0
        assert invalid(broker.produce(topic, None, KNOWN, None, UNKNOWN, None, UNKNOWN)) == [3, 5]

    @pytest.mark.full
    @pytest.mark.parametrize("value", [b"\1" + GUID.bytes + b"content", framed(ID)])
    def test_a_frame_may_be_an_id_or_a_guid_and_be_in_a_header(self, broker: Checked, value: bytes) -> None:
        topic = broker.new_topic(schemas=[ID, GUID])
        assert broker.produce(topic, value).error_code == 0
        assert broker.produce(topic, (None, b"{}", [("__value_schema_id", value)])).error_code == 0
        assert invalid(broker.produce(topic, (None, b"{}", [("__key_schema_id", value)]))) == [0]

    @pytest.mark.full
    @pytest.mark.parametrize("header", [framed(UNKNOWN_ID), b"\1" + OTHER_GUID.bytes, b"7", b"", None])
    def test_the_header_decides_if_the_value_has_a_frame_too(
        self, broker: Checked, header: bytes | None
    ) -> None:
        topic = broker.new_topic()
        named = [("__value_schema_id", header)]
        assert invalid(broker.produce(topic, KNOWN, (None, KNOWN, named))) == [1]
        assert (
            broker.produce(topic, (None, KNOWN, [*named, ("__value_schema_id", framed(ID))])).error_code == 0
        )

    @pytest.mark.full
    def test_keys_are_checked_on_their_own(self, broker: Checked) -> None:
        topic = broker.new_topic(KEYS)
        broker.ids.register(f"{topic}-key", OTHER_ID)
        assert broker.produce(topic, (OTHER, b"plain", ()), (None, b"plain", ())).error_code == 0
        assert invalid(broker.produce(topic, (OTHER, b"", ()), (KNOWN, b"", ()))) == [1], "a schema of values"
        header = [("__key_schema_id", framed(OTHER_ID))]
        assert broker.produce(topic, (b"k", b"plain", header)).error_code == 0

    @pytest.mark.full
    def test_keys_and_values_are_checked_together(self, broker: Checked) -> None:
        topic = broker.new_topic({**KEYS, **VALUES})
        broker.ids.register(f"{topic}-key", OTHER_ID)
        assert broker.produce(topic, (OTHER, KNOWN, ()), (None, KNOWN, ()), (OTHER, None, ())).error_code == 0
        assert invalid(broker.produce(topic, (OTHER, KNOWN, ()), (OTHER, OTHER, ()))) == [1]
        assert invalid(broker.produce(topic, (OTHER, KNOWN, ()), (KNOWN, KNOWN, ()))) == [1]

    @pytest.mark.full
    def test_the_strategy_chooses_the_subject(self, broker: Checked) -> None:
        by_record = broker.new_topic({**VALUES, "mansio.value.subject.name.strategy": "record"}, schemas=[ID])
        by_both = broker.new_topic({**VALUES, "mansio.value.subject.name.strategy": "topic-record"})
        broker.ids.names = {ID: "shop.Order", OTHER_ID: "shop.Order", UNKNOWN_ID: "shop.Other"}
        broker.ids.register("shop.Order", OTHER_ID, UNKNOWN_ID)
        broker.ids.register(f"{by_both}-shop.Order", ID)
        assert broker.produce(by_record, OTHER).error_code == 0
        assert invalid(broker.produce(by_record, OTHER, KNOWN)) == [1], "only in the subject of the topic"
        assert invalid(broker.produce(by_record, OTHER, UNKNOWN)) == [1], "in a subject of another record"
        assert broker.produce(by_both, KNOWN).error_code == 0
        assert invalid(broker.produce(by_both, KNOWN, OTHER)) == [1]

    @pytest.mark.full
    @pytest.mark.parametrize("codec", list(Codec))
    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    def test_compressed_and_large_batches_are_checked(self, broker: Checked, codec: Codec, size: int) -> None:
        topic = broker.new_topic()
        content = random.Random(1).randbytes(size)
        assert broker.produce(topic, framed(ID, content), codec=codec).error_code == 0
        assert invalid(broker.produce(topic, KNOWN, framed(UNKNOWN_ID, content), codec=codec)) == [1]
        assert invalid(broker.produce(topic, KNOWN, b"x" + content, codec=codec)) == [1]

    @pytest.mark.full
    def test_a_topic_with_another_codec_checks_what_was_sent(self, broker: Checked) -> None:
        topic = broker.new_topic({**VALUES, "compression.type": "zstd"})
        assert broker.produce(topic, *[KNOWN] * 50, codec=Codec.GZIP).error_code == 0
        assert invalid(broker.produce(topic, KNOWN, UNKNOWN, codec=Codec.GZIP)) == [1]


class TestSettings:
    def test_the_check_is_turned_on_and_off_while_records_come(self, broker: Checked) -> None:
        topic = broker.new_topic({})
        admin = broker.client().admin
        assert broker.produce(topic, b"plain").error_code == 0
        admin.alter_topic_config(topic, dict(VALUES))
        assert invalid(broker.produce(topic, b"plain")) == [0]
        admin.alter_topic_config(topic, {"mansio.value.subject.name.strategy": "record"})
        assert invalid(broker.produce(topic, KNOWN)) == [0]
        admin.alter_topic_config(topic, {"mansio.value.schema.validation": "false"})
        assert broker.produce(topic, b"plain").error_code == 0

    @pytest.mark.full
    @pytest.mark.parametrize("setting", [*KEYS, *VALUES])
    def test_a_topic_for_dead_letters_cannot_be_checked(self, broker: Checked, setting: str) -> None:
        both = {setting: "true", "errors.deadletterqueue.group.enable": "true"}
        with pytest.raises(InvalidConfig, match=f"{setting}: .*dead letters"):
            broker.new_topic(both)
        topic = broker.new_topic({setting: "true"})
        with pytest.raises(InvalidConfig, match="dead letters"):
            broker.client().admin.alter_topic_config(topic, both)

    @pytest.mark.full
    @pytest.mark.parametrize("setting", [*KEYS, *VALUES])
    def test_a_check_is_refused_where_the_registry_is_turned_off(
        self, broker: Checked, monkeypatch: pytest.MonkeyPatch, setting: str
    ) -> None:
        checked, plain = broker.new_topic({setting: "true"}), broker.new_topic({})
        started = broker._broker
        assert started is not None
        monkeypatch.setattr(started.service.topics, "_has_schema_registry", lambda: False)
        admin = broker.client().admin
        reason = (
            f"{setting}: the brokers have no schema registry, because a client created its topic _schemas"
        )
        with pytest.raises(InvalidConfig, match=reason):
            admin.create_topic("refused", config={setting: "true"})
        with pytest.raises(InvalidConfig, match=reason):
            admin.alter_topic_config(plain, {setting: "true"})
        admin.alter_topic_config(checked, {"retention.ms": "1000"})
        admin.alter_topic_config(checked, {setting: "false"})
        with pytest.raises(InvalidConfig, match=reason):
            admin.alter_topic_config(checked, {setting: "true"})

    @pytest.mark.full
    @pytest.mark.parametrize("text", ["io.confluent.TopicNameStrategy", "", "Record"])
    def test_an_unknown_strategy_is_refused(self, broker: Checked, text: str) -> None:
        with pytest.raises(InvalidConfig, match="strategy"):
            broker.new_topic({"mansio.value.subject.name.strategy": text})


class TestRegistry:
    def test_the_registry_is_asked_once_for_each_schema(self, broker: Checked) -> None:
        topic = broker.new_topic(schemas=[ID, OTHER_ID])
        for _ in range(3):
            assert broker.produce(topic, KNOWN, OTHER, KNOWN).error_code == 0
            assert invalid(broker.produce(topic, UNKNOWN)) == [0]
        found = [[(use.schema, use.subject) for use in uses] for uses in broker.ids.asked]
        subject = f"{topic}-value"
        assert found == [[(ID, subject), (OTHER_ID, subject)], [(UNKNOWN_ID, subject)]]

    @pytest.mark.full
    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    def test_a_batch_is_rejected_as_retriable_if_the_registry_cannot_be_asked(
        self, broker: Checked, size: int
    ) -> None:
        topic = broker.new_topic()
        broker.ids.error = LeaderNotAvailable("no leader for _schemas-0")
        refused = broker.produce(topic, framed(ID, bytes(size)))
        assert refused.error_code == LEADER_NOT_AVAILABLE
        assert "cannot be asked now: no leader for _schemas-0" in (refused.error_message or "")
        broker.ids.error = None
        assert broker.produce(topic, framed(ID, bytes(size))).error_code == 0
        assert len(broker.visible(topic)) == 1

    @pytest.mark.full
    def test_a_registry_that_does_not_answer_delays_batches_for_a_bounded_time(self, broker: Checked) -> None:
        topic = broker.new_topic()
        broker.ids.hold()
        with broker.peer() as peer, broker.peer() as other:
            for one in (peer, other):
                one.send(_frame(topic, broker.batch(KNOWN)))
            wait_until(lambda: broker.ids.waiting_count == 1)
            broker.clock.advance(seconds=6)
            codes = [_code(one) for one in (peer, other)]
        assert codes == [LEADER_NOT_AVAILABLE] * 2, "the time counts from the arrival of each batch"
        assert broker.visible(topic) == []

    @pytest.mark.full
    def test_a_registry_whose_answers_are_forgotten_at_once_is_asked_a_few_times(
        self, broker: Checked
    ) -> None:
        topic = broker.new_topic()
        broker.ids.remembers = False
        assert broker.produce(topic, KNOWN).error_code == TIMED_OUT
        assert len(broker.ids.asked) == LOOK_UPS_MAX
        assert broker.visible(topic) == []

    @pytest.mark.full
    def test_stock_producers_retry_until_the_registry_answers(self, broker: Checked) -> None:
        topic = broker.new_topic()
        broker.ids.error = LeaderNotAvailable("no leader for _schemas-0")
        outcomes: list[KafkaError | None] = []
        producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap_servers,
                "retry.backoff.ms": 50,
                "enable.idempotence": True,
            }
        )
        producer.produce(topic, KNOWN, on_delivery=lambda error, _: outcomes.append(error))
        producer.poll(0)
        wait_until(lambda: len(broker.ids.asked) >= 3)
        broker.ids.error = None
        assert producer.flush(scaled(30)) == 0
        assert outcomes == [None]
        assert broker.visible(topic) == [KNOWN]

    @pytest.mark.full
    def test_other_topics_and_requests_go_on_while_a_batch_waits(self, broker: Checked) -> None:
        topic, plain = broker.new_topic(), broker.new_topic({})
        broker.ids.hold()
        with broker.peer() as peer:
            peer.send(_frame(topic, broker.batch(KNOWN)))
            wait_until(lambda: broker.ids.waiting_count == 1)
            assert broker.produce(plain, b"plain").error_code == 0
            assert broker.visible(topic) == []
            broker.ids.release()
            assert _code(peer) == 0
        assert broker.visible(topic) == [KNOWN]


class TestOrder:
    @pytest.mark.parametrize("is_idempotent", smoke_first(True, False))
    def test_batches_behind_one_that_waits_are_stored_in_their_order(
        self, broker: Checked, *, is_idempotent: bool
    ) -> None:
        """The first has an unknown schema, the others are known, large, rejected, or not framed."""
        topic = broker.new_topic(schemas=[ID, OTHER_ID])
        assert broker.produce(topic, KNOWN).error_code == 0  # in the cache
        values = [OTHER, KNOWN, framed(ID, bytes(LARGE_BYTES)), KNOWN, OTHER]
        broker.ids.hold()
        with broker.peer() as peer:
            for number, value in enumerate(values):
                fields: dict[str, Any] = (
                    {"producer_id": 5, "producer_epoch": 0, "base_sequence": number} if is_idempotent else {}
                )
                peer.send(_frame(topic, broker.batch(value, **fields)))
            wait_until(lambda: broker.ids.waiting_count == 1)
            assert broker.visible(topic) == [KNOWN], "none overtakes the first"
            broker.ids.release()
            assert [_code(peer) for _ in values] == [0] * len(values)
        assert broker.visible(topic) == [KNOWN, *values]

    @pytest.mark.full
    def test_a_rejected_batch_keeps_the_ones_behind_it_from_being_stored(self, broker: Checked) -> None:
        """Of an idempotent producer, which then begins again or fails, as with every rejected batch."""
        topic = broker.new_topic()
        broker.ids.hold()
        with broker.peer() as peer:
            for number, value in enumerate([KNOWN, UNKNOWN, KNOWN]):
                batch = broker.batch(value, producer_id=6, producer_epoch=0, base_sequence=number)
                peer.send(_frame(topic, batch))
            wait_until(lambda: broker.ids.waiting_count == 1)
            broker.ids.release()
            assert [_code(peer) for _ in range(3)] == [0, INVALID_RECORD, OUT_OF_ORDER]
        assert broker.visible(topic) == [KNOWN]

    @pytest.mark.full
    def test_a_batch_that_is_sent_again_is_stored_once(self, broker: Checked) -> None:
        topic = broker.new_topic()
        fields = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0}
        first = broker.produce(topic, KNOWN, **fields)
        broker.ids.subjects.clear()
        broker.ids.forget()
        again = broker.produce(topic, KNOWN, **fields)
        assert (again.error_code, again.base_offset) == (0, first.base_offset)

    @pytest.mark.full
    def test_concurrent_idempotent_producers_keep_their_order_with_a_slow_registry(
        self, broker: Checked
    ) -> None:
        topic = broker.new_topic(schemas=range(100))
        chance = random.Random(3)
        sent: dict[bytes, list[bytes]] = {}
        producers = []
        for number in range(3):
            options = {
                "bootstrap.servers": broker.bootstrap_servers,
                "enable.idempotence": True,
                "linger.ms": 1,
            }
            producer = Producer({**options, "batch.num.messages": 3})
            producers.append((b"%d" % number, producer))
            sent[b"%d" % number] = []
        for turn in range(60):
            for name, producer in producers:
                value = framed(chance.randrange(100), name + b" %d" % turn)
                producer.produce(topic, value, name)
                sent[name].append(value)
                producer.poll(0)
            if turn % 20 == 10:
                broker.ids.hold()
            elif turn % 20 == 15:
                broker.ids.forget()
                broker.ids.release()
        broker.ids.release()
        for _, producer in producers:
            assert producer.flush(scaled(60)) == 0
        stored = broker.visible(topic)
        for name, values in sent.items():
            assert [value for value in stored if value is not None and value[5:6] == name] == values


class TestTransactions:
    @pytest.mark.full
    def test_a_transaction_waits_for_the_registry_and_is_committed(self, broker: Checked) -> None:
        topic = broker.new_topic()
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic})
        producer.init_transactions(scaled(30))
        producer.begin_transaction()
        broker.ids.hold()
        producer.produce(topic, KNOWN)
        producer.poll(0)
        wait_until(lambda: broker.ids.waiting_count == 1)
        broker.ids.release()
        producer.commit_transaction(scaled(30))
        assert broker.visible(topic) == [KNOWN]

    @pytest.mark.full
    def test_a_transaction_with_an_unknown_schema_is_aborted_and_its_marker_is_written(
        self, broker: Checked
    ) -> None:
        topic = broker.new_topic()
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic})
        producer.init_transactions(scaled(30))
        producer.begin_transaction()
        producer.produce(topic, KNOWN)
        assert producer.flush(scaled(30)) == 0
        producer.produce(topic, UNKNOWN)
        with pytest.raises(KafkaException):
            producer.commit_transaction(scaled(30))
        producer.abort_transaction(scaled(30))
        # librdkafka goes on after the sequence of the rejected batch, unless it begins a new epoch.
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "transactional.id": topic})
        producer.init_transactions(scaled(30))
        producer.begin_transaction()
        producer.produce(topic, framed(ID, b"later"))
        producer.commit_transaction(scaled(30))
        assert broker.visible(topic) == [framed(ID, b"later")]


class TestDelayed:
    @pytest.mark.full
    def test_delayed_records_are_checked_when_they_are_accepted(self, broker: Checked) -> None:
        topic = broker.new_topic(DELAYS)
        client = broker.client()
        client.publish(topic, KNOWN, delay=60)
        with pytest.raises(InvalidRecord, match="not in the subject"):
            client.publish(topic, UNKNOWN, delay=60)
        with pytest.raises(InvalidRecord, match="no schema id"):
            client.publish(topic, b"plain", delay=60)
        broker.ids.subjects.clear()
        broker.ids.forget()
        broker.clock.advance(seconds=61)
        wait_until(lambda: broker.visible(topic) == [KNOWN])

    @pytest.mark.full
    def test_the_record_of_a_schedule_is_checked_when_it_is_created(self, broker: Checked) -> None:
        topic = broker.new_topic(DELAYS)
        schedules = broker.client().admin.schedules
        for value, reason in ((UNKNOWN, "not in the subject"), (b"plain", "no schema id")):
            with pytest.raises(InvalidRecord, match=reason):
                schedules.create(topic, "s", value, every=60)
        broker.ids.error = LeaderNotAvailable("no leader")
        with pytest.raises(MansioError, match="cannot be asked now"):
            schedules.create(topic, "later", OTHER, every=60)
        broker.ids.error = None
        schedules.create(topic, "s", KNOWN, every=60)
        broker.ids.subjects.clear()
        broker.ids.forget()
        broker.clock.advance(seconds=61)
        wait_until(lambda: broker.visible(topic) == [KNOWN])


class TestDeduplication:
    @pytest.mark.full
    @pytest.mark.parametrize("size", [10, LARGE_BYTES])
    def test_repeats_are_left_out_of_a_batch_that_waited(self, broker: Checked, size: int) -> None:
        topic = broker.new_topic({**VALUES, "mansio.dedup.ms": "600000"}, schemas=[ID, OTHER_ID])

        def row(value: bytes, dedup_id: bytes) -> Row:
            return None, value + bytes(size), [("mansio-dedup-id", dedup_id)]

        assert broker.produce(topic, row(KNOWN, b"1")).error_code == 0
        assert broker.produce(topic, row(OTHER, b"1"), row(OTHER, b"2")).error_code == 0
        assert invalid(broker.produce(topic, row(KNOWN, b"3"), row(UNKNOWN, b"1"))) == [1]
        assert broker.visible(topic) == [KNOWN + bytes(size), OTHER + bytes(size)]


class TestShareGroups:
    @pytest.mark.full
    def test_dead_letters_keep_their_frames_and_are_redriven_without_a_check(self, broker: Checked) -> None:
        """Also those whose schema the registry does not have any more."""
        topic = broker.new_topic()
        group = f"group-{topic}"

        async def scenario() -> None:
            async with mansio.connect(broker.bootstrap_servers) as client:
                await client.admin.alter_group_config(
                    group,
                    {
                        "share.auto.offset.reset": "earliest",
                        "errors.deadletterqueue.topic.name": f"dlq.{topic}",
                    },
                )
                await client.publish(topic, KNOWN)
                broker.ids.subjects.clear()
                broker.ids.forget()
                async with client.receive(topic, group=group) as receiver:
                    message = await anext(receiver)
                    await message.reject("no amount")
                async with client.consume(f"dlq.{topic}", max_records=1) as dead_letters:
                    (letter,) = await dead_letters.poll(scaled(30))
                assert letter.value == KNOWN
                partition = mansio.TopicPartition(topic, 0)
                result = await client.admin.shares.redrive(group, partition, redrive_id="again")
                assert result.redriven == 1
                async with client.receive(topic, group=group) as receiver:
                    message = await anext(receiver)
                    assert message.value == KNOWN
                    await message.ack()

        run(scenario)


class TestProtocols:
    @pytest.mark.full
    def test_http_rejects_with_the_reason_and_the_status_of_an_invalid_request(self, broker: Checked) -> None:
        topic = broker.new_topic()
        binary = {"Content-Type": "application/octet-stream"}
        with httpx.Client(base_url=f"{broker.http_url}/v1", timeout=scaled(20), headers=binary) as http:
            url = f"/topics/{topic}/records"
            plain, unknown, known = (http.post(url, content=value) for value in (b"plain", UNKNOWN, KNOWN))
        for rejected, reason in ((plain, "no schema id"), (unknown, "not in the subject")):
            assert rejected.status_code == 400
            assert reason in rejected.json()["detail"]
        assert known.is_success, known.text
        assert broker.visible(topic) == [KNOWN]

    @pytest.mark.full
    def test_grpc_rejects_with_the_reason(self, broker: Checked) -> None:
        topic = broker.new_topic()
        with grpc.insecure_channel(broker.grpc_address) as channel:
            stub = Stub(channel)
            answers = [publish(stub, topic, value) for value in (b"plain", UNKNOWN, KNOWN)]
        (plain,), (unknown,), (known,) = (answer.ranges for answer in answers)
        assert "no schema id" in plain.error.message
        assert "not in the subject" in unknown.error.message
        assert not known.HasField("error")
        assert broker.visible(topic) == [KNOWN]

    @pytest.mark.full
    def test_sqs_rejects_the_text_of_a_message(self, broker: Checked) -> None:
        sqs = sqs_client(broker.sqs_url)
        url = queue_of(sqs, "framed")
        broker.client().admin.alter_topic_config("framed", dict(VALUES))
        with pytest.raises(ClientError, match="no schema id") as refused:
            sqs.send_message(QueueUrl=url, MessageBody="plain")
        assert refused.value.response["Error"]["Code"] == "InvalidParameterValue"
        assert broker.visible("framed") == []

    @pytest.mark.full
    def test_the_python_client_names_the_record(self, broker: Checked) -> None:
        topic = broker.new_topic()

        async def scenario() -> list[Any]:
            async with mansio.connect(broker.bootstrap_servers) as client:
                sends = [client.publish(topic, value) for value in (KNOWN, UNKNOWN, KNOWN)]
                return await asyncio.gather(*sends, return_exceptions=True)

        outcomes = asyncio.run(scenario())
        assert any(isinstance(one, InvalidRecord) and "the schema 99" in str(one) for one in outcomes)


def _frame(topic: str, batch: bytes) -> bytes:
    return produce_frame([(topic, None, [(0, batch)])])


def _code(peer: RawPeer) -> int:
    answer = peer.frame()
    assert answer is not None
    return produce.decode_response(9, answer).topics[0][2][0].error_code
