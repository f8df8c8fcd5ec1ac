"""Control batches of schedules."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from mansio.broker.features.delays.delay_control_records import decode_delay_control, encode_cancelled
from mansio.errors import CorruptMessage
from mansio.wire.batch.record_batch import build_batch, check_batch
from mansio.wire.batch.schedule_control_records import (
    CatchUpMode,
    Firing,
    Schedule,
    ScheduleControlType,
    decode_schedule_control,
    encode_fired,
    encode_scheduled,
    encode_schedules,
    encode_unscheduled,
)

IDS = st.integers(0, 2**128 - 1).map(lambda number: UUID(int=number))
INT64 = st.integers(-(2**63), 2**63 - 1)
CONTENT = st.none() | st.binary(max_size=30)
SCHEDULES = st.builds(
    Schedule,
    id=IDS,
    name=st.text(max_size=20),
    cron=st.text(max_size=20),
    every_ms=INT64,
    timezone=st.text(max_size=20),
    catch_up=st.sampled_from(CatchUpMode),
    key=CONTENT,
    value=CONTENT,
    headers=st.lists(st.tuples(st.text(max_size=5), CONTENT), max_size=3).map(tuple),
    created_ms=INT64,
    next_due_ms=INT64,
    firings=INT64,
    is_paused=st.booleans(),
    owner=st.just("") | st.text(max_size=20),
)


@given(st.lists(SCHEDULES, min_size=1, max_size=5))
def test_schedules_are_decoded_as_they_were_encoded(schedules: list[Schedule]) -> None:
    batch = encode_scheduled(schedules)
    assert check_batch(batch).max_timestamp_ms == -1
    found = decode_schedule_control(batch)
    assert found is not None
    assert (found.type, [*found.schedules]) == (ScheduleControlType.SCHEDULED, schedules)


@given(st.lists(SCHEDULES, min_size=1, max_size=3))
def test_an_older_version_reads_schedules_without_owners(schedules: list[Schedule]) -> None:
    assert encode_schedules(schedules)[0] == (2 if any(one.owner for one in schedules) else 1)


@given(st.lists(st.builds(Firing, IDS, INT64, INT64), max_size=5), st.integers(0, 2**32 - 1))
def test_firings_and_ids_are_decoded_as_they_were_encoded(firings: list[Firing], crc: int) -> None:
    found = decode_schedule_control(encode_fired(firings, crc))
    assert found is not None
    assert (found.type, [*found.firings], found.crc) == (ScheduleControlType.FIRED, firings, crc)
    ids = [firing.schedule_id for firing in firings]
    found = decode_schedule_control(encode_unscheduled(ids))
    assert found is not None
    assert (found.type, [*found.ids]) == (ScheduleControlType.UNSCHEDULED, ids)


def test_control_batches_of_other_kinds_are_ignored() -> None:
    assert decode_schedule_control(encode_cancelled([1])) is None
    assert decode_delay_control(encode_unscheduled([UUID(int=1)])) is None
    assert decode_schedule_control(build_batch([(0, b"\0\0\0\1", b"\0\0\0\0\0\0", ())], control=True)) is None


@given(
    st.sampled_from(ScheduleControlType), st.binary(max_size=200), SCHEDULES, st.integers(0, 300), st.data()
)
def test_malformed_control_records_raise_one_error(
    kind: ScheduleControlType, value: bytes, schedule: Schedule, position: int, data: st.DataObject
) -> None:
    if data.draw(st.booleans()):
        whole = bytearray(encode_scheduled([schedule]))
        whole[position % len(whole)] ^= 1 << position % 8
        batch = bytes(whole)
    else:
        batch = build_batch([(-1, b"\0\0" + int(kind).to_bytes(2, "big"), value, ())], control=True)
    try:
        decode_schedule_control(batch)
    except CorruptMessage:
        return
