"""`DeduplicationWindow` compared with a dictionary: ids, expiry, clocks set back, snapshots, copies, bounds."""

from __future__ import annotations

import random
import tracemalloc
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mansio.broker.features.deduplication import window as window_module
from mansio.broker.features.deduplication.window import (
    NO_COPIES,
    AcceptedId,
    Copies,
    DeduplicationWindow,
    KnownId,
)
from mansio.errors import CorruptLog
from mansio.wire.batch.dedup_header import key_of
from support.tiers import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

WINDOW_MS = 40
NUMBERS = st.lists(st.integers(0, 60), min_size=1, max_size=12, unique=True)
CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("accept"), NUMBERS),
        st.tuples(st.just("advance"), st.integers(-15, 30)),
        st.tuples(st.just("expire")),
        st.tuples(st.just("room"), st.integers(1, 20), st.integers(1, 40)),
        st.tuples(st.just("snapshot")),
        st.tuples(st.just("copy"), st.integers(0, 60)),
        st.tuples(st.just("rebuild")),
    ),
    max_size=60,
)


@pytest.fixture(autouse=True)
def _small_shards() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_module, "SHARD_IDS", 3)
        patch.setattr(window_module, "MARK_MS", 10)
        yield


def key(number: int) -> bytes:
    return key_of(b"%d" % number)


class Model:
    """The ids that have not expired, in a dictionary, and the control batches of the log."""

    def __init__(self) -> None:
        self.window = DeduplicationWindow()
        self.ids: dict[bytes, KnownId] = {}
        self.clock_ms = 1_000
        self.end_offset = 0
        self.start_offset = 0
        self.log: list[tuple[int, list[AcceptedId], Copies | None]] = []
        """Location and ids of each control batch, and what it says of copies; None for accepted ids."""

    @property
    def until_ms(self) -> int:
        return self.clock_ms - WINDOW_MS

    def is_live(self, found: KnownId | None) -> bool:
        return found is not None and found.accepted_ms > self.until_ms

    def accept(self, numbers: list[int]) -> None:
        new = [key(number) for number in numbers if not self.is_live(self.ids.get(key(number)))]
        if not new:
            return
        for known, found in self.ids.items():
            self.ids[known] = KnownId(found.offset, min(found.accepted_ms, self.clock_ms))
        location, self.end_offset = self.end_offset, self.end_offset + 1 + len(new)
        accepted = [AcceptedId(one, location + 1 + at, self.clock_ms) for at, one in enumerate(new)]
        self.log.append((location, accepted, None))
        self._apply(self.window, self.log[-1])
        self.ids |= {one.key: KnownId(one.offset, one.accepted_ms) for one in accepted}

    def advance(self, elapsed_ms: int) -> None:
        self.clock_ms += elapsed_ms

    def expire(self) -> None:
        self.window.expire(self.until_ms)

    def room(self, wanted: int, ids_max: int) -> None:
        live = sum(map(self.is_live, self.ids.values()))
        assert self.window.make_room(wanted, ids_max, self.until_ms) == (live + wanted <= ids_max)

    def snapshot(self) -> None:
        self.window = DeduplicationWindow.from_bytes(self.window.freeze().to_bytes())

    def copy(self, offset: int) -> None:
        """Copy the ids below an offset and delete that part of the log."""
        offset = min(offset, self.end_offset)
        after_ms, last_ms = self.window.uncopied_times(offset, self.until_ms)
        ids = [one for part in self.window.select(after_ms, last_ms) for one in part]
        location = self.end_offset if after_ms == self.until_ms else self.window.copies.location
        for begin in range(0, len(ids), 3):
            is_last = begin + 3 >= len(ids)
            copies = Copies(location, last_ms) if is_last else NO_COPIES
            self.log.append((self.end_offset, ids[begin : begin + 3], copies))
            self.end_offset += 1
            self._apply(self.window, self.log[-1])
        self.window.release_below(offset)
        floor = self.window.lowest_location(self.until_ms)
        assert floor is None or floor >= min(offset, self.end_offset)
        self.start_offset = max(self.start_offset, offset)
        self.log = [entry for entry in self.log if entry[0] >= self.start_offset]

    def rebuild(self) -> None:
        """Apply the log to an empty window, as a new replica does."""
        self.window = DeduplicationWindow()
        for entry in self.log:
            self._apply(self.window, entry)

    def _apply(self, window: DeduplicationWindow, entry: tuple[int, list[AcceptedId], Copies | None]) -> None:
        location, ids, copies = entry
        if copies is not None:
            window.restore(ids, location, copies)
        else:
            window.accept([one.key for one in ids], [one.offset for one in ids], ids[0].accepted_ms, location)

    def check(self) -> None:
        for known, expected in self.ids.items():
            found = self.window.find(known)
            assert self.is_live(found) == self.is_live(expected), "an id is forgotten, or has not expired"
            if self.is_live(expected):
                assert found == expected
        assert self.window.find(key(1_000)) is None
        assert self.window.count >= sum(map(self.is_live, self.ids.values()))
        floor = self.window.lowest_location(self.until_ms)
        held = {
            one.key for location, ids, _ in self.log for one in ids if floor is not None and location >= floor
        }
        assert {known for known, found in self.ids.items() if self.is_live(found)} <= held


@settings(max_examples=examples(100, 400))
@given(CHANGES)
def test_window_behaves_like_a_dictionary_with_times(changes: list[tuple]) -> None:
    model = Model()
    for name, *arguments in changes:
        getattr(model, name)(*arguments)
        model.check()


def test_key_across_two_neighbouring_keys_is_not_found() -> None:
    window = DeduplicationWindow()
    first, second = b"\0" * 4 + b"a" * 12, b"\0" * 4 + b"b" * 12
    window.accept([first, second], [7, 8], 100, 6)
    assert window.find((first + second)[4:20]) is None
    across = b"\0" * 4 + b"a" * 12  # the same as the first one: found at the right position only
    assert window.find(across) == KnownId(7, 100)


def test_expired_ids_are_removed_by_later_additions() -> None:
    window = DeduplicationWindow()
    for number in range(20_000):
        window.accept([key(number)], [number], number, number)
        window.expire(number - 500)
    assert window.count < 4_000


@pytest.mark.full
@pytest.mark.parametrize("count", [10_000, 100_000])
def test_an_id_takes_less_than_fifty_bytes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_module, "SHARD_IDS", 128)
    keys = [random.Random(number).randbytes(16) for number in range(count)]
    offsets = list(range(count))
    tracemalloc.start()
    try:
        window = DeduplicationWindow()
        for begin in range(0, count, 1_000):
            window.accept(keys[begin : begin + 1_000], offsets[begin : begin + 1_000], begin, begin)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert window.count == count
    assert size / count < 50


@pytest.mark.parametrize("damage", ["short", "version", "empty"])
def test_damaged_snapshot_is_refused(damage: str) -> None:
    window = DeduplicationWindow()
    window.accept([key(1), key(2)], [1, 2], 5, 0)
    data = window.freeze().to_bytes()
    damaged = {"short": data[:-1], "version": b"\0\7" + data[2:], "empty": b""}[damage]
    with pytest.raises(CorruptLog):
        DeduplicationWindow.from_bytes(damaged)
