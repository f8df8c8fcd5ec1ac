"""The view of the metadata: what damaged or unexpected metadata does to it, and that waits never hang."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import StorageError, Unavailable
from mansio.host.clock import HostRandom
from mansio.metadata.image import MetadataImage
from mansio.metadata.metadata_store import AmbiguousOutcome, Delete, Entry, Put, TransactionResult
from mansio.metadata.topic_plan import NewTopic
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, Admin, sqlite_store, topic_admin

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mansio.metadata.metadata_store import MetadataStore


def run(check: Callable[[Admin], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(scaled(DEADLINE_SECONDS)),
            sqlite_store() as store,
            topic_admin(store) as admin,
        ):
            await check(admin)

    asyncio.run(main())


def changed(entry: Entry, **fields: Any) -> Put:
    return Put(entry.key, json.dumps({**json.loads(entry.value), **fields}).encode())


def test_live_topic_without_one_of_its_partitions_is_reported_at_start() -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("a", 3))
        await admin.store.transact([], [Delete(admin.state.keys.partition(topic.topic_id, 1))])
        with pytest.raises(StorageError, match="topic a: partition 1 is missing"):
            await MetadataImage.load(admin.store, "", HostRandom())

    run(check)


def test_metadata_of_a_newer_version_is_refused_at_start() -> None:
    async def check(admin: Admin) -> None:
        await admin.topics.create(NewTopic("a"))
        entry = await admin.store.get(admin.state.keys.topic("a"))
        assert entry is not None
        await admin.store.transact([], [changed(entry, schema=3)])
        with pytest.raises(StorageError, match="schema 3"):
            await MetadataImage.load(admin.store, "", HostRandom())

    run(check)


@pytest.mark.parametrize("value", [b"damaged", b'{"schema": 99}', b'{"schema": 1}'])
def test_view_that_cannot_go_on_answers_all_that_wait(value: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def check(admin: Admin) -> None:
        waiting = asyncio.create_task(admin.state.wait_for_revision(10**9, admin.scheduler))
        await asyncio.sleep(0)
        await admin.store.transact([], [Put(admin.state.keys.topic("a"), value)])
        with pytest.raises(StorageError, match="metadata"):
            await waiting
        with pytest.raises(StorageError, match="metadata"):
            await admin.state.wait_for_revision(10**9, admin.scheduler)

    run(check)
    assert [
        record.mansio_fields["work"] for record in caplog.records if hasattr(record, "mansio_fields")
    ] == ["watch metadata"]


def test_stopping_ends_waits() -> None:
    async def check(admin: Admin) -> None:
        waiting = asyncio.create_task(admin.state.wait_for_revision(10**9, admin.scheduler))
        await asyncio.sleep(0)
        admin.state.stop()
        with pytest.raises(Unavailable):
            await waiting

    run(check)


def test_topic_deleted_and_made_again_between_two_looks_has_changed_twice() -> None:
    async def check(admin: Admin) -> None:
        topic = await admin.topics.create(NewTopic("a"))
        late = await MetadataImage.load(admin.store, "", HostRandom())
        changes: list[tuple[Any, Any]] = []
        late.on_change(
            lambda change: changes.append(
                (change.before and change.before.topic_id, change.after and change.after.topic_id)
            )
        )
        await admin.topics.delete(topic)
        again = await admin.topics.create(NewTopic("a", 2))
        late._apply_listing(await admin.store.list(late.keys.prefix))
        assert changes == [(topic.topic_id, None), (None, again.topic_id)]
        assert late.topics_by_id.keys() == {again.topic_id}
        assert late.partition_count == 2

    run(check)


def test_brokers_come_and_go() -> None:
    async def check(admin: Admin) -> None:
        state = admin.state
        document = {"schema": 1, "writer": "w", "host": "h", "port": 9, "rack": None, "state": "active"}
        value = json.dumps(document).encode()
        keys = [state.keys.session(2), state.keys.session(1), state.keys.registration(1)]
        done = await admin.store.transact([], [Put(key, value) for key in keys])
        await state.wait_for_revision(done.revision, admin.scheduler)
        assert sorted(state.brokers) == [1, 2]
        assert tuple(state.brokers[2])[:5] == (2, "h", 9, None, done.revision)
        assert [state.may_lead(node_id) for node_id in (1, 2, 3)] == [True, False, False]
        assert [state.epoch_of(node_id) for node_id in (1, 2, 3)] == [done.revision, done.revision, 0]
        done = await admin.store.transact([], [Delete(keys[1])])
        await state.wait_for_revision(done.revision, admin.scheduler)
        assert [state.epoch_of(node_id) for node_id in (1, 2)] == [0, state.brokers[2].epoch]

    run(check)


def test_cluster_id_is_kept_and_may_be_named() -> None:
    async def check(admin: Admin) -> None:
        first = admin.state.cluster_id
        again = await MetadataImage.load(admin.store, first, HostRandom())
        assert again.cluster_id == first
        unnamed = await MetadataImage.load(admin.store, "", HostRandom())
        assert unnamed.cluster_id == first

    run(check)


def test_broker_whose_answer_was_lost_while_another_made_the_cluster_joins_that_one() -> None:
    """Brokers that start together on an empty store: one makes the cluster, whatever becomes of answers."""

    class LosesOneAnswer:
        """Of the first transaction, before which another broker's came."""

        def __init__(self, store: MetadataStore) -> None:
            self._store = store
            self._lost = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self._store, name)

        async def transact(self, *transaction: Any) -> TransactionResult:
            if self._lost:
                return await self._store.transact(*transaction)
            self._lost = True
            self.other = await MetadataImage.load(self._store, "", HostRandom())
            raise AmbiguousOutcome("the answer was lost")

    async def check() -> None:
        async with asyncio.timeout(scaled(DEADLINE_SECONDS)), sqlite_store() as store:
            losing = LosesOneAnswer(store)
            state = await MetadataImage.load(losing, "", HostRandom())
            assert state.cluster_id == losing.other.cluster_id

    asyncio.run(check())
