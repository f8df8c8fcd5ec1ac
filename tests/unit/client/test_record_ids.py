"""Ids of records: UUIDs of version 7 that increase, whatever the clock does."""

from __future__ import annotations

from collections import deque
from uuid import RFC_4122, UUID

from mansio.client.producer.record_ids import COUNTER_MAX, RecordIds
from mansio.client.types import OutgoingRecord
from mansio.wire.batch.record_id_header import RECORD_ID_HEADER, find_record_id, record_id_time_ms

NOW_MS = 1_796_082_605_942


def test_an_id_has_version_variant_and_time_of_rfc_9562() -> None:
    text = RecordIds(lambda: NOW_MS).next()
    found = UUID(text)
    assert str(found) == text
    assert (found.version, found.variant) == (7, RFC_4122)
    assert record_id_time_ms(text) == NOW_MS


def test_ids_increase_within_a_millisecond_and_when_the_clock_is_set_back() -> None:
    count = 3 * COUNTER_MAX
    times = deque([*[NOW_MS] * count, *[NOW_MS - 60_000] * count, NOW_MS + 1_000])
    ids = RecordIds(times.popleft)
    made = [ids.next() for _ in range(len(times))]
    assert made == sorted(set(made))
    assert NOW_MS <= (record_id_time_ms(made[-2]) or 0) < NOW_MS + 100
    assert record_id_time_ms(made[-1]) == NOW_MS + 1_000


def test_a_header_that_the_caller_has_set_is_kept() -> None:
    ids = RecordIds()
    own = OutgoingRecord(b"v", headers=((RECORD_ID_HEADER, b"mine"), ("a", None)))
    assert ids.with_id(own) is own
    given = ids.with_id(OutgoingRecord(b"v", headers=(("a", b"b"),)))
    assert given.headers[0] == ("a", b"b")
    assert find_record_id(given.headers) is not None


def test_texts_that_are_no_uuid_of_version_7_have_no_time() -> None:
    for text in ("", "mine", "8d5f1e2c-0000-4000-8000-000000000000"):
        assert record_id_time_ms(text) is None
