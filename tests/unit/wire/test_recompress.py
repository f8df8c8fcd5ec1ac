"""Recompression changes only the codec of a batch, and its memory is bounded."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mansio.errors import CorruptMessage, InvalidRecord, MansioError, UnsupportedCompression
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.recompress import Compression, recompress
from mansio.wire.batch.record_batch import (
    CODEC_MASK,
    HEADER_BYTES,
    build_batch,
    check_batch,
    encode_batch,
    read_header,
)
from mansio.wire.batch.record_reader import read_records

if TYPE_CHECKING:
    from collections.abc import Sequence

LIMIT = 1 << 20
LEVELS: dict[Codec, Sequence[int | None]] = {
    Codec.NONE: [None],
    Codec.GZIP: [None, 1, 9],
    Codec.SNAPPY: [None],
    Codec.LZ4: [None, 1, 3, 12, 17],
    Codec.ZSTD: [None, -131_072, 1, 19, 22],
}

small_bytes = st.binary(max_size=40)
records = st.lists(
    st.tuples(
        st.integers(0, 1 << 42),
        st.none() | small_bytes,
        st.none() | small_bytes,
        st.lists(st.tuples(st.text(max_size=5), st.none() | small_bytes), max_size=3),
    ),
    min_size=1,
    max_size=30,
)
compressions = st.sampled_from(sorted(LEVELS)).flatmap(
    lambda codec: st.builds(Compression, st.just(codec), st.sampled_from(LEVELS[codec]))
)


@given(
    records=records,
    source=st.sampled_from(sorted(Codec)),
    target=compressions,
    producer=st.tuples(st.integers(0, 1 << 62), st.integers(0, 32_767), st.integers(0, (1 << 31) - 1)),
    has_log_append_time=st.booleans(),
    leader_epoch=st.integers(-1, 1 << 30),
)
def test_everything_but_the_codec_is_kept(
    records: Any,
    source: Codec,
    target: Compression,
    producer: tuple[int, int, int],
    *,
    has_log_append_time: bool,
    leader_epoch: int,
) -> None:
    producer_id, producer_epoch, base_sequence = producer
    batch = build_batch(
        records,
        codec=source,
        base_offset=7,
        leader_epoch=leader_epoch,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
    )
    if has_log_append_time:
        header = read_header(batch)
        batch = encode_batch(header._replace(attributes=header.attributes | 8), batch[HEADER_BYTES:])
    before = read_header(batch)
    result = recompress(batch, target, output_bytes_max=LIMIT)
    after = check_batch(result)
    assert after.codec is target.codec
    assert after.attributes & ~CODEC_MASK == before.attributes & ~CODEC_MASK
    changed = {"attributes": 0, "batch_length": 0, "crc": 0}
    assert after._replace(**changed) == before._replace(**changed)
    assert read_records(result, output_bytes_max=LIMIT) == read_records(batch, output_bytes_max=LIMIT)
    again = recompress(result, Compression(source), output_bytes_max=LIMIT)
    assert read_records(again, output_bytes_max=LIMIT) == read_records(batch, output_bytes_max=LIMIT)


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
def test_a_decompression_bomb_is_refused(codec: Codec) -> None:
    batch = build_batch([(0, None, bytes(8 << 20), ())], codec=codec)
    assert len(batch) < LIMIT
    with pytest.raises(InvalidRecord, match="when decompressed"):
        recompress(batch, Compression(Codec.NONE), output_bytes_max=LIMIT)


def test_damaged_batches_are_refused_with_their_own_errors() -> None:
    batch = build_batch([(0, None, b"value" * 100, ())], codec=Codec.GZIP)
    header = read_header(batch)
    cases: list[tuple[bytes, type[MansioError]]] = [
        (batch[:-1], CorruptMessage),
        (batch[:-1] + b"\x00\x00", CorruptMessage),
        (encode_batch(header, batch[HEADER_BYTES:-9]), CorruptMessage),
        (encode_batch(header._replace(attributes=header.attributes | 7), b"x" * 50), UnsupportedCompression),
        (batch + batch, InvalidRecord),
    ]
    for damaged, error in cases:
        with pytest.raises(error):
            recompress(damaged, Compression(Codec.ZSTD), output_bytes_max=LIMIT)


@pytest.mark.parametrize(
    ("codec", "low", "high"), [(Codec.GZIP, 1, 9), (Codec.LZ4, 1, 12), (Codec.ZSTD, -50, 19)]
)
def test_a_higher_level_compresses_better(codec: Codec, low: int, high: int) -> None:
    chosen = random.Random(1)
    words = [chosen.randbytes(chosen.randrange(3, 9)).hex().encode() for _ in range(3000)]
    value = b" ".join(chosen.choices(words, k=9000))
    batch = build_batch([(0, None, value, ())])
    low_size, high_size = (
        len(recompress(batch, Compression(codec, level), output_bytes_max=LIMIT)) for level in (low, high)
    )
    assert high_size < low_size
