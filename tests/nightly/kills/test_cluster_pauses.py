"""Brokers that are paused for a moment, on a machine that is busy, keep their sessions."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import pytest

from support.cluster import cluster
from support.nightly_counts import leave
from system.cluster.load import NIGHTLY_PAUSE_S, ClusterLoad

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAUSES: Final = int(os.environ.get("MANSIO_NIGHTLY_PAUSES", "120"))
PAUSE_S: Final = 2.0
INTERVAL_S: Final = 30.0
BUSY_LOOPS: Final = 4


@pytest.mark.row("C1")
@pytest.mark.timeout(2 * PAUSES * INTERVAL_S)
def test_pauses_of_two_seconds_on_a_busy_machine_cause_no_fail_over(tmp_path: Path) -> None:
    with cluster(tmp_path) as one, busy():
        load = ClusterLoad(one, "paused", commits=False, pause_s=NIGHTLY_PAUSE_S)
        load.create_topic(segment_bytes="1000000")
        load.begin()
        try:
            sessions = {node_id: one.epoch(node_id) for node_id in one.brokers}
            leaders = [(place.leader, place.leader_epoch) for place in one.places(load.topic)]
            for _, node_id in zip(range(PAUSES), itertools.cycle(one.brokers), strict=False):
                one.pause(node_id)
                threading.Event().wait(PAUSE_S)
                one.resume(node_id)
                threading.Event().wait(INTERVAL_S - PAUSE_S)
                assert {each: one.epoch(each) for each in one.brokers} == sessions
            assert [(place.leader, place.leader_epoch) for place in one.places(load.topic)] == leaders
            verdict = load.judge()
        finally:
            load.stop()
        leave("pauses of two seconds", pauses=PAUSES, acknowledged=verdict.acknowledged)
        one.check_logs()


@contextmanager
def busy() -> Iterator[None]:
    """Run processes that use all processors."""
    context = multiprocessing.get_context("spawn")
    loops = [context.Process(target=spin, daemon=True) for _ in range(BUSY_LOOPS)]
    for each in loops:
        each.start()
    try:
        yield
    finally:
        for each in loops:
            each.kill()
            each.join()


def spin() -> None:
    while True:
        pass
