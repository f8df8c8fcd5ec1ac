"""What compaction leaves of one batch. Pure: bytes and rules in, bytes out.

A batch from which nothing goes stays as it is, to the byte. Otherwise it is written anew with the same offsets,
producer, sequence, leader epoch and codec: it spans the same offsets with fewer records, so that no offset ever changes
its meaning. Two kinds of batches stay without any record: the last ones of each live producer (its sequence can then be
read from the log) and the one that ends the cleaned part (so that a reader never waits for an offset that nobody will
fill).

Tombstones stay for `delete_retention_ms` after the first compaction that saw them, so that a reader who began before
can still meet them. The moment until when is kept in the batch: bit 6 of the attributes says that the base timestamp is
that moment, and the records' timestamp deltas are relative to it (KIP-534).

Always true: a record above the map's end stays; the newest record of a key stays unless it is a tombstone past its
moment; a batch that its writer filled with something that cannot be read, or with more than is opened in one piece,
stays as it is. Tombstones above such a batch stay too, or older values in it would come back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mansio.errors import RequestError
from mansio.storage.cleaner.offset_map import digest_of
from mansio.storage.index import NO_TIMESTAMP
from mansio.storage.timestamp_search import OPENED_BYTES_MAX, OPENED_RECORDS_MAX
from mansio.wire.batch.compression import Codec, compress, decompress
from mansio.wire.batch.record_batch import DELETE_HORIZON, HEADER_BYTES, TimestampType, encode_batch
from mansio.wire.batch.record_reader import scan_records, with_timestamp_delta

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from mansio.ports import Buffer
    from mansio.storage.cleaner.offset_map import OffsetMap
    from mansio.wire.batch.record_batch import BatchHeader
    from mansio.wire.batch.record_reader import RecordLocation

RECORDS_PER_SLICE = 256
"""So many records are looked at before the interpreter is given back: about a millisecond."""

NO_HORIZON = -1
INT64_MAX = (1 << 63) - 1
INT64_MIN = -1 << 63


def never(_: BatchHeader) -> bool:
    """No batch is."""
    return False


class CompactionRules(NamedTuple):
    """What one run of compaction goes by.

    `stamped_below`: only below this offset does a batch's bit 6 come from us; a client may set it too.
    `map_end_offset`: from here on the map knows nothing and everything stays.
    `tombstone_floor`: somebody will read on from here who knows older values, so tombstones from here on stay.
    `is_aborted(header)`: data of a transaction that was aborted: all of it goes.
    `is_obsolete_marker(header)`: a transaction's marker none of whose data is left: it goes as a tombstone does.
    `is_last_of_producer(header)`: the producer lives and this is one of its last batches: it stays, if need be empty.
    """

    now_ms: int
    delete_retention_ms: int
    stamped_below: int
    map_end_offset: int
    output_bytes_max: int
    tombstone_floor: int = INT64_MAX
    is_aborted: Callable[[BatchHeader], bool] = never
    is_obsolete_marker: Callable[[BatchHeader], bool] = never
    is_last_of_producer: Callable[[BatchHeader], bool] = never


class FilteredBatch(NamedTuple):
    """`batch` is what stays: the batch that was given, another one, or None. `horizon_ms`: when its tombstones go.

    `left_alone`: values that newer ones supersede may be in it still.
    """

    batch: Buffer | None
    header: BatchHeader | None
    horizon_ms: int = NO_HORIZON
    left_alone: bool = False


def decompressed_records(batch: Buffer, header: BatchHeader, output_bytes_max: int) -> bytes | None:
    """The records' bytes; None when they cannot be had although the batch is as it was written, or are too many."""
    size_max = min(output_bytes_max, OPENED_BYTES_MAX)
    if header.record_count > OPENED_RECORDS_MAX or (
        header.codec == Codec.NONE and len(batch) - HEADER_BYTES > size_max
    ):
        return None
    try:
        return decompress(header.codec, memoryview(batch)[HEADER_BYTES:], size_max)
    except RequestError:
        return None


def key_digests(
    batch: Buffer, header: BatchHeader, output_bytes_max: int
) -> Generator[int, None, list[tuple[bytes, int]]]:
    """(digest of the key, offset) of every record that has a key. All of them or none: half a batch proves nothing.

    Yields now and then, the number of records since the last time.
    """
    data = decompressed_records(batch, header, output_bytes_max)
    if data is None:
        return []
    keys = []
    seen = 0
    try:
        for place in scan_records(data, header.record_count, header.last_offset_delta):
            if place.key is not None:
                keys.append((digest_of(place.key), header.base_offset + place.offset_delta))
            seen += 1
            if seen == RECORDS_PER_SLICE:
                yield seen
                seen = 0
    except RequestError:
        return []
    return keys


