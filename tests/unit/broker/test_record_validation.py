"""Rules about single records: what is refused, which records are named, and what opening a batch may cost."""

from __future__ import annotations

from typing import Any

import pytest

from mansio.broker.features.deduplication.deduplicator import ID_READER
from mansio.broker.features.delays.delay_manager import DELAY_READER
from mansio.broker.features.priorities.priority_view import PRIORITY_READER
from mansio.broker.partition import append, append_validation
from mansio.broker.partition.append_validation import DECODED_RECORDS_MAX, MISSING_KEY_MESSAGE
from mansio.errors import CorruptMessage, InvalidRecord, InvalidTimestamp, MessageTooLarge
from mansio.wire.batch import compression
from mansio.wire.batch.compression import DECOMPRESSED_BYTES_MAX, Codec
from mansio.wire.batch.inspection import REPORTED_RECORDS_MAX
from mansio.wire.batch.record_batch import TimestampType, build_batch, read_header
from support.logs import ManualClock
from support.partition_bench import RULES
from unit.broker.test_partition import new_bench

COMPACTED = RULES._replace(requires_keys=True, inspects_records=True, message_bytes_max=1 << 20)


def keyed(*keys: bytes | None, codec: Codec = Codec.NONE, timestamp_ms: int = 0, **producer: Any) -> bytes:
    return build_batch([(timestamp_ms, key, b"v", ()) for key in keys], codec=codec, **producer)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_record_without_a_key_is_named_and_its_batch_refused_whole(codec: Codec) -> None:
    bench = new_bench(rules=COMPACTED)
    with pytest.raises(InvalidRecord, match=r"t-0: .* 2 of 4 in the batch have none") as caught:
        bench.partition.append(keyed(b"a", None, b"", None, codec=codec))
    assert caught.value.record_errors == ((1, MISSING_KEY_MESSAGE), (3, MISSING_KEY_MESSAGE))
    assert bench.partition.end_offset == 0
    assert bench.partition.append(keyed(b"a", b"", codec=codec)).end_offset == 2


def test_a_topic_that_is_not_compacted_takes_any_record_and_opens_no_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def opened(*_: object, **__: object) -> None:
        pytest.fail("a batch was opened")

    monkeypatch.setattr(append_validation, "inspect_records", opened)
    monkeypatch.setattr(append, "inspect_records", opened)
    bench = new_bench()
    assert bench.partition.append(keyed(None, None)).end_offset == 2


def test_the_brokers_own_batches_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(append, "inspect_records", None)
    assert new_bench(rules=COMPACTED).partition.append(keyed(b"k"), internal=True).end_offset == 1


def test_as_many_records_are_named_as_an_answer_should_carry() -> None:
    bench = new_bench(rules=COMPACTED)
    with pytest.raises(InvalidRecord, match="2000 of 2000") as caught:
        bench.partition.append(keyed(*[None] * 2000), is_checked=True)
    assert len(caught.value.record_errors) == REPORTED_RECORDS_MAX


def test_a_batch_that_would_take_long_to_look_at_is_too_large() -> None:
    bench = new_bench(rules=COMPACTED)
    with pytest.raises(MessageTooLarge, match="100001 records"):
        bench.partition.append(keyed(*[b"k"] * (DECODED_RECORDS_MAX + 1), codec=Codec.ZSTD), is_checked=True)


def test_a_batch_that_grows_beyond_bounds_or_cannot_be_opened_is_refused() -> None:
    bench = new_bench(rules=COMPACTED)
    bomb = build_batch([(0, b"k", bytes(DECOMPRESSED_BYTES_MAX + 1), ())], codec=Codec.ZSTD)
    assert len(bomb) < 100_000
    with pytest.raises(InvalidRecord, match="decompressed"):
        bench.partition.append(bomb)
    garbage = bytearray(keyed(b"k" * 50, codec=Codec.GZIP))
    garbage[70:80] = bytes(10)
    from crc32c import crc32c

    garbage[17:21] = crc32c(bytes(garbage[21:])).to_bytes(4, "big")
    with pytest.raises((InvalidRecord, CorruptMessage)):
        bench.partition.append(bytes(garbage))
    assert bench.partition.end_offset == 0


def test_records_outside_the_accepted_time_are_named() -> None:
    bench = new_bench(rules=RULES._replace(timestamp_before_max_ms=1000, timestamp_after_max_ms=1000))
    now = bench.clock.wall_ms()
    times = [now, now + 1001, now - 1000, now - 1001, now + 1000]
    batch = build_batch([(when, None, b"v", ()) for when in times])
    with pytest.raises(InvalidTimestamp) as caught:
        bench.partition.append(batch)
    assert [index for index, _ in caught.value.record_errors] == [1, 3]


def test_a_repeat_of_a_batch_on_log_append_time_is_answered_with_the_time_it_was_appended_at() -> None:
    bench = new_bench(rules=RULES._replace(timestamp_type=TimestampType.LOG_APPEND), features=("producers",))
    batch = keyed(b"k", producer_id=7, producer_epoch=0, base_sequence=0)
    first = bench.partition.append(batch)
    assert first.append_time_ms == bench.clock.wall_ms()
    bench.clock.seconds += 60
    again = bench.partition.append(batch)
    assert again.duplicate
    assert again[:3] == first[:3]
    bench.background.run_all()
    bench.partition.close()
    bench.log.close()
    reopened = new_bench(
        bench.disk, rules=RULES._replace(timestamp_type=TimestampType.LOG_APPEND), features=("producers",)
    )
    reopened.clock = ManualClock()
    assert reopened.partition.append(batch)[:3] == first[:3], "also after a restart"


def test_a_repeat_on_create_time_is_answered_without_a_time() -> None:
    bench = new_bench(features=("producers",))
    batch = keyed(b"k", producer_id=7, producer_epoch=0, base_sequence=0, timestamp_ms=5)
    assert bench.partition.append(batch).append_time_ms == -1
    assert bench.partition.append(batch).append_time_ms == -1
    assert read_header(batch).max_timestamp_ms == 5


def test_a_duplicate_batch_is_recognized_before_its_records_are_validated() -> None:
    bench = new_bench(features=("producers",))
    batch = keyed(None, producer_id=7, producer_epoch=0, base_sequence=0)
    first = bench.partition.append(batch)
    bench.partition.rules = COMPACTED  # the topic became compacted while the answer was lost
    assert bench.partition.append(batch)[:2] == first[:2]


def test_a_batch_is_decompressed_once_for_all_features(monkeypatch: pytest.MonkeyPatch) -> None:
    decompressed: list[Codec] = []
    decompress = compression.decompress

    def counted(codec: Codec, *rest: Any, **options: Any) -> bytes:
        decompressed.append(codec)
        return decompress(codec, *rest, **options)

    monkeypatch.setattr("mansio.wire.batch.record_reader.decompress", counted)
    readers = (PRIORITY_READER, ID_READER, DELAY_READER)
    rules = RULES._replace(inspects_records=True, readers=readers)
    headers = [("mansio-priority", b"high"), ("mansio-dedup-id", b"1"), ("mansio-delay-ms", b"5")]
    batch = build_batch([(0, None, b"v", headers), (0, None, b"v", headers[:1])], codec=Codec.ZSTD)
    found = append_validation.inspect_records("t-0", rules, batch, 1_000)
    assert len(found.found[PRIORITY_READER]) == 1
    assert [key is not None for key in found.found[ID_READER].keys] == [True, False]
    assert found.found[DELAY_READER].due_ms[0] == 1_005
    assert decompressed == [Codec.ZSTD]
