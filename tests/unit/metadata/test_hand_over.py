"""Early hand-over over a store in memory, on virtual time: who loses a session early, and who does not."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from mansio.errors import BrokerUnreachable, ConnectionLost
from mansio.metadata.broker_lifecycle import CHECK_FRACTION
from mansio.metadata.hand_over.hand_over import (
    CONFIRMATIONS_MAX,
    HANDED_OVER,
    NOT_CONFIRMED,
    NOT_ENDED,
    HandOver,
)
from mansio.metadata.metadata_store import Delete
from mansio.ports import ConnectOutcome, LinkChange
from mansio.wire import headers
from mansio.wire.api_versions import ApiKey
from mansio.wire.codec import messages
from mansio.wire.features import FIRST_LEVEL
from support.brokers import TTL_S, Cluster
from support.virtual_time import run_virtually

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from support.brokers import Member

EARLY_S_MAX = 1.0


class Links:
    """`PeerLinks` and `Peers` of one broker."""

    def __init__(self, wires: Wires, node_id: int) -> None:
        self._wires = wires
        self._node_id = node_id
        self._callbacks: list[Callable[[int, LinkChange], None]] = []
        self.opened: set[int] = set()
        self.pings = 0

    def on_link_change(self, callback: Callable[[int, LinkChange], None]) -> None:
        self._callbacks.append(callback)

    def change(self, node_id: int, change: LinkChange) -> None:
        for callback in self._callbacks:
            callback(node_id, change)

    def is_open(self, node_id: int) -> bool:
        return node_id in self.opened

    async def open(self, node_id: int, *, timeout_ms: float) -> None:
        if await self.try_connect(node_id, timeout_ms=timeout_ms) is not ConnectOutcome.ACCEPTED:
            raise BrokerUnreachable(f"broker {node_id}")
        self.opened.add(node_id)
        self.change(node_id, LinkChange.OPENED)

    async def try_connect(self, node_id: int, *, timeout_ms: float) -> ConnectOutcome:
        outcome = self._wires.outcome(self._node_id, node_id)
        await asyncio.sleep(timeout_ms / 1000 if outcome is ConnectOutcome.UNKNOWN else 0.001)
        return outcome

    async def send(self, node_id: int, request: bytes, *, timeout_ms: float) -> bytes:
        del timeout_ms
        await asyncio.sleep(0.001)
        if node_id not in self.opened:
            raise ConnectionLost(f"broker {node_id}")
        frame = memoryview(request)[4:]
        header = headers.read_request_header(frame)
        if header.api_key == ApiKey.API_VERSIONS:
            self.pings += 1
            return b""
        body = frame[header.body_position :]
        asked = messages.decode_request(ApiKey.CONFIRM_HAND_OVER, 0, body)
        assert (asked.node_id, asked.broker_epoch) == (self._node_id, self._wires.epoch(self._node_id))
        confirmed = await self._wires.hand_overs[node_id].confirm(asked.suspect_id, asked.suspect_epoch)
        return messages.encode_response(ApiKey.CONFIRM_HAND_OVER, 0, 0, {"confirmed": confirmed})[4:]


class Wires:
    """A cluster whose brokers have connections to each other."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.links: dict[int, Links] = {}
        self.hand_overs: dict[int, HandOver] = {}
        self.refusing: set[tuple[int, int]] = set()
        self.silent: set[int] = set()
        self.store = cluster.store.store_client()

    async def start(self, *node_ids: int) -> None:
        """Start brokers, and wait until their sessions are older than a lease."""
        for node_id in node_ids:
            member = await self.cluster.start_one(node_id)
            self._observe(member)
        await self.cluster.until(
            lambda: all(len(one.opened) == len(node_ids) - 1 for one in self.links.values())
        )
        await self.cluster.until(lambda: len(self.cluster.controllers()) == 1)
        await self.cluster.sleep(2 * TTL_S)

    def _observe(self, member: Member) -> None:
        links = self.links[member.node_id] = Links(self, member.node_id)
        hand_over = self.hand_overs[member.node_id] = HandOver(
            store=member.store_client,
            state=member.state,
            random=member.random,
            links=links,
            peers=links,
            scheduler=member.scheduler,
            clock=self.cluster.clock,
            node_id=member.node_id,
            session=lambda: member.membership.session,
            ttl_s=TTL_S,
        )
        hand_over.start()

    def epoch(self, node_id: int) -> int:
        return self.cluster.brokers[node_id].membership.epoch

    def outcome(self, source: int, target: int) -> ConnectOutcome:
        if target in self.silent:
            return ConnectOutcome.UNKNOWN
        if (source, target) in self.refusing or not self.cluster.brokers[target].running:
            return ConnectOutcome.REFUSED
        return ConnectOutcome.ACCEPTED

    def lose(self, source: int, target: int) -> None:
        """The connections from one to the other end."""
        self.links[source].opened.discard(target)
        self.links[source].change(target, LinkChange.LOST)

    def refuse(self, *ways: tuple[int, int]) -> None:
        """Something in between ends connections and refuses new ones."""
        self.refusing |= set(ways)
        for way in ways:
            self.lose(*way)

    async def kill(self, node_id: int) -> None:
        await self.cluster.brokers[node_id].kill()
        self.links.pop(node_id)
        self.hand_overs.pop(node_id)
        for source in self.links:
            self.lose(source, node_id)

    def session_exists(self, node_id: int) -> bool:
        return self.cluster.store.get(self.any().state.keys.session(node_id)) is not None

    def any(self) -> Member:
        return self.cluster.alive()[0]

    def count(self, outcome: str) -> int:
        return sum(one.counts[outcome] for one in self.hand_overs.values())


