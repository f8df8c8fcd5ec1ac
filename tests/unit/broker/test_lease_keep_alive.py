"""Thread that renews leases: which leases it renews, and when it stops."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

from mansio.errors import Unavailable
from mansio.host.asyncio_loop import AsyncioScheduler
from mansio.host.clock import HostClock
from mansio.metadata.metadata_store import LeaseExpired
from mansio.metadata.session import Session
from mansio.node.lease_keep_alive import LeaseKeepAlive
from support.machine import scaled

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

TTL_S = 1.5
DEADLINE_S = 30


class Store:
    """Leases of a store: counts renewals; `answer` raises what it is given."""

    def __init__(self) -> None:
        self.renewals = 0
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def keep_alive_once(self, lease: int) -> float:
        assert lease == 7
        self.gate.wait(scaled(DEADLINE_S))
        if self.error is not None:
            raise self.error
        self.renewals += 1
        return TTL_S


class Kept:
    """A running `LeaseKeepAlive` and the session it keeps."""

    def __init__(self) -> None:
        self.store = Store()
        self.clock = HostClock()
        self.session = Session(7, TTL_S, self.clock.monotonic())
        self.session.epoch = 1
        self.ended: list[Session] = []
        self.keep_alive = LeaseKeepAlive(
            keep_alive_once=self.store.keep_alive_once,
            current_session=lambda: self.session,
            on_session_end=self.ended.append,
            clock=self.clock,
            scheduler=AsyncioScheduler(asyncio.get_running_loop()),
            ttl_s=TTL_S,
        )

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(scaled(DEADLINE_S)):
            while not condition():  # noqa: ASYNC110 - a thread makes it true
                await asyncio.sleep(0.01)

    def holds(self) -> bool:
        return self.session.is_valid(self.clock.monotonic())


def run(check: Callable[[Kept], Awaitable[None]]) -> None:
    async def main() -> None:
        kept = Kept()
        kept.keep_alive.start()
        try:
            await check(kept)
        finally:
            kept.store.gate.set()
            kept.keep_alive.stop()

    asyncio.run(main())


def test_lease_is_kept_while_the_loop_lives() -> None:
    async def check(kept: Kept) -> None:
        began = time.monotonic()
        await kept.until(lambda: kept.store.renewals >= 8)
        assert time.monotonic() - began > TTL_S, "longer than the lease lives by itself"
        assert kept.holds()

    run(check)


def test_hung_loop_loses_its_lease() -> None:
    async def check(kept: Kept) -> None:
        await kept.until(lambda: kept.store.renewals >= 2)
        hangs_until = time.monotonic() + 2 * TTL_S
        renewals = 0
        while time.monotonic() < hangs_until:
            time.sleep(0.02)  # noqa: ASYNC251 - the loop hangs: that is what is shown
            if hangs_until - time.monotonic() > TTL_S:
                renewals = kept.store.renewals
        assert kept.store.renewals == renewals, "renewed for a loop that hangs"
        assert not kept.holds()
        await kept.until(kept.holds)

    run(check)


def test_store_that_does_not_answer_lets_the_deadline_pass_and_is_asked_again() -> None:
    async def check(kept: Kept) -> None:
        kept.store.error = Unavailable("away")
        await kept.until(lambda: not kept.holds())
        kept.store.error = ValueError("a defect somewhere below")
        await asyncio.sleep(TTL_S / 4)
        kept.store.error = None
        await kept.until(kept.holds)
        assert not kept.ended

    run(check)


def test_answer_that_takes_long_counts_from_when_it_was_asked_for() -> None:
    async def check(kept: Kept) -> None:
        await kept.until(lambda: kept.store.renewals >= 1)
        kept.store.gate.clear()
        await kept.until(lambda: not kept.holds())
        await asyncio.sleep(TTL_S)
        held: list[bool] = []
        kept.keep_alive._stopped.set()
        kept.store.gate.set()
        renewals = kept.store.renewals
        await kept.until(lambda: kept.store.renewals > renewals)
        held.append(kept.holds())
        assert held == [False]

    run(check)


def test_end_of_a_lease_is_reported_once_on_the_loop() -> None:
    async def check(kept: Kept) -> None:
        kept.store.error = LeaseExpired()
        await kept.until(lambda: bool(kept.ended))
        await asyncio.sleep(TTL_S / 2)
        assert kept.ended == [kept.session]
        assert not kept.holds()

    run(check)


def test_stopped_it_renews_nothing() -> None:
    async def check(kept: Kept) -> None:
        await kept.until(lambda: kept.store.renewals >= 1)
        kept.keep_alive.stop()
        renewals = kept.store.renewals
        await asyncio.sleep(TTL_S / 2)
        assert kept.store.renewals == renewals

    run(check)
