"""A group coordinator with transactions on virtual time: its log in memory, checkpoints, reloads and compaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mansio.broker.coordinator.checkpoint import CheckpointStorage
from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator, GroupSettings
from mansio.broker.services.authorization import Authorization
from mansio.broker.services.groups import GroupService
from mansio.storage.cleaner.batch_filter import CompactionRules, filter_batch
from mansio.storage.cleaner.offset_map import OffsetMap, digest_of
from mansio.wire.batch.end_marker import EndMarker, encode_end_marker
from mansio.wire.batch.record_batch import read_header
from mansio.wire.batch.record_reader import read_records
from support.present import present
from unit.broker.groups_fixtures import AppendResult, MemoryPartition, VirtualScheduler
from unit.broker.test_groups import Chance

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

    from mansio.errors import MansioError
    from mansio.testing.disk import SimulatedDisk
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.internal_records.offset_and_group_records import CommittedOffset

COORDINATOR_EPOCH = 3
TOPIC = "t"


class Verifier:
    """Transaction coordinator that answers every verification with `error`; `asked` are the requests."""

    def __init__(self) -> None:
        self.error: MansioError | None = None
        self.raises = False
        self.asked: list[tuple[Any, ...]] = []
        self.on_verify: Callable[[], object] = lambda: None

    async def verify(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[tuple[str, int]],
        *,
        adds: bool,
    ) -> list[MansioError | None]:
        self.asked.append((transactional_id, producer_id, producer_epoch, tuple(partitions), adds))
        self.on_verify()
        if self.raises and self.error is not None:
            raise self.error
        return [self.error] * len(partitions)


class CompactedPartition(MemoryPartition):
    """A partition in memory whose log may have gaps."""

    def __init__(self, scheduler: VirtualScheduler, batches: list[bytes] | None = None) -> None:
        super().__init__(scheduler, batches)
        self.end_offset = read_header(self.stored[-1]).last_offset + 1 if self.stored else 0
        self.high_watermark = self.end_offset

    def append(
        self, batch: bytes, *, internal: bool = False, urgent: bool = True, is_intact: bool = False
    ) -> AppendResult:
        result = super().append(batch, internal=internal, urgent=urgent)
        assert self.end_offset == result.base_offset + read_header(batch).last_offset_delta + 1
        return result

    def compact(
        self, end_offset: int, is_aborted: Callable[[BatchHeader], bool], *, now_ms: int, tombstone_floor: int
    ) -> None:
        """Compact the batches that end at or below `end_offset`, as the log cleaner does."""
        newest = OffsetMap(1 << 16)
        for _ in newest.prepare():
            pass
        for batch in self.stored:
            header = read_header(batch)
            if header.last_offset < end_offset and not header.is_control and not is_aborted(header):
                for record in read_records(batch, output_bytes_max=1 << 20):
                    newest.put(digest_of(present(record.key)), record.offset)
        obsolete = self._obsolete_markers()
        rules = CompactionRules(
            now_ms=now_ms,
            delete_retention_ms=0,
            delete_horizon_end_offset=1 << 62,
            map_end_offset=end_offset,
            tombstone_floor=tombstone_floor,
            is_aborted=is_aborted,
            is_obsolete_marker=lambda header: header.base_offset in obsolete,
        )
        filtered = [
            _result(filter_batch(each, read_header(each), newest, rules)).batch for each in self.stored
        ]
        self.stored = [bytes(each) for each in filtered if each is not None]

    def _obsolete_markers(self) -> set[int]:
        """Base offsets of the end markers whose transaction has no records any more."""
        obsolete, with_records = set(), set()
        for batch in self.stored:
            header = read_header(batch)
            if header.is_transactional and not header.is_control and header.record_count:
                with_records.add(header.producer_id)
            elif header.is_control:
                if header.producer_id not in with_records:
                    obsolete.add(header.base_offset)
                with_records.discard(header.producer_id)
        return obsolete

    def after_power_loss(self, scheduler: VirtualScheduler) -> CompactedPartition:
        kept = [each for each in self.stored if read_header(each).last_offset < self.high_watermark]
        return CompactedPartition(scheduler, kept)


def _result(steps: Generator[int, None, Any]) -> Any:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


class OffsetsRoom:
    """A single broker's group coordinator; topic t has four partitions."""

    def __init__(
        self,
        count: int = 1,
        *,
        partitions: list[CompactedPartition] | None = None,
        scheduler: VirtualScheduler | None = None,
        disk: SimulatedDisk | None = None,
        interval_bytes: int = 1 << 30,
        **settings: Any,
    ) -> None:
        self.scheduler = scheduler or VirtualScheduler()
        self.count, self.disk, self.interval_bytes, self.given = count, disk, interval_bytes, settings
        self.partitions = partitions or []
        self.reported: dict[tuple[str, str, int], CommittedOffset] = {}
        self.topics = {TOPIC}
        self.groups = GroupCoordinator(
            settings=GroupSettings(**settings),
            clock=self.scheduler,
            scheduler=self.scheduler,
            random=Chance(),
            create_topic=self.create,
            end_offset=lambda topic, index: 100 if topic in self.topics and index < 4 else None,
            on_offset=self.note,
            checkpoints=None
            if disk is None
            else CheckpointStorage(disk, self.scheduler, "data/views", interval_bytes),
        )
        self.service = GroupService(
            self.groups, node_id=1, verifier=Verifier(), authorization=Authorization(None)
        )
        self.verifier = self.service.verifier = Verifier()
        self.run(self.groups.start(self.partitions))

    async def create(self) -> list[CompactedPartition]:
        self.partitions = [CompactedPartition(self.scheduler) for _ in range(self.count)]
        return self.partitions

    def note(self, group: str, topic: str, index: int, committed: CommittedOffset | None) -> None:
        if committed is None:
            self.reported.pop((group, topic, index), None)
        else:
            self.reported[group, topic, index] = committed

    def run(self, work: Any) -> Any:
        return self.scheduler.run(work, limit_ms=10**12)

    def index_of(self, group: str) -> int:
        return self.groups.store.partition_for(group)

    def write_marker(self, index: int, producer_id: int, epoch: int, *, is_commit: bool) -> EndMarker:
        """Append an end marker to the log, without telling the coordinator."""
        marker = EndMarker(producer_id, epoch, is_commit, COORDINATOR_EPOCH)
        batch = encode_end_marker(marker, self.scheduler.wall_ms())
        self.partitions[index].append(batch, internal=True)
        self.scheduler.turn()
        return marker

    def end(self, group: str, producer_id: int, epoch: int = 0, *, is_commit: bool = True) -> None:
        """End a producer's transaction in the partition of a group."""
        index = self.index_of(group)
        marker = self.write_marker(index, producer_id, epoch, is_commit=is_commit)
        self.groups.offsets.apply_marker(index, marker)

    def restarted(self, *, is_clean: bool = False) -> OffsetsRoom:
        """The room after a crash, or after a clean stop, which writes checkpoints."""
        if is_clean:
            self.run(self.groups.close())
        scheduler = VirtualScheduler()
        scheduler.now_ms = self.scheduler.now_ms
        partitions = [each.after_power_loss(scheduler) for each in self.partitions]
        return OffsetsRoom(
            self.count,
            partitions=partitions,
            scheduler=scheduler,
            disk=self.disk,
            interval_bytes=self.interval_bytes,
            **self.given,
        )
