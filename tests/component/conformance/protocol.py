"""One protocol as the conformance scenarios use it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from support.waiting import wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mansio.testing.broker import TestBroker

WAIT_S: Final = 20
"""How long a receive waits for a record that must come."""

LEASE_S: Final = 30
ATTEMPTS: Final = 3

UNKNOWN_TOPIC: Final = "unknown topic"
TOO_LARGE: Final = "too large"
LEASE_LOST: Final = "lease lost"
INVALID: Final = "invalid argument"
UNKNOWN_ID: Final = "unknown transactional id"
WRONG_STATE: Final = "wrong state of the transaction"

PRIORITY: Final = "mansio.priority.enable"
DEDUPLICATION: Final = "mansio.dedup.ms"
DELAYS: Final = "mansio.delay.enable"
LOG_APPEND_TIME: Final = "message.timestamp.type"


class Refused(Exception):
    """An error of the broker. Its argument is one of the names above, or what the protocol returned."""


@dataclass(frozen=True, slots=True)
class Received:
    """A leased record. `handle`: by which the protocol acknowledges it."""

    value: str
    key: str | None
    deliveries: int
    handle: Any = None


class Protocol(ABC):
    """A client of one protocol; its group of a topic is its own."""

    name: ClassVar[str]
    cannot: ClassVar[Mapping[str, str]] = {}
    """Reasons by what a scenario needs."""

    def __init__(self, broker: TestBroker) -> None:
        self.broker = broker
        self.admin = broker.client()

    def group(self, topic: str) -> str:
        return f"{self.name}-{topic}"

    def create(self, topic: str, *, by_key: bool = False, attempts: int = ATTEMPTS, **config: str) -> None:
        """Create a topic with one partition whose group has leases of `LEASE_S` seconds."""
        self.admin.admin.create_topic(topic, partitions=1, config=config)
        self.admin.admin.alter_group_config(
            self.group(topic),
            {
                "share.auto.offset.reset": "earliest",
                "share.record.lock.duration.ms": str(LEASE_S * 1000),
                "share.delivery.count.limit": str(attempts),
                "mansio.retry.backoff.ms": "0",
                "errors.deadletterqueue.topic.name": f"dlq.{topic}",
                **({"mansio.share.order": "key"} if by_key else {}),
            },
        )

    @abstractmethod
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
        """Publish a record. Raises `Refused`."""

    @abstractmethod
    def take(self, topic: str, count: int, then: str) -> list[Received]:
        """Receive `count` records and `accept`, `release` or `reject` each. Raises `Refused`."""

    @abstractmethod
    def is_empty(self, topic: str) -> bool:
        """Whether no record of the topic is available to the group."""

    def receive(self, topic: str, count: int) -> list[Received]:
        """Receive `count` records and keep them leased."""
        raise NotImplementedError

    def accept(self, topic: str, record: Received) -> None:
        """Accept a received record. Raises `Refused`."""
        raise NotImplementedError

    def retry(self, topic: str, record: Received, delay_s: int) -> None:
        """Release a received record for a time."""
        raise NotImplementedError

    def extend(self, topic: str, record: Received, lease_s: int) -> None:
        """Make the lease of a received record end in `lease_s` seconds."""
        raise NotImplementedError

    def dead_letters(self, topic: str) -> list[str]:
        """Return the values of the dead letters of a topic, once there are some: they are copied in the background."""
        found: list[str] = []

        def is_found() -> bool:
            try:
                found[:] = self.read_from(f"dlq.{topic}", 0)
            except Refused as error:
                if str(error) != UNKNOWN_TOPIC:  # it is created with the first one
                    raise
            return bool(found)

        wait_until(is_found, WAIT_S)
        return found

    def redrive(self, topic: str) -> int:
        """Make all dead letters of the group available again; return their number."""
        raise NotImplementedError

    def read_from(self, topic: str, time_ms: int) -> list[str]:
        """Return the values of all records of partition 0 at or after a time."""
        raise NotImplementedError

    def transactions(self, pattern: str) -> list[tuple[str, str]]:
        """Return the transactional ids that match an expression, with their states. Raises `Refused`."""
        raise NotImplementedError

    def transaction(self, transactional_id: str) -> tuple[str, list[str]]:
        """Return state and partitions of a transactional id. Raises `Refused`."""
        raise NotImplementedError

    def terminate(self, transactional_id: str) -> None:
        """Abort the transaction of an id as a whole. Raises `Refused`."""
        raise NotImplementedError

    def hanging(self, topic: str) -> list[int]:
        """Return the offsets at which hanging transactions of partition 0 begin. Raises `Refused`."""
        raise NotImplementedError

    def abort(self, topic: str, start_offset: int) -> None:
        """Abort a hanging transaction of partition 0. Raises `Refused`."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """End all connections."""
