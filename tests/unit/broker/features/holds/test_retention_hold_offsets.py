"""Retention holds are derived from `__consumer_offsets`: commits and deletions change them, and a restart restores
them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mansio.broker.coordinator.group.group_coordinator import GroupCoordinator, GroupSettings
from mansio.broker.coordinator.group.offset_manager import OffsetToCommit
from mansio.broker.features.holds.retention_holds import RetentionHolds, UnsupportedHolds
from mansio.errors import StorageError
from mansio.wire.internal_records.hold_metadata import encode_hold_metadata, pipeline_group_id
from mansio.wire.internal_records.offset_and_group_records import CommittedOffset
from unit.broker.groups_fixtures import MemoryPartition, VirtualScheduler

if TYPE_CHECKING:
    from collections.abc import Sequence

DAY_MS = 24 * 3600 * 1000
MARK = encode_hold_metadata("q")


class Groups:
    """A coordinator over partitions in memory, and the holds it reports."""

    def __init__(self, stored: Sequence[MemoryPartition] = ()) -> None:
        self.scheduler = VirtualScheduler()
        self.partitions = [each.after_power_loss(self.scheduler) for each in stored]
        self.holds = RetentionHolds()
        self.coordinator = GroupCoordinator(
            settings=GroupSettings(),
            clock=self.scheduler,
            scheduler=self.scheduler,
            random=None,  # type: ignore[arg-type]  # nobody joins
            create_topic=self._create,
            end_offset=lambda topic, partition: 100 if topic == "t" else None,
            on_offset=self.holds.record_commit,
        )
        self.holds.set_loaded_check(lambda: self.coordinator.runtime.is_loaded)

    async def _create(self) -> list[MemoryPartition]:
        self.partitions = [MemoryPartition(self.scheduler) for _ in range(3)]
        return self.partitions

    def start(self) -> Groups:
        self.scheduler.run(self.coordinator.start(self.partitions))
        return self

    def commit(self, group: str, *offsets: tuple[int, int], metadata: str = MARK) -> None:
        wanted = [OffsetToCommit("t", partition, offset, -1, metadata) for partition, offset in offsets]
        assert self.scheduler.run(self.coordinator.offsets.commit(group, wanted)) == [None] * len(wanted)

    def held(self) -> dict[int, set[tuple[str, int]]]:
        places = {
            index: {(one.pipeline, one.offset) for one in self.holds.holds_on("t", index)}
            for index in range(3)
        }
        return {index: found for index, found in places.items() if found}


@pytest.fixture
def groups() -> Groups:
    return Groups().start()


def test_commits_move_holds_and_deletions_end_them(groups: Groups) -> None:
    groups.commit(pipeline_group_id("a"), (0, 5), (1, 6))
    groups.commit(pipeline_group_id("b"), (0, 3))
    groups.commit("other", (0, 1))
    assert groups.held() == {0: {("a", 5), ("b", 3)}, 1: {("a", 6)}}
    groups.commit(pipeline_group_id("a"), (0, 9))
    groups.scheduler.run(groups.coordinator.offsets.delete(pipeline_group_id("b"), [("t", 0)]))
    assert groups.held() == {0: {("a", 9)}, 1: {("a", 6)}}
    assert pipeline_group_id("b") not in groups.coordinator.store.entries, (
        "a group that holds nothing is no group"
    )
    groups.scheduler.run(groups.coordinator.delete(pipeline_group_id("a")))
    assert groups.held() == {}


def test_a_deleted_topic_has_no_retention_holds(groups: Groups) -> None:
    groups.commit(pipeline_group_id("a"), (0, 5), (1, 6))
    groups.scheduler.run(groups.coordinator.offsets.delete_offsets_of_topic("t"))
    assert groups.held() == {}


def test_a_restart_knows_nothing_until_it_is_loaded_and_then_the_same_holds(groups: Groups) -> None:
    groups.commit(pipeline_group_id("a"), (0, 5), (1, 6))
    groups.commit(pipeline_group_id("b"), (0, 3))
    groups.commit(pipeline_group_id("a"), (0, 7))
    groups.scheduler.run(groups.coordinator.offsets.delete(pipeline_group_id("b"), [("t", 0)]))
    after = Groups(groups.partitions)
    are_loaded = after.holds.are_loaded
    assert not are_loaded
    after.start()
    assert after.holds.are_loaded
    assert after.held() == {0: {("a", 7)}, 1: {("a", 6)}}


def test_offsets_that_cannot_be_loaded_leave_the_holds_unknown(groups: Groups) -> None:
    groups.commit(pipeline_group_id("a"), (0, 5))
    after = Groups(groups.partitions)
    after.partitions[1] = StorageError("no such disk")  # type: ignore[call-overload]  # as the partition set hands it on
    after.start()
    are_loaded = after.holds.are_loaded
    assert not are_loaded


def test_what_holds_records_back_does_not_expire_like_other_offsets(groups: Groups) -> None:
    groups.commit(pipeline_group_id("a"), (0, 5))
    groups.commit(pipeline_group_id("unmarked"), (0, 5), metadata="")
    groups.commit("other", (0, 5))
    groups.scheduler.now_ms += 400 * DAY_MS
    assert groups.scheduler.run(groups.coordinator.offset_expiration.expire()) == 2
    assert groups.held() == {0: {("a", 5)}}
    assert Groups(groups.partitions).start().held() == {0: {("a", 5)}}


def test_a_hold_in_a_cluster_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    holds = UnsupportedHolds()
    held, plain = CommittedOffset(5, -1, MARK, 1), CommittedOffset(5, -1, "", 1)
    with caplog.at_level("WARNING"):
        holds.record_commit("g", "t", 0, held)
        holds.record_commit(pipeline_group_id("q"), "t", 0, plain)
        holds.record_commit(pipeline_group_id("q"), "t", 0, None)
        assert caplog.messages == []
        for partition in range(3):
            holds.record_commit(pipeline_group_id("q"), "t", partition, held)
    assert caplog.messages == ["retention_holds_without_effect"]
