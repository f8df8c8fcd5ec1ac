"""Random histories of transactions with power losses, refused appends and partitions that lose markers.

Whatever happens, each decision that a producer was told reaches every partition of its transaction, no partition gets
both results of one transaction, and every transaction ends.
"""

from __future__ import annotations

from random import Random

import pytest

from mansio.errors import (
    ConcurrentTransactions,
    MansioError,
    NotCoordinator,
    NotLeaderOrFollower,
    StorageError,
)
from support.tiers import examples
from unit.broker.transactions_fixtures import CoordinatorRoom

PARTITIONS = [("a", 0), ("a", 1), ("b", 0)]
STEPS = 60


@pytest.mark.parametrize("seed", range(examples(6, 12)))
def test_each_acknowledged_decision_reaches_all_partitions_and_no_other_does(seed: int) -> None:
    random = Random(seed)
    room = CoordinatorRoom()
    producer = room.begin()
    reported: dict[tuple[int, int], tuple[bool, set[tuple[str, int]]]] = {}
    added: set[tuple[str, int]] = set()
    for _ in range(STEPS):
        event = random.random()
        if event < 0.1:
            room = room.restarted()
        elif event < 0.2:
            room.markers.refusals += [NotLeaderOrFollower()] * random.randrange(1, 6)
        elif event < 0.25 and room.partitions:
            partition = room.partitions[room.index()]
            partition.refuses = StorageError()
            room.run_for(random.choice([10, 300]))
            partition.refuses = None
        elif event < 0.3:
            room.run_for(70_000)  # the transaction times out
        wanted = set(random.sample(PARTITIONS, random.randrange(1, 4)))
        try:
            room.add(producer, *wanted, version=2)
            added |= wanted
            if random.random() < 0.3:
                continue
            is_commit = random.random() < 0.6
            after = room.end(producer, is_commit=is_commit, bumps=True)
            reported[after] = is_commit, added
            added, producer = set(), after
        except (ConcurrentTransactions, NotCoordinator):
            room.run_for(2_000)
        except MansioError:
            room.markers.refusals.clear()
            room.run_for(10_000)
            producer, added = room.begin(), set()
    room.markers.refusals.clear()
    room.run_for(200_000)
    assert not room.coordinator.store.ongoing
    assert not room.coordinator.store.entries["orders"].transaction.is_prepared
    results: dict[tuple[int, int], dict[tuple[str, int], set[bool]]] = {}
    for stored_in, marker in room.markers.stored:
        epoch = (marker.producer_id, marker.producer_epoch)
        results.setdefault(epoch, {}).setdefault(stored_in, set()).add(marker.is_commit)
    assert reported
    for identity, (is_commit, partitions) in reported.items():
        assert results.get(identity) == {each: {is_commit} for each in partitions}, identity
