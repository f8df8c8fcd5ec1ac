"""Fixtures of the client's component tests: a broker in this process and an asyncio client of it."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import mansio
from support.machine import scaled
from support.paths import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

SCENARIO_SECONDS_MAX = 60
STALL_S = 0.15
"""A process that stood still for so long may have missed what was due by the clock."""
STALL_LOOK_S = 0.02
STALLED_RUNS_MAX = 4
QUICK_GROUPS: dict[str, Any] = {
    "group_min_session_timeout_ms": 300,
    "group_initial_rebalance_delay_ms": 0,
    "group_consumer_session_timeout_ms": 1_500,
    "group_consumer_heartbeat_interval_ms": 100,
}
QUICK_MEMBER: dict[str, Any] = {
    "heartbeat_interval_ms": 100,
    "session_timeout_ms": 1_500,
    "rebalance_timeout_ms": 5_000,
    "fetch_wait_ms_max": 100,
}


def broker_in(directory: Path, **settings: Any) -> mansio.Broker:
    """A broker that can be closed and started again on the same port and data."""
    given = {
        "listeners": f"127.0.0.1:{free_port()}",
        "auto_create_topics_enable": False,
        **QUICK_GROUPS,
        **settings,
    }
    return mansio.Broker(directory, **given)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario with a bound on its time."""

    async def bounded() -> None:
        async with asyncio.timeout(scaled(SCENARIO_SECONDS_MAX)):
            await scenario()

    asyncio.run(bounded())


def run_by_the_clock(name: str, scenario: Callable[[str], Awaitable[None]]) -> None:
    """Run a scenario in which leases end by the clock, under a name that is its own. One that fails while the machine
    kept this process from running says nothing, so there is another; each of them failing is a failure."""
    for number in range(STALLED_RUNS_MAX + 1):
        with longest_stall() as stall_s:
            try:
                run(partial(scenario, f"{name}-{number}"))
            except Exception:
                if stall_s() < STALL_S or number == STALLED_RUNS_MAX:
                    raise
            else:
                return


@contextmanager
def longest_stall() -> Iterator[Callable[[], float]]:
    """For how many seconds at most a thread of this process that wanted to run could not, within the block."""
    longest_s = 0.0
    over = threading.Event()

    def look() -> None:
        nonlocal longest_s
        before = time.monotonic()
        while not over.wait(STALL_LOOK_S):
            now = time.monotonic()
            longest_s = max(longest_s, now - before - STALL_LOOK_S)
            before = now

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield lambda: longest_s
    finally:
        over.set()
        thread.join()


@asynccontextmanager
async def connected(broker: mansio.Broker, **topics: int) -> AsyncIterator[mansio.Client]:
    """A client, with topics of so many partitions created."""
    async with mansio.connect(broker.address) as client:
        for name, partitions in topics.items():
            await client.admin.create_topic(name, partitions=partitions)
        yield client


async def until(condition: Callable[..., bool]) -> None:
    """Wait for a condition; the scenario's own time bounds it."""
    while not condition():  # noqa: ASYNC110  # what is waited for has no event
        await asyncio.sleep(0.005)
