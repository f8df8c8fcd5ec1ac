"""Compression codecs compared with the libraries of Kafka's clients, and decompression bombs."""

from __future__ import annotations

import gzip
import random
import zlib
from random import Random
from typing import TYPE_CHECKING, Any

import aiokafka.codec
import lz4.frame
import pytest
import snappy
import zstandard

from mansio.errors import CorruptMessage, InvalidRecord, UnsupportedCompression
from mansio.wire.batch.compression import Codec, compress, decompress, estimate_decompressed_bytes
from unit.wire.kafka_python_codec import kafka_codec

if TYPE_CHECKING:
    from collections.abc import Callable

NOISE = Random(7).randbytes(300_000)
TEXTS = {
    "empty": b"",
    "one byte": b"x",
    "repeats": b"mansio " * 60_000,
    "noise": NOISE,
    "mixed": b"a" * 70_000 + NOISE[:70_000] + b"b" * 40_000,
    "a whole block": bytes(65_536),
}
PLENTY = 1 << 20


def zstd_stream(data: bytes, **options: Any) -> bytes:
    out = zstandard.ZstdCompressor(write_content_size=False, **options).compressobj()
    return out.compress(data) + out.flush()


def zstd_flushed_often(data: bytes) -> bytes:
    out = zstandard.ZstdCompressor().compressobj()
    parts = [
        out.compress(data[start : start + 999]) + out.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
        for start in range(0, len(data), 999)
    ]
    return b"".join(parts) + out.flush()


def lz4_frame(**options: Any) -> object:
    return lambda data: lz4.frame.compress(data, **options)


FOREIGN_WRITERS = {
    "gzip": (Codec.GZIP, gzip.compress),
    "gzip in two members": (Codec.GZIP, lambda d: gzip.compress(d[:100]) + gzip.compress(d[100:])),
    "gzip, kafka-python": (Codec.GZIP, kafka_codec.gzip_encode),
    "snappy raw, librdkafka's way": (Codec.SNAPPY, snappy.compress),
    "snappy xerial, kafka-python": (Codec.SNAPPY, kafka_codec.snappy_encode),
    "snappy xerial, aiokafka": (Codec.SNAPPY, aiokafka.codec.snappy_encode),
    "lz4, kafka-python": (Codec.LZ4, kafka_codec.lz4_encode),
    "lz4, aiokafka": (Codec.LZ4, aiokafka.codec.lz4_encode),
    "lz4 with content size": (Codec.LZ4, lz4_frame(store_size=True)),
    "lz4 without content size": (Codec.LZ4, lz4_frame(store_size=False)),
    "lz4, linked blocks": (Codec.LZ4, lz4_frame(store_size=False, block_linked=True, block_size=4)),
    "lz4, independent blocks": (Codec.LZ4, lz4_frame(block_linked=False, block_size=5)),
    "lz4, 4 MiB blocks": (Codec.LZ4, lz4_frame(store_size=False, block_size=7)),
    "lz4, all checksums": (Codec.LZ4, lz4_frame(content_checksum=True, block_checksum=True)),
    "zstd with content size": (Codec.ZSTD, zstandard.ZstdCompressor().compress),
    "zstd without content size": (Codec.ZSTD, zstd_stream),
    "zstd with checksum": (Codec.ZSTD, lambda d: zstd_stream(d, write_checksum=True)),
    "zstd, high level": (Codec.ZSTD, lambda d: zstd_stream(d, level=19)),
    "zstd in many blocks": (Codec.ZSTD, zstd_flushed_often),
    "zstd in two frames": (Codec.ZSTD, lambda d: zstd_stream(d[:9]) + zstandard.compress(d[9:])),
    "zstd, kafka-python": (Codec.ZSTD, kafka_codec.zstd_encode),
    "zstd, aiokafka": (Codec.ZSTD, aiokafka.codec.zstd_encode),
}
FOREIGN_READERS = {
    "gzip": (Codec.GZIP, gzip.decompress),
    "gzip, aiokafka": (Codec.GZIP, aiokafka.codec.gzip_decode),
    "snappy, kafka-python": (Codec.SNAPPY, kafka_codec.snappy_decode),
    "snappy, aiokafka": (Codec.SNAPPY, aiokafka.codec.snappy_decode),
    "lz4": (Codec.LZ4, lz4.frame.decompress),
    "lz4, kafka-python": (Codec.LZ4, kafka_codec.lz4_decode),
    "lz4, aiokafka": (Codec.LZ4, aiokafka.codec.lz4_decode),
    "zstd": (Codec.ZSTD, lambda d: zstandard.ZstdDecompressor().decompressobj().decompress(d)),
    "zstd, kafka-python": (Codec.ZSTD, kafka_codec.zstd_decode),
    "zstd, aiokafka": (Codec.ZSTD, aiokafka.codec.zstd_decode),
}


