"""Model test of compaction: a compacted log against a plain list, under all operations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mansio.storage.cleaner.offset_map import CAPACITY_MIN, ENTRY_BYTES, OffsetMap, digest_of
from mansio.storage.compaction_run import CompactionOutcome
from mansio.storage.log import Log, LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.compression import Codec
from mansio.wire.batch.record_batch import build_batch, check_batch, read_header
from support.compaction import CompactedModel, Kept, one_piece, records_of, start_compaction
from support.logs import ManualClock
from support.tiers import examples

keys = st.sampled_from([None, b"", b"a", b"b", b"c", b"d" * 200])
values = st.one_of(st.none(), st.binary(max_size=60))
rows = st.lists(st.tuples(st.integers(0, 5000), keys, values), min_size=1, max_size=5)
DIRECTORY = "/data/p"
RETENTION_MS = 1000


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 1 << 40))), st.integers(0, 4))
def test_offset_map_is_a_dictionary_until_it_is_full(puts: list[tuple[int, int]], doublings: int) -> None:
    newest = OffsetMap((CAPACITY_MIN << doublings) * ENTRY_BYTES)
    assert sum(newest.prepare()) == newest.size_bytes
    known: dict[int, int] = {}
    for key, offset in puts:
        digest = digest_of(b"%d" % key)
        fits = newest.put(digest, offset)
        assert fits == (key in known or len(known) < newest.entries_max)
        if fits:
            known[key] = max(offset, known.get(key, -1))
    assert len(newest) == len(known)
    assert {key: newest.get(digest_of(b"%d" % key)) for key in range(70)} == {
        key: known.get(key, -1) for key in range(70)
    }


def test_offset_map_is_full_at_nine_tenths() -> None:
    newest = OffsetMap(1 << 20, entries_wanted=100)
    assert newest.size_bytes == 128 * ENTRY_BYTES
    assert list(newest.prepare()) == [newest.size_bytes]
    assert len(list(OffsetMap(32 << 20).prepare())) == 24  # 1 << 20 slots, as many as fit
    fits = [newest.put(digest_of(b"%d" % n), n) for n in range(200)]
    assert fits == [True] * 115 + [False] * 85
    assert all(newest.get(digest_of(b"%d" % n)) == (n if n < 115 else -1) for n in range(200))
    assert newest.put(digest_of(b"7"), 999)
    assert newest.get(digest_of(b"7")) == 999


class CompactedLogAgainstList(RuleBasedStateMachine):
    """Writes of all codecs, rolls, compactions whole and in pieces with writes in between, trims, restarts."""

    @initialize(segment_bytes=st.sampled_from([300, 900, 4000]), interval=st.sampled_from([1, 200]))
    def open(self, segment_bytes: int, interval: int) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.settings = LogSettings(segment_bytes=segment_bytes, index_interval_bytes=interval)
        self.log = Log.open(self.disk, self.clock, DIRECTORY, self.settings)
        self.model = CompactedModel()
        self.epoch = 0

    @rule(batch=rows, codec=st.sampled_from(list(Codec)), headers=st.booleans())
    def write(self, batch: list[tuple[int, bytes | None, bytes | None]], codec: Codec, headers: bool) -> None:
        extra = (("h", b"x"), ("n", None)) if headers else ()
        data = build_batch([(ts, key, value, extra) for ts, key, value in batch], codec=codec)
        base = self.log.append(data, check_batch(data), self.epoch)
        for delta, (ts, key, value) in enumerate(batch):
            self.model.write(Kept(base + delta, ts, key, value, extra))

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule()
    def new_leader(self) -> None:
        self.epoch += 1

    @rule(seconds=st.sampled_from([0.5, 1.5]))
    def wait(self, seconds: float) -> None:
        self.clock.seconds += seconds

    @rule(pieces=st.integers(0, 6), part=st.floats(0, 0.6), trim=st.booleans(), batch=rows)
    def compact(
        self, pieces: int, part: float, trim: bool, batch: list[tuple[int, bytes | None, bytes | None]]
    ) -> None:
        self.log.sync()
        now_ms = self.clock.wall_ms()
        run = start_compaction(self.log, self.disk, now_ms=now_ms)
        if run is None:
            return
        for _ in range(pieces):
            if run.outcome is None:
                one_piece(run)
        if trim:
            self.trim(part)
        self.write(batch, Codec.NONE, headers=False)
        while run.outcome is None:
            one_piece(run)
        assert run.error is None
        assert run.outcome is (CompactionOutcome.DONE if not trim else run.outcome)
        state = self.log.compaction.state
        assert state.swap is None
        if run.outcome is CompactionOutcome.DONE:
            self.model.compact(state.cleaned_end_offset, now_ms, RETENTION_MS)
        elif run.swaps:  # some of it was done; the rest comes with the next run
            self.take_over()

    def take_over(self) -> None:
        """After a partial run: only superseded records are missing, and the model continues from there."""
        seen = {record.offset: record for record in records_of(self.log)}
        newest = {record.key: record.offset for record in self.model.records.values()}
        now_ms = self.clock.wall_ms()
        for record in self.model.visible(self.log.start_offset):
            if record.offset in seen:
                continue
            tombstone_due = self.model.horizons.get(record.offset, now_ms + 1) < now_ms
            assert record.key is None or newest[record.key] > record.offset or tombstone_due
            del self.model.records[record.offset]
        sparse_end = self.log.compaction.state.sparse_end_offset
        for record in seen.values():
            if record.value is None and record.offset < sparse_end:
                self.model.horizons.setdefault(record.offset, now_ms + RETENTION_MS)

    @rule(part=st.floats(0, 0.6))
    def trim(self, part: float) -> None:
        span = self.log.end_offset - self.log.start_offset
        self.log.trim_to(self.log.start_offset + int(span * part))

    @rule(lose_checkpoint=st.booleans())
    def reopen(self, lose_checkpoint: bool) -> None:
        end, start = self.log.end_offset, self.log.start_offset
        self.log.close()
        if lose_checkpoint and self.log.start_offset == self.log.segment_base_offsets()[0]:
            self.disk.truncate_file(f"{DIRECTORY}/checkpoint", 0)
            self.disk.remove(f"{DIRECTORY}/checkpoint")
        self.log = Log.open(self.disk, self.clock, DIRECTORY, self.settings)
        assert (self.log.start_offset, self.log.end_offset) == (start, end)

    @invariant()
    def same_as_the_list(self) -> None:
        if not hasattr(self, "log"):
            return
        log = self.log
        expected = self.model.visible(log.start_offset)
        assert records_of(log) == expected
        log.verify()
        batches = list(log.batches(log.start_offset))
        headers = [read_header(batch) for batch in batches]
        for offset in range(log.start_offset, log.end_offset):
            following = next((n for n, h in enumerate(headers) if h.last_offset >= offset), None)
            piece = log.read(offset, 1, log.end_offset)
            assert following is not None  # nobody waits for an offset that nobody will fill
            assert piece is not None
            assert piece.read() == batches[following]
            assert piece.next_offset > headers[following].last_offset
        for max_bytes in (1, 300, 1 << 20):
            offset, seen = log.start_offset, []
            while (part := log.read(offset, max_bytes, log.end_offset)) is not None:
                seen.append(part.read())
                offset = part.next_offset
            assert offset == log.end_offset
            assert b"".join(seen) == b"".join(batches)
        times = sorted({record.timestamp_ms for record in expected})
        for moment in [*times[:3], *times[-2:], *(time + 1 for time in times[-2:])]:
            first = next((r for r in expected if r.timestamp_ms >= moment), None)
            found = log.offset_for_time(moment, log.end_offset)
            assert (found and found[:2]) == (first and first[:2])
        largest = next((r for r in expected if times and r.timestamp_ms == times[-1]), None)
        found = log.max_timestamp(log.end_offset)
        assert (found and found[:2]) == (largest and largest[:2])


TestCompactedLogAgainstList = CompactedLogAgainstList.TestCase
TestCompactedLogAgainstList.settings = settings(
    max_examples=examples(20, 80), stateful_step_count=30, deadline=None
)


def test_segment_that_compaction_emptied_is_passed_over_after_the_checkpoint_is_lost() -> None:
    state = CompactedLogAgainstList()
    state.open(segment_bytes=300, interval=1)
    state.write([(0, None, None)], Codec.NONE, headers=False)
    state.reopen(lose_checkpoint=False)
    state.write([(0, None, None), (0, None, None)], Codec.GZIP, headers=False)
    state.write([(0, None, None), (0, None, bytes(4))], Codec.NONE, headers=False)
    state.compact(pieces=0, part=0.0, trim=False, batch=[(0, None, None)])
    state.roll()
    state.compact(pieces=0, part=0.0, trim=False, batch=[(0, None, None)])
    state.reopen(lose_checkpoint=True)
    state.same_as_the_list()
