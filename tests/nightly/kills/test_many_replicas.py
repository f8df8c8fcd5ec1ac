"""Three brokers with ten thousand replicas each: what they need, and how soon the partitions of a dead one are written
to again."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
from bench.many_replicas import SESSION_S, run

from support.machine import scaled
from system.cluster.load import say

if TYPE_CHECKING:
    from pathlib import Path

PARTITIONS = 10_000
TOPICS = 4
START_S_MAX = 10.0
REPLICA_KB_MAX = 100.0
PRODUCED_AFTER_SESSION_S_MAX = 3.0


@pytest.mark.timeout(3600)
def test_brokers_with_ten_thousand_replicas_start_and_take_over(tmp_path: Path) -> None:
    figures = run(tmp_path, PARTITIONS, TOPICS)
    say("10,000 replicas on each broker", **dataclasses.asdict(figures))
    assert figures.moved >= PARTITIONS // 3 - TOPICS
    assert figures.replica_kb <= REPLICA_KB_MAX
    assert figures.start_s <= scaled(START_S_MAX)
    assert figures.produced_s <= scaled(SESSION_S + PRODUCED_AFTER_SESSION_S_MAX)
