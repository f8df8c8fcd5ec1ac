"""Timelines of random histories, compared with what was done: nothing is invented, and what is missing makes a timeline
uncertain."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from support.tiers import repetitions, tier
from support.traced_history import Done, History

NOT_DONE = frozenset({"replicated", "kept", "state-loaded"})
"""Events that nobody has done."""

HISTORIES = {"test": 40, "full": 1_000, "nightly": 20_000}


def events_of(history: History) -> dict[int, tuple[list[Done], bool, tuple[str, ...]]]:
    """What the timeline of each record has, and whether it is certain."""
    found = {}
    for offset, timeline in history.timelines().items():
        events = [
            Done(each.kind, each.attempt, each.who) for each in timeline.events if each.kind not in NOT_DONE
        ]
        found[offset] = (events, timeline.is_certain, timeline.uncertainties)
    return found


def is_part_of(found: list[Done], truth: list[Done]) -> bool:
    """Whether the events were done in this order, by these members; a member may be unknown."""
    left = iter(truth)
    return all(
        any(
            each.kind == one.kind and each.attempt == one.attempt and each.who in ("", one.who)
            for one in left
        )
        for each in found
    )


@pytest.mark.parametrize("disturbances", [False, True], ids=["calm", "with kills and lost blocks"])
def test_a_timeline_has_what_was_done_or_is_uncertain(disturbances: bool) -> None:
    counts = Counter[str]()
    for seed in range(
        repetitions(HISTORIES["full"] if tier() == "full" else HISTORIES["test"], HISTORIES["nightly"])
    ):
        history = History(Random(seed))
        history.run(40, disturbances=disturbances)
        for offset, (found, is_certain, why) in events_of(history).items():
            truth = history.truth[offset]
            assert is_part_of(found, truth), (seed, offset, found, truth)
            if is_certain:
                assert found == truth, (seed, offset, found, truth)
            if not disturbances:
                assert is_certain, (seed, offset, why)
            counts["certain" if is_certain else "uncertain"] += 1
            counts["complete" if found == truth else "incomplete"] += 1
            counts.update(each.kind for each in found)
    wanted = {
        "acknowledged",
        "released",
        "rejected",
        "expired",
        "dead-lettered",
        "redriven",
        "attempts-used-up",
    }
    assert wanted <= counts.keys(), counts
    if disturbances:
        assert counts["uncertain"] > counts["incomplete"] > 0, counts
        assert counts["certain"] > counts["uncertain"] // 10, counts