@pytest.mark.parametrize("codec", Codec)
def test_round_trip(codec: Codec) -> None:
    for name, data in TEXTS.items():
        packed = compress(codec, memoryview(bytearray(data)))
        assert decompress(codec, memoryview(bytearray(packed)), len(data)) == data, name


@pytest.mark.parametrize(("codec", "write"), FOREIGN_WRITERS.values(), ids=FOREIGN_WRITERS.keys())
def test_data_compressed_by_other_libraries_is_decompressed(
    codec: Codec, write: Callable[[bytes], bytes]
) -> None:
    for name, data in TEXTS.items():
        assert decompress(codec, write(data), len(data)) == data, name


@pytest.mark.parametrize(("codec", "read"), FOREIGN_READERS.values(), ids=FOREIGN_READERS.keys())
def test_other_libraries_decompress_our_data(codec: Codec, read: Callable[[bytes], bytes]) -> None:
    for name, data in TEXTS.items():
        assert bytes(read(compress(codec, data))) == data, name


def test_lz4_has_the_form_that_the_java_client_requires() -> None:
    """KafkaLZ4BlockInputStream refuses linked blocks."""
    for name, data in TEXTS.items():
        info = lz4.frame.get_frame_info(compress(Codec.LZ4, data))
        assert info["block_linked"] is False, name
        assert info["content_size"] == 0, name
        assert info["block_size"] == 65_536, name


@pytest.mark.parametrize(("codec", "write"), FOREIGN_WRITERS.values(), ids=FOREIGN_WRITERS.keys())
def test_one_byte_more_than_allowed_is_refused(codec: Codec, write: Callable[[bytes], bytes]) -> None:
    data = TEXTS["mixed"]
    with pytest.raises(InvalidRecord):
        decompress(codec, write(data), len(data) - 1)


@pytest.mark.parametrize(("codec", "write"), FOREIGN_WRITERS.values(), ids=FOREIGN_WRITERS.keys())
def test_the_estimate_is_the_length_or_a_little_more(codec: Codec, write: Callable[[bytes], bytes]) -> None:
    for name, data in TEXTS.items():
        compressed = write(data)
        estimate = estimate_decompressed_bytes(codec, compressed, 1 << 30)
        if write is FOREIGN_WRITERS["gzip in two members"][1]:
            assert estimate == max(len(data) - 100, 0), f"{name}: the length of the last member"
            continue
        assert len(decompress(codec, compressed, PLENTY)) <= estimate, name
        if write is not zstd_flushed_often:  # each block may be longer
            assert estimate <= len(data) + (4 << 20), name
        assert estimate_decompressed_bytes(codec, compressed, 10) <= 10, name


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec != Codec.NONE])
@pytest.mark.parametrize("data", [b"", b"\x07", b"garbage that is longer than any header", b"\x01" * 64])
def test_the_estimate_of_garbage_is_bounded(codec: Codec, data: bytes) -> None:
    assert 0 <= estimate_decompressed_bytes(codec, data, 1000) <= 1000


def test_the_estimate_does_not_look_at_many_blocks() -> None:
    """A client chooses their number; what is not known counts as the most that is possible."""
    many = {
        Codec.SNAPPY: compress(Codec.SNAPPY, b"")[:16] + b"\x00\x00\x00\x01\x00" * 2000,
        Codec.LZ4: compress(Codec.LZ4, b"")[:7] + b"\x01\x00\x00\x80x" * 2000 + bytes(4),
        Codec.ZSTD: b"\x50\x2a\x4d\x18\x00\x00\x00\x00" * 2000,
    }
    for codec, data in many.items():
        assert (
            estimate_decompressed_bytes(codec, data[:-4] if codec is Codec.ZSTD else data, 1 << 30) == 1 << 30
        )
    blocks = zstd_flushed_often(bytes(2_000 * 999))
    assert estimate_decompressed_bytes(Codec.ZSTD, blocks, 1 << 30) == 1 << 30


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec != Codec.NONE])
@pytest.mark.parametrize("cut", [1, 4, 9, 100])
def test_truncated_data_is_corrupt(codec: Codec, cut: int) -> None:
    packed = compress(codec, TEXTS["mixed"])
    with pytest.raises(CorruptMessage):
        decompress(codec, packed[:-cut], PLENTY)


