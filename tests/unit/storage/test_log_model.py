"""Model test of the log: after any operations it contains the records of a plain list and finds them by every index."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from mansio.storage.log import Log, LogSettings
from mansio.testing.disk import SimulatedDisk
from mansio.wire.batch.record_batch import read_header
from support.logs import ManualClock, append, check_contents, last_offset, make_batch
from support.tiers import examples

moments = st.integers(min_value=1_000, max_value=1_200)


class LogAgainstList(RuleBasedStateMachine):
    """`expected` is the list; every step is done to both."""

    @initialize(segment_bytes=st.sampled_from([400, 1500, 1 << 20]), interval=st.sampled_from([1, 300, 4096]))
    def begin(self, segment_bytes: int, interval: int) -> None:
        self.disk = SimulatedDisk()
        self.clock = ManualClock()
        self.settings = LogSettings(
            segment_bytes=segment_bytes,
            segment_ms=10_000,
            index_interval_bytes=interval,
            index_snapshot_bytes=500,
        )
        self.epoch = 0
        self.tag = 0
        self.expected: list[bytes] = []
        self.log = Log.open(self.disk, self.clock, "/data/p", self.settings)

    @rule(timestamps=st.lists(moments, min_size=1, max_size=4), value_bytes=st.integers(8, 200))
    def write(self, timestamps: list[int], value_bytes: int) -> None:
        self.tag += 1
        end = self.log.end_offset
        base_offset, stored = append(self.log, make_batch(timestamps, value_bytes, self.tag), self.epoch)
        assert base_offset == end
        self.expected.append(stored)

    @rule()
    def sync(self) -> None:
        self.log.sync()
        assert self.log.durable_end_offset == self.log.end_offset

    @rule()
    def new_leader(self) -> None:
        self.epoch += 1

    @rule(seconds=st.sampled_from([1, 11]))
    def wait(self, seconds: int) -> None:
        self.clock.seconds += seconds

    @rule(part=st.floats(0, 1))
    def trim(self, part: float) -> None:
        span = self.log.end_offset - self.log.start_offset
        self.log.trim_to(self.log.start_offset + int(span * part))

    @rule(part=st.floats(0.4, 1))
    def truncate(self, part: float) -> None:
        span = self.log.end_offset - self.log.start_offset
        target = self.log.start_offset + int(span * part)
        self.log.truncate_to(target)
        self.expected = [b for b in self.expected if last_offset(b) < target]
        assert self.log.end_offset <= target

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = Log.open(self.disk, self.clock, "/data/p", self.settings)
        assert self.log.recovery.checked_bytes == 0  # a log that was closed cleanly is not read again

    @invariant()
    def same_as_the_list(self) -> None:
        if not hasattr(self, "log"):
            return
        check_contents(self.log, self.expected)
        size = sum(len(b) for b in self.expected if last_offset(b) >= self.log.start_offset)
        assert self.log.size_bytes >= size
        for info in self.log.segments()[:-1]:
            assert info.end_offset > self.log.start_offset
        epochs = [epoch for epoch, _ in self.log.leader_epochs.entries()]
        assert epochs == sorted(set(epochs))
        if self.expected and read_header(self.expected[-1]).base_offset >= self.log.start_offset:
            assert (
                self.log.end_offset_for_epoch(self.log.leader_epochs.latest_epoch)[1] == self.log.end_offset
            )


TestLogAgainstList = LogAgainstList.TestCase
TestLogAgainstList.settings = settings(max_examples=examples(20, 40), stateful_step_count=25, deadline=None)
