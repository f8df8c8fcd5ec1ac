"""Deduplication in simulated histories: several producers of a partition send the same ids, readers read.

The topic of these histories has a deduplication window, and retention deletes its oldest segments, so that ids are
copied. Every fourth history has a single node without etcd. Histories with an even seed have a window that outlasts
them, the others one of `SHORT_WINDOW_MS`, measured by clocks that drift and jump.

* an acknowledged id is in the log, and the offset in the response is that of its record;
* no id is in the log twice within a window, by the times of acceptance in the log;
* the view of each replica is what its log says.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mansio.broker.features.deduplication import deduplicator
from mansio.broker.features.deduplication import window as window_module
from mansio.broker.features.deduplication.dedup_control_records import (
    AcceptedIds,
    CopiedIds,
    decode_dedup_control,
)
from mansio.broker.features.deduplication.deduplicator import Deduplicator
from mansio.broker.log_view import replay as log_replay
from mansio.broker.log_view import snapshots
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER
from mansio.wire.batch.record_batch import read_header
from mansio.wire.batch.record_reader import read_records
from sim.delays import DelayedReader
from sim.feature import Feature, FeatureProducer, UnreadBatches, Until, ViewScene

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.broker.partition.partition import Partition
    from sim.brokers import SimulatedBroker
    from sim.world import World

FIRST_SEED: Final = 2_000_000
"""Histories from this seed on are of deduplication only."""

PARTITIONS: Final = 2
LONG_WINDOW_MS: Final = 7 * 24 * 3_600_000
SHORT_WINDOW_MS: Final = 2_000
CONFIGS: Final = {
    "mansio.dedup.ms": str(LONG_WINDOW_MS),
    "segment.bytes": "4096",
    "index.interval.bytes": "512",
    "retention.ms": "-1",
    "retention.bytes": "12000",
}
SETTINGS: Final = {"log_retention_check_interval_ms": 400}
CONSTANTS: Final = (
    (snapshots, "SNAPSHOT_INTERVAL_BYTES", 60_000),
    (log_replay, "SLICE_BATCHES", 20),
    (log_replay, "READ_RETRY_MS", 500),
    (deduplicator, "COPIED_IDS_MAX", 10),
    (window_module, "SHARD_IDS", 6),
    (window_module, "MARK_MS", 500),
)
"""Bounds that a history of some seconds would not reach."""

RECENT_IDS: Final = 25
DRAIN_MS_MAX: Final = 120_000


def window_ms_of(seed: int) -> int:
    return SHORT_WINDOW_MS if seed % 2 else LONG_WINDOW_MS


def configs_of(seed: int) -> dict[str, str]:
    return {**CONFIGS, "mansio.dedup.ms": str(window_ms_of(seed))}


class DeduplicationHistory:
    """What clients received, and what the logs have. `broken` is called with what is wrong, and raises."""

    def __init__(self, broken: Callable[[str], object], window_ms: int) -> None:
        self._broken = broken
        self._window_ms = window_ms
        self.sent: dict[int, set[bytes]] = {}
        self.acknowledged: dict[tuple[int, bytes], set[int]] = {}
        """Partition and id -> offsets in responses; -1 for a record that was not the first one of its batch."""
        self.stored: dict[tuple[int, bytes], list[int]] = {}
        """Partition and id -> offsets of its records."""
        self.accepted: dict[tuple[int, bytes], int] = {}
        """Partition and key -> time of the last acceptance, reduced where a clock was set back."""
        self._unread = UnreadBatches(broken)
        self.repeats = 0
        self._expected: dict[int, tuple[int, AcceptedIds]] = {}

    def acknowledge(self, index: int, base_offset: int, values: list[bytes]) -> None:
        for number, value in enumerate(values):
            self.acknowledged.setdefault((index, value), set()).add(-1 if number else base_offset)

    def read(self, partition: Partition) -> None:
        """Read what is committed in a replica's log and was not read before, and before it is deleted."""
        index = partition.index
        for header, batch in self._unread.of(partition):
            expected = self._expected.pop(index, None)
            if header.is_control:
                content = decode_dedup_control(batch)
                if isinstance(content, AcceptedIds):
                    self._expected[index] = (header.base_offset + 1, content)
                continue
            if expected is not None and (expected[0], expected[1].crc) == (header.base_offset, header.crc):
                self._accept(index, expected[1])
            for record in read_records(batch, output_bytes_max=1 << 24):
                value = record.value or b""
                if value not in self.sent.get(index, ()):
                    self._broken(f"{value!r} is at {index}/{record.offset}, and nobody sent it there")
                self.stored.setdefault((index, value), []).append(record.offset)

    def _accept(self, index: int, ids: AcceptedIds) -> None:
        for known, accepted_ms in self.accepted.items():
            if known[0] == index and accepted_ms > ids.accepted_ms:
                self.accepted[known] = ids.accepted_ms
        for known in [one for one in self.accepted if one[0] == index]:
            if self.accepted[known] <= ids.accepted_ms - self._window_ms:
                del self.accepted[known]  # it has expired, also if the clock is set back after that
        for key in ids.keys:
            before_ms = self.accepted.get((index, key))
            if before_ms is not None and ids.accepted_ms - before_ms < self._window_ms:
                self._broken(
                    f"an id of partition {index} is accepted twice in {ids.accepted_ms - before_ms} ms"
                )
            self.accepted[index, key] = ids.accepted_ms

    def check_view(self, one: Deduplicator) -> None:
        """A replica's window has the ids of its log that have not expired by a time in the log."""
        partition, window = one.partition, one.view.window
        for key, known in replay(partition, self._window_ms).items():
            if window.find(key) != known:
                self._broken(
                    f"broker {partition.broker_id}: an id of {partition.name} is {window.find(key)}, not {known}"
                )

    def finish(self) -> None:
        is_long = self._window_ms == LONG_WINDOW_MS
        for known, offsets in self.acknowledged.items():
            stored = self.stored.get(known)
            if not stored:
                self._broken(f"{known} was acknowledged and is lost")
                return
            wrong = offsets - {-1, *stored}
            if wrong and is_long:
                self._broken(f"{known} is at {stored}, and was acknowledged at {wrong}")
        if is_long:
            for known, several in self.stored.items():
                if len(several) > 1:
                    self._broken(f"{known} is at {several}")

    def numbers(self) -> dict[str, int]:
        return {"ids": len(self.stored), "repeats": self.repeats}


