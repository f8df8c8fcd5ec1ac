"""Crash tests of the features of a partition: power failures between any two disk changes break none of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

import pytest

from support.tiers import repetitions
from system.crash.deduplication_workload import DeduplicationWorkload
from system.crash.delay_workload import DelayWorkload
from system.crash.feature_workload import run_with_crashes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from system.crash.feature_workload import FeatureWorkload


class Scene(NamedTuple):
    """A workload, and what there must be of it at least: in short runs, and in the long ones of `long_seeds`."""

    workload: type[FeatureWorkload]
    least: dict[str, int]
    long_seeds: range
    long_least: dict[str, int]


SCENES = {
    "deduplication": Scene(
        DeduplicationWorkload,
        {"checks": 61, "repeats": 151, "refused": 4},
        range(100, 100 + repetitions(6, 15)),
        {"checks": 1_001, "repeats": 401, "refused": 16},
    ),
    "delays": Scene(
        DelayWorkload,
        {"checks": 81, "refused": 4, "firings": 31},
        range(100, 100 + repetitions(8, 20)),
        {"checks": 1_501, "refused": 36, "firings": 151},
    ),
}
"""By the name of the feature."""


def run(
    monkeypatch: pytest.MonkeyPatch, scene: Scene, seeds: Iterable[int], steps: int, every: int
) -> Counter[str]:
    for module, name, value in scene.workload.constants:
        monkeypatch.setattr(module, name, value)
    counts: Counter[str] = Counter()
    for seed in seeds:
        counts += run_with_crashes(scene.workload, seed, steps, every=every)
    return counts


@pytest.mark.row("P3", "D6")
@pytest.mark.parametrize("feature", SCENES)
def test_no_power_failure_breaks_a_feature(feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = SCENES[feature]
    assert run(monkeypatch, scene, range(1, 7), steps=60, every=5) >= Counter(scene.least)


@pytest.mark.full
@pytest.mark.row("P3", "D6")
@pytest.mark.parametrize("feature", SCENES)
def test_no_power_failure_breaks_a_feature_in_long_runs(
    feature: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = SCENES[feature]
    assert run(monkeypatch, scene, scene.long_seeds, steps=150, every=2) >= Counter(scene.long_least)
