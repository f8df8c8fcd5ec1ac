"""Decompression bombs, produced for real: small batches that become gigabytes, or a hundred million records.

The broker refuses a bomb when it is produced. With `check_compressed_batches` off it stores batches as sent, so to most
topics a bomb is bytes like any other; where batches are decompressed then (a look-up by time, a compacted topic, our
client) there is a bound, in bytes and in records.
"""

from __future__ import annotations

import asyncio
import gzip
import struct
import zlib
from typing import TYPE_CHECKING

import lz4.frame
import psutil
import pytest
import snappy
import zstandard
from crc32c import crc32c

import mansio
from mansio.errors import CorruptMessage, InvalidRecord, UnreadableRecords
from mansio.wire.api_versions import ApiKey
from mansio.wire.batch.compression import Codec, compress
from mansio.wire.headers import unsigned_varint
from support.machine import scaled
from support.process import ServedBroker, served
from support.raw_peer import RawPeer, batch_of
from system.e2e.other_client import MIB, wait_until_idle, watched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from system.e2e.other_client import Watched

pytestmark = pytest.mark.full

LONG_BYTES = 512 * MIB
RECORDS = 1_500_000
"""Sound ones, and within what may be opened in bytes; as objects they are hundreds of megabytes."""
LOOKUP_CPU_S_MAX = 1.0
"""Of the broker, its neighbour included: what a look-up holds up is measured there, on any machine."""
NO_KEY_OR_TOO_LARGE = {2, 10, 87}
"""CORRUPT_MESSAGE, MESSAGE_TOO_LARGE, INVALID_RECORD."""

GROWTH_BYTES_MAX = 256 * MIB
"""Twice the 128 MiB to which a batch may be decompressed; the bombs hold four times as much."""


