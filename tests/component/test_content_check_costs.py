"""How often the bytes of a large compressed batch are read between its socket and the log."""

from __future__ import annotations

import random
import socket
import struct
from typing import TYPE_CHECKING, Any

import crc32c as checksum
import pytest

import mansio
from mansio.broker.partition.append_validation import INLINE_CONTENT_BYTES_MAX
from mansio.node.embedded import EmbeddedBroker
from mansio.wire.batch import compression, recompress, record_batch, record_reader
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch
from support.hostile_bodies import PRODUCE, kafka_request, kafka_text
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.ports import Buffer

UNTRACED = {"mansio.trace.enable": "false"}  # blocks of the trace are batches that are read, too
TOPICS = {
    "plain": UNTRACED,
    "zstd": {"compression.type": "zstd", **UNTRACED},
    "gzip": {"compression.type": "gzip", **UNTRACED},
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(tmp_path_factory.mktemp("costs") / "data") as started:
        with mansio.blocking.connect(started.address) as client:
            for topic, config in TOPICS.items():
                client.admin.create_topic(topic, partitions=1, config=config)
        yield started


class Reads:
    """Sizes of the bytes whose CRC was computed, and limits with which bytes were decompressed, of large batches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.crcs: list[int] = []
        self.limits: list[int] = []
        real_crc, real_decompress = checksum.crc32c, compression.decompress

        def crc32c(data: Buffer, *rest: int) -> int:
            if len(data) > 60:  # not those of a header
                self.crcs.append(len(data))
            return real_crc(data, *rest)

        def decompress(codec: int, data: Buffer, output_bytes_max: int, **options: Any) -> bytes:
            self.limits.append(output_bytes_max)
            return real_decompress(codec, data, output_bytes_max, **options)

        monkeypatch.setattr(record_batch, "crc32c", crc32c)
        for module in (record_reader, recompress):
            monkeypatch.setattr(module, "decompress", decompress)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("is_large_as_sent", [True, False])
@pytest.mark.parametrize("topic", TOPICS)
def test_a_large_batch_is_read_no_more_often_than_it_must_be(
    broker: EmbeddedBroker,
    monkeypatch: pytest.MonkeyPatch,
    topic: str,
    codec: Codec,
    *,
    is_large_as_sent: bool,
) -> None:
    size = 4 * INLINE_CONTENT_BYTES_MAX
    value = random.Random(1).randbytes(size) if is_large_as_sent else bytes(size)
    batch = build_batch([(0, None, value, ())], codec=codec)
    assert (len(batch) > INLINE_CONTENT_BYTES_MAX) is is_large_as_sent
    body = b"\xff\xff" + struct.pack(">hii", -1, 60_000, 1) + kafka_text(topic.encode())
    body += struct.pack(">iii", 1, 0, len(batch)) + batch
    request = kafka_request(PRODUCE, 7, body, is_flexible=False)
    reads = Reads(monkeypatch)
    stored_as_sent = topic in ("plain", codec.name.lower())
    host, _, port = broker.address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=scaled(60)) as connection:
        answers = connection.makefile("rb")
        for _ in range(3):  # from the second on with the template of the connection
            reads.crcs.clear()
            reads.limits.clear()
            connection.sendall(struct.pack(">i", len(request)) + request)
            (length,) = struct.unpack(">i", answers.read(4))
            assert answers.read(length)[4 + 4 + 2 + len(topic) + 4 + 4 :][:2] == b"\0\0"
            whole = [limit for limit in reads.limits if limit > INLINE_CONTENT_BYTES_MAX]
            assert len(whole) == 1
            assert len(reads.limits) <= (1 if is_large_as_sent else 2), (
                "small as sent: one try on the event loop"
            )
            if stored_as_sent:
                assert reads.crcs == [len(batch) - 21]
            else:  # of the batch as sent, also if it was tried on the event loop, and as stored
                assert len(reads.crcs) <= (2 if is_large_as_sent else 3)
