"""Destinations of audit lines: a file, and the internal topic `__mansio_audit`.

The topic is created with the first line, and has one partition, so that its records have one order. The broker appends
to it by itself, without quotas and authorization.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.topics.leader_appends import LeaderAppends, LedPartition
from mansio.config.topic_names import AUDIT_TOPIC
from mansio.errors import ConfigError
from mansio.host.run_in_thread import run_in_thread
from mansio.wire.batch.record_batch import build_value_only_batch

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from mansio.broker.partition.partition_set import PartitionSet
    from mansio.broker.topics.topics import TopicService
    from mansio.ports import Background, Clock, Disk, Peers, Scheduler

AUDIT_CLIENT_ID: Final = "mansio-audit"
AUDIT_PARTITIONS: Final = 1


class AuditFile:
    """A file to which lines are appended. It is opened for each batch, so it may be renamed at any time."""

    def __init__(self, path: str, disk: Disk, thread: Background, scheduler: Scheduler) -> None:
        self._path = path
        self._disk = disk
        self._thread = thread
        self._scheduler = scheduler

    async def prepare(self) -> None:
        """Create the file unless it exists. Raises `ConfigError` if lines cannot be appended to it."""

        def create() -> None:
            try:
                self._write(b"")
            except OSError as error:
                raise ConfigError(
                    f"audit_log: cannot write to {self._path}: {error.strerror or error}"
                ) from error

        await run_in_thread(self._scheduler, self._thread, create)

    async def append(self, lines: Sequence[str]) -> None:
        """Append lines and flush them. Raises `StorageError`."""
        data = "".join(f"{line}\n" for line in lines).encode()
        await run_in_thread(self._scheduler, self._thread, partial(self._write, data))

    def _write(self, data: bytes) -> None:
        file = self._disk.open(self._path, create=True)
        try:
            file.write_at([data], file.size())
            file.sync()
        finally:
            file.close()


class AuditTopic:
    """The internal topic of the audit."""

    def __init__(
        self,
        *,
        node_id: int,
        topics: TopicService,
        partitions: PartitionSet,
        scheduler: Scheduler,
        clock: Clock,
        create: Callable[[str, int], Awaitable[object]],
        peers: Peers | None,
    ) -> None:
        """`create`: creates an internal topic with a number of partitions, unless it exists; `peers`: None on a single
        node."""
        self._topics = topics
        self._clock = clock
        self._create = create
        self._appends = LeaderAppends(
            node_id=node_id,
            topics=topics,
            partitions=partitions,
            scheduler=scheduler,
            client_id=AUDIT_CLIENT_ID,
            peers=peers,
        )

    async def append(self, lines: Sequence[str]) -> None:
        """Append lines as the values of records, and return when they are committed. Raises `MansioError`."""
        if AUDIT_TOPIC not in self._topics.state.topics:
            await self._create(AUDIT_TOPIC, AUDIT_PARTITIONS)
        topic = self._topics.find(AUDIT_TOPIC)
        now_ms = self._clock.wall_ms()
        batch = build_value_only_batch([now_ms] * len(lines), [line.encode() for line in lines])
        await self._appends.append(LedPartition(topic.name, topic.topic_id.bytes, 0), batch)
