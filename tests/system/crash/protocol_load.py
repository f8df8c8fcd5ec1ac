"""Producers and consumers of one queue over every protocol, which go on while the broker dies, and their checker.

The queue is a FIFO queue of SQS, so its topic keeps the order of keys and deduplicates. Each producer has keys of its
own and sends their numbers in order, each again with the same deduplication id until it is acknowledged. The consumers
are members of one share group.

The checker: a number is received only after every smaller one of its key was acknowledged, or its acknowledgement was
tried; one whose acknowledgement was answered is not received again; at the end everything that a producer was told is
stored has been received, and the log has each number of a key once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, defaultdict, deque
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import grpc
import httpx
from botocore.exceptions import BotoCoreError, ClientError
from confluent_kafka import Producer

import mansio.blocking
from mansio.api.grpc import mansio_pb2 as pb
from mansio.errors import LeaseLost, MansioError
from support.sqs import sqs_client
from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

QUEUE: Final = "mixed.fifo"
GROUP: Final = f"sqs.{QUEUE}"
KEYS: Final = 3
"""Number of keys of each producer."""

BACKLOG_MAX: Final = 60
"""Number of records of one producer that are not acknowledged by consumers."""

LEASE_MS: Final = 2_000
HISTORY_MAX: Final = 5_000
CALL_S: Final = 10
RETRY_S: Final = 0.1
SERVICE: Final = pb.DESCRIPTOR.services_by_name["Mansio"]


class Addresses(NamedTuple):
    """Addresses of one broker: `kafka` and `grpc` as host:port, the others as URLs."""

    kafka: str
    http: str
    grpc: str
    sqs: str


class NoAnswer(Exception):
    """The broker is down, or has not answered: it is unknown what the call has done."""


class Refused(Exception):
    """The lease is lost."""


class Delivery(NamedTuple):
    """A received record: `text` is `key:number`. `handle`: by which it is acknowledged."""

    text: str
    handle: Any


class ProtocolClient:
    """A client of one protocol; each is used by one thread. Calls raise `NoAnswer`."""

    name: ClassVar[str]

    def __init__(self, addresses: Addresses) -> None:
        self.addresses = addresses

    def send(self, key: str, text: str) -> None:
        """Publish a record with `text` as value and deduplication id."""
        raise NotImplementedError

    def receive(self) -> list[Delivery]:
        """Receive records, or none after about a second."""
        raise NotImplementedError

    def acknowledge(self, delivery: Delivery) -> None:
        """Acknowledge a record. Raises `Refused` if its lease is lost."""
        raise NotImplementedError

    def close(self) -> None:
        """End the connections."""


class Http(ProtocolClient):
    name = "http"

    def __init__(self, addresses: Addresses) -> None:
        super().__init__(addresses)
        self._http = httpx.Client(base_url=f"{addresses.http}/v1", timeout=CALL_S)

    def _post(self, path: str, body: Any) -> Any:
        try:
            response = self._http.post(path, json=body)
        except httpx.HTTPError as error:
            raise NoAnswer from error
        if response.status_code >= 500:
            raise NoAnswer(response.text)
        if response.status_code == 409:
            raise Refused(response.text)
        assert response.status_code == 200, response.text
        return response.json()

    def send(self, key: str, text: str) -> None:
        records = [{"value": text, "key": key, "dedup_id": text}]
        answer = self._post(f"/topics/{QUEUE}/records/batch", {"records": records})
        if answer["failed"]:
            raise NoAnswer(answer)

    def receive(self) -> list[Delivery]:
        body = {"topics": [QUEUE], "max_records": 5, "wait_ms": 1_000, "lease_ms": LEASE_MS}
        answer = self._post(f"/groups/{GROUP}/receive", body)
        return [Delivery(each["value"], each["receipt"]) for each in answer["records"]]

    def acknowledge(self, delivery: Delivery) -> None:
        self._post(f"/groups/{GROUP}/ack", {"receipts": [delivery.handle]})

    def close(self) -> None:
        self._http.close()


class Grpc(ProtocolClient):
    name = "grpc"

    def __init__(self, addresses: Addresses) -> None:
        super().__init__(addresses)
        options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 100)]
        self._channel = grpc.insecure_channel(addresses.grpc, options)
        self._requests: queue.SimpleQueue[Any] | None = None
        self._responses: Any = None

    def _method(self, name: str) -> Any:
        method = SERVICE.methods_by_name[name]
        kind = self._channel.stream_stream if method.client_streaming else self._channel.unary_unary
        return kind(
            f"/{SERVICE.full_name}/{name}",
            method.input_type._concrete_class.SerializeToString,
            method.output_type._concrete_class.FromString,
        )

    def send(self, key: str, text: str) -> None:
        record = pb.NewRecord(value=text.encode(), key=key.encode(), dedup_id=text.encode())
        try:
            answer = self._method("Publish")(pb.PublishRequest(topic=QUEUE, records=[record]), timeout=CALL_S)
        except grpc.RpcError as error:
            raise NoAnswer from error
        if answer.ranges[0].HasField("error"):
            raise NoAnswer(str(answer))

    def receive(self) -> list[Delivery]:
        """The stream of a call ends after a second; until then its records are leased."""
        self._end_stream()
        requests = self._requests = queue.SimpleQueue()
        opening = pb.ReceiveOpen(group=GROUP, topics=[QUEUE], lease_ms=LEASE_MS)
        requests.put(pb.ReceiveRequest(open=opening, credits=5))
        self._responses = self._method("Receive")(iter(requests.get, None), timeout=CALL_S)
        watch = threading.Timer(1, self._responses.cancel)
        watch.start()
        try:
            records = next(self._responses).records
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.CANCELLED:
                return []
            raise NoAnswer from error
        finally:
            watch.cancel()
        return [Delivery(each.value.decode(), each.receipt) for each in records]

    def _end_stream(self) -> None:
        if self._requests is not None:
            self._requests.put(None)
            self._responses.cancel()
            self._requests = None

    def acknowledge(self, delivery: Delivery) -> None:
        try:
            request = pb.AckRequest(group=GROUP, receipts=[delivery.handle])
            answer = self._method("Ack")(request, timeout=CALL_S)
        except grpc.RpcError as error:
            raise NoAnswer from error
        for failed in answer.failed:
            raise Refused(str(failed)) if failed.error.name == "InvalidRecordState" else NoAnswer(str(failed))

    def close(self) -> None:
        self._end_stream()
        self._channel.close()


class Sqs(ProtocolClient):
    name = "sqs"

    def __init__(self, addresses: Addresses) -> None:
        super().__init__(addresses)
        self._sqs = sqs_client(addresses.sqs)
        self._url = f"{addresses.sqs}/000000000000/{QUEUE}"

    def _call(self, call: Callable[..., Any], **parameters: Any) -> Any:
        try:
            return call(QueueUrl=self._url, **parameters)
        except BotoCoreError as error:
            raise NoAnswer from error
        except ClientError as error:
            if error.response["ResponseMetadata"]["HTTPStatusCode"] >= 500:
                raise NoAnswer from error
            if "expired" in str(error):
                raise Refused from error
            raise

    def send(self, key: str, text: str) -> None:
        self._call(self._sqs.send_message, MessageBody=text, MessageGroupId=key, MessageDeduplicationId=text)

    def receive(self) -> list[Delivery]:
        answer = self._call(self._sqs.receive_message, MaxNumberOfMessages=5, WaitTimeSeconds=1)
        return [Delivery(each["Body"], each["ReceiptHandle"]) for each in answer.get("Messages", ())]

    def acknowledge(self, delivery: Delivery) -> None:
        self._call(self._sqs.delete_message, ReceiptHandle=delivery.handle)

    def close(self) -> None:
        self._sqs.close()


class Kafka(ProtocolClient):
    """confluent-kafka's producer, and the receiver of Mansio's client."""

    name = "kafka"

    def __init__(self, addresses: Addresses) -> None:
        super().__init__(addresses)
        self._producer: Producer | None = None
        self._client: Any = None
        self._receiver: Any = None

    def send(self, key: str, text: str) -> None:
        if self._producer is None:
            self._producer = Producer(
                {
                    "bootstrap.servers": self.addresses.kafka,
                    "message.timeout.ms": CALL_S * 1000,
                    "linger.ms": 0,
                    "reconnect.backoff.max.ms": 200,
                    "log_level": 0,
                }
            )
        errors: list[Any] = []
        self._producer.produce(
            QUEUE,
            text.encode(),
            key,
            headers=[("mansio-dedup-id", text.encode())],
            on_delivery=lambda error, _: errors.append(error),
        )
        if self._producer.flush(2 * CALL_S) or errors[0] is not None:
            raise NoAnswer(str(errors))

    def receive(self) -> list[Delivery]:
        try:
            if self._receiver is None:
                self._client = mansio.blocking.connect(self.addresses.kafka)
                self._receiver = self._client.receive(QUEUE, group=GROUP, max_records=5, lease_ms=LEASE_MS)
                self._receiver.__enter__()
            return [Delivery(each.value.decode(), each) for each in self._receiver.poll(1_000)]
        except MansioError as error:
            raise NoAnswer from error

    def acknowledge(self, delivery: Delivery) -> None:
        try:
            delivery.handle.ack()
        except LeaseLost as error:
            raise Refused from error
        except MansioError as error:
            raise NoAnswer from error

    def close(self) -> None:
        if self._receiver is not None:
            self._receiver.close()
            self._client.close()


CLIENTS: Final = (Http, Grpc, Sqs, Kafka)


class ProtocolLoad:
    """A producer and a consumer of each protocol."""

    def __init__(self, addresses: Addresses) -> None:
        self._addresses = addresses
        self._lock = threading.Lock()
        self._is_producing = threading.Event()
        self._is_ending = threading.Event()
        self._threads: list[threading.Thread] = []
        self.errors: list[str] = []
        self.sent: dict[str, set[int]] = defaultdict(set)
        """Numbers that are stored, by key."""
        self.tried: dict[str, set[int]] = defaultdict(set)
        """Numbers whose acknowledgement was tried."""
        self.done: dict[str, set[int]] = defaultdict(set)
        """Numbers whose acknowledgement was answered."""
        self.received: Counter[str] = Counter()
        """Deliveries by protocol."""
        self.history: deque[str] = deque(maxlen=HISTORY_MAX)
        """What happened last, for an error: times in seconds, protocols, events, records."""

    def start(self) -> None:
        self._is_producing.set()
        for kind in CLIENTS:
            for work in (self._produce, self._consume):
                thread = threading.Thread(target=self._run, args=(kind, work), daemon=True)
                thread.start()
                self._threads.append(thread)

    def _run(
        self, kind: type[ProtocolClient], work: Callable[[ProtocolClient, Callable[..., Any]], None]
    ) -> None:
        client = kind(self._addresses)

        def attempt(call: Callable[..., Any], *arguments: Any) -> Any:
            """Repeat a call until it is answered or the load ends."""
            while not self._is_ending.is_set():
                try:
                    return call(*arguments)
                except NoAnswer:
                    self._is_ending.wait(RETRY_S)
            return None

        try:
            work(client, attempt)
        except Exception as error:  # noqa: BLE001 - it fails the test
            self.errors.append(f"{kind.name} {work.__name__}: {error!r}")
        finally:
            client.close()

    def _produce(self, client: ProtocolClient, attempt: Callable[..., Any]) -> None:
        keys = [f"{client.name}-{number}" for number in range(KEYS)]
        following = 0
        while self._is_producing.is_set():
            with self._lock:
                waiting = KEYS * following - sum(len(self.tried[key]) for key in keys)
            if waiting > BACKLOG_MAX:
                self._is_ending.wait(RETRY_S)
                continue
            for key in keys:
                attempt(client.send, key, f"{key}:{following}")
                if self._is_ending.is_set():
                    return
                self.note(client.name, "stored", f"{key}:{following}")
                with self._lock:
                    self.sent[key].add(following)
            following += 1

    def _consume(self, client: ProtocolClient, attempt: Callable[..., Any]) -> None:
        while not self._is_ending.is_set():
            deliveries = attempt(client.receive) or []
            self._check(client.name, deliveries)
            for each in deliveries:
                self.note(client.name, "received", each.text)
            for each in deliveries:
                key, number = split(each.text)
                with self._lock:
                    self.tried[key].add(number)
                try:
                    client.acknowledge(each)
                except (NoAnswer, Refused) as error:
                    self.note(client.name, type(error).__name__, each.text)
                    continue
                self.note(client.name, "acknowledged", each.text)
                with self._lock:
                    self.done[key].add(number)

    def note(self, name: str, event: str, text: str = "") -> None:
        """Add to the history."""
        self.history.append(f"{time.monotonic():.3f} {name} {event} {text}")

    def history_of_errors(self) -> str:
        """Return the history of the keys of errors, with the events that have no key."""
        keys = {f" {key}:" for key in self.tried if any(f"{key}:" in error for error in self.errors)}
        lines = [one for one in self.history if ":" not in one or any(key in one for key in keys)]
        return "\n".join([*self.errors, *lines])

    def _check(self, name: str, deliveries: Sequence[Delivery]) -> None:
        with self._lock:
            before: dict[str, set[int]] = defaultdict(set)
            for each in deliveries:
                key, number = split(each.text)
                self.received[name] += 1
                if number in self.done[key]:
                    self.errors.append(f"{name}: {each.text} was acknowledged and is received again")
                missing = set(range(number)) - self.tried[key] - before[key]
                if missing:
                    self.errors.append(f"{name}: {each.text} is received before {sorted(missing)[:5]}")
                before[key].add(number)

    @property
    def progress(self) -> int:
        """Acknowledged numbers of the producer whose records progress least."""
        with self._lock:
            counts = Counter({kind.name: 0 for kind in CLIENTS})
            for key, numbers in self.done.items():
                counts[key.partition("-")[0]] += len(numbers)
            return min(counts.values())

    def end(self, seconds: float) -> None:
        """Stop the producers, and the consumers once everything that is stored has arrived."""
        self._is_producing.clear()
        for thread in self._threads[::2]:
            thread.join(seconds)
        wait_until(lambda: self.errors or self.is_drained(), seconds, "all records arrive")
        self._is_ending.set()
        for thread in self._threads:
            thread.join(seconds)

    def is_drained(self) -> bool:
        """Whether every stored number has arrived."""
        with self._lock:
            return all(numbers <= self.tried[key] for key, numbers in self.sent.items())

    def check_log(self, values: Sequence[str]) -> None:
        """Raise `AssertionError` unless the log has each number of each key once and in order."""
        found: dict[str, list[int]] = defaultdict(list)
        for value in values:
            key, number = split(value)
            found[key].append(number)
        for key, numbers in found.items():
            assert numbers == list(range(len(numbers))), f"{key}: {numbers}"
        for key, sent in self.sent.items():
            assert sent <= set(found[key]), f"{key}: lost {sorted(sent - set(found[key]))}"


def split(text: str) -> tuple[str, int]:
    """Return the key and the number of a record."""
    key, _, number = text.partition(":")
    return key, int(number)
