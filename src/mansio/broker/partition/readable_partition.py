"""The reading side of a partition: what may be read, where it is, and who waits for more of it.

Owns the fetches that are parked here. Always true: no reader gets a record at or above the readable end; whoever is
parked is woken by what it waits for, and by whatever ends the wait.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

from mansio.broker.partition.storage_health import UNKNOWN_OFFSET
from mansio.errors import CorruptLog, NotLeaderOrFollower, OffsetOutOfRange
from mansio.state.replica import ReplicationProgress

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.partition.storage_health import StorageHealth
    from mansio.state.replica import FollowerReplica
    from mansio.storage.flush.group_commit import GroupCommit
    from mansio.storage.log import Log, LogSlice

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1


class ReadablePartition:
    """A log that is read up to its replicas' high watermark. All methods belong to the broker's loop."""

    __slots__ = (
        "_parked",
        "_readable_ends",
        "group_commit",
        "index",
        "log",
        "parked_followers",
        "replica",
        "storage_health",
        "topic",
    )

    def __init__(
        self,
        topic: str,
        index: int,
        log: Log,
        replica: ReplicationProgress | FollowerReplica,
        group_commit: GroupCommit,
        storage_health: StorageHealth,
    ) -> None:
        self.topic = topic
        self.index = index
        self.log = log
        self.replica = replica
        self.group_commit = group_commit
        self.storage_health = storage_health
        self._readable_ends: list[Callable[[int], int | None]] = []
        self._parked: dict[Callable[[], None], None] = {}
        self.parked_followers: dict[Callable[[], None], None] = {}

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.index}"

    @property
    def leader_epoch(self) -> int:
        return self.replica.leader_epoch

    @property
    def start_offset(self) -> int:
        return self.log.start_offset

    @property
    def end_offset(self) -> int:
        return self.log.end_offset

    @property
    def high_watermark(self) -> int:
        return self.replica.high_watermark

    @property
    def is_leadership_uncertain(self) -> bool:
        """May another broker lead by now? So it is while the session of the one that leads here is not sure to live."""
        return isinstance(self.replica, ReplicationProgress) and self.replica.is_session_uncertain

    def readable_end(self, isolation_level: int = READ_UNCOMMITTED) -> int:
        """The offset below which a reader of this isolation level may read."""
        end = self.replica.high_watermark
        for readable_end in self._readable_ends:
            bound = readable_end(isolation_level)
            if bound is not None and bound < end:
                end = bound
        return end

    def read(self, offset: int, max_bytes: int, isolation_level: int = READ_UNCOMMITTED) -> LogSlice | None:
        """Whole batches from the one that holds `offset`, below the readable end; None when there are none yet.

        An offset between the readable end and the end of the log is legal and simply has nothing to show.
        """
        limit = self.readable_end(isolation_level)
        if offset >= limit:
            if offset > self.log.end_offset:
                self._raise_out_of_range(offset)
            return None
        try:
            return self.log.read(offset, max_bytes, limit)
        except CorruptLog as error:
            self.storage_health.corrupt(self.topic, self.index, offset, error)
            raise

    def _raise_out_of_range(self, offset: int) -> NoReturn:
        """A client that is told "out of range" begins elsewhere, and reads again or leaves out what is there. So only a
        leader says it that is sure to be one: another may have written what it does not know of."""
        if self.is_leadership_uncertain:
            raise NotLeaderOrFollower(
                f"{self.name}: offset {offset} is not here, and another broker may lead by now"
            )
        raise OffsetOutOfRange(
            f"{self.name}: offset {offset} is beyond the end of the log, {self.log.end_offset}"
        )

    def offset_at_timestamp(self, timestamp_ms: int, limit_offset: int) -> tuple[int, int, int] | None:
        """(offset, timestamp in ms, leader epoch) of the first record at or after a moment, below `limit_offset`."""
        try:
            return self.log.offset_for_time(timestamp_ms, limit_offset)
        except CorruptLog as error:
            self.storage_health.corrupt(self.topic, self.index, UNKNOWN_OFFSET, error)
            raise

    def max_timestamp_offset(self, limit_offset: int) -> tuple[int, int, int] | None:
        """The same of the first record with the largest timestamp (KIP-734)."""
        try:
            return self.log.max_timestamp(limit_offset)
        except CorruptLog as error:
            self.storage_health.corrupt(self.topic, self.index, UNKNOWN_OFFSET, error)
            raise

    def park(self, wake: Callable[[], None]) -> None:
        """Call `wake` whenever more may be readable, until `unpark`.

        What is in the log and not yet synced is made durable now: somebody waits for it.
        """
        self._parked[wake] = None
        if self.log.end_offset > self.replica.high_watermark:
            self.group_commit.request(self.log, urgent=True)

    def unpark(self, wake: Callable[[], None]) -> None:
        self._parked.pop(wake, None)

    def wake_readers(self) -> None:
        """Have the parked fetches of clients look again: a follower, which gets all of the log, waits for no commit."""
        for wake in tuple(self._parked):
            wake()

    def wake(self) -> None:
        """Have all parked fetches look again."""
        for wake in (*self._parked, *self.parked_followers):
            wake()
