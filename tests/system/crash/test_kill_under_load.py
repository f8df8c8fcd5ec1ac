"""kill -9 and SIGTERM while clients write, read and commit: what was acknowledged is there, where it was.

A seed chooses the times of the kills; MANSIO_TEST_SEED chooses another seed. `tests/nightly/kills` has many more kills,
with random seeds.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING

import pytest

from support.machine import scaled
from support.nightly_counts import leave
from support.process import ServedBroker, served
from support.raw_peer import RawPeer, fetch_frame
from support.seeds import chosen_seed
from support.tiers import repetitions
from support.waiting import wait_until
from system.crash.checker import Verdict, check
from system.crash.kill_load import Load, committed_offsets, read_log, senders

if TYPE_CHECKING:
    from pathlib import Path

KILLS = 20
FEW_KILLS = 3
KILLS_WHILE_STARTING = 3
PROGRESS_RECORDS = 25
PROGRESS_S_MAX = 60
LOAD_S_MAX = 0.4
START_S_MAX = 1.0
DRAIN_S = 5.0
EXIT_S = 1.0
"""What the interpreter itself may take to end, after the drain."""

SETTINGS = ["--set", "group_initial_rebalance_delay_ms=0"]


def judge(load: Load, broker: ServedBroker) -> Verdict:
    """Read everything from the broker as it is now and compare."""
    assert load.failures == []
    final = read_log(broker.bootstrap_servers, load.topic)
    committed = committed_offsets(broker.bootstrap_servers, load.topic, "committer")
    verdict = check(load.history, final, idempotent=load.idempotent, committed=committed)
    assert senders(final) == set(load.history.sent), "every producer got something through"
    return verdict


def wait_for_progress(load: Load, records: int = PROGRESS_RECORDS) -> None:
    """Return when every producer has so many more records acknowledged: quick kills starve none of them."""
    before = dict(load.progress)

    def behind() -> list[str]:
        return [name for name, count in load.progress.items() if count < before[name] + records]

    try:
        wait_until(lambda: load.failures or not behind(), PROGRESS_S_MAX)
    except AssertionError:
        pytest.fail(f"{behind()} had no {records} records more acknowledged within {PROGRESS_S_MAX} s")
    assert load.failures == []


def kill_while_starting(broker: ServedBroker, chance: random.Random) -> bool:
    """Start, and kill after a moment, which may fall into recovery. True when it had not become ready."""

    def kill() -> None:
        wait_until(lambda: broker.running, PROGRESS_S_MAX)  # the moment may come before there is a process
        os.kill(broker.pid, signal.SIGKILL)

    timer = threading.Timer(chance.uniform(0.05, START_S_MAX), kill)
    timer.start()
    try:
        broker.start()
    except AssertionError:
        return True
    finally:
        timer.join()
        broker.kill()
    return False


def note(verdict: Verdict, kills: int) -> None:
    """Leave the sums of one life for the sum of all lives."""
    leave(
        "kills under load",
        kills=kills,
        acknowledged=verdict.acknowledged,
        lost_moved_or_doubled=len(verdict.violations),
        duplicates_of_plain_producers=verdict.duplicates,
    )


def kill_and_judge(data: Path, seed: int, *, kills: int = KILLS, noted: bool = False) -> None:
    """One life of a broker: `kills` kills at random moments under load, then the verdict over all of it."""
    chance = random.Random(seed)
    kills_while_starting = min(KILLS_WHILE_STARTING, kills // 2)
    early = 0
    with served(data, arguments=SETTINGS, http=False) as broker:
        load = Load(broker.bootstrap_servers, "killed")
        load.create_topic(segment_bytes="200000")
        load.start(idempotent=2, plain=1)
        starts_to_spoil = set(chance.sample(range(kills), kills_while_starting))
        try:
            for kill in range(kills):
                if chance.random() < 0.8:
                    wait_for_progress(load)
                time.sleep(chance.uniform(0, LOAD_S_MAX))  # the random moment is the point
                broker.kill()
                if kill in starts_to_spoil:
                    early += kill_while_starting(broker, chance)
                broker.start()
            wait_for_progress(load)
            load.stop_producing()
            load.wait_for_readers()
            load.stop()
            broker.kill()
            broker.start()
            verdict = judge(load, broker)
        finally:
            load.stop()
        read = {name: len(seen) for name, seen in load.history.reads.items()}
        commits = sum(acknowledged for acknowledged, _ in load.history.commits.values())
        print(
            f"kills {kills + kills_while_starting + 1} ({early} before ready), read {read}, commits {commits}"
        )
        print(verdict)
        if noted:
            note(verdict, kills + kills_while_starting + 1)
        assert not verdict.violations, str(verdict)
        assert verdict.acknowledged > kills * len(load.progress) * PROGRESS_RECORDS / 2
        assert min(read.values()) > verdict.acknowledged / 2, "the readers took part"
        assert "Traceback" not in broker.text()


@pytest.mark.row("L4", "L5", "P3", "G4")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kills", [FEW_KILLS, pytest.param(repetitions(10, KILLS), marks=pytest.mark.full)], ids=["few", "many"]
)
def test_nothing_acknowledged_is_lost_or_moved_or_doubled_by_kills_at_random_moments(
    tmp_path: Path, kills: int
) -> None:
    kill_and_judge(tmp_path / "data", chosen_seed(), kills=kills)


@pytest.mark.full
@pytest.mark.row("L4", "L5", "P3", "G4")
def test_sigterm_under_load_drains_within_5_s_and_loses_nothing_acknowledged(tmp_path: Path) -> None:
    with served(tmp_path / "data", arguments=SETTINGS, http=False) as broker:
        load = Load(broker.bootstrap_servers, "stopped")
        load.create_topic()
        load.start(idempotent=2, plain=1)
        try:
            wait_for_progress(load)
            with RawPeer(broker.kafka_port) as idle, RawPeer(broker.kafka_port) as parked:
                parked.create_topic("silent")
                parked.send(fetch_frame("silent", wait_ms=30_000))
                begin = time.monotonic()
                code = broker.stop()
                took_s = time.monotonic() - begin
                assert code == 0, broker.text()
                assert took_s <= scaled(DRAIN_S + EXIT_S)
                assert idle.closed()
                assert parked.frame() is not None, "a parked fetch is answered before the end"
            broker.start()
            wait_for_progress(load)
            assert broker.stop() == 0, broker.text()
            broker.start()
            load.stop_producing()
            load.stop()
            verdict = judge(load, broker)
        finally:
            load.stop()
        print(f"SIGTERM took {took_s:.2f} s; {verdict}")
        assert not verdict.violations, str(verdict)
        assert verdict.duplicates == 0, "a drained stop answers what it has stored, so nobody sends it again"
        assert "Traceback" not in broker.text()
