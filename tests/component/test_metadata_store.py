"""Contract of metadata stores, run with each implementation. To test another one, add its factory to `run`.

A factory is an async context manager: (directory of the test) -> an empty store with `events_kept` small enough that
`fill_past_history` below compacts it.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from mansio.errors import ConcurrentChange, InvalidRequest, StorageError, Unavailable
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostClock
from mansio.metadata.metadata_store import (
    AmbiguousOutcome,
    Compare,
    Delete,
    Event,
    Put,
    RevisionCompacted,
    TransactionResult,
    decode,
    encode,
    transact_resolving_ambiguity,
)
from mansio.testing.metadata import InMemoryStore
from support.etcd import store_as_new
from support.machine import scaled
from support.metadata import DEADLINE_SECONDS, sqlite_store

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from mansio.metadata.metadata_store import MetadataStore
    from support.etcd import Etcd

    Factory = Callable[[Path], AbstractAsyncContextManager[MetadataStore]]
    Check = Callable[[MetadataStore], Awaitable[None]]
    Run = Callable[[Check], None]

EVENTS_KEPT = 240


def sqlite_file(directory: Path) -> AbstractAsyncContextManager[MetadataStore]:
    return sqlite_store(f"{directory}/metadata.sqlite3", events_kept=EVENTS_KEPT)


def on_etcd(etcd: Etcd) -> Factory:
    return partial(store_as_new, etcd, events_kept=EVENTS_KEPT)


def in_memory() -> Factory:
    kept: list[InMemoryStore] = []

    @asynccontextmanager
    async def opened(_: Path) -> AsyncIterator[MetadataStore]:
        scheduler = AsyncioScheduler(asyncio.get_running_loop())
        if not kept:
            kept.append(InMemoryStore(HostClock(), scheduler, events_kept=EVENTS_KEPT))
        kept[0]._scheduler = scheduler  # opened again, on another loop
        store_client = kept[0].store_client()
        try:
            yield store_client
        finally:
            await store_client.close()

    return opened


@pytest.fixture(params=["sqlite", "etcd", "in memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Run a coroutine function on a store. Called again in a test, it gets the same store, opened again."""
    factory: Factory = sqlite_file
    if request.param == "etcd":
        factory = on_etcd(request.getfixturevalue("etcd"))
    elif request.param == "in memory":
        factory = in_memory()

    def run_check(check: Check) -> None:
        async def main() -> None:
            async with asyncio.timeout(scaled(DEADLINE_SECONDS)), factory(tmp_path) as store:
                await check(store)

        asyncio.run(main())

    return run_check


async def put(store: MetadataStore, key: str, value: bytes = b"x") -> int:
    done = await store.transact([], [Put(key, value)])
    assert done.succeeded
    return done.revision


async def fill_past_history(store: MetadataStore) -> int:
    """Return the revision of the last change."""
    revisions = [await put(store, "/fill", str(number).encode()) for number in range(2 * EVENTS_KEPT)]
    return revisions[-1]


async def collect(store: MetadataStore, prefix: str, from_revision: int, count: int) -> list[Event]:
    events: list[Event] = []
    watch = store.watch(prefix, from_revision)
    while len(events) < count:
        events += await anext(watch)
    await watch.aclose()  # type: ignore[attr-defined]  # the stores are async generators
    return events


