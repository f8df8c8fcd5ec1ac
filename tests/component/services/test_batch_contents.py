"""What is inside a compressed batch is checked at produce, with one limit for every kind of topic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from component.services.services_fixtures import run
from mansio.broker.partition.append_validation import INLINE_CONTENT_BYTES_MAX
from mansio.broker.topics.topics import NewTopic
from mansio.config.settings import SPECIFICATIONS, Settings
from mansio.errors import CorruptMessage, InvalidRecord, MansioError, MessageTooLarge, UnsupportedCompression
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX, Codec, compress
from mansio.wire.batch.record_batch import HEADER_BYTES, build_batch, encode_batch, read_header, varint
from mansio.wire.field_values import ACKS_ALL

if TYPE_CHECKING:
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices
    from mansio.broker.services.produce import BatchResult

CODECS = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
NOW_MS = 1_700_000_000_000

TOPICS = {
    "plain": {},
    "compacted": {"cleanup.policy": "compact"},
    "delays": {"mansio.delay.enable": "true"},
    "priorities": {"mansio.priority.enable": "true"},
    "dedup": {"mansio.dedup.ms": "60000"},
    "recompression": {"compression.type": "snappy"},
    "recompression off the loop": {"compression.type": "zstd", "compression.zstd.level": "15"},
    "append time": {"message.timestamp.type": "LogAppendTime"},
}
"""Kinds of topics: settings."""


def records_of(*values: bytes) -> bytes:
    """Encoded records with these values."""
    return build_batch([(NOW_MS, b"k", value, ()) for value in values])[HEADER_BYTES:]


def batch_of(codec: Codec, content: bytes, count: int) -> bytes:
    """A batch with a valid checksum whose header states `count` records."""
    header = read_header(build_batch([(NOW_MS, b"k", b"v", ())] * count))
    return encode_batch(header._replace(attributes=int(codec)), content)


def broken_batches(codec: Codec, good: bytes) -> dict[str, bytes]:
    """Batches of two records with contents that no consumer can read, by what is wrong. `good`: two encoded records."""
    compressed = compress(codec, good)
    return {
        "garbage": batch_of(codec, compressed[:4] + b"garbage" * 5, 2),
        "truncated": batch_of(codec, compressed[:-6], 2),
        "empty": batch_of(codec, b"", 2),
        "too many records": batch_of(codec, compress(codec, good), 3),
        "too few records": batch_of(codec, compress(codec, good), 1),
        "length beyond the batch": batch_of(codec, compress(codec, varint(5000 + len(good)) + good), 2),
        "negative length": batch_of(codec, compress(codec, varint(-1) + good), 3),
        "length of zero": batch_of(codec, compress(codec, varint(0) + good), 3),
        "bytes behind the last record": batch_of(codec, compress(codec, good + b"more"), 2),
        "compressed twice": batch_of(codec, compress(codec, compressed), 2),
        "unknown codec": batch_of(7, compressed, 2),  # type: ignore[arg-type]  # three bits of the attributes
    }


async def produce(services: BrokerServices, topic: str, *batches: bytes) -> list[BatchResult]:
    """Produce batches one after the other."""
    results = []
    for batch in batches:
        ((_, _, (result,)),) = await services.produce.produce(
            [(topic, None, [(0, batch)])], grants=None, acks=ACKS_ALL, timeout_ms=20_000
        )
        results.append(result)
    return results


async def create_topics(services: BrokerServices) -> dict[str, str]:
    """Create a topic of each kind; return the names by kind."""
    names = {}
    for number, (kind, configs) in enumerate(TOPICS.items()):
        names[kind] = f"kind-{number}"
        common = {"max.message.bytes": "90000000", "message.timestamp.before.max.ms": "9223372036854775807"}
        await services.topics.create(NewTopic(names[kind], 1, configs=list({**common, **configs}.items())))
    return names


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_that_no_consumer_can_read_is_refused_and_nothing_is_stored(
    tmp_path: Path, codec: Codec
) -> None:
    async def work(services: BrokerServices) -> None:
        names = await create_topics(services)
        small, large = records_of(b"a", b"b"), records_of(b"a", bytes(2 * INLINE_CONTENT_BYTES_MAX))
        for kind, topic in names.items():
            for good in (small, large):  # checked on the event loop, and on a thread
                for wrong, batch in broken_batches(codec, good).items():
                    (result,) = await produce(services, topic, batch)
                    assert isinstance(
                        result.error, CorruptMessage | InvalidRecord | UnsupportedCompression
                    ), (kind, wrong)
            partition = services.partitions.find(topic, None, 0)
            assert partition.end_offset == 0, kind
            sent = [batch_of(codec, compress(codec, good), 2) for good in (small, large, small)]
            assert [each.error for each in await produce(services, topic, *sent)] == [None] * 3, kind
            assert partition not in services.partitions.batch_processor.queues
        assert not services.partitions.batch_processor.queued_bytes

    run(tmp_path, work)


@pytest.mark.parametrize("codec", CODECS)
def test_one_limit_of_the_decompressed_size_holds_for_every_kind_of_topic(
    tmp_path: Path, codec: Codec
) -> None:
    limit = 1 << 20

    async def work(services: BrokerServices) -> None:
        names = await create_topics(services)
        value = bytes(2 * limit - 100 - len(records_of(bytes(limit - 100))))
        fits = batch_of(codec, compress(codec, records_of(value)), 1)
        exceeds = batch_of(codec, compress(codec, records_of(value + b"1")), 1)
        plain = build_batch([(NOW_MS, b"k", bytes(limit), ())])
        for kind, topic in names.items():
            for batch in (exceeds, plain):
                (result,) = await produce(services, topic, batch)
                assert isinstance(result.error, MessageTooLarge), kind
                assert f"a batch of {len(batch)} bytes exceeds max.decompressed.bytes={limit}" in str(
                    result.error
                )
            (result,) = await produce(services, topic, fits)
            assert result.error is None, kind
            assert services.partitions.find(topic, None, 0).end_offset > 0

    run(tmp_path, work, max_decompressed_bytes=limit)


def test_a_batch_of_40_mib_when_decompressed_is_accepted_by_every_kind_of_topic(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        names = await create_topics(services)
        batch = batch_of(Codec.ZSTD, compress(Codec.ZSTD, records_of(bytes(40 << 20))), 1)
        for kind, topic in names.items():
            (result,) = await produce(services, topic, batch)
            assert result.error is None, kind

    run(tmp_path, work)


def test_without_the_check_batches_are_stored_unread_unless_a_feature_reads_them(tmp_path: Path) -> None:
    async def work(services: BrokerServices) -> None:
        names = await create_topics(services)
        batch = broken_batches(Codec.ZSTD, records_of(b"a", b"b"))["truncated"]
        results = {kind: (await produce(services, topic, batch))[0].error for kind, topic in names.items()}
        assert {kind for kind, error in results.items() if error is None} == {
            "plain",
            "append time",
            "recompression off the loop",  # it has the codec of the topic already
        }

    run(tmp_path, work, check_compressed_batches=False)


def test_the_setting_is_at_most_the_size_that_every_reader_reads() -> None:
    assert SPECIFICATIONS["max_decompressed_bytes"].maximum == DECOMPRESSED_BYTES_MAX
    assert Settings(data_dir="d").max_decompressed_bytes == DECOMPRESSED_BYTES_MAX
    with pytest.raises(MansioError, match="max_decompressed_bytes"):
        Settings(data_dir="d", max_decompressed_bytes=DECOMPRESSED_BYTES_MAX + 1)
