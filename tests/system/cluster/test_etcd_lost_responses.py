"""Errors that a caller gets when etcd or the network fails during a call."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING

import pytest

from mansio.errors import InvalidRequest, MessageTooLarge, Unavailable
from mansio.metadata.etcd.channel import CALL_DEADLINE_S
from mansio.metadata.etcd.client import CALLS_DEADLINE_S
from mansio.metadata.metadata_store import (
    AmbiguousOutcome,
    Compare,
    Put,
    decode,
    encode,
    transact_resolving_ambiguity,
)
from support.etcd import etcd_store, one_etcd
from support.fault_proxy import fault_proxy
from support.machine import scaled
from support.waiting import eventually

if TYPE_CHECKING:
    from mansio.metadata.etcd.store import EtcdStore
    from mansio.metadata.metadata_store import TransactionResult
    from support.etcd import Etcd

pytestmark = pytest.mark.full

DEADLINE_S = 90
CALL_S_MIN = 0.9 * CALL_DEADLINE_S
GIVEN_UP_S_MAX = CALLS_DEADLINE_S + CALL_DEADLINE_S + 4
"""All attempts of a call, on a machine that is busy."""
numbers = itertools.count()


def fresh_key() -> str:
    return f"/lost/{next(numbers)}"


async def put(store: EtcdStore, key: str, value: bytes = b"x") -> TransactionResult:
    return await store.transact([Compare(key, mod_revision=0)], [Put(key, value)])


def seconds() -> float:
    return asyncio.get_running_loop().time()


def failures(store: EtcdStore) -> int:
    """Attempts to call etcd that failed."""
    return sum(store.client.counts.failure_counts.values())


def test_transaction_whose_answer_is_lost_is_ambiguous_after_a_second(etcd: Etcd) -> None:
    async def main() -> None:
        async with fault_proxy(etcd.port) as proxy, etcd_store(proxy.url) as store:
            key = fresh_key()
            await store.get(key)
            proxy.lose_answers()
            begun = seconds()
            with pytest.raises(AmbiguousOutcome) as outcome:
                await put(store, key)
            assert CALL_S_MIN < seconds() - begun < CALLS_DEADLINE_S, "it is not tried again"
            assert proxy.url in outcome.value.message
            assert "\n" not in outcome.value.message
            proxy.pass_on()
            entry = await store.get(key)
            assert entry is not None  # it did happen

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_transaction_that_never_left_is_unavailable_and_did_not_happen(etcd: Etcd) -> None:
    """Where the answer is not `AmbiguousOutcome`, a caller may rely on it."""

    async def main() -> None:
        async with fault_proxy(etcd.port) as proxy, etcd_store(proxy.url) as store:
            key = fresh_key()
            await store.get(key)
            proxy.refuse()
            with contextlib.suppress(Unavailable):  # the first may find the connection still standing
                await put(store, fresh_key())
            with pytest.raises(Unavailable) as outcome:
                await put(store, key)
            assert not isinstance(outcome.value, AmbiguousOutcome)
            proxy.pass_on()
            assert await store.get(key) is None

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_lost_answer_is_read_back_from_another_endpoint(etcd: Etcd) -> None:
    async def main() -> None:
        async with fault_proxy(etcd.port) as proxy, etcd_store(proxy.url, etcd.url) as store:
            key = fresh_key()
            await store.get(key)
            proxy.lose_answers()
            put_it = [Put(key, encode({"n": 1}, "me"))]
            done = await transact_resolving_ambiguity(store, [Compare(key, mod_revision=0)], put_it, "me")
            assert done.succeeded
            assert store.client.endpoint == etcd.url
            entry = await store.get(key)
            assert entry is not None
            assert entry.create_revision == entry.mod_revision == done.revision
            assert decode(key, entry.value)["writer"] == "me"

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_silent_endpoint_costs_one_deadline_once(etcd: Etcd) -> None:
    """Reads are asked of the next endpoint, and every later call goes there straight away."""

    async def main() -> None:
        async with fault_proxy(etcd.port) as proxy, etcd_store(proxy.url, etcd.url) as store:
            key = fresh_key()
            await put(store, key)
            assert store.client.endpoint == proxy.url  # the first, as long as it answers
            assert failures(store) == 0
            proxy.silence()
            begun = seconds()
            assert await store.get(key) is not None
            assert CALL_S_MIN < seconds() - begun < CALLS_DEADLINE_S
            for _ in range(20):
                await store.get(key)
            assert failures(store) == 1

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_nothing_answers_is_unavailable_in_bounded_time_and_over_when_it_is_over(etcd: Etcd) -> None:
    async def main() -> None:
        async with fault_proxy(etcd.port) as proxy, etcd_store(proxy.url) as store:
            proxy.silence()
            begun = seconds()
            with pytest.raises(Unavailable):
                await store.get("/x")
            assert seconds() - begun < scaled(GIVEN_UP_S_MAX)
            proxy.pass_on()
            assert await store.get("/x") is None

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_etcd_killed_in_mid_transaction_every_answer_was_true() -> None:
    """Done is there, at the revision returned; unavailable is not there; only ambiguous may be either."""

    async def main() -> None:
        with one_etcd() as etcd:
            async with etcd_store(etcd.url) as store:
                outcomes: dict[str, TransactionResult | Unavailable] = {}
                stop = asyncio.Event()

                def failed() -> int:
                    return sum(isinstance(outcome, Unavailable) for outcome in outcomes.values())

                async def write(name: int) -> None:
                    for number in itertools.count():
                        if stop.is_set():
                            return
                        key = f"/kill/{name}/{number}"
                        try:
                            outcomes[key] = await put(store, key)
                        except Unavailable as error:
                            outcomes[key] = error

                async with asyncio.TaskGroup() as writers:
                    for name in range(16):
                        writers.create_task(write(name))
                    for _ in range(2):
                        enough, before = len(outcomes) + 300, failed()
                        await eventually(lambda enough=enough: len(outcomes) > enough)
                        await asyncio.to_thread(etcd.kill)  # while the writers go on
                        await eventually(lambda before=before: failed() > before)
                        etcd.start()
                    stop.set()
                there = {entry.key: entry.mod_revision for entry in (await store.list("/kill/")).entries}
            assert len(outcomes) > 600
            for key, outcome in outcomes.items():
                if isinstance(outcome, AmbiguousOutcome):
                    continue
                expected = None if isinstance(outcome, Unavailable) else outcome.revision
                assert there.get(key) == expected, (key, outcome)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_close_in_mid_transaction_ends_it_first(etcd: Etcd) -> None:
    async def main() -> None:
        key = fresh_key()
        async with etcd_store(etcd.url) as store:
            under_way = asyncio.create_task(put(store, key))
            await asyncio.sleep(0)
            await store.close()
            assert (await under_way).succeeded
        async with etcd_store(etcd.url) as store:
            assert await store.get(key) is not None

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_a_hundred_callers_at_a_silent_endpoint_wait_as_long_as_one(etcd: Etcd) -> None:
    """The first to find out that it is silent finds out for all."""

    async def main() -> None:
        async with fault_proxy(etcd.port) as proxy, etcd_store(proxy.url, etcd.url) as store:
            proxy.silence()
            begun = seconds()
            assert await asyncio.gather(*(store.get("/x") for _ in range(100))) == [None] * 100
            assert seconds() - begun < CALLS_DEADLINE_S
        async with fault_proxy(etcd.port) as proxy, etcd_store(proxy.url) as store:
            proxy.silence()
            begun = seconds()
            outcome = await asyncio.gather(*(store.get("/x") for _ in range(100)), return_exceptions=True)
            assert all(isinstance(each, Unavailable) for each in outcome)
            assert seconds() - begun < scaled(GIVEN_UP_S_MAX)

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_too_much_is_refused_as_such_and_nothing_is_written(etcd: Etcd) -> None:
    """Neither may look like an answer that was lost: the same again would be refused again."""

    async def main() -> None:
        async with etcd_store(etcd.url) as store:
            for size in (1_700_000, 5_000_000):
                with pytest.raises(MessageTooLarge):
                    await put(store, "/large", bytes(size))
            for count in (128, 129):
                puts = [Put(f"/many/{number}", b"") for number in range(count)]
                if count <= store.operations_max:
                    assert (await store.transact([], puts)).succeeded
                else:
                    with pytest.raises(InvalidRequest):
                        await store.transact([], puts)
            assert await store.get("/large") is None

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_full_etcd_is_reported_and_its_last_transaction_is_not_taken_for_refused() -> None:
    """etcd carries out the transaction that fills it, and answers that there was no room."""

    async def main() -> None:
        # Its size is that of its last commit, and it commits each tenth of a second unless told to do so at each put.
        quota = ["--quota-backend-bytes", "3000000", "--backend-batch-limit", "1"]
        with one_etcd(arguments=quota) as etcd:
            async with etcd_store(etcd.url) as store:
                for number in itertools.count():
                    try:
                        await put(store, f"/full/{number:02}", bytes(300_000))
                    except AmbiguousOutcome:
                        break
                    assert number < 40
                keys = [entry.key for entry in (await store.list("/full/")).entries]
                outcome = [f"/full/{n:02}" for n in range(number)]
                assert keys in (outcome, [*outcome, f"/full/{number:02}"])
                compares, puts = [Compare("/more", mod_revision=0)], [Put("/more", encode({}, "me"))]
                with pytest.raises(AmbiguousOutcome, match="full"):
                    await transact_resolving_ambiguity(store, compares, puts, "me")
                assert await store.get("/more") is None

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))