def run(check: Callable[[Wires], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = Cluster()
        try:
            await check(Wires(cluster))
        finally:
            await cluster.stop()

    run_virtually(main())


@pytest.mark.parametrize("is_controller", [False, True])
def test_session_of_a_killed_broker_ends_long_before_its_lease(is_controller: bool) -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        cluster = wires.cluster
        (controller,) = cluster.controllers()
        victim = controller if is_controller else next(one for one in (1, 2, 3) if one != controller)
        await cluster.brokers[victim].create("t", 6, 3)
        await wires.kill(victim)
        seen = wires.any()
        took = await cluster.until(lambda: all(one.leader != victim for one in seen.partitions("t")))
        assert took <= EARLY_S_MAX
        assert not wires.session_exists(victim)
        assert len(cluster.controllers()) == 1
        await cluster.sleep(TTL_S)
        assert wires.count(HANDED_OVER) == 1

    run(check)


def test_next_process_registers_as_soon_as_the_session_of_the_killed_one_has_ended() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        old = wires.epoch(3)
        await wires.kill(3)
        member = await wires.cluster.start_one(3)
        wires.cluster.brokers[3].running = False  # it does not listen yet
        took = await wires.cluster.until(lambda: member.membership.epoch > old)
        assert took <= EARLY_S_MAX
        member.running = True

    run(check)


def test_broker_whose_session_ended_early_while_it_runs_registers_again() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        old = wires.epoch(3)
        wires.refuse((1, 3), (2, 3))
        await wires.cluster.until(lambda: wires.epoch(3) > old, within_s=EARLY_S_MAX)
        membership = wires.cluster.brokers[3].membership
        assert membership.sessions_lost == 1
        assert membership.is_session_valid()
        await wires.cluster.sleep(3 * TTL_S)
        assert membership.sessions_lost == 1, "connects are still refused, and no connection has ended"

    run(check)


def test_broker_that_hears_nothing_of_the_end_of_its_session_learns_it_from_its_key() -> None:
    """Also if the response of the transaction was lost."""

    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        member = wires.cluster.brokers[3]
        member.store_client.watch_stalls = True
        for node_id in (1, 2):
            wires.cluster.brokers[node_id].store_client.lost_response_count = 1
        wires.refuse((1, 3), (2, 3))
        await wires.cluster.until(
            lambda: member.membership.session is None, within_s=EARLY_S_MAX + 2 * CHECK_FRACTION * TTL_S
        )

    run(check)


def test_others_know_of_a_broker_that_may_believe_in_its_session_until_it_does_not_any_more() -> None:
    """Until then, the next leaders lease no records and answer for no group."""

    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        member = wires.cluster.brokers[3]
        seen = wires.cluster.brokers[1].state
        member.store_client.watch_stalls = True
        wires.refuse((1, 3), (2, 3))
        await wires.cluster.until(lambda: not wires.session_exists(3), within_s=EARLY_S_MAX)
        old = member.membership.session
        while old is member.membership.session:
            assert 3 in seen.ended_sessions
            await wires.cluster.sleep(0.01)
        member.store_client.watch_stalls = False
        await wires.cluster.until(lambda: not seen.ended_sessions, within_s=1)

    run(check)


def test_a_killed_broker_is_known_as_ended_until_its_lease_ends() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        seen = wires.cluster.brokers[1].state
        await wires.kill(3)
        await wires.cluster.until(lambda: 3 in seen.ended_sessions, within_s=EARLY_S_MAX)
        await wires.cluster.sleep(TTL_S / 2)
        assert 3 in seen.ended_sessions
        await wires.cluster.until(lambda: not seen.ended_sessions, within_s=TTL_S)

    run(check)


def test_no_session_ends_early_beside_a_broker_that_would_not_wait() -> None:
    """Brokers of version 0.1 would not wait as the next leaders: the upgrade of the cluster is not finalized."""

    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        for node_id in (1, 2):
            wires.cluster.brokers[node_id].state.feature_level = FIRST_LEVEL
        await wires.kill(3)
        await wires.cluster.sleep(TTL_S / 2)
        assert wires.session_exists(3)
        assert wires.count(NOT_ENDED) >= 1

    run(check)


def test_connections_are_used_so_that_those_without_another_end_are_noticed() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2)
        before = wires.links[1].pings
        await wires.cluster.sleep(2 * TTL_S)
        assert before + 3 <= wires.links[1].pings <= before + 5

    run(check)


def test_refusal_between_two_brokers_alone_ends_no_session() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        epochs = [wires.epoch(node_id) for node_id in (1, 2, 3)]
        wires.refuse((1, 3), (3, 1))
        await wires.cluster.sleep(TTL_S)
        assert epochs == [wires.epoch(node_id) for node_id in (1, 2, 3)]
        assert wires.count(NOT_CONFIRMED) == 2

    run(check)


def test_brokers_that_refuse_each_other_end_no_session() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3, 4)
        epochs = [wires.epoch(node_id) for node_id in (1, 2, 3, 4)]
        wires.refuse(
            *((one, other) for one in (1, 2, 3, 4) for other in (1, 2, 3, 4) if one // 3 != other // 3)
        )
        await wires.cluster.sleep(2 * TTL_S)
        assert epochs == [wires.epoch(node_id) for node_id in (1, 2, 3, 4)]
        assert wires.count(HANDED_OVER) == 0

    run(check)


def test_broker_that_is_cut_off_or_paused_keeps_its_session_for_the_time_of_its_lease() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        for is_silent in (True, False):
            if is_silent:
                wires.silent.add(3)
            for source in (1, 2):
                wires.lose(source, 3)
            await wires.cluster.sleep(2 * EARLY_S_MAX)
            assert wires.session_exists(3)
            wires.silent.clear()
            await wires.cluster.until(lambda: all(3 in wires.links[one].opened for one in (1, 2)))
        assert wires.count(HANDED_OVER) == 0

    run(check)


def test_with_two_brokers_a_session_ends_with_its_lease() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2)
        await wires.kill(2)
        await wires.cluster.sleep(TTL_S / 2)
        assert wires.session_exists(2)
        await wires.cluster.until(lambda: not wires.session_exists(2), within_s=TTL_S)
        assert wires.count(HANDED_OVER) == 0

    run(check)


