"""kill -9 while members of a share group lease, accept, release, reject and die, and dead records are redriven: at
random moments, and right after each step of a delivery is in the log and nobody knows.

MANSIO_TEST_SEED chooses another seed. `tests/nightly/kills` has many more kills, with random seeds.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from support.killing_serve import POINTS
from support.process import served
from support.raw_peer import RawPeer
from support.seeds import chosen_seed
from support.waiting import wait_until
from system.crash.share_load import ShareLoad, now_ms

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from support.process import ServedBroker
    from support.share_history import ShareHistory

KILLS = 20
MEMBERS = 3
LOCK_MS = 1_000
LOAD_S_MAX = 0.3
LONG_LOAD_S = 1.2
"""Longer than a lease lasts: some end."""

POINT_S_MAX = 3.0
PROGRESS_S_MAX = 60.0
OFTEN = 12
"""Leases, acknowledgements and releases are many: any of the first so many is it. Of the others there are few."""

SETTINGS = [
    "--set",
    "share_coordinator_snapshot_update_records_per_snapshot=40",
    "--set",
    "share_coordinator_state_topic_prune_interval_ms=200",
]


def wait_for_progress(load: ShareLoad, accepted: int = 10) -> None:
    before = load.history.accepted
    try:
        wait_until(lambda: load.failures or load.history.accepted >= before + accepted, PROGRESS_S_MAX)
    except AssertionError:
        pytest.fail(f"{accepted} more were not accepted within {PROGRESS_S_MAX} s: {load.described()}")
    assert not load.failures, load.failures


def die(broker: ServedBroker, load: ShareLoad, point: str, chance: random.Random) -> bool:
    """Have it die at that point, or at any moment. True when it was at the point."""
    if not point:
        wait_for_progress(load)
        time.sleep(
            LONG_LOAD_S if chance.random() < 0.2 else chance.uniform(0, LOAD_S_MAX)
        )  # the moment is the point
    end = time.monotonic() + POINT_S_MAX
    while point and broker.running and time.monotonic() < end:
        time.sleep(0.005)
    was_there = bool(point) and not broker.running
    broker.kill()
    load.killed_ms = now_ms()  # what ended before, also while it was being killed, may stay ended
    assert not load.failures, load.failures
    return was_there


def start(broker: ServedBroker, load: ShareLoad, point: str, chance: random.Random) -> bool:
    """True when it is ready; False when it died on the way at its point."""
    often = any(word in point for word in ("lease", "ack", "release"))
    broker.point = f"{point},{chance.randint(1, OFTEN if often else 2)}" if point else ""
    load.restarted()
    try:
        broker.start()
    except AssertionError:
        assert point == "states loaded", broker.text()
        return False
    return True


def kill_and_judge(
    data: Path,
    seed: int,
    *,
    kills: int = KILLS,
    points: Sequence[str] = POINTS,
    priorities: bool = False,
    fair: bool = False,
) -> ShareHistory:
    """One life of a broker under so many kills, then the verdict over all of it. It dies at some of the `points`, and
    at any moment."""
    chance = random.Random(seed)
    points = [*points, *[""] * (KILLS - len(points))]
    chance.shuffle(points)
    del points[kills:]
    with served(data, arguments=SETTINGS, http=False) as broker:
        with RawPeer(broker.kafka_port) as peer:
            peer.create_topic("work", 2, **({"mansio_priority_enable": "true"} if priorities else {}))
        load = ShareLoad(
            broker.bootstrap_servers,
            lambda: broker.kafka_port,
            topic="work",
            group="crew",
            lock_ms=LOCK_MS,
            seed=seed,
            priorities=priorities,
            fair=fair,
        )
        load.begin()
        load.start(members=MEMBERS)
        try:
            wait_for_progress(load)
            die(broker, load, "", chance)
            hit = [
                point
                for point in points
                if not start(broker, load, point, chance) or die(broker, load, point, chance)
            ]
            start(broker, load, "", chance)
            wait_for_progress(load)
            load.finish()
        finally:
            load.stop()
        print(f"kills {kills + 1}, at their points {sorted(hit)}; {load.history}")
        assert "Traceback" not in broker.text(), broker.text()
        # When a key is isolated depends on how fast the members are, and so on the machine.
        needed = 0 if fair else sum(bool(point) for point in points) / 2
        assert len(hit) > needed, "most of the points were reached"
    return load.history


@pytest.mark.full
@pytest.mark.row("D1", "D3", "D5")
@pytest.mark.timeout(300)
def test_no_delivery_is_undone_lost_or_doubled_by_kills(tmp_path: Path) -> None:
    history = kill_and_judge(tmp_path / "data", chosen_seed())
    assert history.accepted > 10 * KILLS
    assert min(history.rejected, history.released, history.offered_again, history.unanswered) > 0, str(
        history
    )
