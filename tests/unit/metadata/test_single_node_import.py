"""Import of a single node's metadata into a cluster: interrupted at every step it ends with the same metadata, and the
two stores are never both valid."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from mansio.broker.topics.topics import NewTopic
from mansio.errors import ConfigError, MansioError, Unavailable
from mansio.host.clock import HostRandom
from mansio.metadata import metadata_store
from mansio.metadata.feature_level import CURRENT_LEVEL
from mansio.metadata.image import MetadataImage, find_or_create_cluster
from mansio.metadata.metadata_store import (
    FIRST_CLUSTER_KEY,
    KEY_ROOT,
    AmbiguousOutcome,
    Delete,
    Keys,
    Put,
    encode,
)
from mansio.metadata.single_node_import import check_single_node, import_single_node, pieces, read_mark
from support.metadata import sqlite_store, topic_admin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from mansio.metadata.metadata_store import Compare, Entry, Listing, TransactionResult
    from mansio.metadata.sqlite.store import SqliteStore

NODE = 1
RANDOM = HostRandom()
TOPICS = {"format": 3, "large": 200, "small": 1}
"""Numbers of partitions by topic; one has the name of a key of the cluster."""


class Killed(Exception):
    """The process was killed."""


class Calls:
    """Counts the transactions of both stores; the one with the number `killed_at` kills the process, before or after
    it has had its effect, or its response is lost."""

    def __init__(self, killed_at: int = -1, how: str = "") -> None:
        self.count = 0
        self.killed_at = killed_at
        self.how = how


class Store:
    """A store of which the process may be killed. Transactions have at most 128 operations, as those of etcd."""

    def __init__(self, store: SqliteStore, calls: Calls) -> None:
        self._store = store
        self._calls = calls
        self.operations_max = 128

    async def get(self, key: str) -> Entry | None:
        return await self._store.get(key)

    async def list(self, prefix: str) -> Listing:
        return await self._store.list(prefix)

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        assert len(operations) <= self.operations_max
        calls = self._calls
        number, calls.count = calls.count, calls.count + 1
        if number == calls.killed_at and calls.how == "before":
            raise Killed
        done = await self._store.transact(compares, operations)
        if number == calls.killed_at:
            raise AmbiguousOutcome("the response was lost") if calls.how == "lost" else Killed
        return done

    def watch(self, prefix: str, from_revision: int) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


@asynccontextmanager
async def single_node() -> AsyncIterator[SqliteStore]:
    """The store of a single node with topics, users, quotas and producer ids."""
    async with sqlite_store() as store:
        async with topic_admin(store) as admin:
            for name, partitions in TOPICS.items():
                await admin.topics.create(NewTopic(name, partitions))
            await admin.topics.begin_leader_epochs([("small", 0)])
            keys = admin.state.keys
        others: dict[str, dict[str, Any]] = {
            keys.producer_ids: {"next": 5000},
            keys.group_config("format"): {"configs": {"share.session.timeout.ms": "9000"}},
            f"{keys.quotas}x": {"entity": {}, "rates": {}},
        }
        await store.transact([], [Put(key, encode(document, "w")) for key, document in others.items()])
        yield store


async def contents(store: SqliteStore, prefix: str = KEY_ROOT) -> dict[str, Any]:
    """The documents of a store, without tokens, which differ between two imports."""
    found = {}
    for entry in (await store.list(prefix)).entries:
        document = metadata_store.decode(entry.key, entry.value)
        if "import" in document:
            document = {"cluster_id": document["cluster_id"], "incarnation": document["incarnation"]}
        found[entry.key] = document
    return found


async def run_import(source: SqliteStore, target: SqliteStore, calls: Calls | None = None) -> str:
    calls = calls or Calls()
    return await import_single_node(Store(source, calls), Store(target, calls), NODE, RANDOM)


async def is_valid(target: SqliteStore) -> bool:
    return bool(metadata_store.cluster_ids(await target.list(KEY_ROOT)))


def test_ids_stay_and_each_partition_has_the_next_leader_epoch() -> None:
    async def main() -> None:
        async with single_node() as source, sqlite_store() as target:
            before = await MetadataImage.load(source, "", RANDOM)
            assert await run_import(source, target) == before.cluster_id
            after = await MetadataImage.load(target, "", RANDOM)
            assert after.cluster_id == before.cluster_id
            assert after.topics.keys() == before.topics.keys() == TOPICS.keys()
            for name, topic in before.topics.items():
                moved = after.topics[name]
                assert (moved.topic_id, moved.configs) == (topic.topic_id, topic.configs)
                for old, new in zip(topic.partitions, moved.partitions, strict=True):
                    assert (new.replicas, new.isr, new.leader) == ((NODE,), (NODE,), NODE)
                    assert new.leader_epoch == old.leader_epoch + 1
            assert (await contents(target))[before.keys.producer_ids]["next"] == 5000
            assert after.group_configs.keys() == {"format"}

    asyncio.run(main())


async def transactions() -> int:
    """Number of transactions of an import that is not interrupted."""
    calls = Calls()
    async with single_node() as source, sqlite_store() as target:
        await run_import(source, target, calls)
    return calls.count


@pytest.mark.parametrize("how", ["before", "after", "lost"])
def test_an_import_that_is_killed_at_any_transaction_is_completed_by_the_next(how: str) -> None:
    async def main() -> None:
        count = await transactions()
        assert count > 4, "the claim, several pieces, the mark and the format"
        for number in range(count):
            async with single_node() as source, sqlite_store() as target:
                expected = await contents(source)
                try:
                    await run_import(source, target, Calls(number, how))
                except (Killed, MansioError):
                    if await is_valid(target):
                        assert await read_mark(source) is not None, f"both are valid after {number}"
                cluster_id = await run_import(source, target)
                assert await read_mark(source) is not None
                found = await contents(target)
                keys = Keys(cluster_id)
                for key, document in expected.items():
                    if key.startswith(keys.partitions):
                        document["leader_epoch"] += 1
                        document["part_epoch"] += 1
                own = (keys.format, keys.feature_level, FIRST_CLUSTER_KEY)
                assert found[keys.feature_level]["level"] == CURRENT_LEVEL
                assert {key: found[key] for key in found if key not in own} == {
                    key: expected[key] for key in expected if key not in own
                }
                assert metadata_store.cluster_ids(await target.list(KEY_ROOT)) == [cluster_id]

    asyncio.run(main())


def test_a_node_that_went_on_after_an_unmarked_attempt_is_imported_as_it_is_then() -> None:
    async def main() -> None:
        async with single_node() as source, sqlite_store() as target:
            with pytest.raises(Killed):
                await run_import(source, target, Calls(2, "after"))
            assert await read_mark(source) is None
            async with topic_admin(source) as admin:
                await admin.topics.delete(admin.topics.find("large"))
                await admin.topics.create(NewTopic("later", 2))
            await run_import(source, target)
            after = await MetadataImage.load(target, "", RANDOM)
            assert after.topics.keys() == {"format", "small", "later"}
            left = await contents(target, after.keys.partitions)
            assert len(left) == 3 + 1 + 2

    asyncio.run(main())


def test_a_marked_node_is_imported_into_no_other_etcd() -> None:
    """Killed before or after `format` was written: both etcds would have the cluster."""

    async def main() -> None:
        count = await transactions()
        for killed_at, how in ((count - 2, "after"), (count - 1, "after")):
            async with single_node() as source, sqlite_store() as target, sqlite_store() as other:
                with pytest.raises(Killed):
                    await run_import(source, target, Calls(killed_at, how))
                assert await read_mark(source) is not None
                with pytest.raises(ConfigError, match="in another etcd: start with that etcd"):
                    await run_import(source, other)
                assert await contents(other) == {}, "nothing is written"
                await run_import(source, target)
                assert await is_valid(target)

    asyncio.run(main())


def test_a_completed_import_changes_nothing_any_more() -> None:
    async def main() -> None:
        async with single_node() as source, sqlite_store() as target:
            await run_import(source, target)
            async with topic_admin(target) as admin:
                await admin.topics.create(NewTopic("of-the-cluster", 1))
            before = await contents(target)
            calls = Calls()
            await run_import(source, target, calls)
            assert calls.count == 0
            assert await contents(target) == before

    asyncio.run(main())


def test_an_etcd_with_a_cluster_is_refused_also_with_the_same_id() -> None:
    async def main() -> None:
        async with single_node() as source, sqlite_store() as target, single_node() as other:
            await find_or_create_cluster(target, "", RANDOM)
            with pytest.raises(ConfigError, match=r"has the cluster .* already"):
                await run_import(source, target)
            assert await read_mark(source) is None
            with pytest.raises(ConfigError, match="has the cluster"):
                await run_import(source, other)
        async with single_node() as source, sqlite_store() as target:
            cluster_id = (await MetadataImage.load(source, "", RANDOM)).cluster_id
            await find_or_create_cluster(target, cluster_id, RANDOM)
            with pytest.raises(ConfigError, match=f"has the cluster {cluster_id} already"):
                await run_import(source, target)

    asyncio.run(main())


def test_no_cluster_is_created_in_an_etcd_during_an_import() -> None:
    async def main() -> None:
        async with single_node() as source, sqlite_store() as target:
            with pytest.raises(Killed):
                await run_import(source, target, Calls(2, "after"))
            with pytest.raises(Unavailable, match=f"given up, delete the key {FIRST_CLUSTER_KEY} in etcd"):
                await find_or_create_cluster(target, "", RANDOM)
            async with single_node() as other:
                with pytest.raises(
                    ConfigError, match=f"given up, delete the key {FIRST_CLUSTER_KEY} in etcd"
                ):
                    await run_import(other, target)
            assert not await is_valid(target)

    asyncio.run(main())


def test_topics_of_another_node_id_are_refused_before_anything_is_written() -> None:
    async def main() -> None:
        async with single_node() as source, sqlite_store() as target:
            with pytest.raises(ConfigError, match="start with --node-id 1"):
                await import_single_node(source, target, 7, RANDOM)
            assert await contents(target) == {}
            before = await contents(source)
            with pytest.raises(ConfigError, match="start with --node-id 1"):
                await check_single_node(source, 7)
            await check_single_node(source, NODE)
            assert await contents(source) == before

    asyncio.run(main())


def test_pieces_are_bounded_in_number_and_bytes() -> None:
    puts: list[Put | Delete] = [Put(f"k{number}", bytes(100)) for number in range(300)]
    found = list(pieces(puts, 128, 5_000))
    assert [put for piece in found for put in piece] == puts
    assert all(len(piece) <= 128 for piece in found)
    assert all(sum(len(one.key) + 100 for one in piece) <= 5_000 for piece in found)
    assert [len(piece) for piece in pieces(puts, 128)] == [128, 128, 44]
    assert list(pieces([Put("big", bytes(9_000))], 128, 5_000)) == [[Put("big", bytes(9_000))]]
