"""Crash workload of the deduplication window: after a power failure between any two disk changes, a record and its id
are both there or both missing, and each id that was durable is known until it expires, also without its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from mansio.broker.features.deduplication import deduplicator
from mansio.broker.features.deduplication import window as window_module
from mansio.broker.log_view import snapshots
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER
from mansio.wire.batch.record_batch import build_batch
from support.partition_bench import WINDOW_MS, deduplicated
from system.crash.feature_workload import FeatureWorkload

if TYPE_CHECKING:
    import random

    from mansio.broker.features.deduplication.deduplicator import Deduplicator
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.testing.disk import SimulatedDisk
    from support.partition_bench import PartitionBench

WEIGHTS: Final = {
    "produce": 12,
    "produce_on_full_disk": 2,
    "advance": 4,
    "flush": 5,
    "background": 3,
    "delete_records": 2,
}
"""How often each step is drawn."""
PRODUCER_ID = 7
BATCH_RECORDS_MAX = 4


class Accepted(NamedTuple):
    """A record that was stored: its value, offset, and the time of its acceptance."""

    value: bytes
    offset: int
    accepted_ms: int


class Sent(NamedTuple):
    """A batch of the idempotent producer, and the response."""

    batch: bytes
    first_id: int
    base_offset: int
    end_offset: int


class DeduplicationWorkload(FeatureWorkload):
    """Producers that repeat ids."""

    weights = WEIGHTS
    constants = (
        (snapshots, "SNAPSHOT_INTERVAL_BYTES", 300),
        (deduplicator, "COPIED_IDS_MAX", 3),
        (window_module, "SHARD_IDS", 4),
        (window_module, "MARK_MS", 100),
    )

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.accepted: dict[int, list[Accepted]] = {}
        """Acceptances by id."""
        self.sent: dict[bytes, int] = {}
        """Id by value, of all records."""
        self.last: Sent | None = None
        self.sequence = 0
        self.number = 0

    def open(self, disk: SimulatedDisk, seconds: float) -> PartitionBench:
        return deduplicated(disk, seconds=seconds)

    def manager(self) -> Deduplicator:
        return self.live.deduplicator

    def produce_on_full_disk(self) -> None:
        """Produce while the disk has space for the control batch with the ids only."""
        self.run_on_full_disk(self.produce)

    def produce(self) -> None:
        chance, live = self.chance, self.live
        if self.last is not None and chance.random() < 0.1:  # an idempotent producer sends a batch again
            end = live.log.end_offset
            result = live.partition.append(self.last.batch, urgent=True)
            assert live.log.end_offset == end, "a batch is stored twice"
            assert result.base_offset == self.last.base_offset or not self._is_known(self.last)
            return
        rows: list[tuple[int, bytes]] = []
        for _ in range(chance.randrange(1, BATCH_RECORDS_MAX + 1)):
            rows.append((chance.randrange(25), b"%d" % self.number))
            self.number += 1
        self.sent |= {value: dedup_id for dedup_id, value in rows}
        is_idempotent = chance.random() < 0.5
        batch = build_batch(
            [(1000, None, value, [(DEDUP_ID_HEADER, b"%d" % dedup_id)]) for dedup_id, value in rows],
            producer_id=PRODUCER_ID if is_idempotent else -1,
            producer_epoch=0 if is_idempotent else -1,
            base_sequence=self.sequence if is_idempotent else -1,
        )
        now_ms = live.clock.wall_ms()
        before = live.log.end_offset
        result = live.partition.append(batch, urgent=chance.random() < 0.5)
        if is_idempotent:
            self.sequence += len(rows)
            self.last = Sent(batch, rows[0][0], result.base_offset, result.end_offset)
        self._note(rows, now_ms, before, result)

    def _note(self, rows: list[tuple[int, bytes]], now_ms: int, before: int, result: AppendResult) -> None:
        stored = before + 1  # behind the control batch with the ids
        for index, (dedup_id, value) in enumerate(rows):
            known = self.accepted.get(dedup_id, ())
            if known and known[-1].accepted_ms > now_ms - WINDOW_MS:
                self.counts["repeats"] += 1
                offset = known[-1].offset
            else:
                offset, stored = stored, stored + 1
                self.accepted.setdefault(dedup_id, []).append(Accepted(value, offset, now_ms))
            assert index or result.base_offset == offset
        expected = {one.offset: one.value for several in self.accepted.values() for one in several}
        for offset, value in self.live.visible().items():
            assert expected.get(offset) == value, f"{value!r} at {offset} was not accepted"

    def _is_known(self, sent: Sent) -> bool:
        """Whether the first id of a batch has not expired since the batch was sent."""
        known = self.accepted[sent.first_id][-1]
        return known.offset == sent.base_offset and known.accepted_ms > self.live.clock.wall_ms() - WINDOW_MS

    def check_crash(self, chance: random.Random) -> None:
        """Check what a power failure at this moment leaves."""
        durable_end = self.live.log.durable_end_offset
        after = self.after_crash(chance)
        is_stored = self.last is not None and self.last.end_offset <= durable_end
        if (
            self.last is not None
            and is_stored
            and self.last.end_offset - BATCH_RECORDS_MAX >= after.log.start_offset
        ):
            end = after.log.end_offset
            again = after.partition.append(self.last.batch)
            assert again.base_offset == self.last.base_offset or not self._is_known(self.last)
            assert after.log.end_offset == end, "a batch is stored twice"
        visible, start = after.visible(), after.log.start_offset
        until_ms = after.clock.wall_ms() - WINDOW_MS
        for dedup_id, several in self.accepted.items():
            known = [
                one for one in several if one.offset < durable_end or visible.get(one.offset) == one.value
            ]
            for one in known:
                assert one.offset < start or visible.get(one.offset) == one.value, f"{one.value!r} is lost"
            repeat = build_batch([(1000, None, b"repeat", [(DEDUP_ID_HEADER, b"%d" % dedup_id)])])
            end = after.log.end_offset
            result = after.partition.append(repeat)
            if known and known[-1].accepted_ms > until_ms:
                assert result.base_offset == known[-1].offset, f"id {dedup_id} is forgotten"
                assert after.log.end_offset == end
            elif result.base_offset != end + 1:  # the record of an append that has not returned yet
                assert self.sent.get(visible.get(result.base_offset, b"")) == dedup_id, (
                    f"id {dedup_id} is known, but its record is not there"
                )
