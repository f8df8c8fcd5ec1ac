"""Deduplication of the records of one partition on its leader: finds the repeats in a producer's batch.

A record is a repeat if a record with its id was accepted in the last mansio.dedup.ms. It is not stored; the response to
its producer has the offset of the first record. Ids are stored in the partition's own log (`DeduplicationView`), so
replication, recovery and a change of leader need nothing else.

* Of a batch without repeats, all is appended, after a control batch with the ids.
* Of a batch with some repeats, a batch with the other records is appended. It ends with the sequence of the producer's
  batch, by which that batch is recognized if it is sent again.
* Of a batch with repeats only, an idempotent producer's sequence is appended in a control batch, otherwise nothing.

Invariants:
* Checking a batch and appending it is one step of the event loop, so two batches with one id are never both accepted.
  A large batch with some repeats is rebuilt on a thread and then checked again; it is appended only if the same records
  are repeats as before.
* The view changes only with what was appended; ids of an append that failed are not in it.
* The offset in the response is that of the batch's first record, also when the batch is sent again.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from mansio.broker.features.deduplication.dedup_control_records import (
    AcceptedIds,
    CopiedIds,
    encode_copied_ids,
    encode_ids,
    encode_repeated,
)
from mansio.broker.features.deduplication.window import NO_COPIES, Copies
from mansio.broker.partition.append import AppendFeature, Following
from mansio.broker.partition.append_validation import RebuiltBatch, RecordReader, read_all, reject_ids
from mansio.broker.partition.partition_hook import RebuildRequired
from mansio.errors import CoordinatorLoadInProgress, LeaderNotAvailable, ThrottlingQuotaExceeded
from mansio.wire.batch.dedup_header import DEDUP_ID_NAME, read_ids
from mansio.wire.batch.inspection import InspectedBatch
from mansio.wire.batch.record_batch import build_batch
from mansio.wire.batch.record_reader import read_records
from mansio.wire.field_values import SEQUENCE_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

    from mansio.broker.features.deduplication.deduplication_view import DeduplicationView
    from mansio.broker.features.deduplication.window import AcceptedId
    from mansio.broker.log_view.replay import ViewReplay
    from mansio.broker.partition.append import Draft, Finish
    from mansio.broker.partition.append_validation import AppendRules, InspectedRecords
    from mansio.broker.partition.partition import Partition
    from mansio.broker.partition.partition_hook import AppendResult
    from mansio.ports import Buffer
    from mansio.wire.batch.dedup_header import IdentifiedBatch

COPIED_IDS_MAX: Final = 4096
"""Maximum number of ids in one control batch with copies."""


def _read(inspected: InspectedBatch, name: str, now_ms: int) -> IdentifiedBatch | None:
    del now_ms
    return read_ids(inspected, name)


ID_READER: Final = RecordReader((DEDUP_ID_NAME,), _read)


class Deduplicator(AppendFeature):
    """Deduplication of a partition's records. All methods run on the broker's event loop."""

    __slots__ = ("partition", "repeat_count", "replay", "view")

    def __init__(self, partition: Partition, replay: ViewReplay[DeduplicationView]) -> None:
        self.partition = partition
        self.replay = replay
        self.view = replay.view
        self.repeat_count = 0
        """Number of repeats that this broker has found since it opened the partition."""

    def count_ids(self) -> int:
        """Return the number of ids that are remembered: exact above half of the limit, below it with ids that have
        expired."""
        window, settings = self.view.window, self.partition.settings
        until_ms = self.partition.clock.wall_ms() - settings.dedup_ms
        window.make_room(0, settings.dedup_ids_max // 2, until_ms)
        return window.count

    # Batches of producers

    def prepare(self, draft: Draft) -> Finish | None:
        """Find the repeats in a client's batch, and leave them out.

        Raises `InvalidRecord` for ids in a transaction, `ThrottlingQuotaExceeded` if there are too many,
        `LeaderNotAvailable` while the view is being read, and `RebuildRequired` for a batch that a thread has
        inspected, if some of its records are repeats and the thread has not rebuilt it without exactly these."""
        inspected = draft.inspected
        identified: IdentifiedBatch | None = inspected.found.get(ID_READER)
        rebuilt = inspected.rebuilt
        if identified is None:
            return None
        self._check_view()
        partition, window = self.partition, self.view.window
        now_ms = partition.clock.wall_ms()
        if rebuilt is not None and rebuilt.decided_ms >= window.latest_ms:
            now_ms = rebuilt.decided_ms  # ids that have expired since then are still repeats
        until_ms = now_ms - partition.settings.dedup_ms
        keys: list[bytes] = []
        positions: list[int] = []
        kept: list[int] = []
        new: set[bytes] = set()
        first_offset, first_ms, known_end = -1, -1, 0
        for index, key in enumerate(identified.keys):
            if key is not None:
                if key in new:
                    continue
                known = window.find(key)
                if known is not None and known.accepted_ms > until_ms:
                    known_end = max(known_end, known.offset + 1)
                    if not index:
                        first_offset, first_ms = known
                    continue
                new.add(key)
                keys.append(key)
                positions.append(len(kept))
            kept.append(index)
        if rebuilt is not None and rebuilt.kept != kept:
            draft.inspected = inspected._replace(rebuilt=None)
            return self.prepare(draft)
        if new and not window.make_room(len(new), partition.settings.dedup_ids_max, until_ms):
            raise ThrottlingQuotaExceeded(
                f"{partition.name}: {window.count} ids are remembered,"
                f" mansio.dedup.ids.max={partition.settings.dedup_ids_max}"
            )
        repeats = len(identified.keys) - len(kept)
        if kept and repeats:
            if rebuilt is not None:
                draft.replace(rebuilt.batch)
                draft.found = rebuilt.found
            elif inspected.by_thread:
                raise RebuildRequired(
                    partial(rebuild, draft.sent, partition.name, draft.inspected, kept, now_ms)
                )
            else:
                self._leave_out(draft, identified, kept)
        elif not kept:
            draft.replace(None)
        if identified.header.is_transactional:
            reject_ids(partition.name)
        draft.first_offset, draft.first_ms, draft.known_end = first_offset, first_ms, known_end
        draft.appended_ms = now_ms
        return partial(self._finish, identified, keys, positions, repeats)

    def _leave_out(self, draft: Draft, identified: IdentifiedBatch, kept: Sequence[int]) -> None:
        """Store only these records of a small batch."""
        rebuilt = _without_repeats(draft.sent, identified, kept)
        draft.replace(rebuilt)
        draft.found = _read_again(
            rebuilt, self.partition.name, draft.inspected, self.partition.clock.wall_ms()
        )

    def with_first_offset(
        self, known: AppendResult, rules: AppendRules, inspect: Callable[[], InspectedRecords]
    ) -> AppendResult:
        """Return the result of a batch that an idempotent producer sends again, `known` from its sequence, with the
        offset of the first record with its id.

        Raises `LeaderNotAvailable` while the view is being read."""
        if ID_READER not in rules.readers or (identified := inspect().found.get(ID_READER)) is None:
            return known
        self._check_view()
        if (key := identified.keys[0]) is None:
            return known
        found = self.view.window.find(key)
        if found is None or found.offset > known.base_offset:
            return known
        return known._replace(base_offset=found.offset)

    def _check_view(self) -> None:
        if not self.replay.is_complete:  # producers retry this error
            raise LeaderNotAvailable(f"{self.partition.name}: its deduplication ids are being loaded")

    def _finish(
        self,
        identified: IdentifiedBatch,
        keys: Sequence[bytes],
        positions: Sequence[int],
        repeats: int,
        draft: Draft,
    ) -> None:
        """Add the control batch with the ids, or with the sequence of a batch that has only repeats."""
        self.repeat_count += repeats
        if draft.batch is None:
            if identified.header.producer_id >= 0:
                draft.add_before(encode_repeated(identified.header), {})
        elif keys:
            ids = AcceptedIds(keys, positions, draft.appended_ms, draft.header.crc)
            draft.add_before(encode_ids(ids), {self.view: ids})

    # Retention

    def release_below(self, offset: int) -> Iterator[Following]:
        """Yield copies of the ids below an offset that have not expired: see `ReleasingFeature`."""
        partition, view = self.partition, self.view
        self._ensure_usable()
        window = view.window
        until_ms = partition.clock.wall_ms() - partition.settings.dedup_ms
        after_ms, last_ms = window.uncopied_times(offset, until_ms)
        earlier, latest_ms = window.copies, window.latest_ms
        waiting: list[AcceptedId] = []
        first_copy = partition.end_offset
        for found in window.select(after_ms, last_ms):
            waiting += found
            while len(waiting) > COPIED_IDS_MAX:
                yield self._copies(waiting[:COPIED_IDS_MAX], NO_COPIES)
                del waiting[:COPIED_IDS_MAX]
                self._ensure_usable()
                if view.window is not window or window.latest_ms < latest_ms:
                    return  # a part of the log was truncated, or the clock was set back: a later call begins again
        if waiting:
            is_from_begin = after_ms == until_ms  # otherwise older ids are in earlier copies
            location = first_copy if is_from_begin else earlier.location
            yield self._copies(waiting, Copies(location, last_ms))
        window.release_below(offset)

    def _copies(self, ids: Sequence[AcceptedId], copies: Copies) -> Following:
        copied = CopiedIds(
            [one.key for one in ids], [one.offset for one in ids], [one.accepted_ms for one in ids], *copies
        )
        return Following((encode_copied_ids(copied),), ({self.view: copied},))

    def _ensure_usable(self) -> None:
        self.partition.ensure_leader()
        if not self.replay.is_complete:
            raise CoordinatorLoadInProgress(f"{self.partition.name}: its deduplication ids are being loaded")


def rebuild(
    batch: Buffer, name: str, inspected: InspectedRecords, kept: Sequence[int], decided_ms: int
) -> RebuiltBatch:
    """Encode a client's batch without its repeats. Uses no state and may run on any thread. `name` of the partition is
    for errors; `kept`: indexes of the records that are not repeats; `decided_ms`: the time, ms since the Unix epoch, at
    which that was found, and at which delays begin.

    Raises the errors of `RecordReader.read`."""
    rebuilt = _without_repeats(batch, inspected.found[ID_READER], kept)
    return RebuiltBatch(kept, decided_ms, rebuilt, _read_again(rebuilt, name, inspected, decided_ms))


def _read_again(
    rebuilt: bytes, name: str, inspected: InspectedRecords, now_ms: int
) -> Mapping[RecordReader, Any]:
    """Return what other features find in a batch without its repeats."""
    readers = [reader for reader in inspected.found if reader is not ID_READER]
    headers = [header for reader in readers for header in reader.headers]
    return read_all(readers, InspectedBatch(rebuilt, headers), name, now_ms) if readers else {}


def _without_repeats(batch: Buffer, identified: IdentifiedBatch, kept: Sequence[int]) -> bytes:
    """Return a batch with the records at these positions of a producer's batch, and with its last sequence."""
    header = identified.header
    records = read_records(batch)
    sequence = header.base_sequence
    if header.producer_id >= 0:
        sequence = (sequence + header.last_offset_delta + 1 - len(kept)) & SEQUENCE_MAX
    return build_batch(
        [records[index][1:] for index in kept],
        codec=header.codec,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=sequence,
    )