@pytest.mark.parametrize("codec", [codec for codec in Codec if codec != Codec.NONE])
@pytest.mark.parametrize("garbage", [b"", b"\x07", b"garbage that is longer than any header", b"\x01" * 64])
def test_garbage_is_corrupt(codec: Codec, garbage: bytes) -> None:
    with pytest.raises((CorruptMessage, InvalidRecord)):
        decompress(codec, garbage, PLENTY)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.LZ4, Codec.ZSTD])
def test_bytes_after_the_end_are_corrupt(codec: Codec) -> None:
    with pytest.raises(CorruptMessage):
        decompress(codec, compress(codec, b"data") + b"more", PLENTY)


@pytest.mark.parametrize("number", [5, 6, 7, -1, 99])
def test_unknown_codec_is_refused(number: int) -> None:
    with pytest.raises(UnsupportedCompression):
        decompress(number, b"", PLENTY)


def bombs() -> dict[str, tuple[Codec, bytes]]:
    """Small inputs that claim, or really hold, at least 64 MiB."""
    huge = bytes(64 << 20)
    repeat = b"".join((((1 << 17) << 3 | 2).to_bytes(3, "little"), b"\x00"))  # one byte, 128 Ki times
    last = b"".join((((1 << 17) << 3 | 3).to_bytes(3, "little"), b"\x00"))
    zstd_head = (0xFD2FB528).to_bytes(4, "little")
    packer = zlib.compressobj(1, wbits=31)
    zipped = packer.compress(huge) + packer.flush()
    blocks = compress(Codec.SNAPPY, bytes(32 << 10))
    return {
        "gzip": (Codec.GZIP, zipped),
        "gzip in members": (Codec.GZIP, gzip.compress(bytes(900_000)) * 100),
        "snappy that claims 4 GiB": (Codec.SNAPPY, b"\xff\xff\xff\xff\x0f" + bytes(60)),
        "snappy that is 64 MiB": (Codec.SNAPPY, snappy.compress(huge)),
        "snappy in blocks": (Codec.SNAPPY, blocks[:16] + blocks[16:] * 2048),
        "lz4": (Codec.LZ4, lz4.frame.compress(huge, store_size=False)),
        "lz4 with its size": (Codec.LZ4, lz4.frame.compress(huge, store_size=True)),
        "zstd of repeats": (Codec.ZSTD, zstd_head + b"\x00\x58" + repeat * 8192 + last),
        "zstd": (Codec.ZSTD, zstd_stream(huge)),
        "zstd with its size": (Codec.ZSTD, zstandard.compress(huge)),
        "zstd that claims 2^60": (
            Codec.ZSTD,
            zstd_head + b"\xc0\x58" + (1 << 60).to_bytes(8, "little") + last,
        ),
    }


def test_gzip_with_too_many_empty_members_is_refused() -> None:
    """Twenty bytes each, and what is behind a member must not be copied for each of them."""
    empty = gzip.compress(b"")
    assert decompress(Codec.GZIP, empty * 10_000, 1) == b""
    with pytest.raises(InvalidRecord, match="10000 gzip members"):
        decompress(Codec.GZIP, empty * 10_001, 1)


def test_gzip_members_end_anywhere() -> None:
    """At, before and behind the end of a piece that is read at a time; and cut short anywhere."""
    noise = random.Random(1).randbytes(200_000)
    for size in (*range(65_500, 65_540), 200_000):
        data = noise[:size]
        packed = gzip.compress(data, 1)
        assert decompress(Codec.GZIP, packed * 2, 2 * size) == 2 * data
        with pytest.raises(InvalidRecord):
            decompress(Codec.GZIP, packed * 2, 2 * size - 1)
        with pytest.raises(CorruptMessage):
            decompress(Codec.GZIP, packed + packed[:-1], 2 * size)