def filter_batch(
    batch: Buffer, header: BatchHeader, newest: OffsetMap, rules: CompactionRules
) -> Generator[int, None, FilteredBatch]:
    """What stays of a checked batch. Yields now and then, the number of records since the last time."""
    if header.base_offset >= rules.map_end_offset:
        return FilteredBatch(batch, header)
    stamped = bool(header.attributes & DELETE_HORIZON) and header.base_offset < rules.stamped_below
    if header.is_control:
        return _marker(batch, header, rules, stamped=stamped)
    if header.record_count == 0 or rules.is_aborted(header):
        return _rest(batch, header, rules)
    data = decompressed_records(batch, header, rules.output_bytes_max)
    if data is None:
        return FilteredBatch(batch, header, left_alone=True)
    expired = stamped and rules.now_ms > header.base_timestamp_ms
    tombstones_stay = not expired or header.base_offset >= rules.tombstone_floor
    kept: list[RecordLocation] = []
    tombstones = False
    seen = 0
    try:
        for place in scan_records(data, header.record_count, header.last_offset_delta):
            key = place.key
            if (
                key is not None
                and (tombstones_stay or not place.is_tombstone)
                and newest.get(digest_of(key)) <= header.base_offset + place.offset_delta
            ):
                kept.append(place)
                tombstones |= place.is_tombstone
            seen += 1
            if seen == RECORDS_PER_SLICE:
                yield seen
                seen = 0
    except RequestError:
        return FilteredBatch(batch, header)
    if not kept:
        return _rest(batch, header, rules)
    horizon_ms = NO_HORIZON
    if tombstones:
        later_ms = min(rules.now_ms + rules.delete_retention_ms, INT64_MAX)
        horizon_ms = header.base_timestamp_ms if stamped and not expired else later_ms
    if len(kept) == header.record_count and (stamped or not tombstones):
        return FilteredBatch(batch, header, horizon_ms)
    stamp_ms = horizon_ms if tombstones and not stamped else None
    rebuilt = _rebuilt(data, header, kept, stamp_ms, horizon_ms)
    return rebuilt or FilteredBatch(batch, header, left_alone=True)


def _rebuilt(
    data: bytes, header: BatchHeader, kept: list[RecordLocation], stamp_ms: int | None, horizon_ms: int
) -> FilteredBatch | None:
    """The same batch with the records of `kept` only; `stamp_ms` becomes the moment its tombstones go at.

    None when a timestamp is too far from that moment to be told relative to it.
    """
    base_ms = header.base_timestamp_ms
    largest_ms = base_ms + max(place.timestamp_delta_ms for place in kept)
    largest_ms = max(INT64_MIN, min(largest_ms, INT64_MAX))  # a client may send any base and any delta
    if stamp_ms is None:
        body = b"".join([data[place.start : place.end] for place in kept])
    else:
        shift = base_ms - stamp_ms
        if not all(INT64_MIN <= p.timestamp_delta_ms + shift <= INT64_MAX for p in kept):
            return None
        body = b"".join([with_timestamp_delta(data, p, p.timestamp_delta_ms + shift) for p in kept])
        base_ms = stamp_ms
    if header.timestamp_type is TimestampType.LOG_APPEND:
        largest_ms = header.max_timestamp_ms
    new = header._replace(
        attributes=header.attributes | (0 if stamp_ms is None else DELETE_HORIZON),
        base_timestamp_ms=base_ms,
        max_timestamp_ms=largest_ms,
        record_count=len(kept),
    )
    codec = header.codec
    return _sealed(new, body if codec == Codec.NONE else compress(codec, body), horizon_ms)


def _sealed(header: BatchHeader, body: Buffer, horizon_ms: int = NO_HORIZON) -> FilteredBatch:
    batch = encode_batch(header, body)
    return FilteredBatch(batch, header._replace(batch_length=len(batch) - 12), horizon_ms)


def _rest(batch: Buffer, header: BatchHeader, rules: CompactionRules) -> FilteredBatch:
    """A batch without records stays only for what its header says."""
    ends_the_part = header.base_offset + header.last_offset_delta + 1 == rules.map_end_offset
    if not ends_the_part and not (header.producer_id >= 0 and rules.is_last_of_producer(header)):
        return FilteredBatch(None, None)
    if header.record_count == 0:
        return FilteredBatch(batch, header)
    empty = header._replace(
        attributes=header.attributes & ~(DELETE_HORIZON | 0x07),
        base_timestamp_ms=NO_HORIZON,
        max_timestamp_ms=NO_TIMESTAMP,
        record_count=0,
    )
    return _sealed(empty, b"")


def _marker(batch: Buffer, header: BatchHeader, rules: CompactionRules, *, stamped: bool) -> FilteredBatch:
    """A control batch. Once nothing of its transaction is left it goes as a tombstone does."""
    if not rules.is_obsolete_marker(header):
        return FilteredBatch(batch, header)
    if stamped:
        if rules.now_ms <= header.base_timestamp_ms:
            return FilteredBatch(batch, header, header.base_timestamp_ms)
        return _rest(batch, header, rules)
    data = decompressed_records(batch, header, rules.output_bytes_max)
    try:
        places = (
            [] if data is None else list(scan_records(data, header.record_count, header.last_offset_delta))
        )
    except RequestError:
        places = []
    if data is None or not places:
        return FilteredBatch(batch, header)
    horizon_ms = min(rules.now_ms + rules.delete_retention_ms, INT64_MAX)
    return _rebuilt(data, header, places, horizon_ms, horizon_ms) or FilteredBatch(batch, header)
