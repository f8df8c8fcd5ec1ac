"""Compaction of one batch: removes the records that newer ones replace. Pure functions from bytes to bytes.

A batch from which nothing is removed is kept byte for byte. Otherwise it is rewritten with the same offsets, producer,
sequence, leader epoch and codec: it spans the same offsets with fewer records, so that each record keeps its offset.
Two kinds of batches are kept even without any record: the last batches of each live producer, from which the broker
reads the producer's sequence number, and the batch that ends the cleaned part, so that a reader never waits for an
offset that will not be written.

Tombstones are kept for `delete_retention_ms` after the first compaction that found them, so that current readers can
still read them. The end of this time is the *delete horizon*. It is stored in the batch: if bit 6 of the attributes is
set, the base timestamp is the delete horizon, and the records' timestamp deltas are relative to it (KIP-534).

Invariants:
* A record at or above `map_end_offset` is kept. The newest record of a key is kept unless it is a tombstone past its
  delete horizon.
* A batch whose content cannot be decoded, or exceeds a limit for decoding, is kept unchanged. Tombstones above such a
  batch are kept, too; otherwise older values in the batch would become visible again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import RequestError
from mansio.storage.cleaner.offset_map import digest_of
from mansio.storage.index import NO_TIMESTAMP
from mansio.storage.timestamp_search import DECODED_RECORDS_MAX
from mansio.wire.batch.compression import Codec, compress
from mansio.wire.batch.record_batch import DELETE_HORIZON_FLAG, TimestampType, encode_batch
from mansio.wire.batch.record_reader import decompress_batch, scan_records, with_timestamp_delta

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mansio.ports import Buffer
    from mansio.storage.cleaner.offset_map import OffsetMap
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.batch.record_reader import RecordLocation

RECORDS_PER_SLICE = 256
"""Number of records that are processed in one slice, which takes about a millisecond."""

NO_DELETE_HORIZON = -1
INT64_MAX = (1 << 63) - 1
INT64_MIN = -1 << 63


def matches_no_batch(_: BatchHeader) -> bool:
    """Predicate that is false for every batch; the default of the predicates in `CompactionRules`."""
    return False


class CompactionRules(NamedTuple):
    """Parameters of one compaction.

    `now_ms`: time of the compaction. `delete_retention_ms`: delete.retention.ms of the topic.
    `delete_horizon_end_offset`: only below this offset bit 6 of a batch means a delete horizon; above it a client may
    have set the bit. `map_end_offset`: records at or above this offset are not in the offset map and are kept.
    `tombstone_floor`: tombstones at or above this offset are
    kept, because a reader that has older values will continue from this offset.
    `is_aborted(header)`: the batch is data of an aborted transaction and is removed. `is_obsolete_marker(header)`: the
    batch is the marker of a transaction whose data were removed; it is removed like a tombstone.
    `is_last_of_producer(header)`: the batch is one of the last batches of a live producer; it is kept, without records
    if necessary.
    """

    now_ms: int
    delete_retention_ms: int
    delete_horizon_end_offset: int
    map_end_offset: int
    tombstone_floor: int = INT64_MAX
    is_aborted: Callable[[BatchHeader], bool] = matches_no_batch
    is_obsolete_marker: Callable[[BatchHeader], bool] = matches_no_batch
    is_last_of_producer: Callable[[BatchHeader], bool] = matches_no_batch


class FilteredBatch(NamedTuple):
    """Result for one batch: `batch` is the original batch, a rewritten one, or None if the batch is removed.

    `delete_horizon_ms` is the delete horizon of its tombstones. `is_unfiltered`: the batch was kept unchanged because
    it could not be decoded, so it may still contain values that newer records replace.
    """

    batch: Buffer | None
    header: BatchHeader | None
    delete_horizon_ms: int = NO_DELETE_HORIZON
    is_unfiltered: bool = False


def decompressed_records(batch: Buffer, header: BatchHeader) -> bytes | None:
    """Return the decompressed records of a batch; None if they cannot be decompressed or exceed a limit."""
    if header.record_count > DECODED_RECORDS_MAX:
        return None
    try:
        return decompress_batch(batch)[1]
    except RequestError:
        return None


def key_digests(batch: Buffer, header: BatchHeader) -> Generator[int, None, list[tuple[bytes, int]]]:
    """(digest of the key, offset) of every record that has a key; an empty list if the batch cannot be decoded.

    Yields regularly the number of records processed since the last yield.
    """
    data = decompressed_records(batch, header)
    if data is None:
        return []
    keys = []
    processed = 0
    try:
        for record in scan_records(data, header.record_count, header.last_offset_delta):
            if record.key is not None:
                keys.append((digest_of(record.key), header.base_offset + record.offset_delta))
            processed += 1
            if processed == RECORDS_PER_SLICE:
                yield processed
                processed = 0
    except RequestError:
        return []
    return keys


def filter_batch(
    batch: Buffer, header: BatchHeader, newest_offsets: OffsetMap, rules: CompactionRules
) -> Generator[int, None, FilteredBatch]:
    """Filter a validated batch. Yields regularly the number of records processed since the last yield."""
    if header.base_offset >= rules.map_end_offset:
        return FilteredBatch(batch, header)
    has_delete_horizon = (
        bool(header.attributes & DELETE_HORIZON_FLAG) and header.base_offset < rules.delete_horizon_end_offset
    )
    if header.is_control:
        return _filter_marker(batch, header, rules, has_delete_horizon=has_delete_horizon)
    if header.record_count == 0 or rules.is_aborted(header):
        return _remove_all_records(batch, header, rules)
    data = decompressed_records(batch, header)
    if data is None:
        return FilteredBatch(batch, header, is_unfiltered=True)
    expired = has_delete_horizon and rules.now_ms > header.base_timestamp_ms
    keep_tombstones = not expired or header.base_offset >= rules.tombstone_floor
    kept: list[RecordLocation] = []
    tombstones = False
    processed = 0
    try:
        for record in scan_records(data, header.record_count, header.last_offset_delta):
            key = record.key
            if (
                key is not None
                and (keep_tombstones or not record.is_tombstone)
                and newest_offsets.get(digest_of(key)) <= header.base_offset + record.offset_delta
            ):
                kept.append(record)
                tombstones |= record.is_tombstone
            processed += 1
            if processed == RECORDS_PER_SLICE:
                yield processed
                processed = 0
    except RequestError:
        return FilteredBatch(batch, header)
    if not kept:
        return _remove_all_records(batch, header, rules)
    delete_horizon_ms = NO_DELETE_HORIZON
    if tombstones:
        later_ms = min(rules.now_ms + rules.delete_retention_ms, INT64_MAX)
        delete_horizon_ms = header.base_timestamp_ms if has_delete_horizon and not expired else later_ms
    if len(kept) == header.record_count and (has_delete_horizon or not tombstones):
        return FilteredBatch(batch, header, delete_horizon_ms)
    new_delete_horizon_ms = delete_horizon_ms if tombstones and not has_delete_horizon else None
    rebuilt = _rebuild_batch(data, header, kept, new_delete_horizon_ms, delete_horizon_ms)
    return rebuilt or FilteredBatch(batch, header, is_unfiltered=True)


def _rebuild_batch(
    data: bytes,
    header: BatchHeader,
    kept: list[RecordLocation],
    new_delete_horizon_ms: int | None,
    delete_horizon_ms: int,
) -> FilteredBatch | None:
    """Return the batch with only the records `kept`; `new_delete_horizon_ms`, unless None, becomes its delete horizon.

    `delete_horizon_ms` is the delete horizon of its tombstones, `NO_DELETE_HORIZON` if it has none.

    Returns None if the difference between a timestamp and the delete horizon exceeds 64 bits.
    """
    base_ms = header.base_timestamp_ms
    largest_ms = base_ms + max(record.timestamp_delta_ms for record in kept)
    largest_ms = max(INT64_MIN, min(largest_ms, INT64_MAX))  # a client may send any base and any delta
    if new_delete_horizon_ms is None:
        body = b"".join([data[record.start : record.end] for record in kept])
    else:
        shift = base_ms - new_delete_horizon_ms
        if not all(INT64_MIN <= record.timestamp_delta_ms + shift <= INT64_MAX for record in kept):
            return None
        body = b"".join(
            [with_timestamp_delta(data, record, record.timestamp_delta_ms + shift) for record in kept]
        )
        base_ms = new_delete_horizon_ms
    if header.timestamp_type is TimestampType.LOG_APPEND:
        largest_ms = header.max_timestamp_ms
    new = header._replace(
        attributes=header.attributes | (0 if new_delete_horizon_ms is None else DELETE_HORIZON_FLAG),
        base_timestamp_ms=base_ms,
        max_timestamp_ms=largest_ms,
        record_count=len(kept),
    )
    codec = header.codec
    return _encode_filtered_batch(
        new, body if codec == Codec.NONE else compress(codec, body), delete_horizon_ms
    )


def _encode_filtered_batch(
    header: BatchHeader, body: Buffer, delete_horizon_ms: int = NO_DELETE_HORIZON
) -> FilteredBatch:
    batch = encode_batch(header, body)
    return FilteredBatch(batch, header._replace(batch_length=len(batch) - 12), delete_horizon_ms)


def _remove_all_records(batch: Buffer, header: BatchHeader, rules: CompactionRules) -> FilteredBatch:
    """Return the batch without its records, or its removal, unless it is the last one of a producer or of the cleaned
    part."""
    ends_cleaned_part = header.base_offset + header.last_offset_delta + 1 == rules.map_end_offset
    if not ends_cleaned_part and not (header.producer_id >= 0 and rules.is_last_of_producer(header)):
        return FilteredBatch(None, None)
    if header.record_count == 0:
        return FilteredBatch(batch, header)
    empty = header._replace(
        attributes=header.attributes & ~(DELETE_HORIZON_FLAG | 0x07),
        base_timestamp_ms=NO_DELETE_HORIZON,
        max_timestamp_ms=NO_TIMESTAMP,
        record_count=0,
    )
    return _encode_filtered_batch(empty, b"")


def _filter_marker(
    batch: Buffer, header: BatchHeader, rules: CompactionRules, *, has_delete_horizon: bool
) -> FilteredBatch:
    """Filter a control batch. It is removed like a tombstone once the data of its transaction were removed."""
    if not rules.is_obsolete_marker(header):
        return FilteredBatch(batch, header)
    if has_delete_horizon:
        if rules.now_ms <= header.base_timestamp_ms:
            return FilteredBatch(batch, header, header.base_timestamp_ms)
        return _remove_all_records(batch, header, rules)
    data = decompressed_records(batch, header)
    try:
        records = (
            [] if data is None else list(scan_records(data, header.record_count, header.last_offset_delta))
        )
    except RequestError:
        records = []
    if data is None or not records:
        return FilteredBatch(batch, header)
    delete_horizon_ms = min(rules.now_ms + rules.delete_retention_ms, INT64_MAX)
    return _rebuild_batch(data, header, records, delete_horizon_ms, delete_horizon_ms) or FilteredBatch(
        batch, header
    )
