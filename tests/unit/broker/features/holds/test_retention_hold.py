"""Retention holds on virtual time: which segments they keep, when they are ignored, and which warnings are logged."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from mansio.broker.features.holds.retention_holds import (
    RELEASED_BY_BYTES,
    RELEASED_BY_DISK,
    RELEASED_BY_TIME,
    HoldDiskLimit,
    RetentionHoldHook,
    RetentionHolds,
)
from mansio.errors import PolicyViolation
from mansio.logs import FIELDS
from mansio.wire.internal_records.hold_metadata import (
    QUERY_CHARACTERS_MAX,
    encode_hold_metadata,
    parse_hold_metadata,
    pipeline_group_id,
    pipeline_name_of,
)
from mansio.wire.internal_records.offset_and_group_records import CommittedOffset
from support.logs import ManualBackground, ManualScheduler
from support.tiers import examples
from unit.broker.test_retention import MINUTE_MS, RetentionBench

EVERYTHING_GOES = {"retention.ms": "1"}
PIPELINE = "archive"


class HeldBench(RetentionBench):
    """One partition whose retention lets go of everything, and the holds on it."""

    def __init__(self, **settings: str) -> None:
        super().__init__(
            EVERYTHING_GOES | {name.replace("_", "."): value for name, value in settings.items()}
        )
        self.holds = RetentionHolds()
        self.loaded = True
        self.holds.set_loaded_check(lambda: self.loaded)
        self.hook = RetentionHoldHook(self.partition, self.holds, self.clock)
        self.partition.add_hook(self.hook, on_data_path=False)

    def commit(self, offset: int, *, pipeline: str = PIPELINE, metadata: str | None = None) -> None:
        marked = encode_hold_metadata("q") if metadata is None else metadata
        committed = CommittedOffset(offset, -1, marked, self.clock.wall_ms())
        self.holds.record_commit(pipeline_group_id(pipeline), "t", 0, committed)

    def release(self, pipeline: str = PIPELINE) -> None:
        self.holds.record_commit(pipeline_group_id(pipeline), "t", 0, None)

    def start_after_check(self) -> int:
        self.pass_time(10)
        self.check()
        return self.partition.start_offset


def lines(caplog: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [getattr(one, FIELDS) for one in caplog.records if one.message == event]


def test_what_a_pipeline_has_not_read_stays_and_leaves_when_it_has() -> None:
    bench = HeldBench()
    bench.fill(6)
    bench.commit(2)
    assert bench.start_after_check() == 2
    bench.commit(5)
    assert bench.start_after_check() == 5
    bench.commit(6)
    assert bench.start_after_check() == 6


def test_the_slowest_pipeline_counts_until_it_is_released() -> None:
    bench = HeldBench()
    bench.fill(6)
    bench.commit(4)
    bench.commit(1, pipeline="slow")
    assert bench.start_after_check() == 1
    bench.release("slow")
    assert bench.start_after_check() == 4


@pytest.mark.parametrize(
    "metadata", ["", "{}", '{"hold":2}', '{"hold":true}', '["hold"]', '{"hold":1', "x" * 5000]
)
def test_a_commit_without_the_mark_holds_nothing_and_takes_back_one_with_it(metadata: str) -> None:
    bench = HeldBench()
    bench.fill(3)
    bench.commit(0)
    bench.commit(0, metadata=metadata)
    assert bench.start_after_check() == 3
    assert len(bench.holds) == 0


def test_only_groups_with_the_prefix_hold() -> None:
    bench = HeldBench()
    bench.fill(3)
    for group in ("mansio.pipeline.", "mansio.pipelin.x", "x"):
        bench.holds.record_commit(
            group, "t", 0, CommittedOffset(0, -1, encode_hold_metadata(""), bench.clock.wall_ms())
        )
    assert bench.start_after_check() == 3


def test_a_topic_may_refuse_retention_holds() -> None:
    bench = HeldBench(mansio_hold_enable="false")
    bench.fill(3)
    bench.commit(0)
    bench.loaded = False
    assert bench.start_after_check() == 3


def test_nothing_is_deleted_before_the_retention_holds_are_loaded(caplog: pytest.LogCaptureFixture) -> None:
    bench = HeldBench()
    bench.loaded = False
    bench.fill(4)
    with caplog.at_level(logging.ERROR):
        assert bench.start_after_check() == bench.start_after_check() == 0
    assert bench.holds.has_blocked_retention
    assert [one.message for one in caplog.records] == ["retention_blocked_offsets_not_loaded"]
    with pytest.raises(PolicyViolation, match="not known yet"):
        bench.hook.check_deletion(2)
    bench.commit(3)
    bench.loaded = True
    assert bench.start_after_check() == 3
    assert not bench.holds.has_blocked_retention


def test_the_limit_of_bytes_breaks_a_hold_by_whole_segments_and_logs_it_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = HeldBench(mansio_hold_bytes_max="3000")
    bench.fill(3)
    bench.commit(1)
    assert bench.start_after_check() == 1
    bench.fill(3)
    with caplog.at_level(logging.INFO):
        assert bench.start_after_check() == 3, "three segments of about 970 bytes fit"
        bench.fill(1)
        assert bench.start_after_check() == 4
    (line,) = lines(caplog, "hold_released")
    assert (line["pipeline"], line["topic"], line["partition"]) == (PIPELINE, "t", 0)
    assert (line["offset"], line["start"], line["reason"]) == (1, 3, RELEASED_BY_BYTES)
    assert bench.holds.released_counts == {RELEASED_BY_BYTES: 1, RELEASED_BY_TIME: 0, RELEASED_BY_DISK: 0}
    (broken,) = bench.holds.released_holds()
    assert (broken.offset, broken.start) == (1, 4)
    with caplog.at_level(logging.INFO):
        bench.commit(3)
        assert list(bench.holds.released_holds()), "still behind the start of the log"
        bench.commit(4)
        assert not list(bench.holds.released_holds())
    assert len(lines(caplog, "hold_restored")) == 1


def test_a_pipeline_that_is_silent_for_too_long_holds_only_what_is_young(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = HeldBench(mansio_hold_ms_max=str(60 * MINUTE_MS))
    bench.fill(3)
    bench.commit(1)
    bench.pass_time(59 * MINUTE_MS)
    assert bench.start_after_check() == 1
    bench.fill(2)
    bench.pass_time(2 * MINUTE_MS)
    with caplog.at_level(logging.ERROR):
        assert bench.start_after_check() == 3, "two are younger than an hour"
    (line,) = lines(caplog, "hold_released")
    assert line["reason"] == RELEASED_BY_TIME


def test_a_slow_pipeline_that_commits_keeps_old_records() -> None:
    bench = HeldBench(mansio_hold_ms_max=str(60 * MINUTE_MS))
    bench.fill(4)
    bench.pass_time(120 * MINUTE_MS)
    bench.commit(1)
    assert bench.start_after_check() == 1


def test_no_limit_means_none() -> None:
    bench = HeldBench(mansio_hold_bytes_max="-1", mansio_hold_ms_max="-1")
    bench.fill(20)
    bench.commit(0)
    bench.pass_time(1 << 40)
    assert bench.start_after_check() == 0


def test_a_full_disk_breaks_holds_loudly_and_a_later_commit_is_as_good_as_any(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = HeldBench()
    free = [200]
    scheduler, background = ManualScheduler(), ManualBackground()
    checks: list[None] = []
    limit = HoldDiskLimit(
        bench.holds,
        scheduler=scheduler,  # type: ignore[arg-type]  # enough of one
        background=background,
        free_bytes=lambda: free[0],
        free_bytes_min=100,
        on_low=lambda: checks.append(None),
    )
    bench.fill(4)
    bench.commit(1)
    limit.start()
    background.run_all()
    assert bench.start_after_check() == 1
    assert not bench.holds.is_disk_nearly_low
    free[0] = 199
    scheduler.fire()
    background.run_all()
    assert (bench.holds.is_disk_nearly_low, bench.holds.is_disk_low) == (True, False)
    assert bench.start_after_check() == 1
    with caplog.at_level(logging.INFO):
        free[0] = 99
        scheduler.fire()
        background.run_all()
        assert len(checks) == 1
        assert bench.start_after_check() == 4
        free[0] = 100
        scheduler.fire()
        background.run_all()
    assert [one.message for one in caplog.records if "hold" in one.message] == [
        "holds_ignored_disk_full",
        "hold_released",
        "holds_enforced",
    ]
    bench.fill(2)
    bench.commit(5)
    assert bench.start_after_check() == 5
    limit.stop()
    scheduler.fire()
    assert not background.jobs


def test_deleting_records_that_a_pipeline_needs_is_refused_and_names_it() -> None:
    bench = HeldBench()
    bench.fill(4)
    bench.commit(2, pipeline="daily")
    bench.commit(3, pipeline="other")
    bench.hook.check_deletion(2)
    for before in (3, 4, -1):
        with pytest.raises(
            PolicyViolation, match=r"t-0: pipeline 'daily' still needs .* offset 2 .*release daily"
        ):
            bench.hook.check_deletion(before)
    bench.release("daily")
    bench.release("other")
    bench.hook.check_deletion(-1)


def test_the_mark_names_who_committed_within_the_room_that_offsets_have() -> None:
    for query in ("", "q", "ü" * 1000, '"\\\n' * 500, "\U0001f600" * 1000):
        metadata = encode_hold_metadata(query)
        assert len(metadata.encode()) <= 4096
        found = parse_hold_metadata(metadata)
        assert found is not None
        assert found.query == query[:QUERY_CHARACTERS_MAX]
    assert pipeline_name_of(pipeline_group_id("a.b")) == "a.b"
    assert pipeline_name_of("a.b") is None


class HoldModel(RuleBasedStateMachine):
    """Against the plainest of models: a list of records, each with its segment, and what every pipeline has read."""

    BYTES_MAX = 4000
    MS_MAX = 30 * MINUTE_MS

    def __init__(self) -> None:
        super().__init__()
        self.bench = HeldBench(mansio_hold_bytes_max=str(self.BYTES_MAX), mansio_hold_ms_max=str(self.MS_MAX))
        self.commits: dict[str, tuple[int, int]] = {}
        self.written: list[int] = []  # when each record, which fills a segment, was written
        self.low = self.checked = False

    @rule(count=st.integers(1, 4))
    def append(self, count: int) -> None:
        self.written += [self.bench.clock.wall_ms()] * count
        self.bench.fill(count)
        self.checked = False

    @rule(pipeline=st.sampled_from("abc"), data=st.data())
    def commit(self, pipeline: str, data: st.DataObject) -> None:
        offset = data.draw(st.integers(0, len(self.written)))
        self.bench.commit(offset, pipeline=pipeline)
        self.commits[pipeline] = (offset, self.bench.clock.wall_ms())
        self.checked = False

    @rule(pipeline=st.sampled_from("abc"))
    def release(self, pipeline: str) -> None:
        self.bench.release(pipeline)
        self.commits.pop(pipeline, None)
        self.checked = False

    @rule(minutes=st.integers(1, 25))
    def wait(self, minutes: int) -> None:
        self.bench.pass_time(minutes * MINUTE_MS)
        self.checked = False

    @rule(low=st.booleans(), loaded=st.booleans())
    def change(self, low: bool, loaded: bool) -> None:
        self.low = self.bench.holds.is_disk_low = low
        self.bench.loaded = loaded
        self.checked = False

    @precondition(lambda self: not self.checked)
    @rule()
    def check(self) -> None:
        before = self.bench.partition.start_offset
        allowed = self.allowed(before)
        start = self.bench.start_after_check()
        assert start == max(before, min(allowed, len(self.written)))
        self.checked = True

    def allowed(self, before: int) -> int:
        """How far deletion may come: as far as each pipeline allows. The check comes 10 ms later."""
        if self.low:
            return len(self.written)
        if not self.bench.loaded:
            return before
        now_ms = self.bench.clock.wall_ms() + 10
        return min(
            (self.kept_from(*each, now_ms) for each in self.commits.values()), default=len(self.written)
        )

    def kept_from(self, offset: int, commit_ms: int, now_ms: int) -> int:
        batch_bytes = self.bench.partition.log.active_segment().size_bytes
        for candidate in range(offset, len(self.written)):
            fits = (len(self.written) - candidate) * batch_bytes <= self.BYTES_MAX
            silent = now_ms - commit_ms > self.MS_MAX
            if fits and not (silent and now_ms - self.written[candidate] > self.MS_MAX):
                return candidate
        return max(offset, len(self.written))

    @invariant()
    def broken_means_behind_the_start(self) -> None:
        start = self.bench.partition.start_offset
        for one in self.bench.holds.released_holds():
            assert self.commits[one.pipeline][0] < one.start <= start


TestHoldModel = HoldModel.TestCase
TestHoldModel.settings = hypothesis_settings(
    max_examples=examples(20, 60), stateful_step_count=25, deadline=None
)
