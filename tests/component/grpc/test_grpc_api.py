"""gRPC API with a stock channel: all methods, streams, statuses, limits and hostile messages."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mansio.api.grpc import mansio_pb2 as pb
from mansio.api.grpc import server as grpc_server
from mansio.testing.broker import TestBroker
from support.machine import scaled
from support.tiers import examples
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

SERVICE = pb.DESCRIPTOR.services_by_name["Mansio"]


class Stub:
    """The methods of the service on a channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        for method in SERVICE.methods:
            kind = channel.stream_stream if method.client_streaming else channel.unary_unary
            call = kind(
                f"/{SERVICE.full_name}/{method.name}",
                method.input_type._concrete_class.SerializeToString,
                method.output_type._concrete_class.FromString,
            )
            setattr(self, method.name, call)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker() as started:
        yield started


@pytest.fixture(scope="module")
def channel(broker: TestBroker) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(broker.grpc_address) as opened:
        yield opened


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> Any:
    return Stub(channel)


def topic_of(stub: Any, name: str, **config: str) -> str:
    configs = {key.replace("_", "."): value for key, value in config.items()}
    stub.CreateTopic(pb.CreateTopicRequest(name=name, partitions=1, config=configs))
    return name


def group_of(stub: Any, name: str, **config: str) -> str:
    given = {"share.auto.offset.reset": "earliest", "mansio.retry.backoff.ms": "0"}
    stub.AlterGroup(pb.AlterGroupRequest(group=name, set=given | config))
    return name


def publish(stub: Any, topic: str, *values: bytes, **more: Any) -> Any:
    records = [pb.NewRecord(value=value, **more) for value in values]
    return stub.Publish(pb.PublishRequest(topic=topic, records=records))


class Receiver:
    """A Receive stream: requests are sent with `send`, records collected with `take`."""

    def __init__(self, stub: Any, group: str, *topics: str, allowance: int = 100, **more: Any) -> None:
        self._ready = threading.Condition()
        self._requests: list[Any] = []
        self._is_ended = False
        self.send(open=pb.ReceiveOpen(group=group, topics=topics, **more), credits=allowance)
        self.call = stub.Receive(self._iterate(), timeout=scaled(30))
        self.responses: list[Any] = []

    def _iterate(self) -> Iterator[Any]:
        while True:
            with self._ready:
                self._ready.wait_for(lambda: self._requests or self._is_ended)
                if not self._requests:
                    return
                request = self._requests.pop(0)
            yield request

    def send(self, **fields: Any) -> None:
        with self._ready:
            self._requests.append(pb.ReceiveRequest(**fields))
            self._ready.notify()

    def take(self, count: int) -> list[Any]:
        found: list[Any] = []
        while len(found) < count:
            response = next(self.call)
            self.responses.append(response)
            found += response.records
        return found

    def until_acknowledged(self, count: int) -> None:
        done = sum(each.acknowledged + len(each.failed) for each in self.responses)
        while done < count:
            response = next(self.call)
            self.responses.append(response)
            done += response.acknowledged + len(response.failed)

    def end(self) -> None:
        with self._ready:
            self._is_ended = True
            self._ready.notify()
        for response in self.call:
            self.responses.append(response)


def refused(status: grpc.StatusCode, call: Any, *arguments: Any) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as raised:
        call(*arguments)
    assert raised.value.code() is status, raised.value
    return raised.value


@pytest.mark.row("A2")
def test_records_are_published_with_a_result_each_and_fetched(stub: Any, broker: TestBroker) -> None:
    topic = topic_of(stub, "fetch")
    records = [
        pb.NewRecord(
            value=b"v0", key=b"k", headers=[pb.Header(name="h", value=b"x"), pb.Header(name="null")]
        ),
        pb.NewRecord(value=b""),
        pb.NewRecord(),
        pb.NewRecord(value=b"bad", partition=9),
        pb.NewRecord(value=b"v4", timestamp_ms=1_000),
    ]
    response = stub.Publish(pb.PublishRequest(topic=topic, records=records))
    assert sum(each.count for each in response.ranges) == len(records)
    by_first = {each.first: each for each in response.ranges}
    assert by_first[3].error.name == "UnknownTopicOrPartition"
    assert (by_first[4].offset, by_first[4].timestamp_ms) == (3, 1_000)
    found = stub.Fetch(pb.FetchRequest(topic=topic))
    assert [each.value for each in found.records] == [b"v0", b"", b"", b"v4"]
    assert [each.HasField("value") for each in found.records] == [True, True, False, True]
    first = found.records[0]
    assert (first.key, [(h.name, h.HasField("value")) for h in first.headers]) == (
        b"k",
        [("h", True), ("null", False)],
    )
    assert found.next_offset == 4
    assert [each.value for each in stub.Fetch(pb.FetchRequest(topic=topic, offset=3)).records] == [b"v4"]
    assert not stub.Fetch(pb.FetchRequest(topic=topic, latest=True)).records
    assert len(broker.client().consume(topic, to_end=True).poll(timeout_ms=5_000)) > 0
    ends = stub.ListOffsets(pb.ListOffsetsRequest(topic=topic))
    assert [each.offset for each in ends.partitions] == [4]
    starts = stub.ListOffsets(pb.ListOffsetsRequest(topic=topic, earliest=True))
    assert [each.offset for each in starts.partitions] == [0]
    refused(grpc.StatusCode.OUT_OF_RANGE, stub.Fetch, pb.FetchRequest(topic=topic, offset=9))
    refused(grpc.StatusCode.NOT_FOUND, stub.Fetch, pb.FetchRequest(topic=topic, partition=9))