def replay(partition: Partition, window_ms: int) -> dict[bytes, tuple[int, int]]:
    """The ids of a log that have not expired by a time in it, key -> offset and time, by reading all of it."""
    found: dict[bytes, tuple[int, int]] = {}
    expected: tuple[int, AcceptedIds] | None = None
    for batch in partition.log.batches(partition.log.start_offset):
        header = read_header(batch)
        if expected is not None and (expected[0], expected[1].crc) == (header.base_offset, header.crc):
            ids = expected[1]
            until_ms = ids.accepted_ms - window_ms
            found = {
                key: (offset, min(time_ms, ids.accepted_ms))
                for key, (offset, time_ms) in found.items()
                if time_ms > until_ms
            }
            for key, position in zip(ids.keys, ids.positions, strict=True):
                found[key] = (header.base_offset + position, ids.accepted_ms)
        expected = None
        content = decode_dedup_control(batch) if header.is_control else None
        if isinstance(content, AcceptedIds):
            expected = (header.base_offset + 1, content)
        elif isinstance(content, CopiedIds):
            rows = zip(content.keys, content.offsets, content.accepted_ms, strict=True)
            for key, offset, accepted_ms in rows:
                found.setdefault(key, (offset, accepted_ms))
    return found


class Deduplication(ViewScene):
    """The clients of a history of deduplication, and its judge."""

    constants = CONSTANTS
    partitions = PARTITIONS
    history: DeduplicationHistory

    def __init__(self, world: World) -> None:
        super().__init__(world, DeduplicationHistory(world.checker.broken, window_ms_of(world.seed)))
        self.latest = [0] * PARTITIONS
        """Number of the newest id of each partition; producers share them."""

    def begin_clients(self) -> None:
        super().begin_clients()
        world = self.world
        world.producers = [
            RepeatingProducer(world, f"{kind}{index}", index, idempotent=kind == "i", pace_ms=pace_ms)
            for kind, pace_ms in (("i", 60), ("p", 80))
            for index in range(PARTITIONS)
        ]
        world.readers = [DelayedReader(world, f"r{index}", index) for index in range(PARTITIONS)]

    def find_manager(self, broker: SimulatedBroker, partition: Partition) -> Deduplicator | None:
        return partition.find_feature(Deduplicator)

    def drain(self, until: Until) -> None:
        until(lambda: not any(self.reasons()), DRAIN_MS_MAX, "rest of views")

    def check_replica(self, manager: Deduplicator) -> None:
        self.history.check_view(manager)
        self.history.repeats += manager.repeat_count


class RepeatingProducer(FeatureProducer):
    """Sends ids, most of them several times and some that another producer sends, too; each until it is
    acknowledged."""

    def __init__(self, world: World, name: str, index: int, *, idempotent: bool, pace_ms: float) -> None:
        assert isinstance(world.scene, Deduplication)
        self.deduplication = world.scene
        self.batch: tuple[list[bytes], bytes] | None = None
        """Values of the attempts before, and the batch that is sent."""
        self.values: list[bytes] = []
        super().__init__(world, name, index, idempotent=idempotent, pace_ms=pace_ms)

    async def _send(self, values: list[bytes]) -> bool:
        history = self.deduplication.history
        if self.batch is None or self.batch[0] is not values:
            self.values = [self._id() for _ in values]
            history.sent.setdefault(self.index, set()).update(self.values)
            self.world.checker.sent(self.index, self.values, once=False)
            records = [
                (self.world.wall_ms(), None, value, [(DEDUP_ID_HEADER, value)]) for value in self.values
            ]
            self.batch = (values, self.build(records))
        return await self.send_once(
            self.batch[1],
            len(values),
            lambda base_offset: history.acknowledge(self.index, base_offset, self.values),
            repeats=True,
        )

    def _id(self) -> bytes:
        latest = self.deduplication.latest
        newest = latest[self.index]
        age = newest if self.random.random() < 0.2 else RECENT_IDS  # also ids whose records were deleted
        number = newest - self.random.randrange(max(age, 1))
        if number < 1 or self.random.random() < 0.4:
            latest[self.index] += 1
            number = latest[self.index]
        return b"%d-%d" % (self.index, number)


FEATURE: Final = Feature(FIRST_SEED, PARTITIONS, configs_of, SETTINGS, Deduplication)
