"""Share partition: each guarantee by the shortest scenario that fails without it; and two groups on one partition do
not affect each other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.errors import InvalidRecordState, InvalidRequest, MansioError
from mansio.state.share_partition.machine import ACKNOWLEDGEMENT_TYPES_MAX, SharePartition
from mansio.state.share_partition.offset_numbers import NumberedOffsets, NumberedRange, OffsetNumbers
from mansio.state.share_partition.types import (
    ACCEPT,
    ACKNOWLEDGED,
    ACQUIRED,
    ARCHIVING,
    GAP,
    REJECT,
    RELEASE,
    RENEW,
    AcknowledgementBatch,
    AcquiredRange,
    Backoff,
    DeadLetterReservation,
    LoadedState,
    Producer,
    RedriveResult,
    ShareKey,
    ShareSettings,
    StateBatch,
    Update,
)
from support.present import present
from support.share_store import Store
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Iterable
    from random import Random

LOCK_MS, WALL_MS, LOG_END = 100, 1_000_000, 60
SETTINGS = ShareSettings(LOCK_MS, 3, 50, 100, 20, False, True, True, Backoff(0, 1.0, 0, 0.0))


class Leases:
    """A share partition whose updates are stored at once, unless set otherwise."""

    def __init__(self, group: str = "g") -> None:
        self.group, self.store, self.now, self.sequence = group, Store(), 0.0, 0
        self.load()

    def load(self, *, is_complete: bool = True) -> None:
        state = self.store.fold(is_complete=is_complete, withheld_ms=0 if is_complete else LOCK_MS)
        self.state_machine = SharePartition(
            ShareKey(self.group, bytes(16), 0), SETTINGS, state, leader_epoch=1, log_start=0, log_end=LOG_END,
            high_watermark=LOG_END, now_ms=self.now, wall_ms=round(WALL_MS + self.now),
        )  # fmt: skip

    def lose_power(self) -> None:
        """What was not synced is lost."""
        del self.store.log[self.store.synced :]
        self.load(is_complete=False)

    def put(self, update: Update | None) -> list[tuple[int, int]]:
        if update is None:
            return []
        self.store.append(update)
        return [(each.first, each.last) for each in self.state_machine.mark_persisted(update.token)]

    def call_and_rearm(self, member: str, first: int, last: int) -> tuple[list[AcquiredRange], Update | None]:
        size = last - first + 1
        return self.state_machine.acquire(
            member, [(first, last)], size, strict=True, batch_ends=(), now_ms=self.now
        )

    def lease(self, member: str, first: int, last: int) -> list[AcquiredRange]:
        reported, update = self.call_and_rearm(member, first, last)
        self.put(update)
        return reported

    def say(self, member: str, first: int, last: int, kind: int, count: int = -1) -> Update | None:
        batch = AcknowledgementBatch(first, last, bytes([kind]), delivery_count=count)
        return self.state_machine.acknowledge(member, [batch], self.now, round(WALL_MS + self.now), 0.5)

    def reserve(self) -> list[tuple[int, int, DeadLetterReservation]]:
        """Places for all that waits for its dead letter."""
        places = []
        for each in self.state_machine.archiving_ranges():
            reservation = each.reservation._replace(
                topic_id=b"t" * 16, partition=0, producer_id=7, epoch=0, sequence=self.sequence
            )
            places.append((each.first, each.last, reservation))
            self.sequence += each.last - each.first + 1
        self.put(self.state_machine.reserve(Producer(7, 0, ((b"t" * 16, 0, self.sequence),)), places))
        return places

    def redrive(self, name: str) -> RedriveResult:
        """Of all that may ever have been dead."""
        update, result = self.state_machine.redrive(name, [(0, 2)], 10, self.now)
        self.put(update)
        return result

    def wait(self, ms: float) -> None:
        self.now += ms
        self.put(self.state_machine.tick(self.now, round(WALL_MS + self.now), 0.5))

    def states(self) -> list[tuple[int, int, int, int, str]]:
        return [
            (each.first, each.last, each.state, each.deliveries, each.holder)
            for each in self.state_machine.ranges
        ]


@pytest.mark.parametrize(
    "kind", [{}, {"is_ordered": True}, {"is_ordered_by_key": True}], ids=["unordered", "ordered", "by key"]
)
def test_aborted_records_are_passed_without_a_delivery_also_after_a_restart(kind: dict[str, Any]) -> None:
    leases = Leases()
    settings = SETTINGS._replace(**kind)

    def acquire(records_max: int) -> list[AcquiredRange]:
        if settings.is_ordered_by_key:
            leases.state_machine.add_keys(10, {offset: offset for offset in range(10)})
        planned = leases.state_machine.acquirable_ranges("a", 10, 10, leases.now)
        acquired, update = leases.state_machine.acquire(
            "a", planned, records_max, strict=True, batch_ends=(), now_ms=leases.now, aborted=[(0, 2), (4, 4)]
        )
        leases.put(update)
        return acquired

    leases.state_machine.reconfigure(settings, 0.0)
    acquired = acquire(2)
    assert [(each.first, each.last, each.deliveries) for each in acquired] == [(3, 3, 1), (5, 5, 1)]
    for offset in (3, 5):
        leases.put(leases.say("a", offset, offset, ACCEPT))
    leases.load()
    leases.state_machine.reconfigure(settings, 0.0)
    assert [(each.first, each.last) for each in acquire(10)] == [(6, 9)]


def test_late_ack_counts_no_more_once_another_has_the_lease() -> None:
    leases = Leases()
    leases.lease("a", 0, 3)
    leases.wait(LOCK_MS)
    assert leases.lease("b", 0, 3) == [(0, 3, 2)]
    with pytest.raises(InvalidRecordState):
        leases.say("a", 0, 3, ACCEPT)
    leases.put(leases.say("b", 0, 3, ACCEPT))
    assert leases.state_machine.ranges.start == 4


def test_late_acknowledgement_of_an_earlier_delivery_does_not_end_the_later_one() -> None:
    leases = Leases()
    leases.lease("a", 0, 0)
    leases.wait(LOCK_MS)
    leases.lease("a", 0, 0)
    with pytest.raises(InvalidRecordState):
        leases.say("a", 0, 0, ACCEPT, count=1)
    assert leases.say("a", 0, 0, ACCEPT, count=2)


def test_the_release_of_records_that_were_not_handed_out_counts_no_delivery() -> None:
    leases = Leases()
    for turn in range(2 * SETTINGS.delivery_limit):
        assert leases.lease("a", 0, 3) == [(0, 3, turn + 1)]
        unseen = AcknowledgementBatch(0, 3, bytes([RELEASE]), delay_ms=50, was_handed_out=False)
        update = leases.state_machine.acknowledge("a", [unseen], leases.now, WALL_MS, 0.5)
        assert update is not None
        assert update.durable, "if it were lost, the end of the lease would count the delivery"
        assert not leases.put(update), "nothing is dead-lettered"
    leases.lose_power()
    leases.wait(LOCK_MS)
    for _ in range(SETTINGS.delivery_limit - 1):
        assert leases.lease("a", 0, 3)
        assert not leases.put(leases.say("a", 0, 3, RELEASE))
    assert leases.lease("a", 0, 3)
    assert leases.put(leases.say("a", 0, 3, RELEASE)) == [(0, 3)], "only deliveries count as attempts"


def test_more_acknowledgements_than_there_can_be_leases_are_refused_unread() -> None:
    leases = Leases()
    leases.lease("a", 0, 3)
    before = leases.states()
    types = bytes([ACCEPT, RELEASE]) * (ACKNOWLEDGEMENT_TYPES_MAX // 2 + 1)
    half = len(types) // 2
    for batch in (
        [AcknowledgementBatch(0, len(types) - 1, types)],
        [
            AcknowledgementBatch(0, half - 1, types[:half]),
            AcknowledgementBatch(half, len(types) - 1, types[half:]),
        ],
    ):
        with pytest.raises(InvalidRequest):
            leases.state_machine.acknowledge("a", batch, leases.now, WALL_MS, 0.5)
    assert leases.states() == before


def test_lease_ends_at_its_deadline_and_not_before() -> None:
    leases = Leases()
    leases.lease("a", 0, 3)
    leases.wait(LOCK_MS - 1)
    assert leases.lease("b", 0, 3) == []
    assert leases.state_machine.next_deadline_ms() == LOCK_MS
    leases.wait(1)
    assert leases.lease("b", 0, 3) == [(0, 3, 2)]


def test_counts_and_leases_are_found_again_after_a_restart() -> None:
    leases = Leases()
    leases.lease("a", 0, 3)
    leases.wait(LOCK_MS)
    leases.lease("b", 0, 1)
    before = leases.states()
    leases.load()
    assert leases.states() == before
    leases.wait(LOCK_MS)
    assert leases.lease("a", 0, 3) == [(0, 1, 3), (2, 3, 2)]


def test_rejected_record_is_archived_only_when_its_copy_is_there() -> None:
    leases = Leases()
    leases.lease("a", 0, 1)
    assert leases.put(leases.say("a", 0, 1, REJECT)) == [(0, 1)]
    assert leases.states()[0][:3] == (0, 1, ARCHIVING)
    leases.load()
    places = leases.reserve()
    assert leases.state_machine.ranges.start == 0
    leases.put(leases.state_machine.mark_archived(places))
    assert leases.state_machine.ranges.start == 2
    assert leases.state_machine.counts(leases.now).dead == 2


def test_redrive_brings_back_what_is_dead_and_once_for_one_id() -> None:
    leases = Leases()
    leases.lease("a", 0, 2)
    leases.put(leases.say("a", 1, 1, ACCEPT))
    for first, last in ((0, 0), (2, 2)):
        leases.put(leases.say("a", first, last, REJECT))
    leases.put(leases.state_machine.mark_archived(leases.reserve()))
    assert leases.state_machine.ranges.start == 3
    assert leases.redrive("x") == (2, 0, 0)
    assert leases.lease("b", 0, 2) == [(0, 0, 2), (2, 2, 2)]
    for first, last in ((0, 0), (2, 2)):
        leases.put(leases.say("b", first, last, REJECT))
    leases.put(leases.state_machine.mark_archived(leases.reserve()))
    leases.load()
    assert leases.redrive("x") == (0, 2, 0)
    assert leases.redrive("y") == (2, 0, 0)
    assert leases.lease("c", 0, 2) == [(0, 0, 3), (2, 2, 3)]


def test_neighbours_of_other_members_and_other_counts_are_never_one_range() -> None:
    leases = Leases()
    leases.lease("a", 0, 0)
    leases.lease("b", 1, 1)
    with pytest.raises(InvalidRecordState):
        leases.say("a", 0, 1, ACCEPT)
    leases.put(leases.say("a", 0, 0, RELEASE))
    leases.put(leases.say("b", 1, 1, RELEASE))
    leases.lease("a", 0, 0)
    leases.put(leases.say("a", 0, 0, RELEASE))
    assert leases.lease("c", 0, 2) == [(0, 0, 3), (1, 1, 2), (2, 2, 1)]


def test_delivery_after_the_first_is_known_after_any_loss() -> None:
    leases = Leases()
    leases.lease("a", 0, 0)
    leases.wait(LOCK_MS)
    leases.lease("b", 0, 0)
    leases.lose_power()
    leases.wait(LOCK_MS)
    assert leases.lease("c", 0, 0) == [(0, 0, 3)]


def test_nothing_is_leased_at_or_above_a_lease_bound_that_is_not_stored() -> None:
    leases = Leases()
    reported, update = leases.call_and_rearm("a", 0, 15)
    assert update is not None
    assert (reported, update.lease_bound, update.durable) == ([(0, 15, 1)], 40, True)
    assert leases.call_and_rearm("b", 16, 30)[0] == [(16, 19, 1)]
    leases.put(update)
    assert leases.call_and_rearm("b", 20, 30)[0] == [(20, 30, 1)]


def test_what_may_have_been_leased_before_a_loss_is_withheld_for_as_long_as_a_lease_lasts() -> None:
    leases = Leases()
    leases.lease("a", 0, 3)
    leases.lose_power()
    assert leases.lease("b", 0, 3) == []
    leases.wait(LOCK_MS - 1)
    assert leases.lease("b", 0, 3) == []
    leases.put(leases.say("a", 0, 0, ACCEPT))
    leases.wait(1)
    assert leases.lease("b", 0, 3) == [(1, 3, 2)]


def test_start_moves_only_over_what_is_stored() -> None:
    leases = Leases()
    leases.lease("a", 0, 3)
    accepted = leases.say("a", 0, 1, ACCEPT)
    assert leases.put(leases.say("a", 2, 3, RELEASE)) == []
    assert leases.state_machine.ranges.start == leases.store.fold().start_offset == 0
    leases.put(accepted)
    assert leases.state_machine.ranges.start == leases.store.fold().start_offset == 2


def test_what_waits_to_be_stored_can_neither_be_leased_nor_settled_again() -> None:
    leases = Leases()
    leases.lease("a", 0, 1)
    leases.say("a", 0, 0, RELEASE)
    assert leases.lease("b", 0, 0) == []
    with pytest.raises(InvalidRecordState):
        leases.say("a", 0, 1, ACCEPT)
    assert present(leases.say("a", 1, 1, ACCEPT)).changes[0].state == ACKNOWLEDGED
    leases.call_and_rearm("a", 2, 3)
    with pytest.raises(InvalidRecordState):
        leases.say("a", 2, 3, ACCEPT)


def test_two_groups_have_the_same_records_side_by_side() -> None:
    one, other = Leases("g"), Leases("h")
    (reported, first), (reported_too, second) = (
        one.call_and_rearm("a", 0, 3),
        other.call_and_rearm("a", 0, 5),
    )
    assert (reported, reported_too) == ([(0, 3, 1)], [(0, 5, 1)])
    one.put(first)
    other.put(second)
    one.put(one.say("a", 0, 3, ACCEPT))
    other.put(other.say("a", 0, 1, RELEASE))
    assert one.state_machine.ranges.start == 4
    assert other.lease("b", 0, 5) == [(0, 1, 2)]


ACTS = st.tuples(
    st.sampled_from(
        ("lease", "lease", "say", "say", "land", "land", "land", "leave", "wait", "load", "lose")
    ),
    st.sampled_from("ab"),
    st.integers(0, 12),
    st.integers(0, 6),
    st.sampled_from((GAP, ACCEPT, RELEASE, REJECT, RENEW)),
)


def act(leases: Leases, flying: list[Update], acts: Iterable[tuple]) -> list[object]:
    """What a group sees of all it does, and what it stores."""
    seen: list[object] = []
    for name, member, first, more, kind in acts:
        update = None
        try:
            if name == "lease":
                reported, update = leases.call_and_rearm(member, first, first + more)
                seen.append(reported)
            elif name == "say":
                update = leases.say(member, first, first + more, kind)
            elif name == "leave":
                update = leases.state_machine.release_member(member, leases.now)
            elif name == "wait":
                leases.wait(10 * more)
            elif name == "land" and flying:
                seen.append(leases.put(flying.pop(0)))
            elif name in ("load", "lose"):
                flying.clear()
                leases.load() if name == "load" else leases.lose_power()
        except MansioError as error:
            seen.append(str(error))
        if update is not None:
            flying.append(update)
        seen.append((update, leases.states(), leases.state_machine.counts(leases.now)))
    return seen


@settings(max_examples=examples(20, 60))
@given(one=st.lists(ACTS, min_size=9), other=st.lists(ACTS, min_size=9), turns=st.randoms())
def test_two_groups_on_one_partition_never_touch_each_other(one: list, other: list, turns: Random) -> None:
    """Side by side, act by act, each sees and stores what it would see and store alone."""
    alone = [act(Leases(name), [], acts) for name, acts in (("g", one), ("h", other))]
    groups = [Leases("g"), Leases("h")]
    flying: tuple[list, list] = ([], [])
    seen: tuple[list, list] = ([], [])
    left = [list(one), list(other)]
    while left[0] or left[1]:
        which = turns.choice([each for each in (0, 1) if left[each]])
        seen[which].extend(act(groups[which], flying[which], [left[which].pop(0)]))
    assert list(seen) == alone


def test_an_acknowledgement_of_what_another_member_settled_is_refused_also_below_the_start() -> None:
    leases = Leases()
    leases.lease("one", 0, 3)
    leases.now += LOCK_MS
    leases.put(leases.state_machine.tick(leases.now, round(WALL_MS + leases.now), 0.5))
    leases.lease("two", 0, 1)
    leases.put(leases.say("two", 0, 1, ACCEPT))
    assert leases.state_machine.ranges.start == 2
    for kind in (ACCEPT, REJECT, RELEASE):
        with pytest.raises(InvalidRecordState):
            leases.say("one", 0, 0, kind)
    leases.lease("one", 2, 3)
    with pytest.raises(InvalidRecordState):
        leases.say("one", 0, 3, ACCEPT)
    leases.put(leases.state_machine.advance_log_start(3))
    leases.put(leases.say("one", 0, 3, ACCEPT))
    assert leases.state_machine.ranges.start == 4, "what the log has lost is left out"


def test_no_record_of_a_limited_key_is_offered_before_all_leases_are_known() -> None:
    """A record above the keys that are known may be leased, and have the only place of the key."""
    leased = StateBatch(5, 5, ACQUIRED, 1, holder="a")
    state = LoadedState(0, 1, 0, 0, 100, 0, (leased,), (), (), None, True, 0)
    machine = SharePartition(
        ShareKey("g", bytes(16), 0),
        SETTINGS._replace(key_leases_max=1),
        state,
        leader_epoch=1,
        log_start=0,
        log_end=20,
        high_watermark=20,
        now_ms=0.0,
        wall_ms=0,
    )
    machine.add_keys(3, {0: 7, 1: 7, 2: 7})
    assert machine.acquirable_ranges("b", 10, 20, 0.0) == []
    machine.add_keys(8, {3: 8, 4: 8, 5: 7, 6: 9, 7: 7})
    assert machine.acquirable_ranges("b", 10, 20, 0.0) == [(3, 3), (6, 6)]


def test_keys_of_a_batch_are_added_as_far_as_its_offsets_are_divided() -> None:
    """A key is isolated in the middle of a batch, and the rest is divided later."""
    numbers = OffsetNumbers(0)
    numbers.append(4)
    state = LoadedState(0, 1, 0, 0, 100, 0, (), (), (), None, True, 0)
    machine = SharePartition(
        ShareKey("g", bytes(16), 0),
        SETTINGS._replace(key_leases_max=10),
        state,
        leader_epoch=1,
        log_start=0,
        log_end=8,
        high_watermark=8,
        now_ms=0.0,
        wall_ms=0,
        own=NumberedOffsets(numbers, 0),
    )
    keys = dict.fromkeys(range(8), 7)
    machine.add_keys(8, keys)
    assert machine.acquirable_ranges("a", 10, 8, 0.0) == [(0, 3)]
    numbers.append(8, [NumberedRange(4, 5, 16)])
    machine.add_keys(8, keys)
    assert machine.acquirable_ranges("a", 10, 8, 0.0) == [(0, 3), (6, 7)]
