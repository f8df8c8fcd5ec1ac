"""Crash test of the deduplication window: after a power failure between any two disk changes, a record and its id are
both there or both missing, and each id that was durable is known until it expires, also without its record."""

from __future__ import annotations

import contextlib
import errno
import random
from typing import TYPE_CHECKING, NamedTuple

import pytest

from mansio.broker.partition import deduplication_view, deduplicator
from mansio.errors import DiskFull
from mansio.state.deduplication import window as window_module
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.dedup_header import DEDUP_ID_HEADER
from mansio.wire.batch.record_batch import build_batch
from support.deduplicated_partition import DIRECTORY, WINDOW_MS, DeduplicatedPartition

if TYPE_CHECKING:
    from mansio.broker.partition.partition_hook import AppendResult

PRODUCER_ID = 7
BATCH_RECORDS_MAX = 4


class Accepted(NamedTuple):
    """A record that was stored: its value, offset, and the time of its acceptance."""

    value: bytes
    offset: int
    accepted_ms: int


class Sent(NamedTuple):
    """A batch of the idempotent producer, and the response."""

    batch: bytes
    first_id: int
    base_offset: int
    end_offset: int


class Workload:
    """Random use of one partition, and what must be true after a crash."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.live = DeduplicatedPartition(SimulatedDisk(can_sync_all=seed % 2 == 0), 1_000.0)
        self.accepted: dict[int, list[Accepted]] = {}
        """Acceptances by id."""
        self.sent: dict[bytes, int] = {}
        """Id by value, of all records."""
        self.last: Sent | None = None
        self.sequence = 0
        self.number = 0
        self.refused = 0
        """Batches of which only the control batch was appended."""
        self.repeats = 0

    def step(self) -> None:
        chance, live = self.chance, self.live
        name = chance.choices(
            ["produce", "full", "advance", "flush", "background", "carry"], [12, 2, 4, 5, 3, 2]
        )[0]
        if name == "produce":
            self._produce()
        elif name == "full":
            self._produce_on_full_disk()
        elif name == "advance":
            live.clock.seconds += chance.random() / 2
        elif name == "flush":
            live.flush()
        elif name == "background":
            live.background.run_one()
            live.scheduler.fire()
        else:
            self._delete_records()

    def _delete_records(self) -> None:
        chance, live = self.chance, self.live
        target = chance.randrange(live.partition.high_watermark + 1)
        if chance.random() < 0.7:
            copying = live.manager.release_below(target)
            with contextlib.suppress(StopIteration):
                for _ in range(chance.randrange(1, 6)):  # fewer steps: some copies are not committed yet
                    copying.send(None)
                    if chance.random() < 0.5:
                        live.flush()
            copying.close()
        floor, high_watermark = live.partition.retention_floor(), live.partition.high_watermark
        start = min(target, high_watermark if floor is None else floor)
        if start > live.partition.start_offset:
            live.partition.trim(start)
            live.flush()

    def _produce_on_full_disk(self) -> None:
        """Produce while the disk has space for the control batch with the ids only."""
        writes = 0

        def refuse_second(operation: str, path: str) -> int | None:
            nonlocal writes
            if operation != "write" or not path.endswith(".log"):
                return None
            writes += 1
            return errno.ENOSPC if writes > 1 else None

        self.live.disk.fail_when = refuse_second
        try:
            self._produce()
        except DiskFull:
            self.refused += 1
        finally:
            self.live.disk.fail_when = None

    def _produce(self) -> None:
        chance, live = self.chance, self.live
        if self.last is not None and chance.random() < 0.1:  # an idempotent producer sends a batch again
            end = live.log.end_offset
            result = live.partition.append(self.last.batch, urgent=True)
            assert live.log.end_offset == end, "a batch is stored twice"
            assert result.base_offset == self.last.base_offset or not self._is_known(self.last)
            return
        rows: list[tuple[int, bytes]] = []
        for _ in range(chance.randrange(1, BATCH_RECORDS_MAX + 1)):
            rows.append((chance.randrange(25), b"%d" % self.number))
            self.number += 1
        self.sent |= {value: dedup_id for dedup_id, value in rows}
        is_idempotent = chance.random() < 0.5
        batch = build_batch(
            [(1000, None, value, [(DEDUP_ID_HEADER, b"%d" % dedup_id)]) for dedup_id, value in rows],
            producer_id=PRODUCER_ID if is_idempotent else -1,
            producer_epoch=0 if is_idempotent else -1,
            base_sequence=self.sequence if is_idempotent else -1,
        )
        now_ms = live.clock.wall_ms()
        before = live.log.end_offset
        result = live.partition.append(batch, urgent=chance.random() < 0.5)
        if is_idempotent:
            self.sequence += len(rows)
            self.last = Sent(batch, rows[0][0], result.base_offset, result.end_offset)
        self._note(rows, now_ms, before, result)

    def _note(self, rows: list[tuple[int, bytes]], now_ms: int, before: int, result: AppendResult) -> None:
        stored = before + 1  # behind the control batch with the ids
        for index, (dedup_id, value) in enumerate(rows):
            known = self.accepted.get(dedup_id, ())
            if known and known[-1].accepted_ms > now_ms - WINDOW_MS:
                self.repeats += 1
                offset = known[-1].offset
            else:
                offset, stored = stored, stored + 1
                self.accepted.setdefault(dedup_id, []).append(Accepted(value, offset, now_ms))
            assert index or result.base_offset == offset
        expected = {one.offset: one.value for several in self.accepted.values() for one in several}
        for offset, value in self.live.visible().items():
            assert expected.get(offset) == value, f"{value!r} at {offset} was not accepted"

    def _is_known(self, sent: Sent) -> bool:
        """Whether the first id of a batch has not expired since the batch was sent."""
        known = self.accepted[sent.first_id][-1]
        return known.offset == sent.base_offset and known.accepted_ms > self.live.clock.wall_ms() - WINDOW_MS

    def check_crash(self, chance: random.Random) -> None:
        """Check what a power failure at this moment leaves."""
        durable_end = self.live.log.durable_end_offset
        after = DeduplicatedPartition(self.live.disk.crash(chance), self.live.clock.seconds)
        if chance.random() < 0.5:  # another record follows whatever is the last one
            after.partition.append(build_batch([(1000, None, b"after", ())]))
            after.flush()
            after = DeduplicatedPartition(after.disk, after.clock.seconds)
        is_stored = self.last is not None and self.last.end_offset <= durable_end
        if (
            self.last is not None
            and is_stored
            and self.last.end_offset - BATCH_RECORDS_MAX >= after.log.start_offset
        ):
            end = after.log.end_offset
            again = after.partition.append(self.last.batch)
            assert again.base_offset == self.last.base_offset or not self._is_known(self.last)
            assert after.log.end_offset == end, "a batch is stored twice"
        visible, start = after.visible(), after.log.start_offset
        until_ms = after.clock.wall_ms() - WINDOW_MS
        for dedup_id, several in self.accepted.items():
            known = [
                one for one in several if one.offset < durable_end or visible.get(one.offset) == one.value
            ]
            for one in known:
                assert one.offset < start or visible.get(one.offset) == one.value, f"{one.value!r} is lost"
            repeat = build_batch([(1000, None, b"repeat", [(DEDUP_ID_HEADER, b"%d" % dedup_id)])])
            end = after.log.end_offset
            result = after.partition.append(repeat)
            if known and known[-1].accepted_ms > until_ms:
                assert result.base_offset == known[-1].offset, f"id {dedup_id} is forgotten"
                assert after.log.end_offset == end
            elif result.base_offset != end + 1:  # the record of an append that has not returned yet
                assert self.sent.get(visible.get(result.base_offset, b"")) == dedup_id, (
                    f"id {dedup_id} is known, but its record is not there"
                )


@pytest.fixture(autouse=True)
def _small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deduplication_view, "SNAPSHOT_INTERVAL_BYTES", 300)
    monkeypatch.setattr(deduplicator, "COPIED_IDS_MAX", 3)
    monkeypatch.setattr(window_module, "SHARD_IDS", 4)
    monkeypatch.setattr(window_module, "MARK_MS", 100)


def run(seed: int, steps: int, every: int) -> tuple[int, int, int]:
    """Run a workload, check every so many disk changes. Return the number of checks, of repeats, and of batches whose
    append failed."""
    workload = Workload(seed)
    seen = checked = 0
    found: list[AssertionError] = []

    def crash_here() -> None:
        nonlocal seen, checked
        seen += 1
        if seen % every == 0:
            checked += 1
            workload.live.disk.on_change = None
            try:
                workload.check_crash(random.Random(seed * 100_003 + seen))
            except AssertionError as error:  # the log would take it for an error of the disk
                found.append(error)
            workload.live.disk.on_change = crash_here

    workload.live.disk.on_change = crash_here
    for step in range(steps):
        workload.step()
        assert not found, f"seed {seed}, step {step}, change {seen}: {found[0]}"
    return checked, workload.repeats, workload.refused


@pytest.mark.row("P3")
def test_no_power_failure_loses_an_id_or_a_record() -> None:
    checks, repeats, refused = map(sum, zip(*(run(seed, 60, every=5) for seed in range(1, 7)), strict=True))
    assert checks > 60
    assert repeats > 150
    assert refused > 3


@pytest.mark.full
@pytest.mark.row("P3")
def test_no_power_failure_loses_an_id_or_a_record_in_long_runs() -> None:
    checks, repeats, refused = map(
        sum, zip(*(run(seed, 150, every=2) for seed in range(100, 115)), strict=True)
    )
    assert checks > 1_200
    assert repeats > 1_000
    assert refused > 25


@pytest.mark.row("P3")
def test_a_damaged_control_batch_is_read_again_after_its_repair() -> None:
    live = DeduplicatedPartition(SimulatedDisk(), 1_000.0)
    batch = build_batch([(1000, None, b"x", [(DEDUP_ID_HEADER, b"id")])])
    first = live.partition.append(batch).base_offset
    live.flush()
    position = 8 * 90
    live.disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", position)
    live.view.on_truncate(live.log.end_offset)  # the view is loaded again
    live.scheduler.run()
    is_complete = live.view.is_complete
    assert not is_complete
    assert live.partition.storage_health.damaged or live.view.retention_floor() == 0
    live.disk.flip_bit(f"{DIRECTORY}/{0:020d}.log", position)  # as a repair does
    for _ in range(3):
        live.scheduler.fire()
        live.scheduler.run()
    assert live.view.is_complete
    assert live.partition.append(batch).base_offset == first


@pytest.mark.row("P3")
def test_a_clock_that_is_set_back_shortens_no_window() -> None:
    live = DeduplicatedPartition(SimulatedDisk(), 1_000.0)

    def append(dedup_id: bytes) -> int:
        return live.partition.append(
            build_batch([(1000, None, b"x", [(DEDUP_ID_HEADER, dedup_id)])])
        ).base_offset

    live.clock.seconds += 500
    wrong = append(b"wrong clock")
    live.clock.seconds -= 500
    right = append(b"right clock")
    live.clock.seconds += WINDOW_MS / 1000 - 0.1
    assert (append(b"wrong clock"), append(b"right clock")) == (wrong, right)
    live.clock.seconds += 0.2
    assert append(b"wrong clock") > right, "it counts from when the clock was right again"
    assert append(b"right clock") > right