def test_broker_that_is_stopping_ends_its_session_itself() -> None:
    """Its listeners end before its session does."""

    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        member = wires.cluster.brokers[3]
        assert await member.membership.transfer_leaderships(10_000) == 0
        wires.refuse((1, 3), (2, 3))
        await wires.cluster.sleep(2 * TTL_S)
        assert wires.session_exists(3)
        assert wires.count(HANDED_OVER) == 0

    run(check)


def test_lost_response_is_no_reason_to_end_the_next_session() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        for node_id in (1, 2):
            wires.cluster.brokers[node_id].store_client.lost_response_count = 2
        await wires.kill(3)
        await wires.cluster.until(lambda: not wires.session_exists(3), within_s=EARLY_S_MAX)
        member = await wires.cluster.start_one(3)
        await member.registered()
        await wires.cluster.sleep(TTL_S)
        assert member.membership.sessions_lost == 0
        assert wires.count(NOT_ENDED) >= 1

    run(check)


def test_session_ends_although_the_controller_changes_meanwhile() -> None:
    """The controller key is part of the transaction, so that none is left to a broker without a session."""

    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        (controller,) = wires.cluster.controllers()
        victim = next(one for one in (1, 2, 3) if one != controller)
        keys = wires.any().state.keys

        def change() -> None:
            wires.cluster.store.transact([], [Delete(keys.controller)])

        for node_id in (1, 2, 3):
            wires.cluster.brokers[node_id].store_client.before_transaction = change
        await wires.kill(victim)
        await wires.cluster.until(lambda: not wires.session_exists(victim), within_s=EARLY_S_MAX)
        await wires.cluster.until(lambda: len(wires.cluster.controllers()) == 1, within_s=EARLY_S_MAX)

    run(check)


def test_confirmations_in_progress_are_bounded() -> None:
    async def check(wires: Wires) -> None:
        await wires.start(1, 2, 3)
        epoch = wires.epoch(3)
        wires.refuse((1, 3))
        asked: list[Any] = [wires.hand_overs[1].confirm(3, epoch) for _ in range(CONFIRMATIONS_MAX + 5)]
        answers = await asyncio.gather(*asked)
        assert sum(answers) == CONFIRMATIONS_MAX
        assert await wires.hand_overs[1].confirm(3, epoch)
        assert not await wires.hand_overs[1].confirm(3, epoch - 1)
        assert not await wires.hand_overs[2].confirm(3, epoch), "it has a connection"
        wires.hand_overs[1].stop()
        assert not await wires.hand_overs[1].confirm(3, epoch)

    run(check)
