"""Verification by reads: all reads of one turn of the event loop share its time."""

from __future__ import annotations

from typing import Any, cast

from mansio.broker.partition.batch_verifier import BatchVerifier
from mansio.host.item_turns import TURN_S
from support.logs import BenchScheduler, ManualBackground, ManualClock


def test_reads_of_one_turn_verify_for_the_time_of_a_turn_together() -> None:
    clock = ManualClock()
    scheduler = BenchScheduler(clock)
    verifier = BatchVerifier(ManualBackground(), cast("Any", scheduler))
    for _ in range(3):
        checks = 0
        while verifier.may_check():
            checks += 1
            clock.seconds += TURN_S / 4.5
        assert checks == 5
        assert not verifier.may_check(), "another read of this turn"
        assert len(scheduler.soon) == 1, "whatever the number of reads"
        scheduler.run()