def zlib_stream(piece: bytes, total: int) -> bytes:
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(piece) for _ in range(total // len(piece))) + packer.flush()


def zstd_stream(piece: bytes, total: int) -> bytes:
    packer = zstandard.ZstdCompressor().compressobj()
    return b"".join(packer.compress(piece) for _ in range(total // len(piece))) + packer.flush()


def lz4_stream(piece: bytes, total: int) -> bytes:
    with lz4.frame.LZ4FrameCompressor(block_size=lz4.frame.BLOCKSIZE_MAX4MB) as packer:
        return b"".join(
            (packer.begin(), *(packer.compress(piece) for _ in range(total // len(piece))), packer.flush())
        )


def xerial(piece: bytes, total: int) -> bytes:
    packed = compress(Codec.SNAPPY, piece)
    return packed[:16] + packed[16:] * (total // len(piece))


ZEROS = bytes(MIB)


def many_records() -> bytes:
    """Sound records without key, value and headers, one after the other."""
    deltas = map(unsigned_varint, range(0, 2 * RECORDS, 2))  # zigzag
    return b"".join(bytes((2 * (5 + len(delta)), 0, 0)) + delta + b"\x01\x01\x00" for delta in deltas)


def bombs() -> dict[str, tuple[Codec, int, Callable[[], bytes]]]:
    """name -> (codec, number of records it claims, its compressed records)."""
    few = LONG_BYTES // 8
    return {
        "gzip": (Codec.GZIP, 1, lambda: zlib_stream(ZEROS, LONG_BYTES)),
        "gzip in members": (Codec.GZIP, 1, lambda: gzip.compress(ZEROS) * 500),
        "gzip in gzip": (Codec.GZIP, 1, lambda: gzip.compress(zlib_stream(ZEROS, LONG_BYTES))),
        "snappy that lies": (Codec.SNAPPY, 1, lambda: b"\xff\xff\xff\xff\x0f" + bytes(100)),
        "snappy, raw": (Codec.SNAPPY, 1, lambda: bytes(snappy.compress(bytes(few)))),
        "snappy, xerial": (Codec.SNAPPY, 1, lambda: xerial(ZEROS, few)),
        "lz4": (Codec.LZ4, 1, lambda: lz4_stream(ZEROS, LONG_BYTES)),
        "zstd": (Codec.ZSTD, 1, lambda: zstd_stream(ZEROS, LONG_BYTES)),
        "zstd in frames": (Codec.ZSTD, 1, lambda: zstandard.compress(ZEROS) * 500),
        "zstd that lies": (
            Codec.ZSTD,
            1,
            lambda: b"\x28\xb5\x2f\xfd\xc0\x58" + (1 << 60).to_bytes(8, "little") + b"\x01\x00\x00",
        ),
        "zstd of many records": (Codec.ZSTD, RECORDS, lambda: zstandard.compress(many_records())),
    }


def batch_with(codec: Codec, count: int, packed: bytes) -> bytes:
    """A batch whose header is right and whose records are `packed`."""
    header = bytearray(batch_of(b"", codec=Codec.NONE)[:61])
    struct.pack_into(">i", header, 8, 49 + len(packed))
    struct.pack_into(">hi", header, 21, codec, count - 1)
    struct.pack_into(">i", header, 57, count)
    struct.pack_into(">I", header, 17, crc32c(bytes(header[21:]) + packed))
    return bytes(header) + packed


ARGUMENTS = ("--set", "socket_request_max_bytes=41943040")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    """A broker that stores batches as sent."""
    arguments = [*ARGUMENTS, "--set", "check_compressed_batches=false"]
    with served(tmp_path_factory.mktemp("bombs") / "data", arguments=arguments, http=False) as running:
        wait_until_idle(running)
        yield running


@pytest.fixture(scope="module")
def checking_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedBroker]:
    with served(
        tmp_path_factory.mktemp("checked") / "data", arguments=list(ARGUMENTS), http=False
    ) as running:
        wait_until_idle(running)
        yield running


@pytest.fixture
def view(broker: ServedBroker) -> Iterator[Watched]:
    with watched(broker) as found:
        yield found


def look_up(peer: RawPeer, topic: str, timestamp_ms: int) -> int:
    """Ask for the first record of a moment; the error code."""
    partition = {"partition_index": 0, "timestamp": timestamp_ms}
    wanted = {"replica_id": -1, "topics": [{"name": topic, "partitions": [partition]}]}
    return int(peer.call(ApiKey.LIST_OFFSETS, 7, wanted).topics[0].partitions[0].error_code)


def processor_s(pid: int) -> float:
    """What a process has used of the processors."""
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def consume_one(bootstrap_servers: str, topic: str) -> None:
    async def read() -> None:
        async with mansio.connect(bootstrap_servers) as client, client.consume(topic) as consumer:
            async for _ in consumer:
                return

    asyncio.run(asyncio.wait_for(read(), scaled(10)))


@pytest.mark.row("P5")
@pytest.mark.parametrize("bomb", bombs())
def test_decompression_bomb_does_not_affect_other_clients(view: Watched, bomb: str) -> None:
    codec, count, pack = bombs()[bomb]
    batch = batch_with(codec, count, pack())
    plain, compacted = f"plain-{bomb}".translate(NAMES), f"compacted-{bomb}".translate(NAMES)
    with RawPeer(view.port) as peer:
        peer.create_topic(plain, max_message_bytes=str(32 * MIB))
        peer.create_topic(compacted, max_message_bytes=str(32 * MIB), cleanup_policy="compact")
        assert peer.produce(plain, batch).error_code == 0, "to this broker it is bytes like any other"
        before = view.memory.growth
        for timestamp_ms in (1, -3):  # the first record of all times; the one with the largest (KIP-734)
            begin_s = processor_s(view.broker.pid)
            assert look_up(peer, plain, timestamp_ms) == 0
            assert processor_s(view.broker.pid) - begin_s < scaled(LOOKUP_CPU_S_MAX)
        assert peer.produce(compacted, batch).error_code in NO_KEY_OR_TOO_LARGE
        assert peer.end_offset(compacted) == 0
    assert view.memory.growth - before < GROWTH_BYTES_MAX
    if count > 1:  # its records are valid, and are read in parts
        consume_one(view.broker.bootstrap_servers, plain)
        return
    with pytest.raises((InvalidRecord, CorruptMessage, UnreadableRecords)):
        consume_one(view.broker.bootstrap_servers, plain)


NAMES = str.maketrans({" ": "-", ",": None})


@pytest.mark.parametrize("bomb", bombs())
def test_decompression_bomb_is_refused_at_produce(checking_broker: ServedBroker, bomb: str) -> None:
    codec, count, pack = bombs()[bomb]
    batch, topic = batch_with(codec, count, pack()), f"checked-{bomb}".translate(NAMES)
    with watched(checking_broker) as view, RawPeer(view.port) as peer:
        peer.create_topic(topic, max_message_bytes=str(32 * MIB))
        before = view.memory.growth
        assert peer.produce(topic, batch).error_code in NO_KEY_OR_TOO_LARGE
        assert peer.end_offset(topic) == 0
        assert view.memory.growth - before < GROWTH_BYTES_MAX


def test_client_opens_only_what_its_setting_allows(broker: ServedBroker) -> None:
    """The same batch is refused with a typed error below the bound and read above it."""

    async def read(batch_bytes_max: int) -> int:
        async with (
            mansio.connect(broker.bootstrap_servers) as client,
            client.consume("zeros", to_end=True, batch_bytes_max=batch_bytes_max) as consumer,
        ):
            return sum([len(message.value or b"") async for message in consumer])

    with RawPeer(broker.kafka_port) as peer:
        peer.create_topic("zeros")
        assert peer.produce("zeros", batch_of(bytes(3 * MIB), codec=Codec.ZSTD)).error_code == 0
    with pytest.raises(UnreadableRecords, match="more than 1048576 bytes"):
        asyncio.run(read(MIB))
    assert asyncio.run(read(4 * MIB)) == 3 * MIB