@pytest.mark.row("A2")
def test_a_publish_stream_answers_each_request_in_order(stub: Any) -> None:
    topic = topic_of(stub, "stream")
    requests = [
        pb.PublishRequest(topic=topic, records=[pb.NewRecord(value=b"%d" % number)] * 10)
        for number in range(20)
    ]
    responses = list(stub.PublishStream(iter(requests)))
    assert [each.ranges[0].offset for each in responses] == list(range(0, 200, 10))


@pytest.mark.row("A2", "D1", "D2", "D3", "D4")
def test_a_receive_stream_sends_by_credits_and_takes_acknowledgements(stub: Any) -> None:
    topic, group = topic_of(stub, "receive"), group_of(stub, "receive")
    publish(stub, topic, *(b"%d" % number for number in range(10)))
    receiver = Receiver(stub, group, topic, allowance=4, lease_ms=600_000)
    first = receiver.take(4)
    assert [each.value for each in first] == [b"0", b"1", b"2", b"3"]
    assert {each.delivery_count for each in first} == {1}
    receiver.send(
        ack=[first[0].receipt, "no receipt"],
        retry=[pb.Retry(receipt=first[1].receipt, delay_ms=0)],
        reject=[pb.Reject(receipt=first[2].receipt, reason="bad")],
        extend=[pb.Extend(receipt=first[3].receipt, lease_ms=3_600_000)],
    )
    receiver.until_acknowledged(5)
    (failed,) = [one for each in receiver.responses for one in each.failed]
    assert failed.error.name == "InvalidReceipt"
    receiver.send(credits=7)
    second = receiver.take(7)
    assert sorted(each.value for each in second) == [b"1", b"4", b"5", b"6", b"7", b"8", b"9"]
    assert next(each for each in second if each.value == b"1").delivery_count == 2
    receiver.send(ack=[each.receipt for each in second[:3]])
    receiver.until_acknowledged(8)
    receiver.end()
    # What was not acknowledged is released, and that delivery does not count.
    again = Receiver(stub, group, topic)
    released = again.take(5)
    counts = {each.value: each.delivery_count for each in released}
    assert set(counts) == {first[3].value, *(each.value for each in second[3:])}
    assert not stub.Ack(pb.AckRequest(group=group, receipts=[each.receipt for each in released])).failed
    again.call.cancel()

    def redriven() -> bool:
        request = pb.RedriveRequest(group=group, topic=topic, redrive_id="r")
        return bool(stub.Redrive(request).redriven == 1)

    wait_until(redriven)
    last = Receiver(stub, group, topic)
    assert [each.value for each in last.take(1)] == [b"2"]
    last.call.cancel()


@pytest.mark.row("A2", "D6", "D7", "P3")
def test_delays_priorities_and_deduplication(stub: Any, broker: TestBroker) -> None:
    topic = topic_of(
        stub,
        "features",
        mansio_delay_enable="true",
        mansio_priority_enable="true",
        mansio_dedup_ms="60000",
    )
    group = group_of(stub, "features")
    first = publish(stub, topic, b"low", priority="low", dedup_id=b"1").ranges[0].offset
    assert publish(stub, topic, b"low", priority="low", dedup_id=b"1").ranges[0].offset == first
    publish(stub, topic, b"high", priority="high")
    publish(stub, topic, b"later", delay_ms=3_600_000)
    publish(stub, topic, b"never", delay_ms=3_600_000)
    receiver = Receiver(stub, group, topic, max_records=1)
    assert [each.value for each in receiver.take(2)] == [b"high", b"low"]
    pending = stub.ListDelayed(pb.ListDelayedRequest(topic=topic)).records
    assert [each.record.value for each in pending] == [b"later", b"never"]
    changed = stub.ChangeDelayed(pb.ChangeDelayedRequest(topic=topic, ids=[pending[1].id], cancel=True))
    assert [each.id for each in changed.changed] == [pending[1].id.id]
    stub.ChangeDelayed(pb.ChangeDelayedRequest(topic=topic, ids=[pending[0].id], deliver_now=True))
    assert [each.value for each in receiver.take(1)] == [b"later"]
    receiver.call.cancel()
    plain = topic_of(stub, "without")
    for more in ({"delay_ms": 1}, {"priority": "high"}, {"dedup_id": b"1"}):
        (one,) = publish(stub, plain, b"x", **more).ranges
        assert one.error.name.endswith("NotEnabled")


