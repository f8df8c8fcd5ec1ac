"""Faults of a test broker: full disk, failing flushes, dropped and slow connections, a partition without a leader, and
errors of chosen requests.

Faults of the disk are those of the simulated disk. Faults of requests take effect before the broker reads the request,
so a request that fails changes nothing.
"""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mansio.errors import Unavailable
from mansio.metadata.metadata_store import Put, encode
from mansio.metadata.model import partition_document
from mansio.testing.error_responses import encode_error_response, error_code
from mansio.wire.api_versions import SUPPORTED_APIS, ApiKey
from mansio.wire.headers import read_request_header

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Sequence

    from mansio.api.kafka.connections.connection import Connection
    from mansio.api.kafka.connections.socket_writer import ResponsePart
    from mansio.api.kafka.server.listener import BeginRequest
    from mansio.node.broker import Broker
    from mansio.testing.disk import SimulatedDisk
    from mansio.testing.metadata import InMemoryStore

SYNC_CALLS = frozenset({"sync", "sync_all", "sync_directory"})
NO_LEADER = -1


class BrokerFaults:
    """Faults of one test broker. Those that are context managers end with their `with` block."""

    def __init__(self, run_on_loop: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self._run_on_loop = run_on_loop
        self._broker: Broker | None = None
        self._store: InMemoryStore | None = None
        self._errors: dict[int, list[int]] = {}
        """API key -> error codes of its next requests."""
        self._delay_ms = 0.0
        self._refuses = False
        self._is_disk_full = False
        self._do_flushes_fail = False

    # Disk

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """Let every write to the disk fail with ENOSPC: the broker refuses records and serves reads."""
        self._is_disk_full = True
        try:
            yield
        finally:
            self._is_disk_full = False

    @contextmanager
    def failing_flush(self) -> Iterator[None]:
        """Let every flush fail with EIO. A log whose flush failed accepts no records until the broker restarts."""
        self._do_flushes_fail = True
        try:
            yield
        finally:
            self._do_flushes_fail = False

    def _disk_error(self, operation: str, path: str) -> int | None:  # noqa: ARG002  # signature of `use_failures`
        if self._is_disk_full and operation == "write":
            return errno.ENOSPC
        if self._do_flushes_fail and operation in SYNC_CALLS:
            return errno.EIO
        return None

    # Connections

    def drop_connections(self) -> None:
        """Close all connections of clients, which may connect again."""
        self._run_on_loop(self._drop())

    @contextmanager
    def refused_connections(self) -> Iterator[None]:
        """Close all connections, and every new one at its first request."""
        self._refuses = True
        try:
            self.drop_connections()
            yield
        finally:
            self._refuses = False

    @contextmanager
    def slow_connections(self, seconds: float) -> Iterator[None]:
        """Let each connection pause for `seconds` of real time after every request that it starts."""
        self._delay_ms = seconds * 1000
        try:
            yield
        finally:
            self._delay_ms = 0.0

    async def _drop(self) -> None:
        self._running.server.abort_connections()

    # Requests

    def error(self, api: str, name: str, *, count: int = 1) -> None:
        """Let the next `count` requests of an API fail: `error("Produce", "NOT_LEADER_OR_FOLLOWER", count=3)`.

        Raises:
            ValueError: Kafka has no such API or error, or no broker offers the API.
        """
        key = _api_key(api)
        self._errors.setdefault(key, []).extend([error_code(name)] * count)

    def clear(self) -> None:
        """Forget the errors that `error` added and no request has had."""
        self._errors.clear()

    @contextmanager
    def no_leader(self, topic: str, partition: int = 0) -> Iterator[None]:
        """Let a partition have no leader, as after the failure of all its replicas. It gets one at the end."""
        self._run_on_loop(self._resign(topic, partition))
        try:
            yield
        finally:
            self._run_on_loop(self._lead(topic, partition))

    async def _resign(self, topic: str, index: int) -> None:
        partition = self._running.service.partitions.find(topic, None, index)
        partition.resign()
        self._store_leader(topic, index, NO_LEADER, partition.replica.leader_epoch)

    async def _lead(self, topic: str, index: int) -> None:
        partition = self._running.service.partitions.find(topic, None, index)
        epoch = partition.replica.leader_epoch + 1
        partition.become_leader(epoch, in_sync=[partition.broker_id], replicas=[partition.broker_id])
        self._store_leader(topic, index, partition.broker_id, epoch)

    def _store_leader(self, topic: str, index: int, leader: int, epoch: int) -> None:
        """Change the metadata of the partition, as a controller does."""
        topics = self._running.service.topics
        found = topics.find(topic)
        before = found.partitions[index]
        after = before._replace(leader=leader, leader_epoch=epoch, partition_epoch=before.partition_epoch + 1)
        key = topics.state.keys.partition(found.topic_id, index)
        assert self._store is not None
        self._store.transact([], [Put(key, encode(partition_document(after), "test"))])

    # Connection to the broker

    def _attach(self, broker: Broker, disk: SimulatedDisk, store: InMemoryStore) -> None:
        """Use a broker that was started with `_intercept`."""
        self._broker, self._store = broker, store
        disk.use_failures(self._disk_error)

    def _intercept(self, begin: BeginRequest) -> BeginRequest:
        """Return a function that starts requests with the faults of this object; `begin` is the one without."""

        def begin_with_faults(connection: Connection, frame: memoryview) -> Sequence[ResponsePart] | None:
            if self._refuses:
                connection.abort()
                return []
            if self._delay_ms:
                connection.pause_reading_ms(round(self._delay_ms))
            if self._errors and (failed := self._failed_response(frame)) is not None:
                return failed
            return begin(connection, frame)

        return begin_with_faults

    @property
    def _running(self) -> Broker:
        if self._broker is None:
            raise Unavailable("the test broker is not running")
        return self._broker

    def _failed_response(self, frame: memoryview) -> Sequence[ResponsePart] | None:
        """Return the response of a request that is to fail; None if it is not."""
        header = read_request_header(frame)
        codes = self._errors.get(header.api_key)
        if not codes:
            return None
        body = frame[header.body_position :]
        code = codes.pop(0)
        return [encode_error_response(header.api_key, header.api_version, header.correlation_id, body, code)]


def _api_key(name: str) -> int:
    """Return the key of an API that the broker offers, by its name in Kafka's protocol (`ShareFetch`)."""
    wanted = name.replace("_", "").lower()
    for key in SUPPORTED_APIS:
        if ApiKey(key).name.replace("_", "").lower() == wanted:
            return int(key)
    raise ValueError(f"the broker offers no API {name!r}")
