"""Compaction of topics with transactions: aborted records are removed and replace nothing, open ones stay."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer

from component.test_compaction import QUIET, Seen, World, broker_in
from support.machine import scaled

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.row("L7", "P4")
def test_compaction_keeps_the_latest_committed_record_of_each_key(tmp_path: Path) -> None:
    chance = random.Random(7)
    with broker_in(tmp_path / "data") as broker:
        world = World(broker)
        config = {"bootstrap.servers": broker.address, "transactional.id": "writer", **QUIET}
        writer = Producer(config)
        writer.init_transactions(scaled(20))
        latest: dict[bytes, bytes] = {}
        for turn in range(60):
            writer.begin_transaction()
            rows = [(b"%d" % chance.randrange(12), b"%d" % turn) for _ in range(chance.randrange(1, 8))]
            for key, value in rows:
                writer.produce(world.topic, value * 100, key, partition=0)
            assert writer.flush(scaled(20)) == 0
            if chance.random() < 0.5:
                writer.abort_transaction(scaled(20))
            else:
                writer.commit_transaction(scaled(20))
                latest |= dict(rows)
            if turn % 20 == 10:
                world.roll()
                world.wait_compacted()
        world.roll()
        world.wait_compacted()
        # A transaction that is open while the log is compacted.
        writer.begin_transaction()
        writer.produce(world.topic, b"open", b"0", partition=0)
        assert writer.flush(scaled(20)) == 0
        world.roll()

        def values(seen: list[Seen]) -> dict[bytes, bytes]:
            return {each.key: (each.value or b"") for each in seen}

        assert values(world.read()) == {key: value * 100 for key, value in latest.items()}
        size = world.partition.log.size_bytes
        writer.commit_transaction(scaled(20))
        world.roll()
        world.wait_compacted()
        assert values(world.read())[b"0"] == b"open"
        assert world.partition.log.size_bytes <= size + 500
    with broker_in(tmp_path / "data") as broker:
        world.move_to(broker)
        assert values(world.read()) == {key: value * 100 for key, value in latest.items()} | {b"0": b"open"}
