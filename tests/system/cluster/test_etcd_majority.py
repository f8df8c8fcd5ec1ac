"""An etcd of three members, some of them dead: which member is asked, and the error without a majority."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import Unavailable
from mansio.metadata.etcd.channel import CALL_DEADLINE_S
from mansio.metadata.etcd.client import CALLS_DEADLINE_S
from mansio.metadata.etcd.config import EtcdConfig
from mansio.metadata.etcd.lease import ThreadKeepAlive
from mansio.metadata.metadata_store import (
    AmbiguousOutcome,
    Compare,
    Put,
    encode,
    transact_resolving_ambiguity,
)
from support.etcd import etcd_store, three_etcds
from support.machine import scaled
from support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mansio.metadata.etcd.client import EndpointStatus
    from support.etcd import Etcd

pytestmark = pytest.mark.full

DEADLINE_S = 120
GIVEN_UP_S_MAX = CALLS_DEADLINE_S + CALL_DEADLINE_S + 4
"""All attempts of a call, on a machine that is busy."""
TTL_S = 30


@pytest.fixture(scope="module")
def members() -> Iterator[list[Etcd]]:
    with three_etcds() as members:
        yield members


def seconds() -> float:
    return asyncio.get_running_loop().time()


def test_every_member_killed_in_turn_no_write_is_lost_or_doubled(members: list[Etcd]) -> None:
    """One of the three is the leader, one the endpoint in use; a watch follows all the way."""

    async def main() -> None:
        async with etcd_store(*(member.url for member in members)) as store:
            watch: Any = store.watch("/turn/", 1)
            seen: list[tuple[str, int]] = []

            async def collect() -> None:
                async for batch in watch:
                    seen.extend((event.key, event.mod_revision) for event in batch)

            collecting = asyncio.create_task(collect())
            done: list[tuple[str, int]] = []

            async def write() -> None:
                """As any caller does who has to know: again, until there is an answer."""
                key, writer = f"/turn/{len(done):05}", f"writer of {len(done)}"
                while True:
                    try:
                        written = await transact_resolving_ambiguity(
                            store, [Compare(key, mod_revision=0)], [Put(key, encode({}, writer))], writer
                        )
                    except Unavailable:
                        continue
                    break
                revision = written.revision
                if not written.succeeded:  # an earlier attempt of ours came through after all
                    entry = await store.get(key)
                    assert entry is not None
                    revision = entry.mod_revision
                done.append((key, revision))

            used = set()
            for member in members:
                used.add(store.client.endpoint)
                while len(done) % 40 != 39:
                    await write()
                member.kill()
                begun = seconds()
                await write()
                assert seconds() - begun < scaled(20)
                member.launch()
                await eventually(lambda member=member: member._healthy(), 20)
            assert len(used) > 1
            await eventually(lambda: len(seen) == len(done), 10)
            assert seen == done
            collecting.cancel()
            await asyncio.wait([collecting])

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_without_majority_nothing_is_read_written_or_kept_alive(members: list[Etcd]) -> None:
    """The member left still has the data, and must not answer from it."""

    async def main() -> None:
        left, *others = members
        config = EtcdConfig.create([left.url])
        thread = ThreadKeepAlive(config)
        async with etcd_store(left.url) as store:
            lease = await store.leases.grant(TTL_S)
            await store.transact([], [Put("/majority", b"x", lease)])
            assert await store.leases.keep_alive_once(lease) == TTL_S
            for member in others:
                member.kill()
            try:

                async def alone() -> bool:
                    """A leader that has lost the others goes on for a second or two."""
                    try:
                        await store.transact([], [Put("/alone", b"z")])
                    except Unavailable as error:
                        return "no leader" in error.message and not isinstance(error, AmbiguousOutcome)
                    return False

                await eventually(alone)  # the member says so before anything can happen
                begun = seconds()
                outcomes = await asyncio.gather(
                    store.get("/majority"),
                    store.list("/majority"),
                    store.transact([Compare("/majority", mod_revision=0)], []),
                    store.leases.keep_alive_once(lease),
                    asyncio.to_thread(thread.keep_alive_once, lease),
                    store.transact([], [Put("/alone", b"y")]),
                    return_exceptions=True,
                )
                assert seconds() - begun < scaled(GIVEN_UP_S_MAX)
                assert all(isinstance(error, Unavailable) for error in outcomes), outcomes
                assert not any(isinstance(error, AmbiguousOutcome) for error in outcomes)
            finally:
                for member in others:
                    member.launch()
                for member in others:
                    member.wait_healthy()
            assert await store.leases.keep_alive_once(lease) == TTL_S
            assert await asyncio.to_thread(thread.keep_alive_once, lease) == TTL_S
            await store.leases.revoke(lease)
            assert await store.get("/majority") is None
        thread.close()

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))


def test_etcd_members_are_listed_with_their_names(members: list[Etcd]) -> None:
    async def main() -> None:
        async with etcd_store(*(member.url for member in members), "http://127.0.0.1:9") as store:

            async def one_leads() -> list[EndpointStatus]:
                found = await store.client.endpoint_statuses()
                return found if sum(member.is_leader for member in found) == 1 else []

            found = await eventually(one_leads)
            assert [member.endpoint for member in found[:3]] == [member.url for member in members]
            assert all(member.version.startswith("3.") and not member.reason for member in found[:3])
            assert found[3].reason
            assert not found[3].version

    asyncio.run(asyncio.wait_for(main(), scaled(DEADLINE_S)))
