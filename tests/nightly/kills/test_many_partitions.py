"""A broker with two thousand partitions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from system.e2e import test_many_partitions
from system.e2e.test_many_partitions import work

if TYPE_CHECKING:
    from support.process import ServedBroker

broker = test_many_partitions.broker


def test_a_broker_with_two_thousand_partitions_starts_and_serves_after_a_kill(broker: ServedBroker) -> None:
    asyncio.run(work(broker, 1000))
