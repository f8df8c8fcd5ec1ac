"""Records of `__share_group_state`: Kafka's own bytes, round trips, damage, and the state that results from updates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mansio.errors import CorruptLog
from mansio.state.share_partition.snapshot import FoldedState, fold, to_folded_state, to_loaded_state
from mansio.state.share_partition.state_records import (
    CHANGES_PER_RECORD,
    SNAPSHOT,
    UNCHANGED,
    UPDATE,
    RecordKey,
    StateRecord,
    decode_key,
    decode_value,
    encode_key,
    encode_snapshot,
    encode_update,
    encode_update_tags,
)
from mansio.state.share_partition.types import (
    ACKNOWLEDGED,
    ACQUIRED,
    AVAILABLE,
    BACKLOG_QUEUES,
    NUMBER_MAX,
    DeadLetterReservation,
    DeadRange,
    Isolation,
    LoadedState,
    Producer,
    RedrivenRanges,
    ShareKey,
    StateBatch,
    Update,
)
from mansio.wire.headers import unsigned_varint as varint
from mansio.wire.internal_records.flexible_codec import encode_tagged_fields
from support.share_store import at_offset

INT16 = st.integers(0, 2**15 - 1)
INT32 = st.integers(0, 2**31 - 1)
INT64 = st.integers(0, 2**63 - 1)
TEXT = st.text(max_size=8)
IDS = st.binary(min_size=16, max_size=16)
RANGES = st.lists(st.tuples(INT64, INT64), max_size=3).map(tuple)

TICKETS = st.builds(
    DeadLetterReservation,
    IDS,
    INT32,
    st.just(-1) | INT64,
    INT16,
    INT32,
    st.sampled_from((1, 2)),
    TEXT,
    TEXT,
    INT64,
)
KEYS = st.builds(ShareKey, TEXT, IDS, INT32, st.integers(0, NUMBER_MAX))
PRODUCERS = st.builds(Producer, INT64, INT16, st.lists(st.tuples(IDS, INT32, INT32), max_size=2).map(tuple))


def change_of(first: int, length: int, *rest: object) -> StateBatch:
    return StateBatch(first, first + length, *rest)  # type: ignore[arg-type]  # the strategies below know


ANY_CHANGES = st.builds(
    change_of,
    st.integers(0, 2**62),
    st.integers(0, 2**61),
    st.integers(0, 4),
    INT16,
    INT16,
    TEXT,
    st.just(-1) | INT64,
    st.just(-1) | INT64,
    st.booleans(),
    st.none() | TICKETS,
)
ISOLATIONS = st.builds(
    lambda number, first, size, header, key: Isolation(number, first, first + size, header, key),
    st.sampled_from(BACKLOG_QUEUES),
    st.integers(0, 2**40),
    st.integers(0, 2**40),
    TEXT,
    st.binary(max_size=9),
)
ANY_UPDATES = st.builds(
    Update,
    st.just(0),
    st.just(False),
    st.just(UNCHANGED) | INT64,
    st.just(UNCHANGED) | INT64,
    st.just(UNCHANGED) | INT32,
    st.lists(ANY_CHANGES, max_size=3).map(tuple),
    st.booleans(),
    st.none() | st.lists(st.builds(DeadRange, INT64, INT64, INT16, INT16), max_size=3).map(tuple),
    st.none() | st.lists(st.builds(RedrivenRanges, TEXT, RANGES), max_size=2).map(tuple),
    st.none() | PRODUCERS,
    st.lists(st.builds(DeadRange, INT64, INT64, INT16, INT16), max_size=2).map(tuple),
    st.none() | st.lists(ISOLATIONS, min_size=1, max_size=2).map(tuple),
    st.just(0),
    st.none(),
)

# Small ones, that meet each other.
OFFSETS = st.integers(0, 30)
SMALL_TICKETS = st.builds(
    DeadLetterReservation,
    st.just(bytes(16)),
    st.just(0),
    st.sampled_from((-1, 7)),
    st.just(0),
    st.sampled_from((0, 2**31 - 3)),
    st.just(1),
    st.just(""),
    st.just("m"),
    st.just(5),
)
SMALL_CHANGES = st.builds(
    change_of,
    OFFSETS,
    st.integers(0, 9),
    st.sampled_from((AVAILABLE, ACQUIRED, ACKNOWLEDGED, 3)),
    st.integers(0, 2),
    st.integers(0, 1),
    st.sampled_from(("", "m")),
    st.sampled_from((-1, 9)),
    st.sampled_from((-1, -1, 0, 60_000)),
    st.booleans(),
    st.none() | SMALL_TICKETS,
)
SMALL_UPDATES = st.builds(
    Update,
    st.just(0),
    st.just(False),
    OFFSETS,
    OFFSETS,
    OFFSETS,
    st.lists(SMALL_CHANGES, max_size=3).map(tuple),
    st.sampled_from((False, False, False, True)),
    st.none() | st.just((DeadRange(1, 2, 3, 0),)),
    st.none() | st.just((RedrivenRanges("r", ((1, 2),)),)),
    st.none() | st.just(Producer(7, 0, ())),
    st.sampled_from(((), (), (DeadRange(3, 4, 3, 0),), (DeadRange(7, 7, 1, 0), DeadRange(9, 9, 1, 0)))),
    st.none() | st.just((Isolation(16, 3, 9, "", b"k"),)),
    st.just(0),
    st.none(),
)


def state_of(folded: FoldedState) -> LoadedState:
    return to_loaded_state(folded, state_epoch=3, leader_epoch=4, snapshot_epoch=5)


def stored_of(state: LoadedState) -> StateRecord:
    update = Update(
        0,
        False,
        state.start_offset,
        state.lease_bound,
        state.done_count,
        state.changes,
        True,
        state.dead_ranges,
        state.redrives,
        state.producer,
        isolations=state.isolations or None,
    )
    return StateRecord(state.snapshot_epoch, state.leader_epoch, update, state.state_epoch, 10, 20)


@given(st.sampled_from((SNAPSHOT, UPDATE)), KEYS)
def test_keys_come_back_and_end_where_they_end(kind: int, key: ShareKey) -> None:
    raw = encode_key(kind, key)
    assert decode_key(raw) == RecordKey(kind, key)
    for length in range(len(raw)):
        with pytest.raises(CorruptLog):
            decode_key(raw[:length])
    with pytest.raises(CorruptLog):
        decode_key(raw + b"\0")


def test_a_key_of_a_kind_that_is_not_known_is_none() -> None:
    assert decode_key(b"\x00\x02whatever") is None


@given(ANY_UPDATES, INT32, INT32)
def test_updates_come_back_and_every_cut_is_seen(
    update: Update, snapshot_epoch: int, leader_epoch: int
) -> None:
    raw = encode_update(snapshot_epoch, leader_epoch, update)
    assert raw.endswith(encode_tagged_fields(encode_update_tags(update))), (
        "the numbers of most updates are written in a shorter way"
    )
    decoded = decode_value(UPDATE, raw)
    assert decoded == StateRecord(snapshot_epoch, leader_epoch, update._replace(is_snapshot=False))
    for length in range(len(raw)):
        with pytest.raises(CorruptLog):
            decode_value(UPDATE, raw[:length])
    with pytest.raises(CorruptLog):
        decode_value(UPDATE, raw + b"\0")


@given(ANY_UPDATES, INT32, INT32, INT32, INT64, INT64)
def test_snapshots_come_back_and_every_cut_is_seen(
    update: Update, snapshot_epoch: int, leader_epoch: int, state_epoch: int, created_ms: int, written_ms: int
) -> None:
    update = update._replace(is_snapshot=True)
    stored = StateRecord(snapshot_epoch, leader_epoch, update, state_epoch, created_ms, written_ms)
    ((kind, raw),) = encode_snapshot(stored)
    assert (kind, decode_value(SNAPSHOT, raw)) == (SNAPSHOT, stored)
    for length in range(len(raw)):
        with pytest.raises(CorruptLog):
            decode_value(SNAPSHOT, raw[:length])


def test_the_bytes_are_those_of_kafkas_schema() -> None:
    """ShareUpdateValue, version 0: by hand, with a tagged field of ours in the batch, one of Kafka in the value."""
    update = Update(0, durable=False, start_offset=7, lease_bound=UNCHANGED, done_count=2)
    update = update._replace(changes=(StateBatch(8, 9, 2, 1, holder="ab"),))
    raw = bytes.fromhex(
        "0000"  # version
        "00000001"  # snapshot epoch
        "00000003"  # leader epoch
        "0000000000000007"  # start offset
        "02"  # one batch
        "0000000000000008" + "0000000000000009" + "02" + "0001"  # first, last, state, count
        "01" + "e807" + "03" + "036162"  # one tagged field: 1000, three bytes, "ab"
        "01" + "00" + "04" + "00000002"  # one tagged field: 0, four bytes, the delivery complete count
    )
    assert encode_update(1, 3, update) == raw
    assert decode_value(UPDATE, raw) == StateRecord(1, 3, update)
    key = ShareKey("g", bytes(range(16)), 5)
    assert encode_key(UPDATE, key) == b"\x00\x01\x00\x01g" + bytes(range(16)) + b"\x00\x00\x00\x05"


@given(ANY_UPDATES, st.binary(max_size=5))
def test_a_tag_that_is_not_known_is_skipped(update: Update, more: bytes) -> None:
    plain = update._replace(
        done_count=UNCHANGED,
        lease_bound=UNCHANGED,
        producer=None,
        redrives=None,
        dead_ranges=None,
        added_dead_ranges=(),
        isolations=None,
        changes=(),
        is_snapshot=False,
    )
    raw = encode_update(1, 2, plain)
    assert raw.endswith(b"\x00")
    assert decode_value(UPDATE, raw[:-1] + encode_tagged_fields({1900: more})).update == plain
    batch = encode_update(1, 2, plain._replace(changes=(StateBatch(1, 2, 0, 0),)))
    known = decode_value(UPDATE, batch[:-2] + encode_tagged_fields({1900: more}) + b"\x00")
    assert known.update.changes == (StateBatch(1, 2, 0, 0),)


@pytest.mark.parametrize("bad", [(5, 4, 0, 0), (-1, 4, 0, 0), (1, 4, 5, 0), (1, 4, 9, 0), (1, 4, 0, -1)])
def test_a_range_that_cannot_be_is_damage(bad: tuple[int, int, int, int]) -> None:
    raw = encode_update(1, 2, Update(0, False, 0, 0, 0, (StateBatch(*bad),)))
    with pytest.raises(CorruptLog):
        decode_value(UPDATE, raw)


@pytest.mark.parametrize(
    "count", [0, 1, CHANGES_PER_RECORD, CHANGES_PER_RECORD + 1, 2 * CHANGES_PER_RECORD + 7]
)
def test_a_large_snapshot_is_one_record_and_updates_of_its_epoch(count: int) -> None:
    changes = tuple(StateBatch(2 * n, 2 * n, ACQUIRED, 1, holder="m") for n in range(count))
    folded = FoldedState()
    folded.apply(Update(0, False, 0, 9, 4, changes))
    state = state_of(folded)
    records = list(encode_snapshot(stored_of(state)))
    assert len(records) == max(-(-count // CHANGES_PER_RECORD), 1)
    assert [kind for kind, _ in records] == [SNAPSHOT] + [UPDATE] * (len(records) - 1)
    again = FoldedState()
    again.apply(Update(0, False, 0, 0, 0, (StateBatch(5, 5, ACKNOWLEDGED, 9),)))
    for number, (kind, raw) in enumerate(records):
        stored = decode_value(kind, raw)
        assert stored.snapshot_epoch == 5
        assert stored.chunk == (number, len(records))
        again.apply(stored.update)
    assert state_of(again) == state


# What updates come to


class Model:
    """One entry an offset."""

    def __init__(self) -> None:
        self.start = self.lease_bound = self.done = 0
        self.offsets: dict[int, StateBatch] = {}

    def apply(self, update: Update) -> None:
        if update.is_snapshot:
            self.start, self.offsets = update.start_offset, {}
        for change in update.changes:
            for offset in range(change.first, change.last + 1):
                self.offsets[offset] = as_stored(change, offset)
        self.start, self.lease_bound = (
            max(self.start, update.start_offset),
            max(self.lease_bound, update.lease_bound),
        )
        self.done = update.done_count


def as_stored(change: StateBatch, offset: int) -> StateBatch:
    one = at_offset(change, offset)
    if change.reservation is not None and change.reservation.producer_id < 0:
        one = one._replace(reservation=change.reservation)  # nothing is reserved, so nothing counts up
    return one


def nothing(change: StateBatch) -> bool:
    return change[2:] == StateBatch(0, 0, AVAILABLE, 0)[2:]


@given(st.lists(SMALL_UPDATES, max_size=8))
@example(
    [Update(0, False, 0, 0, 0, (StateBatch(0, 9, 1, 1), StateBatch(3, 5, 1, 2), StateBatch(3, 5, 1, 1)))]
)
def test_folded_updates_have_the_latest_state_of_every_offset(updates: list[Update]) -> None:
    model, folded = Model(), FoldedState()
    for update in updates:
        model.apply(update)
        folded.apply(update)
    assert (folded.start_offset, folded.lease_bound) == (model.start, model.lease_bound)
    expected = {o: c for o, c in model.offsets.items() if o >= model.start and not nothing(c)}
    found = {o: as_stored(c, o) for c in folded.changes for o in range(c.first, c.last + 1)}
    assert found == expected
    for before, after in zip(folded.changes, folded.changes[1:], strict=False):
        assert before.last < after.first
        joined = before.last + 1 == after.first and as_stored(before, after.first) == as_stored(
            after, after.first
        )
        assert not joined, "neighbours that say the same are one"


@given(st.lists(SMALL_UPDATES, max_size=8), st.integers(0, 8))
def test_updates_that_are_folded_together_give_the_state_of_those_folded_one_by_one(
    updates: list[Update], together: int
) -> None:
    one_by_one, in_two = FoldedState(), FoldedState()
    plain = [update._replace(is_snapshot=False) for update in updates]
    for update in plain:
        one_by_one.apply(update)
    for part in (plain[:together], plain[together:]):
        in_two.apply_all(part)
    assert state_of(in_two) == state_of(one_by_one)


@given(st.lists(SMALL_UPDATES, max_size=8), st.integers(0, 8))
def test_a_snapshot_may_stand_for_all_before_it_at_every_cut(updates: list[Update], truncated: int) -> None:
    straight = FoldedState()
    for update in updates:
        straight.apply(update)
    state = state_of(FoldedState())
    for update in updates[:truncated]:
        state = fold(state, update)
    over = FoldedState()
    over.apply(Update(0, False, 3, 0, 1, (StateBatch(4, 40, ACQUIRED, 9),)))
    over = to_folded_state(state) if truncated % 2 else over
    for kind, raw in encode_snapshot(stored_of(state)):
        over.apply(decode_value(kind, raw).update)
    for update in updates[truncated:]:
        raw = encode_update(5, 4, update)
        over.apply(decode_value(UPDATE, raw).update._replace(is_snapshot=update.is_snapshot))
    assert state_of(over)._replace(producer=None) == state_of(straight)._replace(producer=None)


@given(SMALL_UPDATES, SMALL_UPDATES)
def test_updates_of_other_offsets_may_come_in_either_order(one: Update, other: Update) -> None:
    same: dict[str, Any] = {
        "done_count": UNCHANGED,
        "dead_ranges": None,
        "redrives": None,
        "producer": None,
        "added_dead_ranges": (),
    }
    one, other = one._replace(is_snapshot=False, **same), other._replace(is_snapshot=False, **same)
    shifted = tuple(
        change._replace(first=change.first + 50, last=change.last + 50) for change in other.changes
    )
    other = other._replace(changes=shifted)
    here, there = FoldedState(), FoldedState()
    for folded, updates in ((here, (one, other)), (there, (other, one))):
        for update in updates:
            folded.apply(update)
    assert state_of(here) == state_of(there)


def test_a_varint_of_a_tag_takes_two_bytes() -> None:
    assert varint(1000) == b"\xe8\x07"


def test_how_far_a_group_is_is_counted_whatever_order_its_updates_came_in() -> None:
    """Both were made when neither was stored: each knows the start and what is done without the other."""
    low = Update(1, True, 2, 100, 3, (StateBatch(0, 1, ACKNOWLEDGED, 1),))
    high = Update(2, True, 0, 100, 5, (StateBatch(2, 4, ACKNOWLEDGED, 1), StateBatch(7, 8, ACKNOWLEDGED, 2)))
    for updates in ((low, high), (high, low)):
        folded = FoldedState()
        for update in updates:
            folded.apply(update)
        assert folded.progress() == (5, 2)
