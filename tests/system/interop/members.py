"""Members of consumer groups, one per foreign client, all with the same face.

Owns: one thread per member, in which its client lives. Always true: a member polls until `leave` (which
closes the client, and so leaves the group) or `fail`; what it was given is in `received`, what it holds now
in `assignment`.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from aiokafka import AIOKafkaConsumer, ConsumerRebalanceListener
from confluent_kafka import Consumer, KafkaError, TopicPartition
from kafka import KafkaConsumer

from support.machine import scaled
from support.present import present
from support.waiting import wait_until
from system.interop.clients import QUIET

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

SESSION_MS = 6_000
KAFKA_PYTHON_METADATA_MS = 2_000
"""kafka-python forgets that it needs metadata if the response to an earlier request arrives in that moment: a consumer
that subscribed then has no partitions until the next refresh, by default for five minutes. Members therefore ask for
the partitions first."""
HEARTBEAT_MS = 200
POLL_S = 0.05
COMMIT_MS = 100
MOVE_DEADLINE_S = 40.0


class Member:
    """A member of `group`, reading `topic`. `options` go to the client as they are."""

    def __init__(self, bootstrap_servers: str, group: str, topic: str, **options: Any) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.group = group
        self.topic = topic
        self.options = options
        self.assignment: frozenset[int] = frozenset()
        self.assignments: list[frozenset[int]] = []
        self.received: list[tuple[int, int, bytes | None]] = []
        self.failure: BaseException | None = None
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self._guarded, name=f"{group} member", daemon=True)

    def join(self) -> Member:
        self._thread.start()
        return self

    def leave(self) -> None:
        """Close the client and return when it is closed."""
        self.stopping.set()
        self._thread.join(scaled(20))
        assert not self._thread.is_alive(), "the client did not close within 20 s"
        if self.failure is not None:
            raise self.failure

    @property
    def values(self) -> list[bytes | None]:
        return [value for _, _, value in self.received]

    def _guarded(self) -> None:
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  # given to the test by `leave` and the waits
            self.failure = error

    def _run(self) -> None:
        raise NotImplementedError

    def _assigned(self, partitions: Iterable[int]) -> None:
        self.assignment = frozenset(partitions)
        self.assignments.append(self.assignment)


class ConfluentMember(Member):
    def _run(self) -> None:
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": self.group,
                "auto.offset.reset": "earliest",
                "session.timeout.ms": SESSION_MS,
                "heartbeat.interval.ms": HEARTBEAT_MS,
                "auto.commit.interval.ms": COMMIT_MS,
                "fetch.wait.max.ms": 50,
                "reconnect.backoff.max.ms": 200,
                **QUIET,
                **self.options,
            }
        )
        consumer.subscribe([self.topic], on_assign=self._given, on_revoke=self._taken, on_lost=self._taken)
        try:
            while not self.stopping.is_set():
                message = consumer.poll(POLL_S)
                if message is None:
                    continue
                error = message.error()
                if error is None:
                    self.received.append(
                        (present(message.partition()), present(message.offset()), message.value())
                    )
                elif error.fatal() or error.code() == KafkaError._FATAL:
                    raise AssertionError(error)
        finally:
            consumer.close()

    def _given(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._assigned(self.assignment | {one.partition for one in partitions})

    def _taken(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._assigned(self.assignment - {one.partition for one in partitions})


class KafkaPythonMember(Member):
    def _run(self) -> None:
        consumer = KafkaConsumer(
            self.topic,
            bootstrap_servers=self.bootstrap_servers,
            group_id=self.group,
            auto_offset_reset="earliest",
            heartbeat_interval_ms=HEARTBEAT_MS,
            auto_commit_interval_ms=COMMIT_MS,
            fetch_max_wait_ms=50,
            reconnect_backoff_max_ms=200,
            metadata_max_age_ms=KAFKA_PYTHON_METADATA_MS,
            **{"session_timeout_ms": SESSION_MS, **self.options},
        )
        try:
            while not self.stopping.is_set() and not consumer.partitions_for_topic(self.topic):
                consumer.poll(timeout_ms=int(POLL_S * 1000))
            while not self.stopping.is_set():
                for messages in consumer.poll(timeout_ms=int(POLL_S * 1000)).values():
                    self.received += [(one.partition, one.offset, one.value) for one in messages]
                now = frozenset(one.partition for one in consumer.assignment())
                if now != self.assignment:
                    self._assigned(now)
        finally:
            consumer.close()


class AiokafkaMember(Member):
    def _run(self) -> None:
        asyncio.run(self._consume())

    async def _consume(self) -> None:
        member = self

        class Listener(ConsumerRebalanceListener):  # type: ignore[misc]  # of a library without types
            async def on_partitions_revoked(self, revoked: Any) -> None:
                member._assigned(())

            async def on_partitions_assigned(self, assigned: Any) -> None:
                member._assigned(one.partition for one in assigned)

        consumer = AIOKafkaConsumer(
            bootstrap_servers=self.bootstrap_servers,
            group_id=self.group,
            auto_offset_reset="earliest",
            session_timeout_ms=SESSION_MS,
            heartbeat_interval_ms=HEARTBEAT_MS,
            auto_commit_interval_ms=COMMIT_MS,
            fetch_max_wait_ms=50,
            **self.options,
        )
        consumer.subscribe([self.topic], listener=Listener())
        await consumer.start()
        try:
            while not self.stopping.is_set():
                for messages in (await consumer.getmany(timeout_ms=int(POLL_S * 1000))).values():
                    self.received += [(one.partition, one.offset, one.value) for one in messages]
        finally:
            await consumer.stop()


MEMBERS: dict[str, Callable[..., Member]] = {
    "confluent-kafka": ConfluentMember,
    "kafka-python": KafkaPythonMember,
    "aiokafka": AiokafkaMember,
}


def wait_for_shares(members: Sequence[Member], *sizes: int) -> None:
    """Return when the members hold disjoint shares of these sizes, in any order."""

    def shared() -> bool:
        for member in members:
            if member.failure is not None:
                raise member.failure
        shares = [member.assignment for member in members]
        return sorted(map(len, shares)) == sorted(sizes) and len(frozenset().union(*shares)) == sum(sizes)

    wait_until(
        shared, MOVE_DEADLINE_S, f"shares of {sizes}, not {[sorted(one.assignment) for one in members]}"
    )


def wait_for_values(members: Sequence[Member], expected: set[bytes]) -> None:
    """Return when the members together have received every one of these values."""

    def received() -> bool:
        for member in members:
            if member.failure is not None:
                raise member.failure
        return {value for member in members for value in member.values} >= expected

    wait_until(received, MOVE_DEADLINE_S, f"{len(expected)} values received")