def test_revisions_of_creation_and_change(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        assert await store.get("/a") is None
        created = await put(store, "/a", b"1")
        changed = await put(store, "/a", b"2")
        assert changed == created + 1
        assert await store.get("/a") == ("/a", b"2", created, changed)
        await store.transact([], [Delete("/a")])
        assert await store.get("/a") is None
        again = await put(store, "/a", b"3")
        assert await store.get("/a") == ("/a", b"3", again, again)

    run(check)


def test_all_of_a_transaction_or_nothing(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        revision = await put(store, "/a")
        refused = await store.transact(
            [Compare("/a", mod_revision=revision), Compare("/b", create_revision=5)],
            [Put("/a", b"new"), Put("/c", b"new"), Delete("/a2")],
        )
        assert refused == (False, revision)
        assert (await store.list("/")).entries == [("/a", b"x", revision, revision)]
        done = await store.transact(
            [Compare("/a", mod_revision=revision), Compare("/b", create_revision=0)],
            [Delete("/a"), Put("/b", b"1"), Put("/c", b"2")],
        )
        assert done == (True, revision + 1)
        assert (await store.list("/")).entries == [
            ("/b", b"1", revision + 1, revision + 1),
            ("/c", b"2", revision + 1, revision + 1),
        ]

    run(check)


def test_compare_distinguishes_creation_from_change(run: Run) -> None:
    """A key made again is another key, even where its value is the same."""

    async def check(store: MetadataStore) -> None:
        first = await put(store, "/a")
        changed = await put(store, "/a")
        assert (await store.transact([Compare("/a", create_revision=first)], [Put("/ok", b"")])).succeeded
        assert not (await store.transact([Compare("/a", mod_revision=first)], [Put("/no", b"")])).succeeded
        assert (await store.transact([Compare("/a", mod_revision=changed)], [Delete("/a")])).succeeded
        await put(store, "/a")
        assert not (await store.transact([Compare("/a", create_revision=first)], [Put("/no", b"")])).succeeded
        assert await store.get("/no") is None

    run(check)


def test_nothing_changed_is_no_revision_and_no_event(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        revision = await put(store, "/a")
        assert await store.transact([], [Delete("/not there")]) == (True, revision)
        assert await store.transact([Compare("/a", mod_revision=revision)], []) == (True, revision)
        await put(store, "/b")
        assert [event.key for event in await collect(store, "/", revision, 2)] == ["/a", "/b"]

    run(check)


def test_of_two_writers_racing_one_wins_each_round(run: Run) -> None:
    async def increment(store: MetadataStore, times: int) -> int:
        lost = 0
        for _ in range(times):
            while True:
                entry = await store.get("/counter")
                value = int(entry.value) if entry else 0
                compare = Compare("/counter", mod_revision=entry.mod_revision if entry else 0)
                if (await store.transact([compare], [Put("/counter", str(value + 1).encode())])).succeeded:
                    break
                lost += 1
        return lost

    async def check(store: MetadataStore) -> None:
        lost = await asyncio.gather(increment(store, 60), increment(store, 60))
        entry = await store.get("/counter")
        assert entry is not None
        assert int(entry.value) == 120
        assert sum(lost) > 0  # else they have not raced

    run(check)


def test_listing_then_watching_misses_nothing_and_repeats_nothing(run: Run) -> None:
    """The watch starts at the listing's revision + 1 while writers go on, before and after it."""

    async def check(store: MetadataStore) -> None:
        async def write(name: str) -> None:
            for number in range(60):
                await put(store, f"/w/{name}{number}")

        writers = [asyncio.create_task(write(name)) for name in "abc"]
        listing = await store.list("/w/")
        while not listing.entries:
            listing = await store.list("/w/")
        rest = 180 - len(listing.entries)
        assert rest > 0
        events = await collect(store, "/w/", listing.revision + 1, rest)
        await asyncio.gather(*writers)
        seen = [entry.key for entry in listing.entries] + [event.key for event in events]
        assert sorted(seen) == sorted(f"/w/{name}{number}" for name in "abc" for number in range(60))
        revisions = [event.mod_revision for event in events]
        assert revisions == sorted(set(revisions))

    run(check)


def test_watch_sees_every_kind_of_change_in_order(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        first = await put(store, "/t/a", b"1")
        await put(store, "/t/a", b"2")
        await store.transact([], [Delete("/t/a"), Put("/t/b", b"3")])
        await put(store, "/t/a", b"4")
        assert await collect(store, "/t/", first, 5) == [
            ("/t/a", b"1", first, first),
            ("/t/a", b"2", first, first + 1),
            ("/t/a", None, 0, first + 2),
            ("/t/b", b"3", first + 2, first + 2),
            ("/t/a", b"4", first + 3, first + 3),
        ]

    run(check)


def test_watch_waits_for_what_is_to_come(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        revision = await put(store, "/t/a")
        waiting = asyncio.create_task(collect(store, "/t/", revision + 1, 1))
        await put(store, "/other")
        await put(store, "/t/b")
        (event,) = await waiting
        assert event.key == "/t/b"

    run(check)


def test_watch_sees_what_was_done_for_one_who_went_away(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        revision = await put(store, "/t/a")
        watching = asyncio.create_task(collect(store, "/t/", revision + 1, 1))
        leaving = asyncio.create_task(put(store, "/t/b"))
        await asyncio.sleep(0)  # until the transaction is under way
        leaving.cancel()
        (event,) = await watching
        assert event.key == "/t/b"
        assert leaving.cancelled()

    run(check)


def test_all_changes_of_one_revision_come_together(run: Run) -> None:
    """Who applies them never sees half of a transaction, however many there are."""

    async def check(store: MetadataStore) -> None:
        count = min(store.operations_max, 1500)
        await store.transact([], [Put(f"/big/{number:04}", b"") for number in range(count)])
        await put(store, "/big/after")
        listing = await store.list("/big/")
        watch = store.watch("/big/", listing.revision - 1)
        assert len(await anext(watch)) >= count
        await watch.aclose()  # type: ignore[attr-defined]  # the stores are async generators

    run(check)


def test_prefix_isolation(run: Run) -> None:
    """Neighbours in the order of keys, and characters that some query languages take for wildcards."""

    async def check(store: MetadataStore) -> None:
        revision = await put(store, "/a_/x")
        for key in ("/a", "/a_", "/a0/x", "/a%/x", "/aa/x", "/b/x", "/A_/x", "/a_0"):
            await put(store, key)
        await put(store, "/a_/y")
        assert [entry.key for entry in (await store.list("/a_/")).entries] == ["/a_/x", "/a_/y"]
        assert [event.key for event in await collect(store, "/a_/", revision, 2)] == ["/a_/x", "/a_/y"]

    run(check)


def test_watch_from_before_what_is_kept_is_compacted(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        first = await put(store, "/t/a")
        await fill_past_history(store)
        with pytest.raises(RevisionCompacted):
            await collect(store, "/t/", first, 1)
        listing = await store.list("/t/")
        assert [entry.key for entry in listing.entries] == ["/t/a"]
        await put(store, "/t/b")
        (event,) = await collect(store, "/t/", listing.revision + 1, 1)
        assert event.key == "/t/b"

    run(check)


def test_slow_watcher_learns_that_it_missed_something(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        first = await put(store, "/fill")
        watch = store.watch("/fill", first)
        await anext(watch)

        async def drain() -> None:
            last = await fill_past_history(store)
            async for events in watch:
                if events[-1].mod_revision >= last:  # a busy etcd sent all changes in one message
                    last = await fill_past_history(store)

        with pytest.raises(RevisionCompacted):
            await drain()

    run(check)


def test_closing_ends_watches_and_refuses_calls(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        async def watch_all() -> int:
            return sum([len(events) async for events in store.watch("/", 1)])

        watching = asyncio.create_task(watch_all())
        await put(store, "/a")
        await asyncio.sleep(0)
        await store.close()
        assert await watching <= 1
        with pytest.raises(Unavailable):
            await store.get("/a")

    run(check)


def test_everything_is_there_after_reopening(run: Run) -> None:
    async def write(store: MetadataStore) -> None:
        await put(store, "/a", b"\x00\xff binary")
        await put(store, "/b")
        await store.transact([], [Delete("/b")])

    async def read(store: MetadataStore) -> None:
        listing = await store.list("/")
        assert listing == (3, [("/a", b"\x00\xff binary", 1, 1)])
        assert [event.value for event in await collect(store, "/b", 1, 2)] == [b"x", None]
        assert await put(store, "/c") == 4

    run(write)
    run(read)


def test_a_key_twice_in_a_transaction_is_refused(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        with pytest.raises(InvalidRequest):
            await store.transact([], [Put("/a", b"1"), Delete("/a")])
        assert await store.get("/a") is None

    run(check)


class LosesAnswers:
    """Between the caller and a store: the first `count` transactions lose their answer, after or before they happen.
    `meanwhile` is what another writer does just then."""

    def __init__(
        self,
        store: MetadataStore,
        count: int,
        *,
        after: bool,
        meanwhile: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self.store = store
        self.count = count
        self.after = after
        self.meanwhile = meanwhile
        self.operations_max = store.operations_max
        self.get = store.get
        self.list = store.list
        self.watch = store.watch
        self.close = store.close

    async def transact(
        self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
    ) -> TransactionResult:
        if self.count <= 0:
            return await self.store.transact(compares, operations)
        self.count -= 1
        if self.after:
            await self.store.transact(compares, operations)
        if self.meanwhile is not None:
            await self.meanwhile()
        raise AmbiguousOutcome("the answer was lost")


async def take_number(store: MetadataStore, writer: str) -> TransactionResult:
    return await transact_resolving_ambiguity(
        store, [Compare("/n", mod_revision=0)], [Put("/n", encode({"n": 1}, writer)), Put("/m", b"")], writer
    )


@pytest.mark.parametrize("after", [True, False])
def test_lost_answer_is_cleared_up_by_the_writer_token(run: Run, after: bool) -> None:
    async def check(store: MetadataStore) -> None:
        done = await take_number(LosesAnswers(store, 2, after=after), "me")
        assert done.succeeded
        entry = await store.get("/n")
        assert entry is not None
        assert entry.mod_revision == done.revision
        assert decode("/n", entry.value)["writer"] == "me"
        assert entry.create_revision == entry.mod_revision  # written once, not twice

    run(check)


@pytest.mark.parametrize("after", [True, False])
def test_lost_answer_and_another_writer_is_a_conflict_not_a_success(run: Run, after: bool) -> None:
    async def check(store: MetadataStore) -> None:
        async def other() -> None:
            await put(store, "/n", encode({"n": 2}, "other"))

        with pytest.raises(ConcurrentChange):
            await take_number(LosesAnswers(store, 1, after=after, meanwhile=other), "me")

    run(check)


def test_transaction_that_comes_through_late_is_known_as_our_own(run: Run) -> None:
    """The first is still on its way when its key is read back, and makes the second fail."""

    class ComesLate(LosesAnswers):
        late: tuple[Sequence[Compare], Sequence[Put | Delete]] | None = None

        async def transact(
            self, compares: Sequence[Compare], operations: Sequence[Put | Delete]
        ) -> TransactionResult:
            if self.late is None:
                self.late = compares, operations
                raise AmbiguousOutcome("the answer was lost")
            await self.store.transact(*self.late)
            return await self.store.transact(compares, operations)

    async def check(store: MetadataStore) -> None:
        done = await take_number(ComesLate(store, 0, after=False), "me")
        entry = await store.get("/n")
        assert entry is not None
        assert done == (True, entry.mod_revision)
        with pytest.raises(ConcurrentChange):
            await take_number(ComesLate(store, 0, after=False), "another")

    run(check)


def test_store_that_never_answers_is_unavailable_in_the_end(run: Run) -> None:
    async def check(store: MetadataStore) -> None:
        with pytest.raises(Unavailable):
            await take_number(LosesAnswers(store, 1000, after=False), "me")

    run(check)


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b'{"schema": 99}', b"\xff"])
def test_damaged_or_newer_value_is_named_not_guessed(value: bytes) -> None:
    with pytest.raises(StorageError, match="/some/key"):
        decode("/some/key", value)
