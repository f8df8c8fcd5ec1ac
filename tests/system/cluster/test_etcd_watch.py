"""A watch on etcd neither skips nor repeats events, whatever the network does."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, Self

import pytest
import uvloop

from mansio.errors import StorageError, Unavailable
from mansio.metadata.metadata_store import Delete, Put, RevisionCompacted
from support.etcd import etcd_store, one_etcd
from support.fault_proxy import fault_proxy
from support.machine import scaled
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Callable

    from mansio.metadata.etcd.store import EtcdStore
    from mansio.metadata.metadata_store import Event
    from support.etcd import Etcd

pytestmark = pytest.mark.full

DEADLINE_S = 90
numbers = itertools.count()


def fresh_prefix() -> str:
    return f"/watched/{next(numbers)}/"


async def put(store: EtcdStore, key: str, value: bytes = b"x") -> int:
    return (await store.transact([], [Put(key, value)])).revision


class Watching:
    """Collects what a watch shows, until closed."""

    def __init__(self, store: EtcdStore, prefix: str, from_revision: int) -> None:
        self.batches: list[list[Event]] = []
        self.task = asyncio.create_task(self._collect(store, prefix, from_revision))

    async def _collect(self, store: EtcdStore, prefix: str, from_revision: int) -> None:
        watch: Any = store.watch(prefix, from_revision)
        async with aclosing(watch):
            async for batch in watch:
                self.batches.append(batch)

    @property
    def events(self) -> list[Event]:
        return [event for batch in self.batches for event in batch]

    async def some_more(self) -> None:
        enough = len(self.events) + 100
        await eventually(lambda: len(self.events) > enough)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


async def assert_complete(watching: Watching, store: EtcdStore, prefix: str) -> None:
    """Every key was put once, so the events are the listing in the order of revisions."""
    listing = await store.list(prefix)
    expected = sorted((entry.mod_revision, entry.key) for entry in listing.entries)
    await eventually(lambda: len(watching.events) >= len(expected) or watching.task.done())
    assert [(event.mod_revision, event.key) for event in watching.events] == expected


def test_watch_goes_on_across_restarts_without_gap_or_repetition() -> None:
    async def main() -> None:
        with one_etcd() as etcd:
            async with etcd_store(etcd.url) as store, Watching(store, "/w/", 1) as watching:
                stop = asyncio.Event()

                async def write(name: int) -> None:
                    for number in itertools.count():
                        if stop.is_set():
                            return
                        try:
                            await put(store, f"/w/{name}/{number}")
                        except Unavailable:
                            continue

                async with asyncio.TaskGroup() as writers:
                    for name in range(8):
                        writers.create_task(write(name))
                    for end in (etcd.kill, etcd.stop):
                        await watching.some_more()
                        await asyncio.to_thread(end)
                        etcd.start()
                    await watching.some_more()
                    stop.set()
                await assert_complete(watching, store, "/w/")

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_watch_leaves_a_silent_endpoint(etcd: Etcd) -> None:
    """No event and a dead connection look the same, unless etcd is asked for a sign of life."""

    async def main() -> None:
        prefix = fresh_prefix()
        async with (
            fault_proxy(etcd.port) as proxy,
            etcd_store(etcd.url) as direct,
            etcd_store(proxy.url, etcd.url) as store,
            Watching(store, prefix, await put(direct, prefix + "0")) as watching,
        ):
            await eventually(lambda: watching.events)
            proxy.silence()
            for number in range(1, 20):
                await put(direct, f"{prefix}{number:02}")
            await eventually(lambda: len(watching.events) == 20, 20)
            await assert_complete(watching, direct, prefix)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_quiet_watch_is_asked_for_a_sign_of_life_and_stays(
    etcd: Etcd, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mansio.metadata.etcd.watch.HEARTBEAT_INTERVAL_S", 0.2)
    monkeypatch.setattr("mansio.metadata.etcd.watch.SILENCE_S_MAX", 1.0)

    async def main() -> None:
        prefix = fresh_prefix()
        async with (
            etcd_store(etcd.url) as store,
            Watching(store, prefix, await put(store, prefix + "a")) as watching,
        ):
            await eventually(lambda: watching.events)
            await asyncio.sleep(2.5)  # more than twice as long as a dead endpoint would get
            assert "etcd_unavailable" not in caplog.messages
            await put(store, prefix + "b")
            await assert_complete(watching, store, prefix)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_connections_cut_again_and_again_cost_no_event(etcd: Etcd, run: Callable[..., None]) -> None:
    async def main() -> None:
        prefix = fresh_prefix()
        async with (
            fault_proxy(etcd.port) as proxy,
            etcd_store(etcd.url) as direct,
            etcd_store(proxy.url) as store,
            Watching(store, prefix, await put(direct, prefix + "first")) as watching,
        ):
            for number in range(200):
                await put(direct, f"{prefix}{number:03}")
                if number % 25 == 0:
                    await eventually(lambda seen=number + 2: len(watching.events) == seen)
                    proxy.cut()
            await assert_complete(watching, direct, prefix)
            assert proxy.connections > 4

    run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_etcd_restored_from_an_older_copy_is_reported_not_waited_for() -> None:
    """It will use the same revisions again, for other changes."""

    async def main() -> None:
        with one_etcd() as etcd:
            async with etcd_store(etcd.url) as store:
                first = await put(store, "/w/a")
                etcd.stop()
                shutil.copytree(etcd.directory / "data", etcd.directory / "copy")
                etcd.start()
                async with Watching(store, "/w/", first) as watching:
                    for number in range(10):
                        await put(store, f"/w/{number}")
                    await eventually(lambda: len(watching.events) == 11)
                    etcd.stop()
                    shutil.rmtree(etcd.directory / "data")
                    (etcd.directory / "copy").rename(etcd.directory / "data")
                    etcd.start()
                    await asyncio.wait([watching.task], timeout=scaled(10))
                    assert isinstance(watching.task.exception(), StorageError)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_changes_compacted_while_cut_off_are_reported_not_skipped(etcd: Etcd) -> None:
    async def main() -> None:
        prefix = fresh_prefix()
        async with (
            fault_proxy(etcd.port) as proxy,
            etcd_store(etcd.url) as direct,
            etcd_store(proxy.url) as store,
            Watching(store, prefix, await put(direct, prefix + "a")) as watching,
        ):
            await eventually(lambda: watching.events)
            proxy.refuse()
            for number in range(10):
                last = await put(direct, f"{prefix}{number}")
            etcd.compact(last)
            proxy.pass_on()
            await asyncio.wait([watching.task], timeout=scaled(10))
            assert isinstance(watching.task.exception(), RevisionCompacted)
            assert [event.key for event in watching.events] == [prefix + "a"]

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_deletion_at_the_revision_of_a_compaction_is_reported_not_skipped(etcd: Etcd) -> None:
    """etcd before 3.4.33 and 3.5.15 shows nothing there, and no error either."""

    async def main() -> None:
        prefix = fresh_prefix()
        async with etcd_store(etcd.url) as store:
            await put(store, prefix + "a")
            deleted = (await store.transact([], [Delete(prefix + "a")])).revision
            await put(store, prefix + "b")
            etcd.compact(deleted)
            watch: Any = store.watch(prefix, deleted)
            async with aclosing(watch):
                try:
                    (first, *_) = await anext(watch)
                except RevisionCompacted:
                    return
            assert first.key == prefix + "a"

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_answers_in_pieces_keep_a_revision_together(etcd: Etcd) -> None:
    """6 MB of history come in several messages, cut where they are full."""

    async def main() -> None:
        prefix, value = fresh_prefix(), bytes(400_000)
        async with etcd_store(etcd.url) as store:
            first = None
            for number in range(5):
                puts = [Put(f"{prefix}{number}/{part}", value) for part in range(3)]
                done = await store.transact([], puts)
                first = first or done.revision
            assert first is not None
            async with Watching(store, prefix, first) as watching:
                await eventually(lambda: len(watching.events) == 15)
                for batch in watching.batches:
                    assert len(batch) % 3 == 0
                revisions = [event.mod_revision for event in watching.events]
                assert revisions == [first + number // 3 for number in range(15)]

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_a_slow_reader_costs_bounded_memory_and_misses_nothing(etcd: Etcd) -> None:
    async def main() -> None:
        prefix = fresh_prefix()
        async with etcd_store(etcd.url, watch_events_max=20) as store:
            first = await put(store, f"{prefix}000")
            watch: Any = store.watch(prefix, first)
            async with aclosing(watch):
                keys = [event.key for event in await anext(watch)]
                for number in range(1, 200):
                    await put(store, f"{prefix}{number:03}")
                (reader,) = store._watches
                assert reader._queued <= 20 + 1
                async for batch in watch:
                    keys += [event.key for event in batch]
                    if len(keys) == 200:
                        break
            assert keys == [f"{prefix}{number:03}" for number in range(200)]

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_listing_of_many_pages_is_of_one_revision(etcd: Etcd) -> None:
    """Each round rewrites all pairs; a listing that mixes revisions shows two values."""

    async def main() -> None:
        prefix = fresh_prefix()
        async with etcd_store(etcd.url) as store:
            for page in range(24):
                await store.transact([], [Put(f"{prefix}{page:02}/{key:03}", b"") for key in range(100)])
            stop = asyncio.Event()

            async def rewrite() -> None:
                for number in itertools.count():
                    if stop.is_set():
                        return
                    value = str(number).encode()
                    await store.transact([], [Put(f"{prefix}00/000", value), Put(f"{prefix}23/099", value)])

            writer = asyncio.create_task(rewrite())
            for _ in range(10):
                listing = await store.list(prefix)
                assert len(listing.entries) == 2400
                assert listing.entries[0].value == listing.entries[-1].value
                assert listing.entries[-1].mod_revision <= listing.revision
            stop.set()
            await writer

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))