@pytest.mark.row("A2")
def test_topics_groups_and_schedules_are_administered(stub: Any, broker: TestBroker) -> None:
    topic = topic_of(stub, "admin", retention_ms="60000", mansio_delay_enable="true")
    request = pb.AlterTopicRequest(name=topic, partitions=2, reset=["retention.ms"])
    altered = stub.AlterTopic(request)
    assert len(altered.partitions) == 2
    assert dict(altered.config) == {"mansio.delay.enable": "true"}
    assert topic in stub.ListTopics(pb.ListTopicsRequest()).names
    stub.CreateSchedule(pb.CreateScheduleRequest(topic=topic, name="s", cron="0 3 * * *", value=b"v"))
    stub.ChangeSchedule(pb.ChangeScheduleRequest(topic=topic, name="s", pause=True))
    (schedule,) = stub.ListSchedules(pb.TopicName(name=topic)).schedules
    assert (schedule.cron, schedule.is_paused) == ("0 3 * * *", True)
    stub.ChangeSchedule(pb.ChangeScheduleRequest(topic=topic, name="s", delete=True))
    publish(stub, topic, b"a", partition=0)
    with broker.client() as client, client.consume(topic, group="readers", max_records=1) as consumer:
        assert len(list(consumer)) == 1
    assert "readers" in [each.name for each in stub.ListGroups(pb.Empty()).groups]
    offsets = stub.GetGroupOffsets(pb.GroupName(name="readers")).offsets
    assert {each.partition: each.offset for each in offsets if each.HasField("offset")}[0] == 1
    reset = pb.ResetGroupOffsetsRequest(group="readers", topics=[topic], earliest=True)
    assert {each.offset for each in stub.ResetGroupOffsets(reset).offsets} == {0}
    stub.DeleteGroup(pb.GroupName(name="readers"))
    refused(grpc.StatusCode.NOT_FOUND, stub.GetGroupOffsets, pb.GroupName(name="readers"))
    stub.DeleteTopic(pb.TopicName(name=topic))
    error = refused(grpc.StatusCode.NOT_FOUND, stub.DescribeTopic, pb.TopicName(name=topic))
    metadata = dict(error.trailing_metadata())
    assert (metadata["mansio-error"], metadata["mansio-code"]) == ("UnknownTopicOrPartition", "3")


@pytest.mark.row("A2")
def test_reflection_and_health_answer(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE.full_name):
        found = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert found.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE.full_name)
    (answer,) = reflection.ServerReflectionInfo(iter([request]))
    file = descriptor_pb2.FileDescriptorProto.FromString(
        answer.file_descriptor_response.file_descriptor_proto[0]
    )
    assert len(file.service[0].method) == len(SERVICE.methods)


def test_the_deadline_of_a_call_ends_its_wait(stub: Any) -> None:
    topic = topic_of(stub, "deadline")
    begin = time.monotonic()
    with pytest.raises(grpc.RpcError) as raised:
        stub.Fetch(pb.FetchRequest(topic=topic, wait_ms=30_000), timeout=0.5)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert time.monotonic() - begin < scaled(10)


def test_streams_that_do_not_begin_right_or_ask_too_much_are_refused(stub: Any) -> None:
    topic = topic_of(stub, "wrong")
    opening = pb.ReceiveOpen(group="g", topics=[topic])
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    for requests in (
        [],
        [pb.ReceiveRequest(credits=1)],
        [pb.ReceiveRequest(open=pb.ReceiveOpen(group="g"))],
        [pb.ReceiveRequest(open=pb.ReceiveOpen(group="", topics=[topic]), credits=1)],
        [pb.ReceiveRequest(open=opening, credits=1_000_000)],
        [pb.ReceiveRequest(open=opening, credits=-1)],
        [pb.ReceiveRequest(open=opening), pb.ReceiveRequest(open=opening)],
        [pb.ReceiveRequest(open=pb.ReceiveOpen(group="g", topics=[topic], lease_ms=-5), credits=1)],
    ):
        refused(invalid, lambda sent=requests: list(stub.Receive(iter(sent), timeout=scaled(20))))


