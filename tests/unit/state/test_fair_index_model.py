"""Numbers of a fair group's offsets: those that were used never change, also when a leader reads the log again."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.state.share_partition.dead_letters import merge_intervals
from mansio.state.share_partition.fairness import fair_index
from mansio.state.share_partition.fairness.fair_index import BACKLOG_MAX, FairIndex, key_id
from mansio.state.share_partition.types import BACKLOG_QUEUES, BASE, OPEN_END, Isolation
from support.present import present
from support.tiers import examples

KEYS = [None, b"quiet", b"noisy", b"other", b"l" * 100]
BATCH = st.lists(
    st.tuples(st.sampled_from([0, 1, 2, 2, 2, 3, 4]), st.integers(1, 40)), min_size=1, max_size=4
)
STEP = st.one_of(
    st.tuples(st.just("add"), BATCH),
    st.tuples(st.just("deliver"), st.floats(0, 1)),
    st.tuples(st.just("forget"), st.floats(0, 1)),
    st.tuples(st.just("review"), st.none()),
    st.tuples(st.just("restart"), st.none()),
    st.tuples(st.just("off"), st.none()),
    st.tuples(st.just("on"), st.none()),
)


class World:
    """A log, what is stored, and how far each share partition has come."""

    def __init__(self) -> None:
        self.log: list[bytes | None] = []
        self.stored: tuple[Isolation, ...] = ()
        self.numbers: dict[int, int] = {}
        """Of each offset that was leased or passed, according to the first decision."""
        self.held: dict[int, set[int]] = {}
        """By backlog queue, delivered offsets that are not done."""
        self.delivered: dict[int, int] = {BASE: 0}
        self.is_fair = self.was_always_fair = True
        self.index = FairIndex(0, (), 0, "")

    def read(self) -> None:
        """As the scan does, in batches of any size."""
        index = self.index
        while index.end < len(self.log):
            for number, end in self.delivered.items():
                index.note_progress(number, end)
            before, end = index.end, min(index.end + 37, len(self.log))
            self.store(
                index.add(
                    {name: [*enumerate(self.log)][before:end] for name in index.headers_at(before)}, end
                )
            )
            assert index.end > before or index.isolations == self.stored
        self.check()

    def store(self, change: tuple[Isolation, ...] | None) -> None:
        if change is None:
            return
        assert change != self.stored, "a change that changes nothing would be stored for ever"
        for each in change:
            if (
                each.end == OPEN_END
                and each not in self.stored
                and all(
                    (one.number, one.key) != (each.number, each.key)
                    for one in self.stored
                    if one.end == OPEN_END
                )
            ):
                assert each.first >= self.delivered.get(each.number, 0), "passed by its backlog queue"
        self.stored = change
        self.index.apply(change)

    def deliver(self, part: float) -> None:
        """Each share partition in use leases up to some offset below the end, and passes those of others."""
        for number in self.index.numbers:
            end = self.delivered.get(number, 0)
            self.delivered[number] = end + round((self.index.end - end) * part)
        self.check()

    def forget(self, part: float) -> None:
        """Some of what was delivered is held, and the rest done; then the index forgets what it can."""
        for number in self.index.numbers[1:]:
            own = [
                o
                for o, known in self.numbers.items()
                if known == number and o < self.delivered.get(number, 0)
            ]
            self.held[number] = set(own[: round(len(own) * part)][-3:])
        for number in self.index.numbers:
            self.index.note_undelivered(number, self.delivered.get(number, 0))
        self.index.forget(self.pinned())

    def pinned(self) -> dict[int, list[tuple[int, int]]]:
        return {number: merge_intervals((o, o) for o in held) for number, held in self.held.items()}

    def restart(self) -> None:
        """As `load_index` does."""
        ends = [*self.delivered.values(), *[each.end for each in self.stored if each.end != OPEN_END]]
        start = min([max(ends), *[each.first for each in self.stored if each.first < each.end]])
        self.index = FairIndex(start, self.stored, max(ends), "")
        for number, ranges in self.pinned().items():
            self.index.pin(number, ranges)
        if not self.is_fair:
            self.switch(is_fair=False)

    def check(self) -> None:
        """Offsets that are not done have the numbers that were used; those that are, too, or that of `BASE`."""
        used = max(self.delivered.values())
        for part in self.index.split(0, self.index.end - 1):
            for offset in range(part.first, part.last + 1):
                if offset < used:
                    number = self.numbers.setdefault(offset, part.number)
                    is_done = offset < self.delivered.get(number, 0) and offset not in self.held.get(
                        number, ()
                    )
                    assert part.number == number or (is_done and part.number == BASE)
                    if is_done and part.number != number:
                        assert offset < self.delivered[BASE], "delivered again by BASE"

    def switch(self, *, is_fair: bool) -> None:
        self.is_fair = is_fair
        self.was_always_fair = False
        if self.index.end < self.index.decided_end:
            self.read()
        self.store(self.index.close_all())
        self.index.set_active(is_active=is_fair)


@settings(max_examples=examples(200, 2_000))
@given(st.lists(STEP, max_size=25))
def test_numbers_of_leased_offsets_never_change(steps: list[tuple[str, object]]) -> None:
    world = World()
    for kind, value in steps:
        if kind == "add":
            for key, count in value:  # type: ignore[attr-defined]
                world.log += [KEYS[key]] * count
            world.read()
        elif kind == "deliver":
            world.deliver(value)  # type: ignore[arg-type]
        elif kind == "forget":
            world.forget(value)  # type: ignore[arg-type]
        elif kind == "review":
            for number, end in world.delivered.items():
                world.index.note_progress(number, end)
            world.store(world.index.close_drained())
        elif kind == "restart":
            world.restart()
        else:
            world.switch(is_fair=kind == "on")
        world.read()
        found = {
            offset: each.number
            for each in world.index.split(0, world.index.end - 1)
            for offset in range(each.first, each.last + 1)
        }
        if world.was_always_fair:
            waiting = Counter(
                world.log[offset]
                for offset, number in found.items()
                if number == BASE and offset >= max(world.delivered.values())
            )
            waiting.pop(None, None)
            assert all(count <= BACKLOG_MAX * 2 for count in waiting.values())
        assert len(world.stored) <= fair_index.ISOLATIONS_MAX


def test_a_key_is_isolated_when_too_many_of_its_records_wait_and_not_when_they_are_delivered() -> None:
    index = FairIndex(0, (), 0, "")
    keys = [(offset, b"noisy") for offset in range(200)]
    change = index.add({"": keys}, 200)
    assert change == (Isolation(BACKLOG_QUEUES[0], BACKLOG_MAX, OPEN_END, "", b"noisy"),)
    assert index.end == BACKLOG_MAX, "before the change is stored, nothing behind it is offered"
    index.apply(change)
    assert index.add({"": keys}, 200) is None
    assert [tuple(each) for each in index.split(0, 199)] == [(0, 63, BASE), (64, 199, BACKLOG_QUEUES[0])]
    index.note_progress(BACKLOG_QUEUES[0], 200)
    index.note_progress(BASE, 200)
    change = index.add({"": [(200, b"noisy")]}, 201)
    assert change == (Isolation(BACKLOG_QUEUES[0], BACKLOG_MAX, 200, "", b"noisy"),)
    index.apply(change)
    assert index.add({"": [(200, b"noisy")]}, 201) is None
    assert [tuple(each) for each in index.split(200, 200)] == [(200, 200, BASE)]


def test_an_isolation_is_kept_as_far_as_its_records_are_not_delivered() -> None:
    index = FairIndex(0, (), 0, "")
    keys = [(offset, b"noisy") for offset in range(200)]
    index.apply(present(index.add({"": keys}, 200)))
    assert index.add({"": keys}, 200) is None
    index.note_undelivered(BASE, 200)
    index.note_undelivered(BACKLOG_QUEUES[0], 100)
    index.forget({})
    assert index.start == 100
    assert index.close_all() == (Isolation(BACKLOG_QUEUES[0], 100, 200, "", b"noisy"),)


def test_long_keys_are_stored_as_digests() -> None:
    assert key_id(b"k" * 64) == b"k" * 64
    assert len(key_id(b"k" * 65)) < 64
    assert key_id(b"k" * 65) != key_id(b"k" * 66)


def test_a_large_backlog_finds_a_queue_among_many_small_ones() -> None:
    index = FairIndex(0, (), 0, "")
    offset = 0
    for number in range(1_000):
        keys = [(offset + each, b"%d" % number) for each in range(70)]
        while index.end < offset + 70:
            if (change := index.add({"": keys}, offset + 70)) is not None:
                index.apply(change)
        offset += 70
    assert index.isolated_count < fair_index.ISOLATIONS_MAX
    keys = [(offset + each, b"noisy") for each in range(50_000)]
    while index.end < offset + 50_000:
        if (change := index.add({"": keys}, offset + 50_000)) is not None:
            index.apply(change)
    assert any(each.key == b"noisy" for each in index.isolations)
