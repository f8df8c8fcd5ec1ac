"""Partitions of a broker: a topic that the disk does not allow to open or remove does not affect others."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from mansio.broker.replication.replica_manager import APPLIED_AT_ONCE_MAX, ReplicaManager
from mansio.errors import CorruptLog, StorageError
from mansio.metadata.model import TOPIC_LIVE, PartitionState, Topic, TopicChange
from mansio.testing.scheduler import Simulation

if TYPE_CHECKING:
    from collections.abc import Iterable

NODE = 1


def topic(name: str) -> Topic:
    placed = (PartitionState((NODE,), NODE, 0, (NODE,)),)
    return Topic(name, UUID(int=sum(name.encode())), placed, 1, {}, False, TOPIC_LIVE, 1)


class ReplicaManagerBench:
    """A broker whose disk refuses what has to do with the topics in `bad`."""

    def __init__(self, *served: Topic) -> None:
        """`served`: what was opened before the view was followed."""
        self.found = list(served)
        self.simulation = Simulation(1)
        self.revision = 1
        self.bad: set[str] = set()
        self.opened: list[str] = []
        self.removed: list[str] = []
        self.given_up: list[tuple[UUID, int]] = []
        self.topics: dict[str, Topic] = {}
        self.topics_by_id: dict[UUID, Topic] = {}
        self.tell: Any = None
        self.has_session = True
        self.replica_manager = ReplicaManager(
            NODE,
            partitions=self,  # type: ignore[arg-type]  # enough of one
            replication=SimpleNamespace(),  # type: ignore[arg-type]  # nothing gets a role here
            state=self,  # type: ignore[arg-type]  # enough of one
            scheduler=self.simulation.scheduler("broker"),
            remove=self.remove,
            remove_replica=self.remove_replica,
            give_up=self.note_given_up,
            has_session=lambda: self.has_session,
            on_role_applied=lambda _: None,
            on_topics_created=self.made,
        )
        self.replica_manager.start()

    def on_change(self, tell: Any) -> None:
        self.tell = tell

    def partitions_or_errors(self, topic: Topic) -> list[Any]:
        return [None]

    def partition_or_error(self, topic: Topic, index: int) -> Any:
        return self.partitions_or_errors(topic)[index]

    def served_topics(self) -> list[Topic]:
        return list(self.found)

    def stop_serving(self, gone: Topic) -> None:
        self.found.remove(gone)

    def serve(self, _: Topic) -> None: ...

    def apply_topic_change(self, _: TopicChange) -> None: ...

    def __iter__(self) -> Any:
        return iter(())

    async def made(self, _: int) -> None: ...

    async def note_given_up(self, places: Any) -> int:
        self.given_up += places
        return len(places)

    async def open_partitions(self, found: Topic) -> None:
        self._refuse(found)
        if found.name not in self.opened:
            self.opened.append(found.name)
        self.partitions_or_errors = lambda topic: [
            None if topic.name not in self.opened else SimpleNamespace()
        ]

    async def remove_replica(self, found: Topic, index: int) -> None:
        self.removed.append(f"{found.name}-{index}")

    async def remove(self, found: Topic) -> None:
        self._refuse(found)
        self.removed.append(found.name)

    def _refuse(self, found: Topic) -> None:
        if found.name in self.bad:
            raise StorageError(f"{found.name}: input/output error")

    def make(self, *names: str) -> None:
        for name in names:
            made = self.topics[name] = topic(name)
            self.topics_by_id[made.topic_id] = made
            self.tell(TopicChange(None, made))

    def delete(self, *names: str) -> None:
        for name in names:
            gone = self.topics.pop(name)
            del self.topics_by_id[gone.topic_id]
            self.tell(TopicChange(gone, None))


def test_a_topic_that_cannot_be_opened_keeps_no_other_from_being_opened() -> None:
    bench = ReplicaManagerBench()
    bench.bad = {"bad"}
    bench.make("bad", "good")
    bench.simulation.run_until(lambda: bench.opened == ["good"], within_ms=500)
    bench.simulation.run_for(20_000)
    bench.make("later")
    bench.simulation.run_until(lambda: bench.opened == ["good", "later"], within_ms=500)
    bench.bad.clear()
    bench.simulation.run_until(lambda: "bad" in bench.opened, within_ms=61_000)


def test_a_topic_that_was_deleted_while_the_broker_started_is_removed() -> None:
    """After its partitions were opened, and before the broker knows of changes."""
    bench = ReplicaManagerBench(topic("gone"))
    bench.make("new")
    bench.simulation.run_until(lambda: bench.removed == ["gone"] and bench.opened == ["new"], within_ms=500)
    assert bench.found == []


def test_a_topic_that_cannot_be_removed_keeps_no_other_from_being_opened_or_removed() -> None:
    bench = ReplicaManagerBench()
    bench.make("bad", "good")
    bench.simulation.run_until(lambda: len(bench.opened) == 2)
    bench.bad = {"bad"}
    bench.delete("bad", "good")
    bench.make("next")
    bench.simulation.run_until(lambda: bench.removed == ["good"] and "next" in bench.opened, within_ms=500)
    bench.bad.clear()
    bench.simulation.run_until(lambda: "bad" in bench.removed, within_ms=61_000)


@pytest.mark.parametrize("isr", [(NODE, 2), (NODE,)])
def test_others_do_not_wait_for_a_partition_that_cannot_be_opened(isr: tuple[int, ...]) -> None:
    """It may be the one that leads, of a topic that has just been made; the only replica in sync gives up nothing."""
    bench = ReplicaManagerBench()
    bench.bad = {"bad"}
    state = PartitionState((NODE, 2), NODE, 0, isr)
    made = dataclasses.replace(topic("bad"), partitions=(state,))
    bench.topics["bad"] = bench.topics_by_id[made.topic_id] = made
    bench.tell(TopicChange(None, made))
    bench.simulation.run_for(5000)
    assert set(bench.given_up) == ({(made.topic_id, 0)} if len(isr) > 1 else set())


@pytest.mark.parametrize(
    ("isr", "error", "lost"),
    [
        ((NODE,), StorageError("input/output error"), False),
        ((NODE,), CorruptLog("the directory is missing"), True),
        ((NODE, 2), StorageError("input/output error"), True),
    ],
)
def test_the_only_replica_in_sync_is_not_given_up_for_a_disk_that_does_not_answer(
    isr: tuple[int, ...], error: StorageError, lost: bool
) -> None:
    """Its log may be all there is: it is opened when the disk answers again, and never begun again."""
    bench = ReplicaManagerBench()
    state = PartitionState((NODE, 2), NODE, 0, isr)
    made = dataclasses.replace(topic("t"), partitions=(state,))
    opened: list[Any] = [error]
    bench.partitions_or_errors = lambda topic: opened
    tries: list[str] = []

    async def reopen(found: Topic, index: int) -> None:
        tries.append(f"{found.name}-{index}")
        if len(tries) < 3:
            raise error
        opened[index] = SimpleNamespace()

    bench.reopen = reopen  # type: ignore[attr-defined]
    bench.topics["t"] = bench.topics_by_id[made.topic_id] = made
    assert list(bench.replica_manager.lost_logs()) == ([(made.topic_id, 0)] if lost else [])
    bench.tell(TopicChange(None, made))
    bench.simulation.run_for(20_000)
    assert tries == ([] if lost else ["t-0"] * 3)


def test_a_lost_log_is_not_replaced_before_this_broker_has_registered() -> None:
    """An earlier process's session may be alive, and a late fetch request of that process puts the broker back into
    the in-sync set; a replacement that exists by then is no longer recognized as a lost log."""
    bench = ReplicaManagerBench()
    state = PartitionState((NODE, 2), 2, 0, (2,))
    made = dataclasses.replace(topic("t"), partitions=(state,))
    opened: list[Any] = [CorruptLog("the directory is missing")]
    bench.partitions_or_errors = lambda topic: opened
    recreated: list[str] = []

    async def recreate(found: Topic, index: int) -> None:
        recreated.append(f"{found.name}-{index}")
        bench.replica_manager.stop()

    bench.recreate = recreate  # type: ignore[attr-defined]
    bench.topics["t"] = bench.topics_by_id[made.topic_id] = made
    bench.has_session = False
    bench.tell(TopicChange(None, made))
    bench.simulation.run_for(5000)
    assert not recreated
    assert list(bench.replica_manager.lost_logs()) == [(made.topic_id, 0)]
    bench.has_session = True
    bench.replica_manager.apply_all()
    bench.simulation.run_for(5000)
    assert recreated == ["t-0"]


def test_a_former_replica_is_removed_unless_it_was_assigned_again() -> None:
    bench = ReplicaManagerBench()
    states = [PartitionState((2, 3), 2, 4, (2,)), PartitionState((NODE, 2), 2, 4, (2,))]
    made = dataclasses.replace(topic("t"), partitions=tuple(states))
    opened: list[Any] = [CorruptLog("damaged"), CorruptLog("damaged")]
    bench.partitions_or_errors = lambda topic: opened
    bench.topics["t"] = bench.topics_by_id[made.topic_id] = made
    bench.has_session = False
    remove_replica = bench.replica_manager._remove_replica

    async def remove(found: Topic, index: int) -> None:
        opened[index] = None
        await remove_replica(found, index)

    bench.replica_manager._remove_replica = remove
    bench.tell(TopicChange(None, made))
    bench.simulation.run_for(5000)
    assert bench.removed == ["t-0"]


def test_only_the_partitions_that_have_changed_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReplicaManagerBench()
    before = topic("large")
    before = dataclasses.replace(before, partitions=before.partitions * 1_000)
    after = dataclasses.replace(before)
    looked_at: list[int] = []
    monkeypatch.setattr(bench, "partition_or_error", lambda _, index: looked_at.append(index))
    bench.tell(TopicChange(before, after, [3, 500]))
    assert looked_at == [3, 500]


def test_roles_of_many_partitions_are_applied_in_turns_according_to_the_latest_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = ReplicaManagerBench()
    made = topic("large")
    made = bench.topics[made.name] = dataclasses.replace(made, partitions=made.partitions * 2_000)
    bench.topics_by_id[made.topic_id] = made
    applied: list[tuple[int, int]] = []
    monkeypatch.setattr(
        bench.replica_manager,
        "_apply_at_once",
        lambda newest, indexes: applied.extend((newest.mod_revision, index) for index in indexes),
    )
    bench.tell(TopicChange(None, made))
    assert not applied
    bench.simulation.run_until(lambda: applied)
    assert len(applied) <= APPLIED_AT_ONCE_MAX
    latest = bench.topics_by_id[made.topic_id] = dataclasses.replace(made, mod_revision=9)
    bench.tell(TopicChange(made, latest, [1_900]))
    assert applied[-1] == (9, 1_900)
    seen = len(applied)
    bench.simulation.run_until(lambda: len(applied) == 2_001)
    assert {revision for revision, _ in applied[seen:]} == {9}
    assert {index for _, index in applied} == set(range(2_000))


def large_topic(bench: ReplicaManagerBench, partitions: int) -> Topic:
    """Make a live topic, of which the roles are not applied yet."""
    made = topic("large")
    made = bench.topics[made.name] = dataclasses.replace(made, partitions=made.partitions * partitions)
    bench.topics_by_id[made.topic_id] = made
    return made


def test_a_broker_that_leaves_gives_up_all_its_roles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ReplicaManagerBench()
    large_topic(bench, 2 * APPLIED_AT_ONCE_MAX)
    applied: list[int] = []
    monkeypatch.setattr(
        bench.replica_manager, "_apply_at_once", lambda _topic, indexes: applied.extend(indexes)
    )
    bench.replica_manager.stop()
    bench.replica_manager.apply_all()
    assert len(applied) == 2 * APPLIED_AT_ONCE_MAX


def test_roles_whose_application_failed_are_applied_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = ReplicaManagerBench()
    made = large_topic(bench, 3 * APPLIED_AT_ONCE_MAX)
    applied: set[int] = set()
    failures = iter([ValueError("a defect")])

    def apply(_topic: Topic, indexes: Iterable[int]) -> None:
        for failure in failures:
            raise failure
        applied.update(indexes)

    monkeypatch.setattr(bench.replica_manager, "_apply_at_once", apply)
    bench.tell(TopicChange(None, made))
    bench.simulation.run_until(lambda: len(applied) == 3 * APPLIED_AT_ONCE_MAX)
    assert "roles_not_applied" in caplog.messages
