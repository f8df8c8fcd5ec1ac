"""TopicService: what it refuses, what it makes, and what a crash between any two of its steps leaves."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pytest

from mansio.config.config_def import Change, Operation
from mansio.config.settings import Settings
from mansio.errors import (
    ConfigError,
    InvalidConfig,
    InvalidPartitions,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    InvalidTopic,
    MansioError,
    PolicyViolation,
    StorageError,
    TopicAlreadyExists,
    UnknownTopicId,
    UnknownTopicOrPartition,
)
from mansio.metadata.metadata_store import Delete, Put, encode
from mansio.metadata.model import partition_document, topic_document
from mansio.metadata.topic_plan import NewTopic, check_topic_name
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, Admin, Host, sqlite_store, topic_admin
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from mansio.metadata.metadata_store import Compare, MetadataStore, TransactionResult

    Check = Callable[[Admin], Awaitable[None]]


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition, DEADLINE_SECONDS)


def run(check: Check, settings: Settings | None = None) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store() as store,
            topic_admin(store, settings=settings) as admin,
        ):
            await check(admin)

    asyncio.run(main())


@pytest.mark.parametrize(
    "name", ["", None, ".", "..", "a" * 250, "a b", "a/b", "ä", "a\n", "a\x00", "a:b", "a,b", "topic\n"]
)
def test_illegal_names(name: str | None) -> None:
    with pytest.raises(InvalidTopic):
        check_topic_name(name)


@pytest.mark.parametrize("name", ["a", "...", "a" * 249, "A.b_c-9", "__x", "-"])
def test_legal_names(name: str) -> None:
    check_topic_name(name)


def test_created_topic_is_open_visible_and_durable() -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("orders", 3, 1, None, [("retention.ms", "5")]))
        assert admin.topics.find("orders") is topic
        assert admin.topics.find_by_id(topic.topic_id) is topic
        assert admin.host.directories == {str(topic.topic_id): 3}
        assert [(part.leader, part.replicas, part.isr) for part in topic.partitions] == [(1, (1,), (1,))] * 3
        assert admin.topics.settings_of(topic).retention_ms == 5
        assert admin.state.partition_count == 3

    run(check)


def test_defaults_come_from_the_settings() -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("orders"))
        assert len(topic.partitions) == 4
        assert topic.replication_factor == 1
        assert admin.topics.settings_of(topic).segment_ms == 77

    run(check, Settings(num_partitions=4, topic_defaults={"segment.ms": "77"}))


@pytest.mark.parametrize(
    ("new", "error"),
    [
        (NewTopic("a/b"), InvalidTopic),
        (NewTopic("__consumer_offsets"), InvalidTopic),
        (NewTopic("there"), TopicAlreadyExists),
        (NewTopic("t", 0), InvalidPartitions),
        (NewTopic("t", -2), InvalidPartitions),
        (NewTopic("t", 2**31 - 1), PolicyViolation),
        (NewTopic("t", 1, 2), InvalidReplicationFactor),
        (NewTopic("t", 1, 0), InvalidReplicationFactor),
        (NewTopic("t", 1, -2), InvalidReplicationFactor),
        (NewTopic("t", assignments={0: [2]}), InvalidReplicaAssignment),
        (NewTopic("t", assignments={0: []}), InvalidReplicaAssignment),
        (NewTopic("t", assignments={0: [1, 1]}), InvalidReplicaAssignment),
        (NewTopic("t", assignments={1: [1]}), InvalidReplicaAssignment),
        (NewTopic("t", 3, assignments={0: [1]}), InvalidPartitions),
        (NewTopic("t", -1, 1, assignments={0: [1]}), InvalidReplicationFactor),
        (NewTopic("t", configs=[("cleanup.policy", "shred")]), InvalidConfig),
        (
            NewTopic("t", configs=[("min.compaction.lag.ms", "5"), ("max.compaction.lag.ms", "4")]),
            InvalidConfig,
        ),
        (NewTopic("t", configs=[("min.insync.replicas", "2")]), InvalidConfig),
    ],
)
@pytest.mark.parametrize("validate_only", [True, False])
def test_refused_creation_leaves_nothing(
    new: NewTopic, error: type[MansioError], validate_only: bool
) -> None:
    async def check(admin: Admin) -> None:
        await admin.topics.create(NewTopic("there"))
        before = await admin.store.list("/")
        with pytest.raises(error):
            await admin.topics.create(new, validate_only=validate_only)
        assert await admin.store.list("/") == before

    run(check)


def test_assignments_make_the_partitions() -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("t", assignments={1: [1], 0: [1]}))
        assert len(topic.partitions) == 2

    run(check)


def test_validate_only_makes_nothing() -> None:
    async def check(admin: Admin) -> None:
        before = await admin.store.list("/")
        planned = await admin.topics.create(NewTopic("t", 5), validate_only=True)
        assert len(planned.partitions) == 5
        topic = await admin.topics.create(NewTopic("u"))
        grown = await admin.topics.add_partitions("u", 3, validate_only=True)
        assert len(grown.partitions) == 3
        await admin.topics.alter_configs("u", [Change("retention.ms", 0, "1")], validate_only=True)
        assert admin.topics.find("u") is topic
        await admin.topics.delete(topic)
        assert (await admin.store.list("/")).entries == before.entries

    run(check)


def test_partitions_of_all_topics_are_bounded_while_several_are_made() -> None:
    async def check(admin: Admin) -> None:
        admin.host.gate = asyncio.Event()
        making = asyncio.create_task(admin.topics.create(NewTopic("a", 6)))
        await until(lambda: admin.state.unfinished_topics)
        with pytest.raises(PolicyViolation):
            await admin.topics.create(NewTopic("b", 5))
        admin.host.gate.set()
        topic = await making
        with pytest.raises(PolicyViolation):
            await admin.topics.add_partitions("a", 11)
        await admin.topics.delete(topic)
        await admin.topics.create(NewTopic("b", 10))

    run(check, Settings(partitions_max=10))


def test_topic_is_not_visible_before_its_partitions_are_open() -> None:
    async def check(admin: Admin) -> None:
        seen: list[str] = []
        admin.state.on_change(lambda change: seen.append(change.after.name if change.after else "-"))
        admin.host.gate = asyncio.Event()
        making = asyncio.create_task(admin.topics.create(NewTopic("a")))
        await until(lambda: admin.state.unfinished_topics)
        assert not admin.state.topics
        assert not seen
        with pytest.raises(TopicAlreadyExists, match="being created"):
            await admin.topics.create(NewTopic("a"))
        admin.host.gate.set()
        await making
        assert seen == ["a"]

    run(check)


def test_of_two_that_make_the_same_topic_one_wins() -> None:
    async def check(admin: Admin) -> None:
        results = await asyncio.gather(
            *[admin.topics.create(NewTopic("a", 2)) for _ in range(5)], return_exceptions=True
        )
        errors = [result for result in results if isinstance(result, TopicAlreadyExists)]
        assert len(errors) == 4
        assert len(admin.host.directories) == 1
        assert admin.state.partition_count == 2

    run(check)


def test_who_goes_away_in_the_middle_leaves_no_half_made_topic() -> None:
    async def check(admin: Admin) -> None:
        admin.host.gate = asyncio.Event()
        making = asyncio.create_task(admin.topics.create(NewTopic("a")))
        await until(lambda: admin.state.unfinished_topics)
        making.cancel()
        admin.host.gate.set()
        await until(lambda: admin.state.topics)
        assert not admin.state.unfinished_topics

    run(check)


def test_disk_error_while_opening_takes_the_topic_back() -> None:
    async def check(admin: Admin) -> None:
        before = (await admin.store.list("/")).entries
        admin.host.fail = StorageError("no space")
        with pytest.raises(StorageError, match="no space"):
            await admin.topics.create(NewTopic("a"))
        assert (await admin.store.list("/")).entries == before
        admin.host.fail = None
        await admin.topics.create(NewTopic("a"))

    run(check)


def test_what_a_full_disk_leaves_half_made_is_taken_back_when_there_is_room() -> None:
    async def check(admin: Admin) -> None:
        transact, is_full = admin.store.transact, True

        async def on_a_full_disk(
            compares: Sequence[Compare], operations: Sequence[Put | Delete]
        ) -> TransactionResult:
            if is_full and any(isinstance(each, Delete) for each in operations):
                raise StorageError("database or disk is full")
            return await transact(compares, operations)

        admin.store.transact = on_a_full_disk
        admin.host.fail = StorageError("no space")
        with pytest.raises(StorageError, match="no space"):
            await admin.topics.create(NewTopic("a"))
        with pytest.raises(TopicAlreadyExists, match="being created"):
            await admin.topics.create(NewTopic("a"))
        await admin.scheduler.close()  # the next start, which a full disk does not keep from ending well
        async with topic_admin(admin.store, host=admin.host) as again:
            assert again.state.unfinished_topics
            is_full, admin.host.fail = False, None
            await until(lambda: not again.state.unfinished_topics)
            await again.topics.create(NewTopic("a"))

    run(check)


def test_a_defect_while_opening_answers_instead_of_hanging(caplog: pytest.LogCaptureFixture) -> None:
    async def check(admin: Admin) -> None:
        admin.host.fail = ZeroDivisionError("a defect")
        with pytest.raises(MansioError, match="interrupted by an unexpected error"):
            await admin.topics.create(NewTopic("a"))

    run(check)
    assert "a defect" in caplog.text


@pytest.mark.parametrize(
    ("there", "new"), [("a.b", "a_b"), ("a_b", "a.b"), ("a.b_c", "a_b.c"), ("__x", "_.x")]
)
@pytest.mark.parametrize("validate_only", [True, False])
def test_a_topic_that_differs_from_another_in_dot_and_underscore_only_is_refused(
    there: str, new: str, validate_only: bool
) -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic(there))
        with pytest.raises(InvalidTopic, match="collides with the existing topic"):
            await admin.topics.create(NewTopic(new), validate_only=validate_only)
        with pytest.raises(InvalidTopic, match="collides with the existing topic"):
            await admin.topics.auto_create(new)
        with pytest.raises(TopicAlreadyExists):
            await admin.topics.create(NewTopic(there), validate_only=validate_only)
        await admin.topics.delete(topic)
        await admin.topics.create(NewTopic(new))

    run(check)


@pytest.mark.parametrize("name", ["__consumer.offsets", "..share_group_state", "__transaction.state"])
def test_a_name_that_collides_with_an_internal_topic_is_refused_before_that_exists(name: str) -> None:
    async def check(admin: Admin) -> None:
        with pytest.raises(InvalidTopic, match="collides"):
            await admin.topics.create(NewTopic(name))

    run(check)


def test_of_topics_with_colliding_names_that_are_created_at_the_same_time_one_is_created() -> None:
    async def check(admin: Admin) -> None:
        names = ["a.b.c", "a_b.c", "a.b_c", "a_b_c"]
        works = [admin.topics.create(NewTopic(name)) for name in names]
        found = await asyncio.gather(*works, return_exceptions=True)
        refused = [each for each in found if isinstance(each, InvalidTopic)]
        assert len(refused) == 3
        await until(lambda: not admin.state.unfinished_topics)
        assert len(admin.state.topics) == 1
        assert len(admin.host.directories) == 1

    run(check)


def test_topics_of_an_earlier_version_with_colliding_names_keep_working() -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("a.b"))
        other = dataclasses.replace(topic, topic_id=UUID(int=7))
        documents = {
            admin.state.keys.topic("a_b"): topic_document(other),
            admin.state.keys.partition(other.topic_id, 0): partition_document(other.partitions[0]),
        }
        puts = [Put(key, encode(document, "earlier")) for key, document in documents.items()]
        done = await admin.store.transact([], puts)
        await admin.state.wait_for_revision(done.revision, admin.scheduler)
        for name in ("a.b", "a_b"):
            await admin.topics.alter_configs(name, [Change("retention.ms", Operation.SET, "5")])
            assert admin.topics.settings_of(admin.topics.find(name)).retention_ms == 5
        await admin.topics.delete(admin.topics.find("a.b"))
        with pytest.raises(InvalidTopic, match="collides"):
            await admin.topics.create(NewTopic("a.b"))
        assert admin.topics.find("a_b")

    run(check)


def test_deleted_topic_is_gone_with_its_data_and_a_new_one_is_another() -> None:
    async def check(admin: Admin) -> None:
        before = (await admin.store.list("/")).entries
        first = await admin.topics.create(NewTopic("a", 2))
        await admin.topics.delete(first)
        assert not admin.host.directories
        assert (await admin.store.list("/")).entries == before
        with pytest.raises(UnknownTopicOrPartition):
            admin.topics.find("a")
        with pytest.raises(UnknownTopicId):
            admin.topics.find_by_id(first.topic_id)
        with pytest.raises(UnknownTopicOrPartition):
            await admin.topics.delete(first)
        second = await admin.topics.create(NewTopic("a"))
        assert second.topic_id != first.topic_id
        with pytest.raises(UnknownTopicOrPartition):
            await admin.topics.delete(first)
        assert admin.topics.find("a") is second

    run(check)


def test_two_deleting_the_same_topic_do_no_harm() -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("a"))
        results = await asyncio.gather(
            admin.topics.delete(topic), admin.topics.delete(topic), return_exceptions=True
        )
        assert [type(result) for result in results if result is not None] == [UnknownTopicId]
        assert not admin.state.topics
        assert not admin.state.unfinished_topics

    run(check)


def test_internal_topics_are_not_for_clients() -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("__consumer_offsets", 16), internal=True)
        assert topic.internal
        assert admin.topics.settings_of(topic).retention_ms == -1
        with pytest.raises(InvalidTopic):
            await admin.topics.delete(topic)
        with pytest.raises(InvalidTopic):
            await admin.topics.add_partitions("__consumer_offsets", 32)

    run(check)


def test_grow_adds_partitions_and_keeps_the_others() -> None:
    async def check(admin: Admin) -> None:
        before = await admin.topics.create(NewTopic("a", 2))
        after = await admin.topics.add_partitions("a", 5, [[1], [1], [1]])
        assert after.topic_id == before.topic_id
        assert after.partitions[:2] == before.partitions
        assert len(after.partitions) == 5
        assert admin.host.directories == {str(after.topic_id): 5}
        assert admin.state.partition_count == 5

    run(check)


@pytest.mark.parametrize(
    ("name", "count", "assignments", "error"),
    [
        ("none", 3, None, UnknownTopicOrPartition),
        ("a", 2, None, InvalidPartitions),
        ("a", 1, None, InvalidPartitions),
        ("a", -1, None, InvalidPartitions),
        ("a", 2**31 - 1, None, PolicyViolation),
        ("a", 3, [[1], [1]], InvalidReplicaAssignment),
        ("a", 3, [], InvalidReplicaAssignment),
        ("a", 3, [[9]], InvalidReplicaAssignment),
        ("a", 3, [[1, 1]], InvalidReplicaAssignment),
    ],
)
def test_refused_growth(name: str, count: int, assignments: Any, error: type[MansioError]) -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("a", 2))
        with pytest.raises(error):
            await admin.topics.add_partitions(name, count, assignments)
        assert admin.topics.find("a") is topic

    run(check)


def test_concurrent_changes_of_settings_are_all_kept() -> None:
    async def check(admin: Admin) -> None:
        await admin.topics.create(NewTopic("a"))
        await asyncio.gather(
            admin.topics.alter_configs("a", [Change("retention.ms", 0, "1")]),
            admin.topics.alter_configs("a", [Change("segment.ms", 0, "2")]),
            admin.topics.alter_configs("a", [Change("retention.bytes", 0, "3")]),
        )
        assert dict(admin.topics.find("a").configs) == {
            "retention.ms": "1",
            "segment.ms": "2",
            "retention.bytes": "3",
        }

    run(check)


def test_auto_create_takes_the_topic_another_has_just_made() -> None:
    async def check(admin: Admin) -> None:
        made = await admin.topics.create(NewTopic("a"))
        assert await admin.topics.auto_create("a") is made
        assert (await admin.topics.auto_create("b")).name == "b"

    run(check)


def test_a_topic_that_is_created_or_deleted_meanwhile_is_unknown_and_no_failure_of_its_creation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def check(admin: Admin) -> None:
        admin.host.gate = asyncio.Event()
        first = asyncio.create_task(admin.topics.find_or_auto_create("a", is_allowed_by_client=True))
        await until(lambda: admin.state.unfinished_topics)
        with pytest.raises(UnknownTopicOrPartition):
            await admin.topics.find_or_auto_create("a", is_allowed_by_client=True)
        admin.host.gate.set()
        assert (await first).name == "a"
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    run(check, Settings(auto_create_topics_enable=True))


def test_leader_epochs_of_many_partitions_begin_with_one_change() -> None:
    async def check(admin: Admin) -> None:
        await admin.topics.create(NewTopic("a", 40))
        await admin.topics.create(NewTopic("b", 2))
        changes = 0

        def count(_: object) -> None:
            nonlocal changes
            changes += 1

        admin.state.on_change(count)
        await admin.topics.begin_leader_epochs([*(("a", index) for index in range(1, 40)), ("b", 1)])
        epochs = {name: [part.leader_epoch for part in admin.topics.find(name).partitions] for name in "ab"}
        assert epochs == {"a": [0, *[1] * 39], "b": [0, 1]}
        assert changes == 2
        await admin.topics.begin_leader_epochs([])

    run(check)


class Crash(MansioError):
    """The process ends here."""


class CrashingStore:
    """Does `steps` transactions (`done` counts them), then the process is dead: nothing more happens."""

    def __init__(self, store: MetadataStore, steps: int, operations_max: int) -> None:
        self.store = store
        self.steps = steps
        self.operations_max = operations_max
        self.get = store.get
        self.list = store.list
        self.watch = store.watch
        self.close = store.close

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        if self.steps <= 0:
            raise Crash
        self.steps -= 1
        assert max(len(compares), len(operations)) <= self.operations_max
        return await self.store.transact(compares, operations)


@asynccontextmanager
async def crashing(
    path: str, host: Host, steps: int, operations_max: int
) -> AsyncIterator[tuple[Admin, CrashingStore]]:
    async with sqlite_store(path) as store:
        crashing_store = CrashingStore(store, steps, operations_max)
        async with topic_admin(crashing_store, host=host) as admin:
            yield admin, crashing_store


@pytest.mark.parametrize("operations_max", [3, 10_000])
def test_crash_after_every_step_leaves_each_topic_whole_or_gone(tmp_path: Path, operations_max: int) -> None:
    """Create (7 partitions), grow (to 12), alter, delete: the process ends after each transaction in turn; the next
    start finds whole topics only, each with all its directories, and no keys or directories of others."""

    async def work(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("a", 7))
        await admin.topics.create(NewTopic("stays", 1))
        await admin.topics.add_partitions("a", 12)
        await admin.topics.alter_configs("a", [Change("retention.ms", 0, "1")])
        await admin.topics.delete(topic)

    async def main() -> None:
        finished = False
        steps = 1
        while not finished:
            path, host = f"{tmp_path}/{steps}.sqlite3", Host()
            async with crashing(path, host, steps, operations_max) as (admin, store):
                # the directory of a topic that is being removed is gone before its keys
                try:
                    await work(admin)
                    finished = True
                except Crash:
                    assert store.steps == 0
            async with sqlite_store(path) as reopened, topic_admin(reopened, host=host) as admin:
                assert not admin.state.unfinished_topics
                live = admin.state.topics
                assert {str(topic.topic_id) for topic in live.values()} == set(host.directories)
                for topic in live.values():
                    assert len(topic.partitions) <= host.directories[str(topic.topic_id)]
                    assert len(topic.partitions) in (1, 7, 12)
                keys = [entry.key for entry in (await reopened.list(admin.state.keys.partitions)).entries]
                owners = {key.split("/")[4] for key in keys}
                assert owners == set(host.directories)
                assert admin.state.partition_count == sum(len(topic.partitions) for topic in live.values())
                if "a" not in live:
                    await admin.topics.create(NewTopic("a", 2))
                if len(live["a"].partitions) == 7:
                    assert len((await admin.topics.add_partitions("a", 12)).partitions) == 12
            steps += 1
        assert steps > (6 if operations_max > 100 else 15)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_SECONDS)))


def test_topics_and_settings_are_there_after_a_restart(tmp_path: Path) -> None:
    async def main() -> None:
        path = f"{tmp_path}/m.sqlite3"
        async with sqlite_store(path) as store, topic_admin(store) as admin:
            first = await admin.topics.create(NewTopic("a", 3, 1, None, [("retention.ms", "5")]))
            await admin.topics.alter_configs("a", [Change("segment.ms", 0, "6")])
            cluster_id = admin.state.cluster_id
        async with sqlite_store(path) as store, topic_admin(store) as admin:
            again = admin.topics.find("a")
            assert again.topic_id == first.topic_id
            assert again.partitions == first.partitions
            assert dict(again.configs) == {"retention.ms": "5", "segment.ms": "6"}
            assert admin.state.cluster_id == cluster_id
            assert len(cluster_id) == 22
        with pytest.raises(ConfigError, match=f"not the cluster in this store, {cluster_id}"):
            async with sqlite_store(path) as store, topic_admin(store, settings=Settings(cluster_id="other")):
                pass

    asyncio.run(main())


def test_own_topics_of_an_earlier_version_get_the_settings_they_lack_and_keep_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        path = f"{tmp_path}/m.sqlite3"
        earlier = {"retention.ms": "-1", "retention.bytes": "-1"}
        async with sqlite_store(path) as store, topic_admin(store) as admin:
            monkeypatch.setattr("mansio.broker.topics.topics.COMPACTED_TOPIC_CONFIGS", earlier)
            await admin.topics.create(NewTopic("__consumer_offsets", 2), internal=True)
            await admin.topics.create(NewTopic("mine"))
            await admin.topics.alter_configs("__consumer_offsets", [Change("segment.bytes", 0, "5000")])
            monkeypatch.undo()
        for _ in range(2):
            async with sqlite_store(path) as store, topic_admin(store) as admin:
                topic = admin.topics.find("__consumer_offsets")
                assert admin.topics.settings_of(topic).cleanup_policy == ("compact",)
                assert topic.configs == {**earlier, "cleanup.policy": "compact", "segment.bytes": "5000"}
                assert admin.topics.find("mine").configs == {}

    asyncio.run(main())


def test_compaction_settings_that_contradict_each_other_are_refused_when_they_meet() -> None:
    async def check(admin: Admin) -> None:
        await admin.topics.create(NewTopic("a", configs=[("max.compaction.lag.ms", "10")]))
        with pytest.raises(InvalidConfig, match="more than max"):
            await admin.topics.alter_configs("a", [Change("min.compaction.lag.ms", 0, "11")])
        await admin.topics.alter_configs("a", [Change("min.compaction.lag.ms", 0, "10")])
        with pytest.raises(InvalidConfig, match="more than max"):
            await admin.topics.create(NewTopic("b", configs=[("min.compaction.lag.ms", "21")]))

    run(check, Settings(topic_defaults={"max.compaction.lag.ms": "20"}))


def test_view_follows_again_after_its_history_was_compacted() -> None:
    """A view that fell far behind lists again, and ends up with the same topics, reported once each."""

    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store(events_kept=8) as store,
            topic_admin(store) as fast,
        ):
            gone = await fast.topics.create(NewTopic("gone"))
            async with topic_admin(store) as slow:
                slow.state.stop()
                changes: list[tuple[str | None, str | None]] = []
                slow.state.on_change(
                    lambda change: changes.append(
                        (getattr(change.before, "name", None), getattr(change.after, "name", None))
                    )
                )
                for number in range(10):
                    await fast.topics.create(NewTopic(f"t{number}"))
                await fast.topics.delete(gone)
                slow.state.failure = None
                slow.state.start(store, slow.scheduler)
                await slow.state.wait_for_revision(fast.state.revision, slow.scheduler)
                assert slow.state.topics.keys() == fast.state.topics.keys()
                assert slow.state.partition_count == fast.state.partition_count == 10
                assert sorted(changes, key=str) == sorted(
                    [("gone", None), *((None, f"t{number}") for number in range(10))], key=str
                )

    asyncio.run(main())
