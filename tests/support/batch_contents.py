"""Batches with a valid CRC and any content: as an earlier version of a broker could have stored them."""

from __future__ import annotations

import gzip
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from crc32c import crc32c

from mansio.wire.batch.compression import Codec, compress
from mansio.wire.batch.record_batch import read_header, varint

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

    from mansio.testing import TestBroker

CODECS: Final = (Codec.NONE, Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD)


def encoded_record(delta: int, value: bytes | None, key: bytes | None = b"k") -> bytes:
    """One encoded record without headers."""
    fields = [b"\0", varint(0), varint(delta)]
    for field in (key, value):
        fields += [varint(-1)] if field is None else [varint(len(field)), field]
    body = b"".join((*fields, varint(0)))
    return varint(len(body)) + body


def raw_batch(
    payload: bytes,
    count: int,
    *,
    codec: int = 0,
    last_delta: int | None = None,
    base_offset: int = 0,
    timestamp_ms: int = 1_700_000_000_000,
) -> bytes:
    """A batch of these bytes, which are not compressed here, with a valid CRC. `last_delta`: None for `count` - 1."""
    last = count - 1 if last_delta is None else last_delta
    tail = struct.pack(">hiqqqhii", codec, last, timestamp_ms, timestamp_ms, -1, -1, -1, count) + payload
    head = struct.pack(">iBI", -1, 2, crc32c(tail))
    return struct.pack(">qi", base_offset, len(head) + len(tail)) + head + tail


def compressed_batch(records: bytes, count: int, codec: Codec, **more: int) -> bytes:
    """A batch of these encoded records, compressed."""
    return raw_batch(compress(codec, records), count, codec=codec, **more)


class Case(NamedTuple):
    """A batch, the number of offsets that it takes, and whether all its records can be read. `kind`: for messages."""

    kind: str
    batch: bytes
    offsets: int
    is_readable: bool


def _records(random: Random, count: int) -> list[bytes]:
    same = random.random() < 0.5
    key = None if same else b"key"
    size = random.randrange(40)
    return [
        encoded_record(delta, random.randbytes(size if same else random.randrange(60)), key)
        for delta in range(count)
    ]


def random_case(random: Random) -> Case:
    """A batch that is sound or wrong in one way."""
    count = random.choice((1, 2, 3, 20, 40))
    records = _records(random, count)
    data = b"".join(records)
    codec = random.choice(CODECS)
    compressed = random.choice(CODECS[1:])
    payload = compress(codec, data)
    kind = random.choice(_KINDS)
    match kind:
        case "sound":
            return Case(kind, raw_batch(payload, count, codec=codec), count, is_readable=True)
        case "garbage":
            found = raw_batch(random.randbytes(random.randrange(200)), count, codec=compressed)
        case "truncated":
            payload = compress(compressed, data)
            found = raw_batch(payload[: random.randrange(len(payload))], count, codec=compressed)
        case "flipped":
            changed = bytearray(payload)
            for _ in range(random.randrange(1, 4)):
                changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
            # What is flipped in a value or checksum may leave a sound batch.
            return Case(kind, raw_batch(bytes(changed), count, codec=codec), count, is_readable=False)
        case "more counted":
            more = count + random.choice((1, 5, 1000, 1 << 20))
            return Case(kind, raw_batch(payload, more, codec=codec), more, is_readable=False)
        case "fewer counted":
            fewer = random.randrange(count)
            found = raw_batch(payload, fewer, codec=codec, last_delta=count - 1)
        case "negative count":
            found = raw_batch(payload, -random.choice((1, 7, 1 << 31)), codec=codec, last_delta=count - 1)
        case "offsets beyond":
            wrong = encoded_record(count + random.randrange(9), b"x")
            records[random.randrange(count)] = wrong
            found = raw_batch(compress(codec, b"".join(records)), count, codec=codec)
        case "wrong length":
            length = random.choice((-1, 0, 5, 5000, (1 << 31) - 1, (1 << 62)))
            records[random.randrange(count)] = varint(length) + records[0][1:]
            found = raw_batch(compress(codec, b"".join(records)), count, codec=codec)
        case "nested":
            found = raw_batch(compress(codec, compress(compressed, data)), count, codec=codec)
        case "other codec":
            other = random.choice([each for each in CODECS[1:] if each != compressed])
            found = raw_batch(compress(compressed, data), count, codec=other)
        case "unknown codec":
            found = raw_batch(payload, count, codec=random.choice((5, 6, 7)))
        case "two frames":
            found = raw_batch(compress(compressed, data) * 2, count, codec=compressed)
        case "many members":
            found = raw_batch(gzip.compress(b"") * 40 + b"\x1f\x8b", count, codec=Codec.GZIP)
        case _:  # "after the records"
            rest = random.randbytes(random.randrange(1, 9))
            found = raw_batch(compress(codec, data + rest), count, codec=codec)
    return Case(kind, found, count, is_readable=False)


_KINDS: Final = (
    "sound",
    "garbage",
    "truncated",
    "flipped",
    "more counted",
    "fewer counted",
    "negative count",
    "offsets beyond",
    "wrong length",
    "nested",
    "other codec",
    "unknown codec",
    "two frames",
    "many members",
    "after the records",
)


def expanding_case(random: Random, bytes_max: int) -> Case:
    """A small batch that is sound and as large as `bytes_max` when decompressed, or one byte larger."""
    codec = random.choice((Codec.GZIP, Codec.LZ4, Codec.ZSTD))
    fits = random.random() < 0.5
    overhead = len(encoded_record(0, bytes(bytes_max - 64))) - (bytes_max - 64)
    record = encoded_record(0, bytes(bytes_max - overhead + (0 if fits else 1)))
    return Case("expanding", compressed_batch(record, 1, codec), 1, is_readable=fits)


def with_base_offset(batch: bytes, base_offset: int) -> bytes:
    """The batch at another offset, which its CRC does not cover."""
    return struct.pack(">q", base_offset) + batch[8:]


def store(broker: TestBroker, topic: str, batches: Iterable[bytes], partition: int = 0) -> list[int]:
    """Write batches into the log of a partition without the checks of an append, and return their base offsets."""

    async def write() -> list[int]:
        found = broker._running().service.partitions.get(topic, partition)
        assert found is not None
        epoch = found.replica.leader_epoch
        offsets = []
        for batch in batches:
            header = read_header(batch)
            offsets.append(found.log.append(batch, header, epoch))
            for after in found._after_append:
                after(header, offsets[-1], None)
        found.request_flush()
        await found.commit_promise(found.log.end_offset)
        return offsets

    return broker._run_on_loop(write())
