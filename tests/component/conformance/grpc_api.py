"""gRPC: `mansio.v1` with a stock channel. Records come through a stream, acknowledgements go through calls."""

from __future__ import annotations

import queue
import threading
from typing import Any, Final

import grpc

from component.conformance.protocol import (
    INVALID,
    LEASE_LOST,
    TOO_LARGE,
    UNKNOWN_ID,
    UNKNOWN_TOPIC,
    WAIT_S,
    WRONG_STATE,
    Protocol,
    Received,
    Refused,
)
from mansio.api.grpc import mansio_pb2 as pb
from support.machine import scaled

SERVICE: Final = pb.DESCRIPTOR.services_by_name["Mansio"]
EMPTY_S: Final = 0.3
NAMES: Final = {
    "UnknownTopicOrPartition": UNKNOWN_TOPIC,
    "MessageTooLarge": TOO_LARGE,
    "InvalidRecordState": LEASE_LOST,
    "TransactionalIdNotFound": UNKNOWN_ID,
    "InvalidTxnState": WRONG_STATE,
    "InvalidRequest": INVALID,
    "InvalidRecord": INVALID,
}


class Stream:
    """A Receive stream."""

    def __init__(self, call: Any, group: str, topic: str, count: int) -> None:
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        opening = pb.ReceiveOpen(group=group, topics=[topic])
        self._requests.put(pb.ReceiveRequest(open=opening, credits=count))
        self.responses = call(iter(self._requests.get, None))

    def half_close(self) -> None:
        """Send no more requests. The broker ends the stream, which releases its leases."""
        self._requests.put(None)

    def end(self) -> None:
        """End the stream without waiting for the broker."""
        self.half_close()
        self.responses.cancel()


class GrpcApi(Protocol):
    name = "grpc"

    def __init__(self, broker: Any) -> None:
        super().__init__(broker)
        self._channel = grpc.insecure_channel(broker.grpc_address)
        self._streams: list[Stream] = []

    def _method(self, name: str) -> Any:
        method = SERVICE.methods_by_name[name]
        kind = self._channel.stream_stream if method.client_streaming else self._channel.unary_unary
        return kind(
            f"/{SERVICE.full_name}/{name}",
            method.input_type._concrete_class.SerializeToString,
            method.output_type._concrete_class.FromString,
        )

    def _call(self, name: str, request: Any) -> Any:
        try:
            return self._method(name)(request, timeout=scaled(2 * WAIT_S))
        except grpc.RpcError as error:
            raise refused(error) from error

    def publish(
        self,
        topic: str,
        value: str,
        *,
        key: str | None = None,
        delay_s: int | None = None,
        priority: str | None = None,
        dedup_id: str | None = None,
    ) -> None:
        record = pb.NewRecord(
            value=value.encode(),
            key=None if key is None else key.encode(),
            priority=priority,
            dedup_id=None if dedup_id is None else dedup_id.encode(),
            delay_ms=None if delay_s is None else delay_s * 1000,
        )
        answer = self._call("Publish", pb.PublishRequest(topic=topic, records=[record]))
        (one,) = answer.ranges
        if one.HasField("error"):
            raise Refused(NAMES.get(one.error.name, one.error.name))

    def receive(self, topic: str, count: int) -> list[Received]:
        stream = Stream(self._method("Receive"), self.group(topic), topic, count)
        self._streams.append(stream)
        found: list[Received] = []
        try:
            while len(found) < count:
                found += [received(each) for each in next(stream.responses).records]
        except grpc.RpcError as error:
            raise refused(error) from error
        return found

    def take(self, topic: str, count: int, then: str) -> list[Received]:
        found = self.receive(topic, count)
        for each in found:
            if then == "accept":
                self.accept(topic, each)
            elif then == "release":
                entry = pb.Retry(receipt=each.handle)
                self._acknowledge("Retry", pb.RetryRequest(group=self.group(topic), records=[entry]))
            else:
                rejected = pb.Reject(receipt=each.handle)
                self._acknowledge("Reject", pb.RejectRequest(group=self.group(topic), records=[rejected]))
        return found

    def _acknowledge(self, name: str, request: Any) -> None:
        for failed in self._call(name, request).failed:
            raise Refused(NAMES.get(failed.error.name, failed.error.name))

    def accept(self, topic: str, record: Received) -> None:
        self._acknowledge("Ack", pb.AckRequest(group=self.group(topic), receipts=[record.handle]))

    def retry(self, topic: str, record: Received, delay_s: int) -> None:
        entry = pb.Retry(receipt=record.handle, delay_ms=delay_s * 1000)
        self._acknowledge("Retry", pb.RetryRequest(group=self.group(topic), records=[entry]))

    def extend(self, topic: str, record: Received, lease_s: int) -> None:
        entry = pb.Extend(receipt=record.handle, lease_ms=lease_s * 1000)
        self._acknowledge("Extend", pb.ExtendRequest(group=self.group(topic), records=[entry]))

    def is_empty(self, topic: str) -> bool:
        """Return whether a stream receives nothing. It ends from the client's side, and the method waits for the status
        of the broker: after a deadline of the call the broker could still lease a record of a later step."""
        stream = Stream(self._method("Receive"), self.group(topic), topic, 1)
        ending = threading.Timer(scaled(EMPTY_S), stream.half_close)
        ending.start()
        try:
            return not any(response.records for response in stream.responses)
        finally:
            ending.cancel()
            stream.end()

    def redrive(self, topic: str) -> int:
        request = pb.RedriveRequest(group=self.group(topic), topic=topic, redrive_id="one")
        return int(self._call("Redrive", request).redriven)

    def read_from(self, topic: str, time_ms: int) -> list[str]:
        answer = self._call("Fetch", pb.FetchRequest(topic=topic, time_ms=time_ms))
        return [each.value.decode() for each in answer.records]

    def transactions(self, pattern: str) -> list[tuple[str, str]]:
        answer = self._call("ListTransactions", pb.ListTransactionsRequest(pattern=pattern))
        assert answer.is_complete
        return [(each.transactional_id, each.state) for each in answer.transactions]

    def transaction(self, transactional_id: str) -> tuple[str, list[str]]:
        found = self._call("DescribeTransaction", pb.TransactionalId(transactional_id=transactional_id))
        return found.state, [f"{each.topic}-{each.partition}" for each in found.partitions]

    def terminate(self, transactional_id: str) -> None:
        self._call("TerminateTransaction", pb.TransactionalId(transactional_id=transactional_id))

    def hanging(self, topic: str) -> list[int]:
        request = pb.FindHangingRequest(topic=topic, partition=0, open_ms_min=0)
        answer = self._call("FindHangingTransactions", request)
        return [each.start_offset for each in answer.transactions]

    def abort(self, topic: str, start_offset: int) -> None:
        request = pb.AbortTransactionRequest(topic=topic, partition=0, start_offset=start_offset)
        self._call("AbortTransaction", request)
        producers = self._call("DescribeProducers", pb.DescribeProducersRequest(topic=topic, partition=0))
        assert not any(each.HasField("transaction_start_offset") for each in producers.producers)

    def close(self) -> None:
        for stream in self._streams:
            stream.end()
        self._channel.close()


def received(record: Any) -> Received:
    key = record.key.decode() if record.HasField("key") else None
    return Received(record.value.decode(), key, record.delivery_count, record.receipt)


def refused(error: Any) -> Refused:
    """Return the error by the name in its trailing metadata."""
    metadata = dict(error.trailing_metadata() or ())
    name = metadata.get("mansio-error", f"{error.code()}: {error.details()}")
    return Refused(NAMES.get(name, name))
