"""A broker in this process and an asyncio client of it: what the client's end-to-end tests stand on."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import mansio
from support.places import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

SCENARIO_SECONDS_MAX = 60
QUICK_GROUPS = {
    "group_session_timeout_ms_min": 300,
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
    given = {"kafka_listen": f"127.0.0.1:{free_port()}", **QUICK_GROUPS, **settings}
    return mansio.Broker(directory, **given)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    """Run a scenario with a bound on its time."""

    async def bounded() -> None:
        async with asyncio.timeout(SCENARIO_SECONDS_MAX):
            await scenario()

    asyncio.run(bounded())


@asynccontextmanager
async def connected(broker: mansio.Broker, **topics: int) -> AsyncIterator[mansio.Client]:
    """A client, with topics of so many partitions created."""
    async with mansio.connect(broker.address) as client:
        for name, partitions in topics.items():
            await client.admin.create_topic(name, partitions=partitions)
        yield client


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition; the scenario's own time bounds it."""
    while not condition():  # noqa: ASYNC110  # what is waited for has no event
        await asyncio.sleep(0.005)