def test_messages_and_metadata_are_bounded(stub: Any) -> None:
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    large = pb.PublishRequest(topic="t", records=[pb.NewRecord(value=bytes(grpc_server.MESSAGE_BYTES_MAX))])
    refused(exhausted, stub.Publish, large)
    with pytest.raises(grpc.RpcError) as raised:
        stub.ListGroups(pb.Empty(), metadata=(("x-large", "x" * 100_000),))
    assert raised.value.code() in (exhausted, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE)
    assert stub.ListTopics(pb.ListTopicsRequest())  # the listener lives on


def http2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def test_rapid_resets_of_streams_do_not_keep_others_from_being_answered(
    broker: TestBroker, stub: Any
) -> None:
    """CVE-2023-44487: each request is cancelled as soon as it is sent."""
    texts = [(b":path", b"/mansio.v1.Mansio/ListTopics"), (b":authority", b"localhost")]
    texts += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
    headers = b"\x83\x86" + b"".join(  # POST, http, then literal headers (RFC 7541)
        b"\x00" + bytes([len(name)]) + name + bytes([len(value)]) + value for name, value in texts
    )
    host, _, port = broker.grpc_address.partition(":")
    with socket.create_connection((host, int(port)), timeout=scaled(20)) as peer:
        peer.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + http2_frame(4, 0, 0))
        with contextlib.suppress(ConnectionError):  # to be closed is an answer, too
            for stream in range(1, 40_001, 2):
                peer.sendall(
                    http2_frame(1, 4, stream, headers) + http2_frame(3, 0, stream, b"\x00\x00\x00\x08")
                )
                if stream % 10_000 == 1:
                    stub.ListTopics(pb.ListTopicsRequest(), timeout=scaled(10))
    assert stub.ListTopics(pb.ListTopicsRequest(), timeout=scaled(10)) is not None


METHODS = [each for each in SERVICE.methods if not each.client_streaming and each.name != "DeleteTopic"]
VALUES = {
    "string": st.sampled_from(["", "fuzzed", "t", "\x00", "x" * 300, "*/5 * * * *", "A" * 64])
    | st.text(max_size=9),
    "bytes": st.binary(max_size=9),
    "int": st.sampled_from([-(1 << 31), -1, 0, 1, 2, 100, (1 << 31) - 1]),
    "long": st.sampled_from([-(1 << 63), -1, 0, 1, 1_700_000_000_000, (1 << 63) - 1]),
    "bool": st.booleans(),
}
KINDS = {3: "long", 5: "int", 8: "bool", 9: "string", 12: "bytes"}


def messages(descriptor: Any, depth: int = 0) -> st.SearchStrategy[Any]:
    """Messages of any content."""
    fields: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            fields[field.name] = st.dictionaries(VALUES["string"], VALUES["string"], max_size=2)
        elif field.message_type is not None:
            if depth < 2:
                inner = messages(field.message_type, depth + 1)
                fields[field.name] = st.lists(inner, max_size=2) if field.is_repeated else inner
        else:
            value = VALUES[KINDS[field.type]]
            fields[field.name] = st.lists(value, max_size=3) if field.is_repeated else value
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: descriptor._concrete_class(**given))


@settings(
    max_examples=examples(25, 400),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_messages_made_from_the_schema_get_a_result_or_a_typed_status(stub: Any, data: st.DataObject) -> None:
    method = data.draw(st.sampled_from(METHODS))
    request = data.draw(messages(method.input_type))
    if hasattr(request, "wait_ms"):
        request.wait_ms = min(request.wait_ms, 10)
    if hasattr(request, "partitions") and isinstance(request.partitions, int):
        request.partitions = min(request.partitions, 3)
    future = getattr(stub, method.name).future(request, timeout=scaled(20))
    error = future.exception()
    internal = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
    assert error is None or error.code() not in internal, (method.name, request, error)


def test_bytes_that_are_no_message_do_not_harm_the_listener(channel: grpc.Channel, stub: Any) -> None:
    call = channel.unary_unary(f"/{SERVICE.full_name}/Publish")
    with pytest.raises(grpc.RpcError):
        call(b"\xff" * 100)
    with pytest.raises(grpc.RpcError) as raised:
        channel.unary_unary(f"/{SERVICE.full_name}/NoSuchMethod")(b"")
    assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert stub.ListTopics(pb.ListTopicsRequest())
