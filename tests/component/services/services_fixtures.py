"""A broker on whose event loop a test calls services, without any wire protocol."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import mansio
from mansio.broker.topics.topics import NewTopic
from support.present import present

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from mansio.broker.services.broker_services import BrokerServices

TIMEOUT_S = 30


def run(tmp_path: Path, work: Callable[[BrokerServices], Coroutine[Any, Any, None]], **settings: Any) -> None:
    """Run `work` on the event loop of a broker with topic t (2 partitions)."""

    async def prepare_and_work(services: BrokerServices) -> None:
        await services.topics.create(NewTopic("t", 2))
        await work(services)

    with mansio.Broker(tmp_path / "data", **settings) as broker:
        started = present(broker._broker)
        work_done = asyncio.run_coroutine_threadsafe(prepare_and_work(started.service), started.server.loop)
        work_done.result(TIMEOUT_S)
