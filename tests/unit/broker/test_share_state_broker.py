"""The state of share groups as a whole broker keeps it on a real disk: from the first use on, and over restarts."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from mansio.config.settings import Settings
from mansio.errors import NotCoordinator
from mansio.host.clock import boot_id
from mansio.node.broker import Broker
from support.share_state_fixtures import begun, key_of, leased

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from mansio.broker.coordinator.share.share_coordinator import ShareCoordinator

G = key_of()
TOPIC = "__share_group_state"


def with_broker(data: Path, work: Callable[[Broker, ShareCoordinator], Awaitable[None]]) -> None:
    async def main() -> None:
        broker = Broker(Settings(listeners="127.0.0.1:0", http_listener="", data_dir=str(data)))
        await broker.start()
        try:
            assert broker.service.share_coordinator is not None
            await work(broker, broker.service.share_coordinator)
        finally:
            await broker.stop()

    asyncio.run(main())


def test_a_broker_that_has_no_share_groups_has_nothing_of_them(tmp_path: Path) -> None:
    async def work(broker: Broker, state: ShareCoordinator) -> None:
        assert await state.persister.read(G, 0) is None
        assert await state.persister.summary(G) is None
        await state.persister.delete(G)
        assert TOPIC not in broker.service.topics.state.topics

    with_broker(tmp_path, work)
    assert not (tmp_path / "boot").exists()
    assert not list((tmp_path / "topics").glob(f"{TOPIC}*")) if (tmp_path / "topics").exists() else True


@pytest.mark.skipif(not boot_id(), reason="nobody says when this machine was started")
def test_the_state_is_there_after_a_restart_and_nothing_is_missing_while_the_machine_runs(
    tmp_path: Path,
) -> None:
    async def first(broker: Broker, state: ShareCoordinator) -> None:
        with pytest.raises(NotCoordinator):
            await state.persister.write(G, 0, 0, leased(0, 1))  # nobody has read it
        assert await state.persister.read(G, 0) is None
        await state.persister.write(G, 0, 0, begun())
        await state.persister.write(G, 0, 0, leased(0, 9))
        topic = broker.service.topics.state.topics[TOPIC]
        assert len(topic.partitions) == 4
        assert topic.internal
        assert dict(topic.configs)["cleanup.policy"] == "delete"
        assert dict(topic.configs)["retention.ms"] == "-1"

    async def second(broker: Broker, state: ShareCoordinator) -> None:
        found = await state.persister.read(G, 1)
        assert found is not None
        assert [(change.first, change.last) for change in found.changes] == [(0, 9)]
        assert found.is_complete
        await state.persister.write(G, 0, 1, leased(10, 11, durable=True))
        del broker

    async def third(broker: Broker, state: ShareCoordinator) -> None:
        found = await state.persister.read(G, 1)
        assert found is not None
        assert (found.is_complete, found.withheld_ms) == (False, 30_000)
        del broker

    with_broker(tmp_path, first)
    assert (tmp_path / "boot").read_text() == boot_id()
    with_broker(tmp_path, second)
    (tmp_path / "boot").write_text("another start of the machine")
    with_broker(tmp_path, third)
