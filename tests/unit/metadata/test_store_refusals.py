"""A store that refuses for a while, being full or refusing all connections: brokers go on by themselves when it is
over."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mansio.errors import DiskFull, MansioError
from mansio.metadata.etcd.call_outcome import EtcdDenied
from mansio.testing.metadata import InMemoryStoreClient
from support.brokers import TTL_S, Cluster
from support.virtual_time import run_virtually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from mansio.metadata.metadata_store import Event


def run(check: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = Cluster()
        try:
            await check(cluster)
        finally:
            await cluster.stop()

    run_virtually(main())


class RefusingStoreClient(InMemoryStoreClient):
    """`refusal`: what grants of leases come to; with `watches` also what watches do."""

    refusal: MansioError | None = None
    watches = False

    async def grant(self, ttl_s: float) -> int:
        if self.refusal is not None:
            raise self.refusal
        return await super().grant(ttl_s)

    async def watch(self, prefix: str, from_revision: int) -> AsyncIterator[Sequence[Event]]:
        async for events in super().watch(prefix, from_revision):
            if self.refusal is not None and self.watches:
                raise self.refusal
            yield events


async def refused(cluster: Cluster, refusal: MansioError) -> None:
    """Broker 1 loses its session while the store refuses; some time later it does not any more."""
    await cluster.start(2)
    member = await cluster.start_one(1)
    member.state.stop()
    client = member.store_client = RefusingStoreClient(cluster.store, member.scheduler)
    member.membership._store = member.membership._leases = client
    member.state.start(client, member.scheduler, shared=True)
    before = (await member.registered()).membership.epoch
    client.refusal, client.watches = refusal, isinstance(refusal, EtcdDenied)
    cluster.store.end_lease(member.membership.session.lease)  # type: ignore[union-attr]  # it is registered
    member.membership.end_session(member.membership.session)  # type: ignore[arg-type]  # as the keep-alive hears
    await cluster.sleep(2 * TTL_S)
    assert member.membership.epoch == 0
    client.refusal = None
    await cluster.until(lambda: member.membership.epoch > before)
    await cluster.brokers[2].registered()
    await cluster.brokers[2].create("t", 1, 2)
    await cluster.until(lambda: "t" in member.state.topics)


def test_broker_that_lost_its_session_while_the_store_was_full_registers_when_there_is_room() -> None:
    run(lambda cluster: refused(cluster, DiskFull("etcd's database is full")))


def test_broker_goes_on_when_a_store_that_let_it_in_no_more_does_so_again() -> None:
    run(lambda cluster: refused(cluster, EtcdDenied("etcd refused the user name or password")))
